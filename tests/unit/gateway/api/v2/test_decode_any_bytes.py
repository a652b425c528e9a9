"""The codec of the Open Inference Protocol over generated input: the tensors that were sent, or a refusal; nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.changed_bytes import changed_bytes
from tests.support.oip_bodies import DATATYPES, binary_input, text_input
from tests.unit.gateway.codecs.arena_room import NUMPY, ArenaRoom
from tilewire.service.errors import BodyTooLarge, InvalidRequest, TilewireError
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.ops.registry import OPS

SHAPES = st.lists(st.integers(0, 3), max_size=8).filter(lambda shape: math.prod(shape) <= 300).map(tuple)
OP_NAMES = st.sampled_from(sorted(OPS))


def outcome_of(op: str, body: bytes, header_bytes: int | None) -> tuple[ArenaRoom, InferRequest | TilewireError]:
    """What the codec says; an exception of any other kind fails the test."""
    room = ArenaRoom(body, limit=2**16)
    try:
        # Lengths beyond the body are the caller's to refuse.
        length = None if header_bytes is None else min(header_bytes, len(body))
        request = decode_request(OPS[op], room.body, room.start, length, room)
    except (InvalidRequest, BodyTooLarge) as refusal:
        check_detail(refusal)
        return room, refusal
    for one in request.inputs:
        assert [one.placed, one.region, one.resident].count(None) == 2
        if one.placed is not None:
            assert one.placed.type == one.type
            assert room.holds(one.placed)
    return room, request


def check_detail(refusal: TilewireError) -> None:
    assert 0 < len(refusal.detail) < 1000
    refusal.detail.encode()


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(data=st.data(), dtype=st.sampled_from(sorted(DATATYPES)), shapes=st.tuples(SHAPES, SHAPES))
def test_what_was_sent_is_what_is_read(data: st.DataObject, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    arrays: dict[str, Any] = {}
    inputs, tail = [], b""
    for name, shape in zip("ab", shapes, strict=True):
        raw = data.draw(st.binary(min_size=math.prod(shape), max_size=math.prod(shape)))
        arrays[name] = (np.frombuffer(raw, dtype=np.int8) % 16).astype(NUMPY[dtype]).reshape(shape)
        if not dtype.startswith("float8") and data.draw(st.booleans()):
            inputs.append(text_input(name, arrays[name], is_nested=data.draw(st.booleans())))
        else:
            inputs.append(binary_input(name, arrays[name]))
            tail += arrays[name].tobytes()
    text = json.dumps({"inputs": inputs}).encode()
    room, request = outcome_of("add", text + tail, len(text))
    assert isinstance(request, InferRequest)
    for one in request.inputs:
        assert one.placed is not None
        got = room.read(one.placed)
        assert got.dtype == arrays[one.name].dtype
        assert got.shape == arrays[one.name].shape
        np.testing.assert_array_equal(got, arrays[one.name])


@settings(deadline=None, max_examples=300)
@given(op=OP_NAMES, body=st.binary(max_size=300), header_bytes=st.none() | st.integers(0, 400))
def test_any_bytes(op: str, body: bytes, header_bytes: int | None) -> None:
    outcome_of(op, body, header_bytes)


def real_body() -> tuple[bytes, int]:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.float32)
    document = {
        "id": "7",
        "inputs": [binary_input("a", a), text_input("b", b)],
        "outputs": [{"name": "out", "parameters": {"binary_data": True}}],
        "parameters": {"alpha": 2, "priority": 1, "timeout": 1000},
    }
    text = json.dumps(document).encode()
    return text + a.tobytes(), len(text)


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(data=st.data())
def test_a_real_body_with_bytes_changed(data: st.DataObject) -> None:
    body, header_bytes = real_body()
    changed = changed_bytes(data, body)
    shift = data.draw(st.integers(-5, 5))
    outcome_of("add", changed, data.draw(st.sampled_from([None, header_bytes, header_bytes + shift])))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["name", "data", "shape", "datatype", "parameters", "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b"]) | VALUES},
    optional={
        "datatype": st.sampled_from(["FP32", "INT64", "FP8_E5M2"]) | VALUES,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | VALUES,
        "data": st.lists(st.integers() | st.floats(), max_size=6) | VALUES,
        "parameters": st.dictionaries(
            st.sampled_from(
                ["binary_data_size", "resident", "shared_memory_region", "shared_memory_byte_size", "binary_data"]
            ),
            st.integers(0, 16) | st.text(max_size=3) | VALUES,
            max_size=3,
        ),
    },
)
DOCUMENTS = st.fixed_dictionaries(
    {"inputs": st.lists(ENTRIES, max_size=3) | VALUES},
    optional={
        "id": st.text(max_size=3) | VALUES,
        "outputs": st.lists(ENTRIES, max_size=2) | VALUES,
        "parameters": st.dictionaries(
            st.sampled_from(["alpha", "out_dtype", "a", "priority", "timeout", "binary_data_output", "sequence_id"]),
            st.integers() | st.floats() | st.just("@w") | VALUES,
            max_size=3,
        ),
    },
)


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(document=DOCUMENTS, tail=st.binary(max_size=20))
def test_any_document(document: object, tail: bytes) -> None:
    text = json.dumps(document).encode()
    outcome_of("add", text + tail, len(text))
