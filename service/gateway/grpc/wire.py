"""Finds the tensors in a serialized `ModelInferRequest` without copying them, and lays them out in a slot.

A frame is what stands in the slot: lengths, the message without its raw contents, and each raw content aligned. All in front
of the raw contents determines what is computed, so it is the lead by which templates are found.

Source: the encoding of protocol buffers, https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferRequest

MessageT = TypeVar("MessageT", bound=Message)

# Raw contents begin on this in their slot: unaligned ones are copied to the device in smaller words.
ALIGN_BYTES = 64
# Bytes that are copied before others have their turn: about a millisecond.
COPY_BYTES = 2**22

_COUNTS = struct.Struct("<II")
_LENGTH_BYTES = 8
# Tag of a field whose value has a length, in one byte.
_MODEL_NAME, _MODEL_VERSION, _RAW = 0x0A, 0x12, 0x3A
_HEADER_TAGS = frozenset({_MODEL_NAME, _MODEL_VERSION, 0x1A, 0x22, 0x2A, 0x32})
_RAW_FIELD = b"\x3a"
_CONTINUES = 0x80
# No length is longer: messages have less than 2 GiB.
_MAX_SHIFT = 28


class Frame(NamedTuple):
    """A message taken apart.

    Attributes:
        model: Name of the model, UTF-8.
        version: Version of the model, UTF-8; empty for any.
        lead: First bytes of the slot.
        raws: Raw contents, in order.
        nbytes: Size of the slot.
    """

    model: bytes
    version: bytes
    lead: bytes
    raws: tuple[memoryview, ...]
    nbytes: int


def frame_of(message: bytes) -> Frame:
    """Takes a message apart.

    Raises:
        InvalidRequest: It is no `ModelInferRequest`.
    """
    found = _scan(message)
    if found is None:
        # An encoding that no protobuf library writes, or no such message at all.
        found = _scan_slowly(message)
    model, version, header, raws = found
    lead = b"".join(
        (_COUNTS.pack(len(header), len(raws)), *(raw.nbytes.to_bytes(_LENGTH_BYTES, "little") for raw in raws), header)
    )
    nbytes = len(lead)
    for raw in raws:
        nbytes = aligned(nbytes) + raw.nbytes
    return Frame(model, version, lead, tuple(raws), nbytes)


def pieces_of(frame: Frame) -> list[tuple[int, memoryview]]:
    """Where each part of a frame goes in its slot, in pieces of at most `COPY_BYTES`."""
    at = len(frame.lead)
    pieces = [(0, memoryview(frame.lead))]
    for raw in frame.raws:
        at = aligned(at)
        pieces += [(at + begin, raw[begin : begin + COPY_BYTES]) for begin in range(0, raw.nbytes, COPY_BYTES)]
        at += raw.nbytes
    return pieces


def read_frame(slot: memoryview) -> tuple[int, bytes, list[tuple[int, int]]]:
    """Reads a frame out of its slot.

    Returns:
        Bytes of the lead, the message without raw contents, and the offset and length of each raw content in the slot.
    """
    header_bytes, num_raws = _COUNTS.unpack_from(slot)
    lengths = [
        int.from_bytes(slot[at : at + _LENGTH_BYTES], "little")
        for at in range(_COUNTS.size, _COUNTS.size + num_raws * _LENGTH_BYTES, _LENGTH_BYTES)
    ]
    begin = _COUNTS.size + num_raws * _LENGTH_BYTES
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


def _scan(message: bytes) -> tuple[bytes, bytes, bytes, list[memoryview]] | None:
    """Goes through the fields; None for an encoding other than the shortest, or fields that there are not."""
    view = memoryview(message)
    model = version = b""
    raws: list[memoryview] = []
    header: list[memoryview] = []
    at = begin = 0
    end = len(message)
    while at < end:
        tag, field = message[at], at
        length, shift, at = 0, 0, at + 1
        while at < end:
            byte = message[at]
            at += 1
            length |= (byte & 0x7F) << shift
            if byte < _CONTINUES:
                break
            shift += 7
            if shift > _MAX_SHIFT:
                return None
        else:
            return None
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
        elif tag not in _HEADER_TAGS:
            return None
        at = stop
    if begin < end:
        header.append(view[begin:])
    return model, version, bytes(header[0]) if len(header) == 1 else b"".join(header), raws


def _scan_slowly(message: bytes) -> tuple[bytes, bytes, bytes, list[memoryview]]:
    request = parse(ModelInferRequest, message)
    raws = [memoryview(raw) for raw in request.raw_input_contents]
    del request.raw_input_contents[:]
    request.DiscardUnknownFields()
    return request.model_name.encode(), request.model_version.encode(), request.SerializeToString(), raws
