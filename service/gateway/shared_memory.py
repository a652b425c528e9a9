"""What requests say of system shared memory: the body of a registration, and the tensors of an inference that lie in regions.

Owns the reading and checking of both; which regions there are, and whether a tensor lies inside, the engines know. Knows no
HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from service.errors import InvalidRequest
from service.gateway.codecs.strict_json import parse_object
from service.messages import Operand, RegionInfo
from service.ops import TensorType

MAX_NAME_CHARACTERS = 255
# Offsets and sizes cross the socket as signed 64-bit integers; the sum of two still fits.
MAX_BYTES = 2**62

REGION, BYTE_SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PARAMETERS = (REGION, BYTE_SIZE, OFFSET)


class RegionRef(msgspec.Struct, frozen=True):
    """Where a tensor lies in shared memory, as its request says.

    Attributes:
        name: Of the region.
        byte_size: Of the tensor; of a result, the room for it.
        offset: From the region's beginning.
    """

    name: str
    byte_size: int
    offset: int = 0


def region_ref(parameters: Mapping[str, object], field: str, *, is_allowed: bool) -> RegionRef | None:
    """Reads the shared-memory parameters of an input or an output.

    Args:
        parameters: Of the input or output; others among them are not looked at.
        field: How error texts call it.
        is_allowed: Whether this server offers shared memory.

    Returns:
        None when there are none.

    Raises:
        InvalidRequest: Shared memory is off, or a parameter is missing or cannot be right.
    """
    if not any(name in parameters for name in PARAMETERS):
        return None
    check_allowed(is_allowed)
    for name in (REGION, BYTE_SIZE):
        if name not in parameters:
            raise InvalidRequest(f"{field}: {name} is missing")
    return RegionRef(
        region_name(parameters[REGION], f"{field}: {REGION}"),
        _size(parameters[BYTE_SIZE], f"{field}: {BYTE_SIZE}"),
        _size(parameters.get(OFFSET, 0), f"{field}: {OFFSET}"),
    )


def region_operand(ref: RegionRef, kind: TensorType, field: str) -> Operand:
    """The operand of an input that lies in a region.

    Raises:
        InvalidRequest: The request's size is not that of the tensor.
    """
    if ref.byte_size != kind.nbytes:
        raise InvalidRequest(f"{field}: {BYTE_SIZE} is {ref.byte_size}; {kind} has {kind.nbytes} bytes")
    return Operand(kind, ref.offset, region=ref.name)


def check_room(ref: RegionRef, out: TensorType, field: str) -> None:
    """Checks that a result fits where its request wants it.

    Raises:
        InvalidRequest: It does not.
    """
    if ref.byte_size < out.nbytes:
        raise InvalidRequest(f"{field}: {BYTE_SIZE} is {ref.byte_size}; the result {out} needs {out.nbytes}")


def parse_registration(name: str, body: bytes | memoryview) -> RegionInfo:
    """Reads the body of a registration.

    Args:
        name: From the path.
        body: `{"key": …, "offset": …, "byte_size": …}`; other members are ignored, as Triton does.

    Raises:
        InvalidRequest: Not such a body.
    """
    values = parse_object(body, "body")
    key = values.get("key")
    if not isinstance(key, str) or not _is_plain(key):
        raise InvalidRequest(
            f"key: expected the shared-memory key as a string of printable characters; got {_show(key)}"
        )
    return RegionInfo(
        region_name(name, "name"),
        key,
        _size(values.get("offset", 0), "offset"),
        _size(values.get("byte_size"), "byte_size"),
    )


def region_name(value: object, field: str) -> str:
    """Checks the name of a region.

    Raises:
        InvalidRequest: Not 1 to 255 printable characters.
    """
    if not isinstance(value, str) or not _is_plain(value):
        raise InvalidRequest(f"{field}: expected 1 to {MAX_NAME_CHARACTERS} printable characters; got {_show(value)}")
    return value


def check_allowed(is_allowed: bool) -> None:
    """Refuses when shared memory is off.

    Raises:
        InvalidRequest: It is.
    """
    if not is_allowed:
        raise InvalidRequest(
            "shared memory is off on this server; it is started with --allow-shared-memory to offer it"
        )


def _is_plain(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARACTERS and text.isprintable()


def _size(value: object, field: str) -> int:
    # JSON's true is an int in Python.
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise InvalidRequest(f"{field}: expected a number of bytes, 0 or more; got {_show(value)}")
    return value


def _show(value: object) -> str:
    """A value for an error text: short, whatever it is; a long integer is not even formatted."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:64] if not isinstance(value, dict | list) else type(value).__name__
