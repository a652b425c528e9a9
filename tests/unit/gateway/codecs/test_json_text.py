"""JSON tensors: what a person types is read, what cannot be right is named."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest

from tests.unit.gateway.codecs.arena_room import NUMPY, ArenaRoom, decode
from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BeyondLimit, BodyTooLarge, InvalidRequest
from tilewire.service.gateway.codecs.json_text import MAX_BODY_BYTES, PIECE_ELEMENTS, PROGRAM_KEY, Json
from tilewire.service.gateway.codecs.protocol import MAX_TENSORS
from tilewire.service.ops.op import TensorType

CODEC = Json()


def test_nested_lists_are_float32() -> None:
    got = decode(CODEC, b'{"a": [[1, 2.5], [-3, 4e-1]], "b": 7}')
    assert got["a"].dtype == got["b"].dtype == np.float32
    assert got["a"].tolist() == [[1, 2.5], [-3, np.float32(0.4)]]
    assert got["b"].shape == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_dtype_for_all(dtype: str) -> None:
    got = decode(CODEC, json.dumps({"a": [[1, 2], [3, -4]], "dtype": dtype}).encode())["a"]
    assert got.dtype == NUMPY[dtype]
    assert got.astype(np.float64).tolist() == [[1, 2], [3, -4]]


def test_a_dtype_and_a_shape_per_tensor() -> None:
    body = b'{"a": {"dtype": "int8", "data": [1, 2, 3, 4], "shape": [2, 2]}, "b": {"data": [0.5]}, "dtype": "float16"}'
    got = decode(CODEC, body)
    assert got["a"].dtype == np.int8
    assert got["a"].tolist() == [[1, 2], [3, 4]]
    assert got["b"].dtype == np.float16


@pytest.mark.parametrize("value", [[], [[]], [[], []], [[[], []], [[], []]], [[[]]]])
def test_empty_lists_have_numpys_shapes(value: Any) -> None:
    assert decode(CODEC, json.dumps({"x": value}).encode())["x"].shape == np.array(value).shape


def test_an_empty_tensor_of_any_shape_leases_nothing() -> None:
    room = ArenaRoom(b'{"x": {"data": [], "shape": [0, 1000000000000]}}')
    assert CODEC.decode(room.body, room.start, room)["x"].type.shape == (0, 10**12)
    assert room.leased == []


def test_a_program_is_beside_the_tensors_where_the_call_reads_one() -> None:
    room = ArenaRoom(b'{"x": [1], "program": {"steps": []}}')
    assert CODEC.decode(room.body, room.start, room, beside=[PROGRAM_KEY]).keys() == {"x"}
    assert CODEC.metadata(room.body) == {PROGRAM_KEY: '{"steps": []}'}
    with pytest.raises(InvalidRequest, match=r"^program: "):
        CODEC.decode(room.body, room.start, room)


def test_nan_and_infinity_are_bare() -> None:
    got = decode(CODEC, b'{"x": [NaN, Infinity, -Infinity]}')["x"]
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf])
    parts = CODEC.encode({"out": TensorType("float32", (3,))}, [memoryview(got.tobytes())])
    assert b"".join(parts) == b'{"out":[NaN,Infinity,-Infinity],"dtype":"float32","shape":[3]}'


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
@pytest.mark.parametrize(
    "value",
    ["{}", "[[Infinity, {}]]", '{{"data": [{}]}}', f"[{'1.5, ' * 20_000} Infinity, {{}}]"],
    ids=lambda value: value[:20],
)
def test_a_number_past_the_range_of_a_float_is_refused(value: str, number: str) -> None:
    body = f'{{"a": [Infinity], "x": {value.format(number)}}}'.encode()
    with pytest.raises(InvalidRequest, match=rf"^x: {number} is beyond the range of a float"):
        decode(CODEC, body)


def test_a_number_past_the_range_of_its_dtype_is_infinity() -> None:
    assert decode(CODEC, b'{"x": [1e39, -1e39]}')["x"].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (PIECE_ELEMENTS,),
        (PIECE_ELEMENTS + 1,),
        (3, PIECE_ELEMENTS + 5),
        (700, 3, 5),
        (2, 1, 2 * PIECE_ELEMENTS),
    ],
    ids=str,
)
def test_every_number_is_written_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    size = math.prod(shape) * DTYPES[dtype].itemsize
    # Any bits: the least and the greatest numbers of a dtype, NaN and infinities anywhere.
    payload = np.frombuffer(rng.bytes(size), dtype=NUMPY[dtype]).reshape(shape)
    parts = CODEC.encode({"out": TensorType(dtype, shape)}, [memoryview(payload.tobytes())])
    out = json.loads(b"".join(parts))
    assert (out["dtype"], tuple(out["shape"])) == (dtype, shape)
    exact = np.float64 if DTYPES[dtype].is_float else np.int64
    with np.errstate(invalid="ignore"):  # signalling NaN
        np.testing.assert_array_equal(np.array(out["out"], exact), payload.astype(exact))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "JSON body"),
        ("[]", "expected an object"),
        ("3", "expected an object"),
        ("null", "expected an object"),
        ('"x"', "expected an object"),
        ("\ufeff{}", "BOM"),
        ('{"a": [1], "a": [2]}', "twice"),
        ('{"a": {"data": [1], "data": [2]}}', "twice"),
        ('{"\\ud800": [1]}', "surrogate"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
        ('{"a":' * 100_000, "nested"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "dimensions"),
        ('{"a": ' + "9" * 5000 + "}", "JSON body"),
        ('{"a": ' + "9" * 400 + "}", "float64"),
        ('{"a": [[1, 2], [3]]}', "ragged"),
        ('{"a": [1, [2]]}', "ragged"),
        ('{"a": [[], [1]]}', "ragged"),
        ('{"a": [true]}', "bool"),
        ('{"a": true}', "bool"),
        ('{"a": [1, null]}', "holds null"),
        ('{"a": ["1"]}', "str"),
        ('{"a": "gelu"}', "query"),
        ('{"a": [{}]}', "an object"),
        ('{"a": {}}', "data"),
        ('{"a": {"data": [1], "more": 1}}', "data"),
        ('{"a": {"data": {"data": [1]}}}', "an object"),
        ('{"a": {"data": [1], "shape": [2]}}', "does not hold"),
        ('{"a": {"data": [1], "shape": [-1]}}', "outside"),
        ('{"a": {"data": [1], "shape": 1}}', "expected a list"),
        ('{"a": {"data": [1], "dtype": "bool"}}', "unknown dtype"),
        ('{"a": [1], "dtype": "f4"}', "unknown dtype"),
        ('{"a": [1], "dtype": null}', "got nothing"),
        ('{"a": [1], "dtype": ["int8"]}', "list"),
        ('{"a": [128], "dtype": "int8"}', "outside"),
        ('{"a": [-129], "dtype": "int8"}', "outside"),
        ('{"a": [9223372036854775808], "dtype": "int64"}', "outside"),
        ('{"a": [1.0], "dtype": "int32"}', "whole numbers"),
        ('{"a": [NaN], "dtype": "int32"}', "whole numbers"),
    ],
)
def test_a_body_that_cannot_be_right(body: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest) as raised:
        decode(CODEC, body.encode())
    assert said in raised.value.detail
    assert len(raised.value.detail) < 400
    assert time.process_time() - began < 1


def test_bytes_that_are_not_utf8() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        decode(CODEC, b'{"\xff": 1}')


def test_the_room_bounds_the_tensors() -> None:
    with pytest.raises(BodyTooLarge):
        decode(CODEC, json.dumps({"a": [0] * 1000, "dtype": "float64"}).encode(), limit=4096)


def test_text_past_the_bound_is_not_parsed() -> None:
    with pytest.raises(BodyTooLarge, match="safetensors"):
        CODEC.decode(memoryview(bytearray(MAX_BODY_BYTES + 1)), 0, ArenaRoom(b""))


def test_an_answer_past_the_bound_is_not_written() -> None:
    with pytest.raises(BeyondLimit):
        CODEC.encode({"out": TensorType("float32", (2**15, 2**15))}, [memoryview(b"")])


def test_an_empty_answer_of_any_shape_is_short() -> None:
    assert CODEC.encode({"out": TensorType("int8", (2**40, 0))}, [memoryview(b"")]) == [
        b'{"out":[],"dtype":"int8","shape":[1099511627776,0]}'
    ]


def test_a_large_body_is_quick() -> None:
    body = json.dumps({"a": [[0.5] * 500] * 1000}).encode()
    began = time.process_time()
    assert decode(CODEC, body, limit=4 * 2**20)["a"].shape == (1000, 500)
    assert time.process_time() - began < 2


def test_many_tensors_take_no_room() -> None:
    text = json.dumps({f"t{index}": 1 for index in range(MAX_TENSORS + 1)} | {"dtype": "int8"}).encode()
    room = ArenaRoom(text)
    with pytest.raises(InvalidRequest, match=f"{MAX_TENSORS + 1} tensors; at most {MAX_TENSORS}"):
        CODEC.decode(room.body, room.start, room)
    assert not room.leased
    assert len(decode(CODEC, json.dumps({f"t{index}": 1 for index in range(MAX_TENSORS)}).encode())) == MAX_TENSORS


def test_a_long_integer_is_told_in_our_words() -> None:
    with pytest.raises(InvalidRequest, match=r"holds an integer of more than \d+ digits"):
        decode(CODEC, b'{"a": ' + b"9" * 10_000 + b"}")
