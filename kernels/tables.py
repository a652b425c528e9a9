"""The tuned tables: what was measured on a device, as JSON beside this file. Knows no kernel; reads only the package.

A device without a table of its own uses that of its nearest relative, or none.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from kernels.targets import Target

_RELATIVES = {"cuda": "nvidia_h100"}


def table_for(target: Target) -> dict[str, Any]:
    """The table of `target`; empty when there is none that it could use.

    Tables are made for devices with descriptors, so only such devices borrow one.
    """
    own = _read(target.name)
    if own or not target.has_tma:
        return own
    return _read(_RELATIVES.get(target.backend, ""))


def is_tuned(target: Target) -> bool:
    """Whether `target` has a table of its own."""
    return bool(_read(target.name))


@functools.cache
def _read(name: str) -> dict[str, Any]:
    file = resources.files("kernels") / "tuned" / f"{name}.json"
    return dict(json.loads(file.read_text())) if name and file.is_file() else {}
