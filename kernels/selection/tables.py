"""The tuned tables: what was measured on a device, as JSON beside this file. Imports no op.

A device without a table of its own uses that of its nearest relative, or none.
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
_RELATIVES = {"cuda": "nvidia_h100"}
_tables: dict[str, Entry] = {}


def table_for(target: Target) -> dict[str, Any]:
    """The table of `target`; empty when there is none that it could use.

    Tables are made for devices with descriptors, so only such devices borrow one.
    """
    own = _read(target.name)
    if own or not target.has_tma:
        return own
    return _read(_RELATIVES.get(target.backend, ""))


def costs_for(target: Target, key: str) -> dict[str, Any] | None:
    """The fitted costs that `target`'s own table has under `key`; a relative's do not hold for it."""
    found: dict[str, Any] | None = _read(target.name).get("costs", {}).get(key)
    return found


def is_tuned(target: Target) -> bool:
    """Whether `target` has a table of its own."""
    return bool(_read(target.name))


def install(name: str, table: Entry) -> None:
    """Use `table` for devices called `name`, which nothing was chosen for yet in this process.

    Raises:
        RuntimeError: something was.
    """
    if name in _names_read:
        raise RuntimeError(f"a table for {name} can only be installed before anything is chosen for it")
    _tables[name] = table


_names_read: set[str] = set()


@functools.cache
def _read(name: str) -> dict[str, Any]:
    _names_read.add(name)
    if name in _tables:
        return _tables[name]
    file = resources.files("tilewire.kernels.selection") / "tuned" / f"{name}.json"
    return dict(json.loads(file.read_text())) if name and file.is_file() else {}


def write_atomically(path: Path, text: str) -> None:
    """Writes `text`; a reader of `path` finds the old or the new content, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
