"""Where a table comes from, and how it lies on disk. Knows neither what is in it nor how it was found."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.cache import triton_key

from tilewire import kernels
from tilewire.kernels.runtime.targets import Target

Table = dict[str, Any]
# What binaries are made from, tables aside: those only say which of them.
_SOURCES = ("kernel.py", "variants.py", "epilogue.py", "overlap.py")


@dataclass(frozen=True)
class Device:
    """The device, as a table's provenance names it."""

    target: Target
    name: str
    driver: str


def as_text(table: Table) -> str:
    """JSON with one configuration a line, so that changes can be read; where it comes from first."""
    ordered = {key: table[key] for key in ("device", "measured") if key in table} | table
    text = json.dumps(ordered, indent=1)
    innermost = re.compile(r"\{\n\s+(\"[^{}]*)\n\s+\}")
    return innermost.sub(lambda match: "{" + re.sub(r"\s*\n\s*", " ", match[1]) + "}", text) + "\n"


def identity(device: Device) -> dict[str, str]:
    """What measurements depend on: the device, its driver, Triton, and the sources of the kernels."""
    digest = hashlib.sha256(triton_key().encode())
    root = Path(kernels.__file__).parent
    for path in sorted(path for name in _SOURCES for path in root.rglob(name)):
        digest.update(path.read_bytes())
    return {
        "device": device.name,
        "driver": device.driver,
        "triton": triton.__version__,
        "sources": digest.hexdigest()[:32],
    }


def driver_version() -> str:
    """The driver's version, from NVML; on AMD that of HIP."""
    if torch.version.hip:
        return f"hip {torch.version.hip}"
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        is_known = nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
    except OSError:
        is_known = False
    return text.value.decode() if is_known else "unknown"
