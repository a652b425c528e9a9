"""Describes what a GPU offers for the choice of a kernel. Only `current` imports torch.

Configurations are chosen from a `Target`, never from the device itself. So the choice can be tested, and kernels
compiled, on a machine without that device.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

KIB = 1024


# Floating-point operations of the matrix units (for `ieee` of the scalar ones) of one multiprocessor in a clock, dense.
_FLOPS_PER_CLOCK: dict[int | str, dict[str, int]] = {
    80: {"half": 2048, "int8": 4096, "tf32": 1024, "tf32x3": 341, "ieee": 128},
    89: {"half": 1024, "int8": 2048, "float8": 2048, "tf32": 512, "tf32x3": 170, "ieee": 256},
    90: {"half": 4096, "int8": 8192, "float8": 8192, "tf32": 2048, "tf32x3": 682, "ieee": 256},
    100: {"half": 8192, "int8": 16384, "float8": 16384, "tf32": 4096, "tf32x3": 1365, "ieee": 256},
    "gfx90a": {"half": 1024, "int8": 1024, "ieee": 256},
    "gfx942": {"half": 2048, "int8": 4096, "float8": 4096, "tf32": 1024, "ieee": 256},
    "gfx950": {"half": 4096, "int8": 8192, "float8": 8192, "ieee": 256},
}
# Bytes that one multiprocessor gets from L2 in a clock.
_L2_BYTES_PER_CLOCK = 64


@dataclass(frozen=True)
class Target:
    """One device as the configuration functions see it.

    Attributes:
        backend: `cuda`, `hip`, or `interpreter` (Triton's, on the CPU).
        arch: Compute capability times ten (90) for CUDA, the gfx name for HIP.
        warp_size: Threads of one warp or wavefront.
        num_sms: Multiprocessors or compute units.
        shared_bytes: Largest shared memory (LDS) of one program.
        name: Name of the device, e.g. `nvidia_h100`.
        bandwidth_gbs: Memory bandwidth by the device's clock and width, GB/s.
        clock_ghz: Highest clock of the multiprocessors.
    """

    backend: str
    arch: int | str
    warp_size: int
    num_sms: int
    shared_bytes: int
    name: str
    bandwidth_gbs: int = 3000
    clock_ghz: float = 1.7

    @property
    def chip(self) -> str:
        """Name of the tuned table: architecture and multiprocessors, e.g. `cuda_90_132` for H100 and H200 alike."""
        return f"{self.backend}_{self.arch}_{self.num_sms}"

    @property
    def has_tma(self) -> bool:
        """Whether tensor descriptors become bulk copies (Hopper and later) rather than plain loads."""
        return self.backend == "interpreter" or (self.backend == "cuda" and int(self.arch) >= 90)

    @property
    def has_overlap(self) -> bool:
        """Whether a kernel can be brought up while the one before it ends."""
        return self.backend == "cuda" and int(self.arch) >= 90

    def sm_flops_per_us(self, arithmetic: str) -> float:
        """Operations that one multiprocessor does in a microsecond at the full rate of `arithmetic`."""
        rates = _FLOPS_PER_CLOCK.get(self.arch) or _FLOPS_PER_CLOCK[90 if self.backend == "cuda" else "gfx942"]
        return rates.get(arithmetic.removesuffix(" fast"), rates["ieee"]) * self.clock_ghz * 1e3

    @property
    def sm_l2_bytes_per_us(self) -> float:
        """Bytes that one multiprocessor gets from L2 in a microsecond."""
        return _L2_BYTES_PER_CLOCK * self.clock_ghz * 1e3

    @property
    def bytes_per_us(self) -> float:
        """Bytes that the device's memory moves in a microsecond."""
        return self.bandwidth_gbs * 1e3


KNOWN = {
    target.name: target
    for target in (
        Target("cuda", 80, 32, 108, 163 * KIB, "nvidia_a100", 2039, 1.41),
        Target("cuda", 90, 32, 132, 227 * KIB, "nvidia_h100", 3352, 1.98),
        Target("cuda", 90, 32, 132, 227 * KIB, "nvidia_h200", 4917, 1.98),
        Target("cuda", 100, 32, 148, 227 * KIB, "nvidia_b200", 8000, 1.96),
        Target("hip", "gfx90a", 64, 104, 64 * KIB, "amd_mi250", 1638, 1.7),
        Target("hip", "gfx942", 64, 304, 64 * KIB, "amd_mi300x", 5300, 2.1),
        Target("hip", "gfx950", 64, 256, 160 * KIB, "amd_mi355x", 8000, 2.4),
    )
}
INTERPRETER = Target("interpreter", 0, 32, 4, 227 * KIB, "interpreter")


def is_interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU in this process (its own switch, read as Triton reads it)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on"}


@functools.lru_cache(maxsize=64)
def current(device_index: int) -> Target:
    """The target that kernels launched on `device_index` are compiled for.

    Raises:
        RuntimeError: there is no such GPU and Triton does not interpret.
    """
    if is_interpreting():
        return INTERPRETER
    import torch  # noqa: PLC0415 - the pure half of the package must import without torch

    properties = torch.cuda.get_device_properties(device_index)
    if torch.version.hip:
        gfx = properties.gcnArchName.split(":")[0]
        shared_bytes = 160 * KIB if gfx == "gfx950" else 64 * KIB
        count = properties.multi_processor_count
        return Target("hip", gfx, 64, count, shared_bytes, _hip_name(gfx), *_rates(properties, _hip_name(gfx)))
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 * KIB)
    name = "_".join(properties.name.lower().split()[:2])
    arch = properties.major * 10 + properties.minor
    return Target("cuda", arch, 32, properties.multi_processor_count, shared_bytes, name, *_rates(properties, name))


def parse_target(text: str) -> Target:
    """Reads `cuda:90` or `hip:gfx942`, or the name of a known device.

    Raises:
        ValueError: It names no device that there are configurations for.
    """
    if text in KNOWN:
        return KNOWN[text]
    for target in KNOWN.values():
        if text == f"{target.backend}:{target.arch}":
            return target
    known = ", ".join(dict.fromkeys(f"{target.backend}:{target.arch}" for target in KNOWN.values()))
    raise ValueError(f"target: {text!r} is not one of {known}")


def _rates(properties: Any, name: str) -> tuple[int, float]:
    """Bandwidth (GB/s) and clock (GHz) that the driver states; those of the device of this name where it states none."""
    known = KNOWN.get(name)
    # Both edges of a memory clock that is stated in kHz move the bus' width in bits.
    stated_gbs = 2 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8e6
    stated_ghz = getattr(properties, "clock_rate", 0) / 1e6
    bandwidth_gbs = round(stated_gbs) or (known.bandwidth_gbs if known else Target.bandwidth_gbs)
    return bandwidth_gbs, round(stated_ghz, 2) or (known.clock_ghz if known else Target.clock_ghz)


def _hip_name(arch: str) -> str:
    return next((target.name for target in KNOWN.values() if target.arch == arch), arch)
