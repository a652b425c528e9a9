"""Remembering that a device has passed the self-tests of all its binaries: the same bytes there need no second trial.

A note lies beside the binaries in the kernel cache. Its name stands for the device, its driver, and every byte of every
binary, so whatever changes is tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from tilewire.kernels.runtime.launch import Loaded, Variant
from tilewire.kernels.selection.tables import write_atomically

logger = logging.getLogger(__name__)

# Where a driver says which one it is; the others come with the system's kernel.
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


@dataclass(frozen=True)
class Place:
    """Where binaries run.

    Attributes:
        device: Identifier that no other device has.
        driver: Its driver's name and version.
    """

    device: str
    driver: str


def place_of(device_index: int) -> Place | None:
    """The place that a GPU is; None where it has no identifier."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    stated = next((path.read_text() for path in _DRIVERS if path.is_file()), "")
    return Place(str(uuid), stated.strip() or os.uname().release)


def note_of(place: Place, loaded: Mapping[Variant, Loaded], order: Sequence[Variant]) -> Path:
    """The file that is there once the binaries `loaded`, in `order`, have passed at `place`."""
    digest = hashlib.sha256(f"{place.device}\n{place.driver}\n".encode())
    for variant in order:
        digest.update(loaded[variant].digest)
    return Path(knobs.cache.dir) / f"tilewire-tried-{digest.hexdigest()[:32]}.json"


def keep(note: Path, place: Place, count: int) -> None:
    """Notes that `count` binaries have passed at `place`. Where the cache cannot be written, they are tried at each start."""
    try:
        write_atomically(note, json.dumps(asdict(place) | {"binaries": count}) + "\n")
    except OSError as error:
        logger.info("%s is not written, so the next start tries all kernels again: %s", note, error.strerror)
