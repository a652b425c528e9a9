"""Names of resident tensors: the rule that requests and the files of `--tensors-dir` share."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,255}", re.ASCII)


def problem_of(name: str) -> str | None:
    """Returns what is wrong with a name, or None for one that requests can reach."""
    if _NAME.fullmatch(name) is None:
        return f"a name is 1 to 255 of A-Z a-z 0-9 . _ - /; got {name[:64]!r}"
    if any(segment in ("", "..") for segment in name.split("/")):
        return f"a name has no empty and no '..' segment; got {name[:64]!r}"
    return None
