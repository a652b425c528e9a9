"""Frames of messages against protobuf's own reading: same model, same fields, same raw contents, for any bytes."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.grpc.open_inference_pb2 import InferParameter, ModelInferRequest
from tilewire.service.gateway.grpc.wire import (
    MAX_FIELDS,
    Frame,
    frame_of,
    parse,
    pieces_of,
    read_frame,
    varint,
)
from tilewire.service.gateway.request.body import ALIGN_BYTES

Input, Output = ModelInferRequest.InferInputTensor, ModelInferRequest.InferRequestedOutputTensor

names = st.text(max_size=6)
parameters = st.dictionaries(
    names, st.integers(-(2**63), 2**63 - 1).map(lambda n: InferParameter(int64_param=n)), max_size=2
)
fields = st.one_of(
    names.map(lambda text: ModelInferRequest(model_name=text)),
    names.map(lambda text: ModelInferRequest(model_version=text)),
    names.map(lambda text: ModelInferRequest(id=text)),
    parameters.map(lambda given: ModelInferRequest(parameters=given)),
    st.builds(Input, name=names, datatype=names, shape=st.lists(st.integers(-1, 2**40), max_size=4)).map(
        lambda one: ModelInferRequest(inputs=[one])
    ),
    names.map(lambda text: ModelInferRequest(outputs=[Output(name=text)])),
    st.binary(max_size=300).map(lambda data: ModelInferRequest(raw_input_contents=[data])),
).map(lambda message: message.SerializeToString())
# Fields that the message does not have: a number, 8 bytes, bytes, 4 bytes, and a group.
unknown = st.sampled_from([b"\x78\x05", b"\x79" + b"x" * 8, b"\x7a\x03abc", b"\x7d" + b"x" * 4, b"\x7b\x08\x01\x7c"])
# The same raw content with its tag, or its length, in more bytes than needed.
overlong = st.sampled_from([b"\xba\x00\x02ab", b"\x3a\x82\x00ab", b"\x3a\x82\x80\x80\x00ab"])
messages = st.lists(st.one_of(fields, fields, fields, unknown, overlong), max_size=8).map(b"".join)


def placed(frame: Frame) -> memoryview:
    slot = memoryview(bytearray(b"\xaa" * frame.nbytes))
    for at, piece in frame.parts:
        slot[at : at + len(piece)] = piece
    return slot


def check_as_protobuf(message: bytes) -> None:
    """A frame holds what protobuf reads; what protobuf refuses, is refused by the time its fields are read."""
    try:
        expected = ModelInferRequest.FromString(message)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            parse(ModelInferRequest, read_frame(placed(frame_of(message)))[1])
        return
    frame = frame_of(message)
    slot = placed(frame)
    lead_bytes, header, places = read_frame(slot)
    assert slot[:lead_bytes] == frame.lead
    names = tuple(name.decode() for name in (frame.model, frame.version, frame.id))
    assert names == (expected.model_name, expected.model_version, expected.id)
    assert [bytes(slot[at : at + nbytes]) for at, nbytes in places] == list(expected.raw_input_contents)
    assert all(at % ALIGN_BYTES == 0 for at, _ in places)
    del expected.raw_input_contents[:]
    found = parse(ModelInferRequest, header)
    found.DiscardUnknownFields()
    expected.DiscardUnknownFields()
    assert found == expected


@given(messages)
@example(b"")
@example(b"\x3a\x00\x3a\x00")
def test_messages_in_any_order(message: bytes) -> None:
    check_as_protobuf(message)


@given(messages, st.integers(0, 2**16), st.binary(max_size=4))
def test_messages_with_other_bytes_in_them(message: bytes, place: int, data: bytes) -> None:
    at = place % (len(message) + 1)
    check_as_protobuf(message[:at] + data + message[at + len(data) // 2 :])


@given(st.binary(max_size=64))
@example(b"\x3a" + b"\xff" * 60)
@example(b"\x3a\xff\xff\xff\xff\x0f")
@example(b"\x0b\x3a\x01x\x0c\x3a\x01y")
@example(b"\x0b\x3a\x01x")
@example(b"\x0c\x3a\x01x")
@example(b"\x3b\x3c\xba\x80\x80\x80\x00\x80\x80\x80\x80\x00")
@example(b"\x3a\x80\x80\x80\x80\x80\x00")
@example(b"\xba\x80\x80\x80\x80\x00\x00")
@example(b"\xba\x80\x80\x80\x10\x00")
@example(b"\x38\x05\x39" + bytes(8) + b"\x3d" + bytes(4) + b"\x3a\x01x")
@example(b"\x38\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x3a\x01x")
@example(b"\x38\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x3a\x01x")
@example(b"\x02\x00\x3a\x01x")
@example(b"\x3a")
@example(b"\x3e\x00")
@example(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_any_bytes(message: bytes) -> None:
    check_as_protobuf(message)


@pytest.mark.parametrize("first", [b"", b"\xf8\x01\x00", b"\xba\x00\x00"], ids=["shortest", "unknown", "longer"])
@pytest.mark.parametrize("field", [b"\x22\x00", b"\x2a\x00", b"\x3a\x00", b"\xf8\x01\x00", b"\x0b\x0c"])
def test_messages_of_very_many_fields_are_refused_at_once(first: bytes, field: bytes) -> None:
    """Each takes the event loop some time, and up to 400 bytes of memory."""
    message = first + field * 2**20
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=f"request: more than {MAX_FIELDS} fields"):
        frame_of(message)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**21


@given(st.integers(0, 2**63 - 1))
def test_numbers(number: int) -> None:
    message = b"\x78" + varint(number)
    assert ModelInferRequest.FromString(message).SerializeToString() == message


def test_a_large_content_is_copied_in_pieces() -> None:
    data = bytes(range(256)) * 2**16
    frame = frame_of(ModelInferRequest(raw_input_contents=[data, b"x"]).SerializeToString())
    pieces = list(pieces_of(frame))
    assert len(pieces) == 6
    assert b"".join(piece for _, piece in pieces[1:5]) == data
    _, _, places = read_frame(placed(frame))
    assert [nbytes for _, nbytes in places] == [2**24, 1]
