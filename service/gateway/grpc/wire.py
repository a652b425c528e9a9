"""Finds the tensors in a serialized `ModelInferRequest` without copying them, and lays them out in a slot; inflates messages.

A frame is what stands in the slot: lengths, the message without its raw contents, and each raw content aligned. All in front
of the raw contents determines what is computed, so it is the lead by which templates are found.

Compressed messages are inflated within a bound: the library would inflate them first and measure them then. It hands messages
over as they came, so a compressed one is found by its first bytes. In our messages no field begins with those of gzip, and no
message with those of zlib.

Source: the encoding of protocol buffers, https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from tilewire.service.errors import BodyTooLarge, InvalidRequest
from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferRequest
from tilewire.service.gateway.request.body import ALIGN_BYTES, COPY_BYTES

MessageT = TypeVar("MessageT", bound=Message)

# Most fields of a message, where each parameter and each tensor is one: each takes a microsecond, and some memory.
MAX_FIELDS = 2**12

# Tags of fields whose value has a length.
_MODEL_NAME, _MODEL_VERSION, _ID, _RAW = 0x0A, 0x12, 0x1A, 0x3A
# What a tag says of its value, in its last three bits.
_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)
_CONTINUES = 0x80
# Longest encodings that protobuf takes, in bytes.
_MAX_TAG_BYTES, _MAX_NUMBER_BYTES = 5, 10

_GZIP, _ZLIB = b"\x1f\x8b", 0x78
_FIRST = (b"\x1f", b"\x78")
# The first two bytes of zlib, read as a number, are a multiple of this.
_ZLIB_CHECK = 31
# Takes both formats.
_WINDOW_BITS = 47
# Bytes that are inflated, and compressed ones that are read, at once: a millisecond.
STEP_BYTES, FED_BYTES = 2**20, 2**16


class Frame(NamedTuple):
    """A message taken apart.

    Attributes:
        model: Name of the model, UTF-8.
        version: Version of the model, UTF-8; empty for any.
        id: Id of the request, UTF-8; empty for none.
        lead: First bytes of the slot.
        parts: Lead and raw contents, in order, with their places in the slot.
        nbytes: Size of the slot.
    """

    model: bytes
    version: bytes
    id: bytes
    lead: bytes
    parts: list[tuple[int, bytes | memoryview]]
    nbytes: int


def frame_of(message: bytes | bytearray) -> Frame:
    """Takes a message apart.

    Raises:
        InvalidRequest: It is no `ModelInferRequest`, as far as its raw contents and names are concerned.
    """
    try:
        names, header, raws = _scan(message)
    except IndexError:
        raise _broken(ModelInferRequest) from None
    lead = struct.pack(f"<II{len(raws)}Q", len(header), len(raws), *[len(raw) for raw in raws]) + header
    parts: list[tuple[int, bytes | memoryview]] = [(0, lead)]
    at = len(lead)
    for raw in raws:
        at = aligned(at)
        parts.append((at, raw))
        at += len(raw)
    model, version, request_id = names
    return Frame(model, version, request_id, lead, parts, at)


def pieces_of(frame: Frame) -> Iterator[tuple[int, bytes | memoryview]]:
    """Returns the parts of a large frame in pieces of at most `COPY_BYTES`."""
    for place, part in frame.parts:
        for begin in range(0, len(part), COPY_BYTES):
            yield place + begin, part[begin : begin + COPY_BYTES]


def read_frame(slot: memoryview) -> tuple[int, bytes, list[tuple[int, int]]]:
    """Reads a frame out of its slot.

    Returns:
        Bytes of the lead, the message without raw contents, and the offset and length of each raw content in the slot.
    """
    header_bytes, num_raws = struct.unpack_from("<II", slot)
    lengths: tuple[int, ...] = struct.unpack_from(f"<{num_raws}Q", slot, 8)
    begin = 8 + 8 * num_raws
    at = lead_bytes = begin + header_bytes
    places = []
    for nbytes in lengths:
        at = aligned(at)
        places.append((at, nbytes))
        at += nbytes
    return lead_bytes, bytes(slot[begin:lead_bytes]), places


def aligned(offset: int) -> int:
    """The next offset at which raw contents may begin."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def varint(number: int) -> bytes:
    """Encodes a number of 0 or more."""
    encoded = bytearray()
    while number >= _CONTINUES:
        encoded.append(number & 0x7F | _CONTINUES)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Parses a message.

    Raises:
        InvalidRequest: It is none of that kind.
    """
    try:
        message: MessageT = kind.FromString(data)
    except DecodeError:
        raise _broken(kind) from None
    return message


def _broken(kind: type[Message]) -> InvalidRequest:
    return InvalidRequest(f"request: not a {kind.DESCRIPTOR.name} in the encoding of protocol buffers")


def _scan(message: bytes | bytearray) -> tuple[tuple[bytes, ...], bytes, list[memoryview]]:
    """Goes through the fields; all but names and raw contents is for protobuf to read.

    Returns:
        Model, version and id; the message without its raw contents; and those.

    Raises:
        InvalidRequest: There are too many.
        IndexError: A field does not end within the message.
    """
    view, end = memoryview(message), len(message)
    names = dict.fromkeys((_MODEL_NAME, _MODEL_VERSION, _ID), b"")
    raws: list[memoryview] = []
    header: list[memoryview] = []
    at = begin = depth = num_fields = 0
    while at < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise InvalidRequest(f"request: more than {MAX_FIELDS} fields")
        field, tag = at, message[at]
        at += 1
        if tag >= _CONTINUES:
            tag, at = _read_varint(message, field, _MAX_TAG_BYTES)
        form = tag & 7
        if form != _LENGTH:
            depth += (form == _GROUP) - (form == _GROUP_END)
            at = _skip(message, at, tag)
            continue
        length = message[at]
        at += 1
        if length >= _CONTINUES:
            length, at = _read_varint(message, at - 1, _MAX_NUMBER_BYTES)
        stop = at + length
        # Fields of a group are none of the request's.
        if tag == _RAW and not depth:
            if begin < field:
                header.append(view[begin:field])
            raws.append(view[at:stop])
            begin = stop
        elif tag in names and not depth:
            names[tag] = bytes(message[at:stop])
        at = stop
    if at != end:
        raise IndexError
    if begin < end:
        header.append(view[begin:])
    return tuple(names.values()), bytes(header[0]) if len(header) == 1 else b"".join(header), raws


def _skip(message: bytes | bytearray, at: int, tag: int) -> int:
    """Returns the place behind a value without a length."""
    form = tag & 7
    if form == _VARINT:
        return _read_varint(message, at, _MAX_NUMBER_BYTES)[1]
    if form in (_FIXED64, _FIXED32):
        return at + (8 if form == _FIXED64 else 4)
    if form in (_GROUP, _GROUP_END):
        return at
    raise IndexError


def _read_varint(message: bytes | bytearray, at: int, max_bytes: int) -> tuple[int, int]:
    """Returns the number at a place, and the place behind it; an IndexError for one that does not end."""
    number = 0
    for place in range(max_bytes):
        byte = message[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < _CONTINUES:
            return number, at + place + 1
    raise IndexError


def is_compressed(message: bytes) -> bool:
    """Whether a message begins as gzip or zlib do."""
    if message[:1] not in _FIRST:
        return False
    head = message[:2]
    return head == _GZIP or (head[0] == _ZLIB and len(head) > 1 and not int.from_bytes(head, "big") % _ZLIB_CHECK)


class Inflater:
    """Inflates one message, step by step: all at once would be copied at once, too, with the interpreter's lock held.

    Args:
        message: As it came.
        max_bytes: Largest message.

    Attributes:
        inflated: What there is of it.
    """

    def __init__(self, message: bytes, max_bytes: int) -> None:
        self.inflated = bytearray()
        self._max_bytes = max_bytes
        self._decoder = zlib.decompressobj(_WINDOW_BITS)
        self._rest = memoryview(message)
        self._fed: bytes | memoryview = b""

    def step(self) -> bool:
        """Inflates at most `STEP_BYTES` more. Returns whether there is more to do.

        Raises:
            InvalidRequest: It is not what its first bytes say.
            BodyTooLarge: It inflates to more than it may.
        """
        if not self._fed:
            self._fed, self._rest = self._rest[:FED_BYTES], self._rest[FED_BYTES:]
        try:
            piece = self._decoder.decompress(self._fed, STEP_BYTES)
        except zlib.error:
            raise InvalidRequest("request: its compression is broken") from None
        self._fed = self._decoder.unconsumed_tail
        self.inflated += piece
        if len(self.inflated) > self._max_bytes:
            raise BodyTooLarge(f"request: inflates to more than the limit of {self._max_bytes} bytes")
        if self._decoder.eof:
            return False
        # A full piece may be part of what it was fed last.
        if not self._fed and not self._rest and len(piece) < STEP_BYTES:
            raise InvalidRequest("request: its compression is broken off")
        return True
