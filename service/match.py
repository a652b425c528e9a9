"""Conditions on the version of what a path names: the headers `If-Match` and `If-None-Match`, and what they mean."""

from __future__ import annotations

import re

from tilewire.service.errors import InvalidRequest, PreconditionFailed

# Versions of which a tensor must have one; empty for any version of a tensor that exists.
Match = tuple[int, ...]
ANY: Match = ()
# Of an entity tag that no tensor of ours has.
_FOREIGN = -1

_VERSION = re.compile(r"0|[1-9][0-9]{0,19}")
_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


def entity_tag(version: int) -> str:
    """Returns the value of the header `ETag` for a version."""
    return f'"{version}"'


def parse_match(value: str | None) -> Match | None:
    """Reads the value of `If-Match`; None without the header.

    Raises:
        InvalidRequest: It is neither `*` nor a list of entity tags.
    """
    if value is None:
        return None
    if value.strip() == "*":
        return ANY
    # Empty elements of a list count for nothing (RFC 9110, section 5.6.1).
    found = [_TAG.fullmatch(one) for one in map(str.strip, value.split(",")) if one]
    tags = [one for one in found if one is not None]
    if not tags or len(tags) < len(found):
        raise InvalidRequest(f'if-match: expected *, or versions such as "17"; got {value[:64]!r}')
    return tuple(_FOREIGN if one[1] or _VERSION.fullmatch(one[2]) is None else int(one[2]) for one in tags)


def is_known(value: str | None, tag: str) -> bool:
    """Whether a header `If-None-Match` says that its sender has what an entity tag names.

    Args:
        value: Value of the header, or None.
        tag: The entity tag. A weak one of the header counts as well: proxies that compress make tags weak.
    """
    known = {one.strip().removeprefix("W/") for one in (value or "").split(",")}
    return tag in known or "*" in known


def is_match(match: Match | None, version: int | None) -> bool:
    """Whether a condition holds.

    Args:
        match: The condition; None for none.
        version: Version of the tensor; None where there is no tensor.
    """
    if match is None:
        return True
    return version is not None and (match == ANY or version in match)


def check_match(name: str, match: Match | None, version: int | None) -> None:
    """Refuses a change or a read whose condition does not hold.

    Raises:
        PreconditionFailed: The tensor has another version.
    """
    if not is_match(match, version):
        # A program is `program:<name>`.
        kind, _, shown = name.rpartition(":")
        there = f"there is no such {kind or 'tensor'}" if version is None else f"{shown!r} has version {version}"
        raise PreconditionFailed(f"if-match: {there}")
