"""Parses registrations of shared memory; the engines decide what can be registered."""

from __future__ import annotations

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.strict_json import parse_object
from tilewire.service.ipc.messages import RegionInfo

MAX_NAME_CHARACTERS = 255
# Offsets and sizes cross the socket as 64-bit integers.
MAX_BYTES = 2**63 - 1


def parse_registration(name: str, body: bytes) -> RegionInfo:
    """Reads the body of a registration.

    Args:
        name: From the path.
        body: `{"key": …, "offset": …, "byte_size": …}`; other members are ignored, as Triton does.

    Raises:
        InvalidRequest: Not such a body.
    """
    values = parse_object(body, "body")
    return RegionInfo(
        region_name(name),
        _text(values.get("key"), "key"),
        _size(values.get("offset", 0), "offset"),
        _size(values.get("byte_size"), "byte_size"),
    )


def region_name(name: str) -> str:
    """Checks the name of a region.

    Raises:
        InvalidRequest: Not 1 to 255 printable characters.
    """
    return _text(name, "name")


def check_allowed(is_allowed: bool) -> None:
    """Refuses when shared memory is off.

    Raises:
        InvalidRequest: It is.
    """
    if not is_allowed:
        raise InvalidRequest("shared memory is off on this server; --allow-shared-memory turns it on")


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS or not value.isprintable():
        shown = repr(value[:64]) if isinstance(value, str) else type(value).__name__
        raise InvalidRequest(f"{field}: expected 1 to {MAX_NAME_CHARACTERS} printable characters; got {shown}")
    return value


def _size(value: object, field: str) -> int:
    # Not isinstance: JSON's true is an int there.
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise InvalidRequest(f"{field}: expected a whole number of bytes in [0, 2^63 - 1]")
    return value
