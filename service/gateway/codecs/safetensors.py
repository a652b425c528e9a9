"""The safetensors format: 8-byte header length, JSON header, payload. Owns its rules; reads and writes no payload byte.

Source: the format as documented at https://github.com/huggingface/safetensors, including its rule that the tensors
cover the payload without holes or overlaps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from tilewire.service.dtypes import BY_SAFETENSORS, DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.protocol import Codec, Placed, Room, check_count, field_of
from tilewire.service.gateway.codecs.shapes import check_shape
from tilewire.service.gateway.codecs.strict_json import kind_of, parse_object
from tilewire.service.ops.op import TensorType

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 2**20
# Longer headers are read each time: the cache stays small whatever clients send.
CACHED_BYTES = 1024
_ALIGNMENT = 8
_FIELDS = {"dtype", "shape", "data_offsets"}


class Safetensors(Codec):
    """Codec of `application/x-safetensors`: tensors by name, of every dtype."""

    name = "safetensors"
    content_type = "application/x-safetensors"
    aliases = ("application/vnd.safetensors", "application/octet-stream")

    def begins(self, first: bytes) -> bool:
        return (
            first[PREFIX_BYTES:].startswith(b"{") and int.from_bytes(first[:PREFIX_BYTES], "little") <= MAX_HEADER_BYTES
        )

    def decode(
        self, body: memoryview, offset: int, room: Room, *, beside: Collection[str] = ()
    ) -> Mapping[str, Placed]:
        header = _header_bytes(body)
        payload_bytes = body.nbytes - PREFIX_BYTES - len(header)
        start = offset + PREFIX_BYTES + len(header)
        read = _read_layout if len(header) <= CACHED_BYTES else _read_layout.__wrapped__
        return {name: Placed(kind, start + begin) for name, kind, begin in read(header, payload_bytes)}

    def metadata(self, body: memoryview) -> Mapping[str, str]:
        return _take_metadata(parse_object(memoryview(_header_bytes(body)), "safetensors header"))

    def work_bytes(self, body: memoryview) -> int:
        """All of the header's text."""
        return min(int.from_bytes(body[:PREFIX_BYTES], "little"), body.nbytes)

    def lead_bytes(self, body: memoryview) -> int | None:
        """Length of the prefix and the header."""
        return PREFIX_BYTES + int.from_bytes(body[:PREFIX_BYTES], "little")

    def encode(self, outputs: Mapping[str, TensorType], payloads: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        return [_head_of(tuple(outputs.items())), *payloads]


@lru_cache(maxsize=512)
def _head_of(outputs: tuple[tuple[str, TensorType], ...]) -> bytes:
    entries, end = {}, 0
    for name, kind in outputs:
        begin, end = end, end + kind.nbytes
        entries[name] = {"dtype": DTYPES[kind.dtype].safetensors, "shape": kind.shape, "data_offsets": (begin, end)}
    header = msgspec.json.encode(entries)
    # Spaces are legal at the end of the header; with them a reader that maps the file finds an aligned payload.
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(PREFIX_BYTES, "little") + header


def _header_bytes(body: memoryview) -> bytes:
    length = int.from_bytes(body[:PREFIX_BYTES], "little")
    if body.nbytes < PREFIX_BYTES or length > body.nbytes - PREFIX_BYTES:
        raise InvalidRequest(f"safetensors header: length says {length} bytes, the body has {body.nbytes} in all")
    if length > MAX_HEADER_BYTES:
        raise InvalidRequest(f"safetensors header: {length} bytes; at most {MAX_HEADER_BYTES} are read")
    return bytes(body[PREFIX_BYTES : PREFIX_BYTES + length])


@lru_cache(maxsize=512)
def _read_layout(text: bytes, payload_bytes: int) -> tuple[tuple[str, TensorType, int], ...]:
    """Reads a header: name, type and place in the payload of each tensor. A client's requests mostly have the same one."""
    if not text.startswith(b"{"):
        raise InvalidRequest("safetensors header: does not begin with '{'")
    header = parse_object(memoryview(text), "safetensors header")
    _take_metadata(header)
    check_count(len(header), "safetensors header")
    tensors = {name: _read_entry(name, entry) for name, entry in header.items()}
    _check_cover(tensors, payload_bytes)
    return tuple((name, kind, begin) for name, (kind, begin, _) in tensors.items())


def _take_metadata(header: dict[str, object]) -> dict[str, str]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidRequest("__metadata__: expected an object whose values are strings")
    return metadata


def _read_entry(name: str, entry: object) -> tuple[TensorType, int, int]:
    """Returns type, begin and end of one tensor, consistent with one another."""
    field = field_of(name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise InvalidRequest(f"{field}: expected an object with exactly dtype, shape and data_offsets")
    code = entry["dtype"]
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        wrong = repr(code[:64]) if isinstance(code, str) else kind_of(code)
        raise InvalidRequest(f"{field}: dtype {wrong}; expected one of {', '.join(BY_SAFETENSORS)}")
    kind = TensorType(dtype.name, check_shape(entry["shape"], f"{field}: shape"))
    offsets = check_shape(entry["data_offsets"], f"{field}: data_offsets")
    if len(offsets) != 2 or offsets[1] - offsets[0] != kind.nbytes:
        raise InvalidRequest(f"{field}: data_offsets {list(offsets)[:2]} do not span the {kind.nbytes} bytes of {kind}")
    return kind, offsets[0], offsets[1]


def _check_cover(tensors: Mapping[str, tuple[TensorType, int, int]], payload_bytes: int) -> None:
    reached = 0
    for name, (_, begin, end) in sorted(tensors.items(), key=lambda item: item[1][1:]):
        if begin != reached:
            raise InvalidRequest(
                f"{field_of(name)}: data_offsets begin at {begin}; expected {reached}, without holes or overlaps"
            )
        reached = end
    if reached != payload_bytes:
        raise InvalidRequest(f"safetensors payload: {payload_bytes} bytes, but the tensors cover {reached}")
