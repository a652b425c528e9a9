"""Checks shapes in headers of any format, before anything is allocated."""

from __future__ import annotations

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.strict_json import kind_of, word_of
from tilewire.service.ops.op import MAX_DIM, MAX_RANK


def check_shape(value: object, field: str) -> tuple[int, ...]:
    """Validates the dimensions of a tensor.

    Raises:
        InvalidRequest: Not a list of whole, non-negative numbers, or beyond any format's bounds.
    """
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{field} is {kind_of(value)}; expected a list of integers")
    if len(value) > MAX_RANK:
        raise InvalidRequest(f"{field} has {len(value)} dimensions; at most {MAX_RANK} are possible")
    for dim in value:
        # Not isinstance: True is an int there.
        if type(dim) is not int:
            raise InvalidRequest(f"{field} holds {word_of(type(dim))}; expected integers")
        if not 0 <= dim <= MAX_DIM:
            raise InvalidRequest(f"{field} holds a dimension outside [0, 2^63 - 1]")
    return tuple(value)
