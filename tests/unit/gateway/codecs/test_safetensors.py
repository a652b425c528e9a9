"""safetensors: real files read, every rule of the header enforced."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.unit.gateway.codecs.arena_room import NUMPY, decode
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.protocol import MAX_TENSORS
from tilewire.service.gateway.codecs.safetensors import MAX_HEADER_BYTES, Safetensors
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES
from tilewire.service.ops.op import TensorType

CODEC = Safetensors()


def body(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_library_writes() -> None:
    tensors: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.int8),
        "c": np.array(2.5, dtype=np.float16),
        "d": np.ones((3, 2), dtype=NUMPY["bfloat16"]),
        "e": np.zeros((0, 5), dtype=np.int64),
    }
    got = decode(CODEC, safetensors.numpy.save(tensors, metadata={"made": "by a test"}))
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        np.testing.assert_array_equal(got[name], tensor)


def test_the_library_reads_what_we_write() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    head, payload = CODEC.encode({"out": TensorType("float32", (2, 3))}, [memoryview(values.tobytes())])
    assert len(head) % 8 == 0
    assert isinstance(payload, memoryview)
    np.testing.assert_array_equal(safetensors.numpy.load(bytes(head) + bytes(payload))["out"], values)


def test_no_tensors_is_a_body_of_options_only() -> None:
    assert decode(CODEC, body({})) == {}


@pytest.mark.parametrize(
    ("header", "payload", "said"),
    [
        (b"", b"", "begin with"),
        (b"[]", b"", "begin with"),
        (b"\xef\xbb\xbf{}", b"", "begin with"),
        (b"{", b"", "safetensors header"),
        (b'{"\xff": 1}', b"", "not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, b"", "nested too deeply"),
        (b'{"\\ud800": {}}', b"", "surrogate"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "safetensors header"),
        ({"a": 3}, b"", "a: "),
        ({"a": None}, b"", "a: "),
        ({"a": {"dtype": "F32", "shape": []}}, b"", "exactly"),
        ({"a": {**entry(), "more": 1}}, b"0000", "exactly"),
        ({"a": entry(dtype="BOOL")}, b"0000", "BOOL"),
        ({"a": entry(dtype=["F32"])}, b"0000", "list"),
        ({"a": entry(dtype=None)}, b"0000", "dtype nothing"),
        ({"a": entry(shape=[-1])}, b"0000", "shape"),
        ({"a": entry(shape=[True])}, b"0000", "bool"),
        ({"a": entry(shape=[1.0])}, b"0000", "a number"),
        ({"a": entry(shape=["1"])}, b"0000", "str"),
        ({"a": entry(shape=[None])}, b"0000", "holds null"),
        ({"a": entry(shape=[[1]])}, b"0000", "list"),
        ({"a": entry(shape={})}, b"0000", "an object"),
        ({"a": entry(shape=[1] * 10_000)}, b"0000", "dimensions"),
        ({"a": entry(shape=[4, 2**60 + 2])}, b"0000", "do not span"),
        ({"a": entry(shape=[0, 2**63], offsets=[0, 0])}, b"", "2^63"),
        ({"a": entry(offsets=[0, 5])}, b"00000", "do not span"),
        ({"a": entry(offsets=[4, 0])}, b"0000", "do not span"),
        ({"a": entry(offsets=[0])}, b"0000", "do not span"),
        ({"a": entry(offsets=[-4, 0])}, b"0000", "data_offsets"),
        ({"a": entry(offsets=[0.0, 4])}, b"0000", "a number"),
        ({"a": entry(offsets=[4, 8])}, b"00000000", "holes"),
        ({"a": entry(), "b": entry()}, b"0000", "overlaps"),
        ({"a": entry()}, b"00000", "cover"),
        ({"a": entry()}, b"000", "cover"),
        ({"__metadata__": [], "a": entry()}, b"0000", "__metadata__"),
        ({"__metadata__": {"x": 1}, "a": entry()}, b"0000", "__metadata__"),
    ],
)
def test_a_header_that_cannot_be_right(header: Any, payload: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(CODEC, body(header, payload))
    assert said in raised.value.detail
    assert len(raised.value.detail) < 500
    raised.value.detail.encode()


@pytest.mark.parametrize("length", [1, 2**31, 2**63, 2**64 - 1])
def test_a_length_beyond_the_body(length: int) -> None:
    with pytest.raises(InvalidRequest, match="length"):
        decode(CODEC, length.to_bytes(8, "little"))


def test_a_header_over_the_cap() -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        decode(CODEC, body(b"{}" + b" " * MAX_HEADER_BYTES))


def test_many_tensors_are_counted_before_they_are_read() -> None:
    entries = {f"t{index}": None for index in range(MAX_TENSORS + 1)}
    with pytest.raises(InvalidRequest, match=f"{MAX_TENSORS + 1} tensors; at most {MAX_TENSORS}"):
        decode(CODEC, body(entries))


def test_a_long_header_is_work_for_a_thread() -> None:
    for nbytes, is_long in ((100, False), (OFFLOAD_BYTES + 1, True)):
        assert (CODEC.work_bytes(memoryview(body(b"{}" + b" " * nbytes))) > OFFLOAD_BYTES) == is_long
