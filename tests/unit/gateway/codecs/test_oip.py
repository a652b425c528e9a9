"""The codec of the Open Inference Protocol: what it reads, and what it refuses with which field."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from service.dtypes import DTYPES
from service.errors import InvalidRequest
from service.gateway.codecs.oip import decode_request
from service.gateway.codecs.oip_answer import encode_answer
from service.gateway.codecs.oip_request import InferRequest, Output, Region
from service.ops import OPS, AddOptions, MatmulOptions, TensorType
from tests.float64_oracle import random_array
from tests.oip_bodies import binary_input, from_answer, text_input
from tests.unit.gateway.codecs.arena_room import ArenaRoom

A = random_array("float32", (2, 3), 1)
B = random_array("float32", (3, 4), 2)


def read(op: str, document: object, tail: bytes = b"") -> tuple[InferRequest, dict[str, Any]]:
    """Decodes, and looks up what was placed."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    room = ArenaRoom(text + tail)
    request = decode_request(OPS[op], room.body, room.start, len(text), room)
    placed = [one for one in request.inputs if one.placed is not None]
    assert all(one.placed is not None and room.holds(one.placed) for one in placed)
    return request, {one.name: room.read(one.placed) for one in placed if one.placed is not None}


def refusal(op: str, document: object, tail: bytes = b"") -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(op, document, tail)
    caught.value.detail.encode()
    return caught.value.detail


# ── what is read ──────────────────────────────────────────────────────────────────────────────────


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
        output=Output(is_binary=True),
        options=MatmulOptions(transpose_a=True, activation="gelu", out_dtype="bfloat16", precision="tf32"),
        priority=3,
        timeout_us=5000,
    )


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
    assert request.output.region == Region("out", 32, 0)


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
    assert read("add", document)[0].output.is_binary is expected


def test_a_raw_body_is_one_float32_vector() -> None:
    x = np.arange(5, dtype=np.float32)
    room = ArenaRoom(x.tobytes())
    request = decode_request(OPS["softmax"], room.body, room.start, 0, room)
    (only,) = request.inputs
    assert only.placed is not None
    np.testing.assert_array_equal(room.read(only.placed), x)
    assert request.output.is_binary


@pytest.mark.parametrize(("op", "body"), [("matmul", bytes(8)), ("add", bytes(8)), ("softmax", bytes(7))])
def test_raw_bodies_that_cannot_be_right(op: str, body: bytes) -> None:
    room = ArenaRoom(body)
    with pytest.raises(InvalidRequest):
        decode_request(OPS[op], room.body, room.start, 0, room)


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


def x_of(**changes: object) -> dict[str, object]:
    """A request for softmax whose only input differs in these members."""
    entry = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2], **changes}
    return {"inputs": [{key: value for key, value in entry.items() if value is not ...}]}


BAD_SHAPES: list[object] = [
    ..., None, 2, "2", {}, [-2], [-1, -2], [True, 2], [2.0], ["2"], [None], [[2]], [2**63], [2] * 65, [1, 4, 2**60 + 2],
    [2**32, 2**32], [3], [2, 0],
]  # fmt: skip


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=lambda shape: str(shape)[:20])
@pytest.mark.parametrize("is_binary", [False, True])
def test_shapes_that_cannot_be_right(shape: object, is_binary: bool) -> None:
    changes = {"data": ..., "parameters": {"binary_data_size": 8}} if is_binary else {}
    assert refusal("softmax", x_of(shape=shape, **changes), bytes(8) if is_binary else b"").startswith("x:")


def test_a_shape_of_ten_thousand_dimensions() -> None:
    assert "dimensions" in refusal("softmax", x_of(shape=[1] * 10_000))


def test_a_shape_of_five_thousand_digits() -> None:
    text = json.dumps(x_of(shape=["digits"])).replace('"digits"', "9" * 5000).encode()
    assert "digits" in refusal("softmax", text)


@pytest.mark.parametrize(
    "data",
    [
        None,
        "1, 2",
        [1],
        [1, 2, 3],
        [[1], [2]],
        [[1, 2]],
        [1, "2"],
        [1, None],
        [True, False],
        [1, [2]],
        {"0": 1},
        [[], []],
    ],
    ids=str,
)
def test_data_that_cannot_be_right(data: object) -> None:
    assert refusal("softmax", x_of(data=data)).startswith("x:")


def test_data_past_the_range_of_its_integers() -> None:
    entry = {"name": "a", "datatype": "INT8", "shape": [1]}
    for number in (128, -129, 1.5, 10**30):
        assert refusal("add", {"inputs": [{**entry, "data": [number]}]}).startswith("a:")


def test_numbers_past_the_range_of_a_float() -> None:
    text = json.dumps(x_of(data=[1, "huge"])).encode()
    assert "1e999" in refusal("softmax", text.replace(b'"huge"', b"1e999"))
    assert "1e999" in refusal("softmax", text.replace(b'"huge"', b"Infinity, 1e999").replace(b"[2]", b"[3]"))
    assert refusal("softmax", text.replace(b'"huge"', b"9" * 400))
    assert "1e999" in refusal("add", b'{"inputs": [], "parameters": {"alpha": 1e999}}')


@pytest.mark.parametrize("dtype", ["FP8_E4M3", "FP8_E5M2"])
def test_float8_is_binary_only(dtype: str) -> None:
    assert "binary" in refusal("matmul", {"inputs": [{"name": "a", "datatype": dtype, "shape": [1], "data": [1]}]})


@pytest.mark.parametrize("datatype", [..., None, 32, "fp32", "float32", "BYTES", "BOOL", "UINT8", "\ud800", ["FP32"]])
def test_datatypes_that_are_not_served(datatype: object) -> None:
    assert "datatype" in refusal("softmax", x_of(datatype=datatype))


@pytest.mark.parametrize("size", [7, 9, 0, -8, 8.0, "8", True, 2**64, 2**63, 2**70])
def test_binary_sizes_that_are_not_the_product(size: object) -> None:
    document = x_of(data=..., parameters={"binary_data_size": size})
    assert "binary_data_size" in refusal("softmax", document, bytes(8))


@pytest.mark.parametrize("tail", [b"", bytes(7), bytes(9), bytes(16)])
def test_blobs_that_are_short_or_long(tail: bytes) -> None:
    assert refusal("softmax", x_of(data=..., parameters={"binary_data_size": 8}), tail).startswith("body:")


def test_bytes_behind_numbers() -> None:
    assert refusal("softmax", x_of(), b"x").startswith("body:")


@pytest.mark.parametrize(
    "changes",
    [
        {"data": ...},
        {"parameters": {"binary_data_size": 8}},
        {"parameters": {"resident": "w"}},
        {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}},
        {"data": ..., "parameters": {"binary_data_size": 8, "resident": "w"}},
        {"data": ..., "parameters": {"binary_data_size": 8, "shared_memory_region": "r", "shared_memory_byte_size": 8}},
    ],
    ids=str,
)
def test_every_input_has_exactly_one_source(changes: dict[str, object]) -> None:
    assert "expected one of data" in refusal("softmax", x_of(**changes), bytes(8))


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": "r"},
        {"shared_memory_region": "", "shared_memory_byte_size": 8},
        {"shared_memory_region": 1, "shared_memory_byte_size": 8},
        {"shared_memory_region": "r", "shared_memory_byte_size": -8},
        {"shared_memory_region": "r", "shared_memory_byte_size": 2**63},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 2**63},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": "0"},
        {"shared_memory_region": "r", "shared_memory_byte_size": 7},
        {"shared_memory_byte_size": 8},
        {"shared_memory_offset": 8, "binary_data_size": 8},
    ],
    ids=str,
)
def test_regions_that_cannot_be_right(parameters: dict[str, object]) -> None:
    assert refusal("softmax", x_of(data=..., parameters=parameters), b"").startswith("x:")


@pytest.mark.parametrize("name", ["", "@", "a//b", "../x", "a b", "x" * 256, 5])
def test_resident_names_that_cannot_be_right(name: object) -> None:
    assert refusal("softmax", x_of(data=..., parameters={"resident": name})).startswith("x:")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"inputs": None},
        {"inputs": {}},
        {"inputs": "x"},
        {"inputs": [None]},
        {"inputs": [[]]},
        {"inputs": [{}]},
        {"inputs": [{"name": None}]},
        {"inputs": [{"name": ["x"]}]},
        {"inputs": [{"name": "y"}]},
        {"inputs": [{"name": "x\x00"}]},
        {"inputs": [{"name": "\ud800"}]},
        {"inputs": [{"name": "x" * 100_000}]},
        {"inputs": x_of()["inputs"] + x_of()["inputs"]},  # type: ignore[operator]
    ],
    ids=lambda document: str(document)[:30].encode("ascii", "replace").decode(),
)
def test_inputs_that_cannot_be_right(document: dict[str, object]) -> None:
    assert refusal("softmax", document).startswith("inputs:")


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        "out",
        5,
        [None],
        [{}],
        [{"name": "y"}],
        [{"name": 1}],
        [{"name": "out"}, {"name": "out"}],
        [{"name": "out"}] * 100_000,
        [{"name": "out", "parameters": {"binary_data": "yes"}}],
        [{"name": "out", "parameters": {"binary_data": 1}}],
        [{"name": "out", "parameters": {"classification": 3}}],
        [{"name": "out", "parameters": []}],
        [{"name": "out", "parameters": {"shared_memory_region": "r"}}],
    ],
    ids=lambda outputs: str(outputs)[:40],
)
def test_outputs_that_cannot_be_right(outputs: object) -> None:
    assert refusal("softmax", {**x_of(), "outputs": outputs}).startswith(("outputs:", "out:"))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ([], "parameters"),
        ("axis", "parameters"),
        ({"nonsense": 1}, "nonsense"),
        ({"activation": "gelu"}, "activation"),
        ({"sequence_id": 1}, "reserved"),
        ({"sequence_start": True}, "reserved"),
        ({"triton_enable_empty_final_response": True}, "reserved"),
        ({"axis": "x"}, "axis"),
        ({"axis": None}, "axis"),
        ({"axis": [0]}, "axis"),
        ({"axis": {"a": 1}}, "axis"),
        ({"log": "perhaps"}, "log"),
        ({"out_dtype": "FP31"}, "out_dtype"),
        ({"out_dtype": "\ud800"}, "out_dtype"),
        ({"priority": -1}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"priority": True}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 2**63}, "timeout"),
        ({"timeout": 0.5}, "timeout"),
        ({"binary_data_output": 1}, "binary_data_output"),
        ({"binary_data_output": "true"}, "binary_data_output"),
        ({"x": "@w"}, "x"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_parameters_that_cannot_be_right(parameters: object, named: str) -> None:
    assert named in refusal("softmax", {**x_of(), "parameters": parameters})


@pytest.mark.parametrize("value", ["w", "@", "@a//b", 5, True])
def test_resident_parameters_that_cannot_be_right(value: object) -> None:
    assert "b" in refusal("matmul", {"inputs": [], "parameters": {"b": value}})


@pytest.mark.parametrize("given", [5, [], {}, True, "x" * 1025])
def test_ids_that_cannot_be_right(given: object) -> None:
    assert refusal("add", {"id": given, "inputs": []}).startswith("id:")


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"null",
        b'"inputs"',
        b"{",
        b'{"inputs": []',
        b'{"inputs": []} {}',
        b'\xef\xbb\xbf{"inputs": []}',
        b'{"inputs": [], "inputs": []}',
        b'{"inputs": [{"name": "x", "name": "x"}]}',
        b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"parameters": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"inputs": "\xff"}',
        b'{"\\ud800": 1, "inputs": []}',
        b"\x00",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_json_that_cannot_be_right(text: bytes) -> None:
    assert refusal("softmax", text).startswith("inference header:")


@pytest.mark.parametrize("length", [1, 10, 50])
def test_a_header_length_that_splits_the_json(length: int) -> None:
    text = json.dumps(x_of()).encode()
    room = ArenaRoom(text)
    with pytest.raises(InvalidRequest, match="inference header"):
        decode_request(OPS["softmax"], room.body, room.start, length, room)


def test_an_empty_body_is_no_raw_tensor() -> None:
    room = ArenaRoom(b"")
    with pytest.raises(InvalidRequest, match="inference header"):
        decode_request(OPS["softmax"], room.body, room.start, None, room)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def answer_of(request_id: str | None, array: Any, *, is_binary: bool) -> tuple[dict[str, Any], Any, int | None]:
    request = InferRequest(request_id, (), Output(is_binary), AddOptions())
    kind = TensorType(array.dtype.name, array.shape)
    answer = encode_answer(OPS["add"], request, kind, memoryview(array.tobytes()))
    body = b"".join(answer.chunks)
    header_bytes = None if answer.header_bytes is None else str(answer.header_bytes)
    return *from_answer(body, header_bytes), answer.header_bytes


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
    request = InferRequest("\ud800\n", (), Output(), AddOptions())
    answer = encode_answer(OPS["add"], request, TensorType("float16", (4,)), memoryview(array.tobytes()))
    body = b"".join(answer.chunks)
    assert b'"data":[NaN,Infinity,-Infinity,-0.0]' in body
    assert json.loads(body)["id"] == "\ud800\n"


def test_an_answer_in_a_region_has_no_data_and_no_parameters() -> None:
    request = InferRequest(None, (), Output(region=Region("r", 8)), AddOptions())
    answer = encode_answer(OPS["add"], request, TensorType("float32", (2,)), memoryview(b""))
    (output,) = json.loads(b"".join(answer.chunks))["outputs"]
    assert output == {"name": "out", "datatype": "FP32", "shape": [2]}
    assert answer.header_bytes is None
