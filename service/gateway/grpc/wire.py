"""Finds the tensors in a serialized `ModelInferRequest` without copying them, and lays them out in a slot.

A frame is what stands in the slot: lengths, the message without its raw contents, and each raw content aligned. All in front
of the raw contents determines what is computed, so it is the lead by which templates are found.

Source: the encoding of protocol buffers, https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferRequest

MessageT = TypeVar("MessageT", bound=Message)
# Name and version of the model, and id of the request.
Names = tuple[bytes, bytes, bytes]

# Raw contents begin on this in their slot: unaligned ones are copied to the device in smaller words.
ALIGN_BYTES = 64
# Bytes that are copied before others have their turn: about a millisecond.
COPY_BYTES = 2**22

# Tag of a field whose value has a length, in one byte.
_MODEL_NAME, _MODEL_VERSION, _ID, _RAW = 0x0A, 0x12, 0x1A, 0x3A
_HEADER_TAGS = frozenset({0x22, 0x2A, 0x32})
_RAW_FIELD = b"\x3a"
_CONTINUES = 0x80
# No length takes more bytes: messages have less than 2 GiB.
_MAX_LENGTH_BYTES, _TOO_LONG = 5, 2**35


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


def frame_of(message: bytes) -> Frame:
    """Takes a message apart.

    Raises:
        InvalidRequest: It is no `ModelInferRequest`.
    """
    # No protobuf library writes another encoding than the shortest, so other messages may take longer.
    names, header, raws = _scan(message) or _scan_slowly(message)
    lead = struct.pack(f"<II{len(raws)}Q", len(header), len(raws), *[len(raw) for raw in raws]) + header
    parts: list[tuple[int, bytes | memoryview]] = [(0, lead)]
    at = len(lead)
    for raw in raws:
        at = aligned(at)
        parts.append((at, raw))
        at += len(raw)
    return Frame(*names, lead, parts, at)


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
        raise InvalidRequest(f"request: not a {kind.DESCRIPTOR.name} in the encoding of protocol buffers") from None
    return message


def _scan(message: bytes) -> tuple[Names, bytes, list[memoryview]] | None:
    """Goes through the fields; None for an encoding other than the shortest, or fields that there are not."""
    view, end = memoryview(message), len(message)
    model = version = request_id = b""
    raws: list[memoryview] = []
    header: list[memoryview] = []
    at = begin = 0
    while at + 1 < end:
        tag, length, field = message[at], message[at + 1], at
        at += 2
        if length >= _CONTINUES:
            length, at = _read_length(message, at, length)
        stop = at + length
        if stop > end:
            return None
        if tag == _RAW:
            if begin < field:
                header.append(view[begin:field])
            raws.append(view[at:stop])
            begin = stop
        elif tag == _MODEL_NAME:
            model = message[at:stop]
        elif tag == _MODEL_VERSION:
            version = message[at:stop]
        elif tag == _ID:
            request_id = message[at:stop]
        elif tag not in _HEADER_TAGS:
            return None
        at = stop
    if at != end:
        return None
    if begin < end:
        header.append(view[begin:])
    return (model, version, request_id), bytes(header[0]) if len(header) == 1 else b"".join(header), raws


def _read_length(message: bytes, at: int, length: int) -> tuple[int, int]:
    """Reads a length of several bytes.

    Args:
        message: The message.
        at: Place of its second byte.
        length: Its first byte.

    Returns:
        The length and the place behind it; a length beyond any message for one that cannot be read.
    """
    length &= 0x7F
    shift = 7
    for byte in message[at : at + _MAX_LENGTH_BYTES - 1]:
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < _CONTINUES:
            return length, at
        shift += 7
    return _TOO_LONG, at


def _scan_slowly(message: bytes) -> tuple[Names, bytes, list[memoryview]]:
    request = parse(ModelInferRequest, message)
    raws = [memoryview(raw) for raw in request.raw_input_contents]
    del request.raw_input_contents[:]
    request.DiscardUnknownFields()
    names = request.model_name.encode(), request.model_version.encode(), request.id.encode()
    return names, request.SerializeToString(), raws
