"""npy: NumPy's own files read in every version and order; nothing evaluated; no dtype guessed."""

from __future__ import annotations

import io
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit.gateway.codecs.arena_room import ArenaRoom, decode
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.npy import MAGIC, Npy
from tilewire.service.ops.op import TensorType

CODEC = Npy()
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"


def saved(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return file.getvalue()


def framed(text: str, payload: bytes = b"\0\0\0\0", version: bytes = b"\1\0") -> bytes:
    size = len(text.encode()).to_bytes(2 if version == b"\1\0" else 4, "little")
    return MAGIC + version + size + text.encode() + payload


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("code", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "i1", "<i4", ">i4", "<i8", ">i8"])
def test_reads_what_numpy_writes(code: str, version: tuple[int, int]) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(code)
    got = decode(CODEC, saved(array, version))[""]
    assert got.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 0, 3), (1,) * 8])
@pytest.mark.parametrize("code", ["<f4", ">f4"])
def test_shapes(shape: tuple[int, ...], code: str) -> None:
    array = np.ones(shape, dtype=code)
    got = decode(CODEC, saved(array))[""]
    assert got.shape == shape
    np.testing.assert_array_equal(got, array)


def test_fortran_order_stays_in_place() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    room = ArenaRoom(saved(array))
    placed = CODEC.decode(room.body, room.start, room)[""]
    assert placed.fortran
    assert room.leased == []
    np.testing.assert_array_equal(room.read(placed), array)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 7), (1,) * 8])
def test_numpy_reads_what_we_write(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=np.int32)
    head, payload = CODEC.encode({"out": TensorType("int32", shape)}, [memoryview(array.tobytes())])
    assert len(head) % 64 == 0
    got = np.load(io.BytesIO(bytes(head) + bytes(payload)), allow_pickle=False)
    assert got.shape == shape
    np.testing.assert_array_equal(got, array)


def test_what_it_can_hold() -> None:
    assert CODEC.writes(["float64"])
    assert not CODEC.writes(["bfloat16"])
    assert not CODEC.writes(["float8_e5m2"])


@pytest.mark.parametrize(
    "text",
    [
        "{'shape': (1,), 'fortran_order': False, 'descr': '<f4'}",
        '{"descr": "<f4", "fortran_order": False, "shape": (1,)}',
        "{'descr': 'f4', 'fortran_order': False, 'shape': (1L,), }\n",
        "  {'descr': '=f4', 'fortran_order': True, 'shape': ( 1 , ) }   \n",
    ],
)
def test_other_writers_headers(text: str) -> None:
    assert decode(CODEC, framed(text))[""].shape == (1,)


@pytest.mark.parametrize(
    ("descr", "said"),
    [("<V2", "safetensors"), ("|V1", "safetensors"), ("|O", "'|O'"), ("|b1", "'|b1'"), ("<U3", "'<U3'"),
     ("<c8", "'<c8'"), ("<u4", "'<u4'"), ("|V16", "'|V16'"), ("<f16", "'<f16'"), ("", "''"), ("<M8[ns]", "'<M8[ns]'")],
)  # fmt: skip
def test_dtypes_that_are_not_served(descr: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(CODEC, framed(HEADER.replace("<f4", descr)))
    assert said in raised.value.detail


def test_bfloat16_saved_by_numpy_points_to_safetensors() -> None:
    file = io.BytesIO()
    np.save(file, np.ones(3, dtype=ml_dtypes.bfloat16))
    with pytest.raises(InvalidRequest, match="safetensors"):
        decode(CODEC, file.getvalue())


def test_a_header_that_is_cut_off() -> None:
    for end in (6, 9, 10, 60):
        with pytest.raises(InvalidRequest, match="header"):
            decode(CODEC, saved(np.zeros(2))[:end])


def test_structured_dtypes() -> None:
    with pytest.raises(InvalidRequest, match="structured"):
        decode(CODEC, saved(np.zeros(2, dtype=[("x", "<f4"), ("y", "<i4")])))


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "()", "{'descr': '<f4'}", HEADER[:-1], HEADER * 2,
        HEADER.replace("(1,)", "(1)"), HEADER.replace("(1,)", "(-1,)"), HEADER.replace("(1,)", "(1.0,)"),
        HEADER.replace("(1,)", "(True,)"), HEADER.replace("(1,)", "[1]"), HEADER.replace("(1,)", "(1,,)"),
        HEADER.replace("(1,)", "(,)"), HEADER.replace("(1,)", "(" + "9" * 5000 + ",)"),
        HEADER.replace("(1,)", "(0, 9999999999999999999)"), HEADER.replace("(1,)", "(" + "1, " * 70 + ")"),
        HEADER.replace("False", "0"), HEADER.replace("False", "'False'"), HEADER.replace("'<f4'", "True"),
        HEADER.replace("'<f4'", "__import__('os').getcwd()"), HEADER.replace("}", "'more': (1,)}"),
        HEADER.replace("}", "'descr': '<f4'}"), "{" * 9_000, "-" * 9_000 + "1", "(" * 9_000 + ")" * 9_000,
        HEADER.replace("(1,)", "(4, 1152921504606846978)"),
    ],
)  # fmt: skip
def test_headers_that_cannot_be_right(text: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        decode(CODEC, framed(text))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "data",
    [
        b"", MAGIC, MAGIC + b"\1\0", MAGIC + b"\1\0\0", MAGIC + b"\2\0\0\0", b"\x93NUMPX\1\0\0\0",
        framed(HEADER, version=b"\4\0"),
        framed(HEADER, version=b"\1\1"), framed(HEADER, b""), framed(HEADER, b"12345"), framed(" " * 20_000 + HEADER),
        MAGIC + b"\2\0\xff\xff\xff\xff", MAGIC + b"\1\0\xff\xff",
    ],
)  # fmt: skip
def test_files_that_cannot_be_right(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(CODEC, data)
