"""The tuned tables: what was measured on a device, as JSON beside this file, and picks among what a table offers.

Knows no kernel. A device without a table of its own uses that of its nearest relative, or none; for such a device picks
can be installed: for a bucket of sizes, the member of the catalogue that was measured best when the process started.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from tilewire.kernels.runtime.targets import Target

Entry = dict[str, Any]
_RELATIVES = {"cuda": "nvidia_h100"}
_NO_PICKS: Mapping[str, Entry] = MappingProxyType({})
_tables: dict[str, Entry] = {}
_picks: dict[Target, Mapping[str, Entry]] = {}


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


def install_picks(target: Target, picks: Mapping[str, Entry | None]) -> None:
    """Have choices for `target` consult `picks` first.

    To be called once, at start: launches that were prepared before keep what they were prepared with. The catalogue
    does not change, since picks only name members of it, and each is checked again for each problem.
    """
    _picks[target] = MappingProxyType({bucket: entry for bucket, entry in picks.items() if entry is not None})


def pick_for(target: Target, bucket: str) -> Entry | None:
    """What was picked for `bucket`, a name that the op gives to a range of sizes."""
    return _picks.get(target, _NO_PICKS).get(bucket)


_names_read: set[str] = set()


@functools.cache
def _read(name: str) -> dict[str, Any]:
    _names_read.add(name)
    if name in _tables:
        return _tables[name]
    file = resources.files("tilewire.kernels.selection") / "tuned" / f"{name}.json"
    return dict(json.loads(file.read_text())) if name and file.is_file() else {}
