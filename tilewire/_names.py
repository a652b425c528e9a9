"""Names of resident tensors and of programs, checked before they become part of a path."""

from __future__ import annotations

import re

_TENSOR = re.compile(r"@?((?:[A-Za-z0-9._-]+/)*[A-Za-z0-9._-]+)", re.ASCII)
_PROGRAM = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)


def tensor_name(name: str, argument: str = "name") -> str:
    """Returns the name without its `@`, checked here because HTTP libraries rewrite paths that hold `..`.

    Args:
        name: Name as it was given.
        argument: Argument that errors begin with.

    Raises:
        TypeError: No text.
        ValueError: A name that no tensor can have.
    """
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a text, got {name!r}")
    match = _TENSOR.fullmatch(name)
    if match is None or ".." in match[1].split("/") or "." in match[1].split("/"):
        raise ValueError(
            f"{argument}: {name[:64]!r} cannot name a tensor; expected A-Z a-z 0-9 . _ - in segments parted by /"
        )
    return match[1]


def program_name(name: str) -> str:
    """Returns the name.

    Raises:
        TypeError: No text.
        ValueError: A name that no program can have.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a text, got {name!r}")
    if _PROGRAM.fullmatch(name) is None or name in (".", ".."):
        raise ValueError(f"name: {name[:64]!r} cannot name a program; expected 1 to 255 of A-Z a-z 0-9 . _ -")
    return name
