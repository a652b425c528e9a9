"""What a GPU offers, as far as choosing a kernel for it goes. Knows no kernel and, but for `current`, no torch.

Configurations are chosen from a `Target`, never from the device itself, so that the choice can be tested, and kernels
compiled, on a machine without that device.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Target:
    """One device as the configuration functions see it.

    Attributes:
        backend: `cuda`, `hip`, or `interpreter` (Triton's, on the CPU).
        arch: compute capability times ten (90) for CUDA, the gfx name for HIP.
        warp_size: threads of one warp or wavefront.
        num_sms: multiprocessors or compute units.
        shared_bytes: the most shared memory (LDS) that one program can have.
        name: key of the tuned table, e.g. `nvidia_h100`.
    """

    backend: str
    arch: int | str
    warp_size: int
    num_sms: int
    shared_bytes: int
    name: str

    @property
    def has_tma(self) -> bool:
        """Whether tensor descriptors become bulk copies (Hopper and later) rather than plain loads."""
        return self.backend == "interpreter" or (self.backend == "cuda" and int(self.arch) >= 90)

    @property
    def has_overlap(self) -> bool:
        """Whether a kernel can be brought up while the one before it ends."""
        return self.backend == "cuda" and int(self.arch) >= 90


KNOWN = {
    target.name: target
    for target in (
        Target("cuda", 80, 32, 108, 163 * KIB, "nvidia_a100"),
        Target("cuda", 90, 32, 132, 227 * KIB, "nvidia_h100"),
        Target("cuda", 100, 32, 148, 227 * KIB, "nvidia_b200"),
        Target("hip", "gfx90a", 64, 104, 64 * KIB, "amd_mi250"),
        Target("hip", "gfx942", 64, 304, 64 * KIB, "amd_mi300x"),
        Target("hip", "gfx950", 64, 256, 160 * KIB, "amd_mi355x"),
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
        return Target("hip", gfx, 64, properties.multi_processor_count, shared_bytes, _hip_name(gfx))
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 * KIB)
    name = "_".join(properties.name.lower().split()[:2])
    arch = properties.major * 10 + properties.minor
    return Target("cuda", arch, 32, properties.multi_processor_count, shared_bytes, name)


def _hip_name(arch: str) -> str:
    return next((target.name for target in KNOWN.values() if target.arch == arch), arch)
