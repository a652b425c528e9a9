"""What the codec of the Open Inference Protocol refuses, and which field it names."""

from __future__ import annotations

import json

import pytest

from tests.unit.gateway.api.v2.oip_reading import read
from tests.unit.gateway.codecs.arena_room import ArenaRoom
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.ops.registry import OPS


def refusal(op: str, document: object, tail: bytes = b"") -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(op, document, tail)
    caught.value.detail.encode()
    return caught.value.detail


@pytest.mark.parametrize(("op", "body"), [("matmul", bytes(8)), ("add", bytes(8)), ("softmax", bytes(7))])
def test_raw_bodies_that_cannot_be_right(op: str, body: bytes) -> None:
    room = ArenaRoom(body)
    with pytest.raises(InvalidRequest):
        decode_request(OPS[op], room.body, room.start, 0, room)


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
        [{"name": "out"}] * 10_000,
        [{"name": "out", "parameters": {"binary_data": "yes"}}],
        [{"name": "out", "parameters": {"binary_data": 1}}],
        [{"name": "out", "parameters": {"classification": 3}}],
        [{"name": "out", "parameters": {"classification": False}}],
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
        ({"sequence_id": "s"}, "reserved"),
        ({"sequence_id": False}, "reserved"),
        ({"sequence_start": True}, "reserved"),
        ({"sequence_end": 0}, "reserved"),
        ({"classification": 1}, "classification"),
        ({"triton_enable_empty_final_response": 1}, "triton_enable_empty_final_response"),
        ({"triton_other": True}, "reserved"),
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
        b'{"inputs": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
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
