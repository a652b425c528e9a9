"""Checks the names of resident tensors."""

from __future__ import annotations

import re

from tilewire.service.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,255}", re.ASCII)


def check_name(name: str, *, field: str) -> str:
    """Checks the name of a resident tensor.

    Args:
        name: The name, without `@`.
        field: Part of the request, for the error's detail.

    Returns:
        The name.

    Raises:
        InvalidRequest: It has other characters, is too long, or has an empty or `..` segment.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{field}: a name is 1 to 255 of A-Z a-z 0-9 . _ - /; got {name[:64]!r}")
    if any(segment in ("", "..") for segment in name.split("/")):
        raise InvalidRequest(f"{field}: a name has no empty and no '..' segment; got {name[:64]!r}")
    return name
