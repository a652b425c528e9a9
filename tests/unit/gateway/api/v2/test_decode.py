"""The codec of the Open Inference Protocol: what it reads, and what it answers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.support.float64_oracle import random_array
from tests.support.oip_bodies import binary_input, from_answer, text_input
from tests.unit.gateway.api.v2.oip_reading import read
from tests.unit.gateway.codecs.arena_room import ArenaRoom
from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.v2.answer import encode_answer
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.request import InferRequest, Output
from tilewire.service.gateway.request.adapter import Region
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.program.op import ProgramOp, ProgramOptions
from tilewire.service.ops.registry import OPS, PROGRAM_FAMILY
from tilewire.service.ops.softmax import SoftmaxOptions

A = random_array("float32", (2, 3), 1)
B = random_array("float32", (3, 4), 2)


# ── requests ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_inputs_stay_in_the_body(dtype: str) -> None:
    a, b = random_array(dtype, (2, 3), 1), random_array(dtype, (3, 4), 2)
    text = json.dumps({"inputs": [binary_input("a", a), binary_input("b", b)]}).encode()
    room = ArenaRoom(text + a.tobytes() + b.tobytes())
    request = decode_request(OPS["matmul"], room.body, room.start, len(text), room)
    places = [one.placed for one in request.inputs]
    assert [place.offset - room.start for place in places if place] == [len(text), len(text) + a.nbytes]
    assert not room.leased
    for place, expected in zip(places, (a, b), strict=True):
        assert place is not None
        assert room.read(place).tobytes() == expected.tobytes()


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_numbers_in_the_json(dtype: str, is_nested: bool) -> None:
    a = random_array(dtype, (2, 1, 3), 1)
    _, arrays = read("add", {"inputs": [text_input("a", a, is_nested=is_nested), text_input("b", a)]})
    assert arrays["a"].dtype == a.dtype
    np.testing.assert_array_equal(arrays["a"], a)


def test_json_and_binary_inputs_may_be_mixed() -> None:
    inputs = [binary_input("a", A), text_input("bias", np.ones(4, np.float32)), binary_input("b", B)]
    _, arrays = read("matmul", {"inputs": inputs}, A.tobytes() + B.tobytes())
    np.testing.assert_array_equal(arrays["a"], A)
    np.testing.assert_array_equal(arrays["b"], B)
    np.testing.assert_array_equal(arrays["bias"], np.ones(4))


def test_nan_and_infinity_are_bare() -> None:
    text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [NaN, Infinity, -Infinity, 1]}]}'
    _, arrays = read("softmax", text)
    np.testing.assert_array_equal(arrays["x"], np.array([np.nan, np.inf, -np.inf, 1], np.float32))


@pytest.mark.parametrize("rank", range(9))
@pytest.mark.parametrize("is_binary", [False, True])
def test_ranks(rank: int, is_binary: bool) -> None:
    array = np.arange(2**rank, dtype=np.float32).reshape((2,) * rank)
    make = binary_input if is_binary else text_input
    _, arrays = read("add", {"inputs": [make("a", array), make("b", array)]}, 2 * array.tobytes() if is_binary else b"")
    np.testing.assert_array_equal(arrays["b"], array)


def test_a_scalar_may_be_bare() -> None:
    one = {"name": "a", "datatype": "FP32", "shape": [], "data": 5}
    _, arrays = read("add", {"inputs": [one]})
    assert arrays["a"].shape == ()
    assert arrays["a"] == 5


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("is_binary", [False, True])
def test_zero_sizes(shape: tuple[int, ...], is_binary: bool) -> None:
    empty = np.zeros(shape, np.float32)
    make = binary_input if is_binary else text_input
    _, arrays = read("softmax", {"inputs": [make("x", empty)]})
    assert arrays["x"].shape == shape


def test_options_priority_and_timeout() -> None:
    parameters = {
        "transpose_a": True,
        "activation": "gelu",
        "out_dtype": "BF16",
        "precision": "tf32",
        "priority": 3,
        "timeout": 5000,
        "binary_data_output": True,
    }
    request, _ = read("matmul", {"id": "x", "inputs": [], "parameters": parameters})
    assert request == InferRequest(
        id="x",
        inputs=(),
        outputs={"out": Output(is_binary=True)},
        options=MatmulOptions(transpose_a=True, activation="gelu", out_dtype="bfloat16", precision="tf32"),
        priority=3,
        timeout_us=5000,
    )


@pytest.mark.parametrize("sequence_id", [0, ""])
def test_what_asks_for_nothing_is_nothing(sequence_id: object) -> None:
    x = text_input("x", np.ones(3, np.float32))
    wanted = {"name": "out", "parameters": {"classification": 0, "binary_data": True}}
    parameters = {"sequence_id": sequence_id, "sequence_start": False, "sequence_end": False, "axis": 0}
    request, _ = read("softmax", {"inputs": [x], "outputs": [wanted], "parameters": parameters})
    assert request.options == SoftmaxOptions(axis=0)
    assert request.outputs == {"out": Output(is_binary=True)}


def test_options_may_be_text() -> None:
    request, _ = read("add", {"inputs": [], "parameters": {"alpha": "0.5", "out_dtype": "float32"}})
    assert request.options == AddOptions(alpha=0.5, out_dtype="float32")


def test_an_absurd_timeout_or_priority_is_the_largest_one() -> None:
    request, _ = read("add", {"inputs": [], "parameters": {"timeout": 2**63 - 1, "priority": 2**63 - 1}})
    assert request.timeout_us == 86_400_000_000
    assert request.priority == 2**31 - 1


@pytest.mark.parametrize("given", ["", None])
def test_an_empty_id_is_none(given: object) -> None:
    request, _ = read("add", {"id": given, "inputs": []})
    assert request.id is None


def test_unknown_members_are_ignored() -> None:
    read("add", {"model_name": "add", "inputs": [{**text_input("a", A), "note": {}}], "outputs": None, "more": []})


def test_residents_of_an_input_and_of_the_request() -> None:
    inputs = [{"name": "b", "datatype": "FP32", "shape": [3, 4], "parameters": {"resident": "weights/w1"}}]
    request, _ = read("matmul", {"inputs": inputs, "parameters": {"bias": "@weights/b1"}})
    b, bias = request.inputs
    assert (b.name, b.resident, b.type) == ("b", "weights/w1", TensorType("float32", (3, 4)))
    assert (bias.name, bias.resident, bias.type) == ("bias", "weights/b1", None)
    request, _ = read("matmul", {"inputs": [{"name": "b", "parameters": {"resident": "@w"}}]})
    assert (request.inputs[0].resident, request.inputs[0].type) == ("w", None)


def test_regions_are_described() -> None:
    entry = {"name": "x", "datatype": "FP16", "shape": [4, 2]}
    where = {"shared_memory_region": "in", "shared_memory_byte_size": 16, "shared_memory_offset": 64}
    result = {"shared_memory_region": "out", "shared_memory_byte_size": 32}
    document = {
        "inputs": [{**entry, "parameters": where}],
        "outputs": [{"name": "out", "parameters": {**result, "binary_data": False}}],
    }
    request, _ = read("softmax", document)
    (x,) = request.inputs
    assert x.type == TensorType("float16", (4, 2))
    assert x.region == Region("in", 16, 64)
    assert x.placed is None
    assert request.outputs["out"].region == Region("out", 32, 0)


@pytest.mark.parametrize(
    ("outputs", "default", "expected"),
    [
        (None, None, False),
        (None, True, True),
        ([], True, True),
        ([{"name": "out"}], True, True),
        ([{"name": "out", "parameters": {"binary_data": False}}], True, False),
        ([{"name": "out", "parameters": {"binary_data": True}}], None, True),
    ],
)
def test_where_the_output_goes(outputs: object, default: bool | None, expected: bool) -> None:
    document: dict[str, object] = {"inputs": []}
    if outputs is not None:
        document["outputs"] = outputs
    if default is not None:
        document["parameters"] = {"binary_data_output": default}
    assert read("add", document)[0].outputs["out"].is_binary is expected


def test_a_raw_body_is_one_float32_vector() -> None:
    x = np.arange(5, dtype=np.float32)
    room = ArenaRoom(x.tobytes())
    request = decode_request(OPS["softmax"], room.body, room.start, 0, room)
    (only,) = request.inputs
    assert only.placed is not None
    np.testing.assert_array_equal(room.read(only.placed), x)
    assert request.outputs["out"].is_binary


def program_of(*shape: int, count: int = 1, dtype: str = "int64") -> ProgramOp:
    """A program of `count` inputs, each of which it gives back."""
    names = [f"INPUT{number}" for number in range(count)]
    steps = [
        {"op": "add", "inputs": {"a": name, "b": name}, "options": {"alpha": 0}, "as": f"OUT{name}"} for name in names
    ]
    inputs = {name: {"dtype": dtype, "shape": list(shape)} for name in names}
    text = json.dumps({"inputs": inputs, "steps": steps, "outputs": [f"OUT{name}" for name in names]})
    return PROGRAM_FAMILY.bound(ProgramOptions(text))


@pytest.mark.parametrize(
    ("declared", "elements", "shape"),
    [((-1,), 6, (6,)), ((-1, 3), 6, (2, 3)), ((-1, -1), 6, (1, 6)), ((2, 3), 6, (2, 3)), ((-1, 3), 0, (0, 3))],
)
def test_a_raw_body_is_the_only_input_of_a_program(
    declared: tuple[int, ...], elements: int, shape: tuple[int, ...]
) -> None:
    room = ArenaRoom(np.arange(elements, dtype=np.int64).tobytes())
    (only,) = decode_request(program_of(*declared), room.body, room.start, 0, room).inputs
    assert (only.name, only.type) == ("INPUT0", TensorType("int64", shape))


@pytest.mark.parametrize(
    ("program", "nbytes", "words"),
    [
        (program_of(-1, 3), 20, "a multiple of 24"),
        (program_of(2, 3), 24, "takes 48"),
        (program_of(-1, -1, -1), 48, "more than one size"),
        (program_of(-1, count=3), 48, "INPUT0, INPUT1, INPUT2"),
    ],
)
def test_a_raw_body_that_a_program_cannot_take(program: ProgramOp, nbytes: int, words: str) -> None:
    room = ArenaRoom(bytes(nbytes))
    with pytest.raises(InvalidRequest, match=words):
        decode_request(program, room.body, room.start, 0, room)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def answer_of(request_id: str | None, array: Any, *, is_binary: bool) -> tuple[dict[str, Any], Any, int | None]:
    request = InferRequest(request_id, (), {"out": Output(is_binary)}, AddOptions())
    kind = TensorType(array.dtype.name, array.shape)
    chunks, nbytes = encode_answer(OPS["add"], request, {"out": kind}, {"out": memoryview(array.tobytes())})
    return *from_answer(b"".join(chunks), None if nbytes is None else str(nbytes)), nbytes


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_answers(dtype: str, shape: tuple[int, ...], is_binary: bool) -> None:
    array = random_array(dtype, shape, 3)
    document, shown, header_bytes = answer_of("7", array, is_binary=is_binary)
    assert list(document) == ["id", "model_name", "model_version", "outputs"]
    assert (document["id"], document["model_name"], document["model_version"]) == ("7", "add", "1")
    assert shown.dtype == array.dtype
    np.testing.assert_array_equal(shown, array)
    assert (header_bytes is not None) == (is_binary and math.prod(shape) > 0)


def test_an_answer_without_id_has_none() -> None:
    document, _, _ = answer_of(None, np.ones(2, np.float32), is_binary=True)
    assert "id" not in document


def test_nan_and_infinity_are_written_bare() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0], np.float16)
    request = InferRequest("\ud800\n", (), {"out": Output()}, AddOptions())
    chunks, _ = encode_answer(
        OPS["add"], request, {"out": TensorType("float16", (4,))}, {"out": memoryview(array.tobytes())}
    )
    body = b"".join(chunks)
    assert b'"data":[NaN,Infinity,-Infinity,-0.0]' in body
    assert json.loads(body)["id"] == "\ud800\n"


def test_an_answer_in_a_region_has_no_data_and_no_parameters() -> None:
    request = InferRequest(None, (), {"out": Output(region=Region("r", 8))}, AddOptions())
    types = {"out": TensorType("float32", (2,))}
    chunks, header_bytes = encode_answer(OPS["add"], request, types, {"out": memoryview(b"")})
    (output,) = json.loads(b"".join(chunks))["outputs"]
    assert output == {"name": "out", "datatype": "FP32", "shape": [2]}
    assert header_bytes is None
