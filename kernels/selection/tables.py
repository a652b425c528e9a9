"""The tuned tables: what was measured on a chip, as JSON beside this file. Imports no op.

A table is found by the chip: architecture and number of multiprocessors. A chip without one uses that of its nearest
relative: the same kind of device, the nearest architecture, then the nearest number of multiprocessors. Figures in a table
are relative to the device's bandwidth and clock, so that they hold for relatives.
"""

from __future__ import annotations

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from tilewire.kernels.runtime.targets import Target

Entry = dict[str, Any]
# Architectures of AMD in the order of their age.
_HIP = ("gfx90a", "gfx942", "gfx950")
_FOLDER = resources.files("tilewire.kernels.selection") / "tuned"
_installed: dict[str, Entry] = {}
_chips_read: set[str] = set()


def table_for(target: Target) -> Entry:
    """The table of `target`'s chip, or of its nearest relative; empty for the interpreter."""
    name = table_name(target)
    return _read(name) if name else {}


def table_name(target: Target) -> str:
    """Name of the table that `target` uses, e.g. `cuda_90_132`; empty for the interpreter."""
    if target.chip in _installed:
        return target.chip
    return min(_relatives(target), key=lambda name: _distance(target, name), default="")


def is_tuned(target: Target) -> bool:
    """Whether `target`'s own chip was measured."""
    return table_name(target) == target.chip and "measured" in table_for(target)


def install(chip: str, table: Entry) -> None:
    """Use `table` for a chip that nothing was chosen for yet in this process.

    Raises:
        RuntimeError: Something was.
    """
    if chip in _chips_read:
        raise RuntimeError(f"a table for {chip} can only be installed before anything is chosen for it")
    _installed[chip] = table


def write_atomically(path: Path, text: str) -> None:
    """Writes `text`; a reader of `path` finds the old or the new content, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


@functools.cache
def _shipped() -> tuple[str, ...]:
    return tuple(sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir() if file.name.endswith(".json")))


def _relatives(target: Target) -> list[str]:
    """Tables whose configurations `target` can run: those of devices with descriptors need them."""
    return [name for name in _shipped() if name.startswith(f"{target.backend}_") and _has_tma(name) == target.has_tma]


def _has_tma(name: str) -> bool:
    backend, arch, _ = name.split("_")
    return backend == "cuda" and int(arch) >= 90


def _distance(target: Target, name: str) -> tuple[int, int]:
    _, arch, num_sms = name.split("_")
    return abs(_generation(arch) - _generation(str(target.arch))), abs(int(num_sms) - target.num_sms)


def _generation(arch: str) -> int:
    if arch.isdigit():
        return int(arch)
    return 10 * (_HIP.index(arch) if arch in _HIP else len(_HIP))


@functools.cache
def _read(name: str) -> Entry:
    _chips_read.add(name)
    if name in _installed:
        return _installed[name]
    found: Entry = json.loads((_FOLDER / f"{name}.json").read_text())
    return found
