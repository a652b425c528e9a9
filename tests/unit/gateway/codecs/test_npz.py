"""npz: NumPy's archives read in place or inflated within bounds; archives that lie are refused."""

from __future__ import annotations

import io
import struct
import time
import warnings
import zipfile
import zlib
from typing import Any

import numpy as np
import pytest

from tests.support.tensor_bodies import Array
from tests.unit.gateway.codecs.arena_room import ArenaRoom, decode
from tilewire.service.errors import BodyTooLarge, InvalidRequest, TilewireError
from tilewire.service.gateway.codecs import npz
from tilewire.service.gateway.codecs.npz import MAX_READ_BYTES, Npz
from tilewire.service.gateway.codecs.protocol import MAX_TENSORS
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES
from tilewire.service.ops.op import TensorType

CODEC = Npz()
TENSORS: dict[str, Any] = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.asfortranarray(np.arange(12).reshape(4, 3)),
    "bias": np.array(1.5, dtype=np.float16),
    "none": np.zeros((0, 3), dtype=np.int8),
}


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


ONE = npy(np.arange(1000, dtype=np.float32))


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytearray:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as zipped:
        for name, data in members.items():
            zipped.writestr(name, data)
    return bytearray(file.getvalue())


def saved(compressed: bool) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **TENSORS)
    return file.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_reads_what_numpy_writes(compressed: bool) -> None:
    got = decode(CODEC, saved(compressed))
    assert got.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        np.testing.assert_array_equal(got[name], tensor)


def test_stored_members_stay_in_the_body() -> None:
    room = ArenaRoom(saved(compressed=False))
    CODEC.decode(room.body, room.start, room)
    assert room.leased == []


class Unseekable(io.RawIOBase):
    """What zipfile writes data descriptors for."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


@pytest.mark.parametrize("compressed", [False, True])
def test_archives_written_to_a_pipe(compressed: bool) -> None:
    file = Unseekable()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as zipped:
        with zipped.open("a.npy", "w", force_zip64=True) as member:
            member.write(ONE)
        zipped.writestr("b.npy", ONE)
    assert [tensor.shape for tensor in decode(CODEC, bytes(file.data)).values()] == [(1000,), (1000,)]


def test_a_zip64_directory() -> None:
    plain = bytes(archive({"a.npy": ONE}))
    end = plain.rindex(b"PK\x05\x06")
    size, start = struct.unpack_from("<II", plain, end + 12)
    wide = plain[:end] + struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, start)
    wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    wide += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    assert decode(CODEC, wide)["a"].shape == (1000,)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 7)])
def test_numpy_reads_what_we_write(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=np.float16)
    parts = CODEC.encode({"out": TensorType("float16", shape)}, [memoryview(array.tobytes())])
    assert isinstance(parts[1], memoryview)
    data = b"".join(parts)
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        assert zipped.testzip() is None
    got = np.load(io.BytesIO(data), allow_pickle=False)["out"]
    assert got.shape == shape
    np.testing.assert_array_equal(got, array)
    np.testing.assert_array_equal(decode(CODEC, data)["out"], array)


def test_an_archive_over_4_gib_has_zip64_fields() -> None:
    size = 2**32 + 5
    local, first = npz._zip_member(b"a.npy", 7, size, 0)
    packed, unpacked, name_bytes, extra_bytes = struct.unpack_from("<IIHH", local, 18)
    assert packed == unpacked == 0xFFFFFFFF
    assert struct.unpack_from("<HHQQ", local, 30 + name_bytes) == (1, 16, size, size)
    assert extra_bytes == 20
    _, second = npz._zip_member(b"b.npy", 7, 10, len(local) + size)
    assert struct.unpack_from("<HHQ", second, 46 + 5) == (1, 8, len(local) + size)
    after = npz._zip_end([first, second], len(local) + size + 10)
    at = after.index(b"PK\x06\x06")
    entries, directory_bytes, start = struct.unpack_from("<QQQ", after, at + 32)
    assert (entries, directory_bytes, start) == (2, at, len(local) + size + 10)
    assert struct.unpack_from("<Q", after, after.index(b"PK\x06\x07") + 8) == (start + at,)


def test_several_tensors_by_name() -> None:
    arrays: dict[str, Array] = {
        "values": np.arange(6, dtype=np.float32).reshape(2, 3),
        "indices": np.arange(4, dtype=np.int64),
    }
    types = {name: TensorType(array.dtype.name, array.shape) for name, array in arrays.items()}
    data = b"".join(CODEC.encode(types, [memoryview(array.tobytes()) for array in arrays.values()]))
    read = np.load(io.BytesIO(data), allow_pickle=False)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        np.testing.assert_array_equal(decode(CODEC, data)[name], array)


def patched(data: bytearray, signature: bytes, at: int, value: bytes) -> bytes:
    """The archive with the bytes at an offset behind a signature's last appearance replaced."""
    begin = data.rindex(signature) + at
    data[begin : begin + len(value)] = value
    return bytes(data)


def deflated() -> bytearray:
    return archive({"a.npy": ONE}, zipfile.ZIP_DEFLATED)


CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
LARGER = b"\xff\xff\1\0"
BROKEN = {
    "encrypted": patched(deflated(), CENTRAL, 8, b"\1\0"),
    "method": patched(deflated(), CENTRAL, 10, b"\x0c\0"),
    "crc": patched(deflated(), CENTRAL, 16, b"abcd"),
    "stored crc": patched(archive({"a.npy": ONE}), CENTRAL, 16, b"abcd"),
    "stored damaged": patched(archive({"a.npy": ONE}), LOCAL, 30 + 5 + 128, b"\xff"),
    "declared larger": patched(bytearray(patched(deflated(), CENTRAL, 24, LARGER)), LOCAL, 22, LARGER),
    "sizes disagree": patched(deflated(), CENTRAL, 24, b"\1\0\0\0"),
    "local name": patched(deflated(), LOCAL, 30, b"b"),
    "local offset": patched(deflated(), CENTRAL, 42, b"\xff\xff\0\0"),
    "local zip64": patched(deflated(), CENTRAL, 42, b"\xff\xff\xff\xff"),
    "entries": patched(deflated(), END, 8, b"\2\0\2\0"),
    "no entries": patched(deflated(), END, 8, b"\0\0\0\0"),
    "disks": patched(deflated(), END, 4, b"\1\0"),
    "directory start": patched(deflated(), END, 16, b"\0\0\0\0"),
    "stored sizes": patched(archive({"a.npy": ONE}), CENTRAL, 24, b"\1\0\0\0"),
    "damaged": patched(deflated(), LOCAL, 60, b"\xff" * 40),
    "cut": bytes(deflated())[:-30],
    "trailing": bytes(deflated()) + b"more",
    "only magic": b"PK\3\4",
    "no npy": bytes(archive({"a.txt": b"hello"})),
    "empty member": bytes(archive({"a.npy": b""})),
    "empty deflated": bytes(archive({"a.npy": b""}, zipfile.ZIP_DEFLATED)),
    "dots": bytes(archive({"../a.npy": ONE})),
    "backslashes": bytes(archive({"x\\..\\a.npy": ONE})),
    "rooted": bytes(archive({"/a.npy": ONE})),
    "same tensor": bytes(archive({"a.npy": ONE, "a": ONE})),
    "many": bytes(archive({f"t{index}.npy": ONE for index in range(MAX_TENSORS + 1)})),
    "lzma": bytes(archive({"a.npy": ONE}, zipfile.ZIP_LZMA)),
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_archives_that_cannot_be_right(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(CODEC, data)


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_long_directory_is_not_read(is_counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CENTRAL + struct.pack("<HHHHHHIIIHHHHHII", 20, 20, 0, 0, 0, 0x21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    directory = entry * (MAX_READ_BYTES // len(entry) + 1)
    counts = (4, 4) if is_counted else (0xFFFF, 0xFFFF)
    data = LOCAL + directory + END + struct.pack("<HHHHIIH", 0, 0, *counts, len(directory), 4, 0)
    entries: list[object] = []
    monkeypatch.setattr(zipfile, "ZipInfo", lambda *_arguments: entries.append(None))
    for use in (CODEC.work_bytes, lambda body: decode(CODEC, bytes(body))):
        with pytest.raises(InvalidRequest, match="directory of more than"):
            use(memoryview(data))
    assert not entries


def test_an_archive_without_members_has_no_tensors() -> None:
    assert decode(CODEC, bytes(archive({}))) == {}


def test_large_archives_are_work_for_a_thread() -> None:
    for nbytes, is_long in ((2**10, False), (2**23, True)):
        data = memoryview(archive({"a.npy": npy(np.zeros(nbytes, np.int8))}))
        assert (CODEC.work_bytes(data) > OFFLOAD_BYTES) == is_long
        assert (CODEC.encode_work_bytes(nbytes) > OFFLOAD_BYTES) == is_long


def test_duplicate_names() -> None:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as zipped:
        warnings.simplefilter("ignore")
        zipped.writestr("a.npy", ONE)
        zipped.writestr("a.npy", ONE)
    with pytest.raises(InvalidRequest, match="twice"):
        decode(CODEC, file.getvalue())


def test_overlapping_members() -> None:
    data = archive({"a.npy": ONE, "b.npy": ONE})
    second = data.rindex(CENTRAL)
    # Both entries now are the first member, under one name each in the directory and the local header.
    data[second + 42 : second + 46] = bytes(4)
    with pytest.raises(InvalidRequest, match="disagree"):
        decode(CODEC, bytes(data))
    data[second + 46 : second + 47] = b"a"
    with pytest.raises(InvalidRequest, match="twice"):
        decode(CODEC, bytes(data))


def bomb(size: int) -> bytes:
    header = npy(np.zeros(0, dtype=np.int8)).replace(b"(0,)", f"({size},)".encode())
    return bytes(archive({"a.npy": header + bytes(size)}, zipfile.ZIP_DEFLATED))


def test_a_bomb_takes_no_memory() -> None:
    data = bomb(64 * 2**20)
    assert len(data) < 2**17
    began = time.process_time()
    with pytest.raises(BodyTooLarge):
        decode(CODEC, data, limit=2**20)
    assert time.process_time() - began < 0.5


def test_a_bomb_that_understates_its_size_stops_there() -> None:
    data = bytearray(bomb(64 * 2**20))
    for signature, at in ((CENTRAL, 24), (LOCAL, 22)):
        begin = data.rindex(signature) + at
        data[begin : begin + 4] = struct.pack("<I", 1000)
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="does not inflate"):
        decode(CODEC, bytes(data))
    assert time.process_time() - began < 0.5


def test_a_ratio_that_deflate_cannot_reach() -> None:
    data = deflated()
    for signature, at in ((CENTRAL, 24), (LOCAL, 22)):
        begin = data.rindex(signature) + at
        data[begin : begin + 4] = struct.pack("<I", 2**31)
    with pytest.raises(InvalidRequest, match="cannot inflate"):
        decode(CODEC, bytes(data))


def test_bytes_behind_the_deflate_stream() -> None:
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(ONE) + packer.flush() + b"hidden"
    data = bytearray(archive({"a.npy": packed}))
    for signature, method_at, crc_at in ((CENTRAL, 10, 16), (LOCAL, 8, 14)):
        begin = data.rindex(signature)
        data[begin + method_at] = 8
        data[begin + crc_at : begin + crc_at + 4] = struct.pack("<I", zlib.crc32(ONE))
        data[begin + crc_at + 8 : begin + crc_at + 12] = struct.pack("<I", len(ONE))
    with pytest.raises(TilewireError):
        decode(CODEC, bytes(data))
