"""NumPy's npz format: npy files in a zip archive, tensors by name. Owns inflation and its bounds; knows no zip header.

Stored members stay where they were received. Deflated ones are inflated into more of the arena: exactly the declared
bytes are leased before a byte is inflated, and inflation stops there.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.npy import npy_header, read_npy
from tilewire.service.gateway.codecs.protocol import Placed, Room
from tilewire.service.gateway.codecs.zip_directory import STORED, Member, read_members
from tilewire.service.ops.op import TensorType

MAGIC = b"PK\x03\x04"
_SUFFIX = ".npy"
_IN_BYTES, _OUT_BYTES = 2**14, 2**18
# Deflate cannot expand further than 1032:1; a declared size beyond that is a lie.
_MAX_RATIO = 1032
_ZIP64_FROM_BYTES = 0xFFFFFFFF


class Npz:
    """Codec of `application/x-npz`: tensors by name; no bfloat16 and no float8."""

    name = "npz"
    content_type = "application/x-npz"

    def decode(self, body: memoryview, offset: int, room: Room) -> Mapping[str, Placed]:
        """Reads the archive's directory and each member's header; see `Codec.decode`."""
        tensors: dict[str, Placed] = {}
        for member in read_members(body):
            name = member.name.removesuffix(_SUFFIX)
            if name in tensors:
                raise InvalidRequest(f"{name[:64]!r}: twice in the archive")
            packed = body[member.offset : member.offset + member.packed_bytes]
            if member.method == STORED:
                tensors[name] = read_npy(packed, offset + member.offset, repr(name[:64]))
            else:
                tensors[name] = _read_deflated(packed, member, room, repr(name[:64]))
        return tensors

    def writes(self, dtype: str) -> bool:
        """Whether NumPy has the dtype."""
        return DTYPES[dtype].npy is not None

    def encode(self, name: str, kind: TensorType, payload: memoryview) -> Sequence[bytes | memoryview]:
        """Writes a stored archive of one member around the payload; see `Codec.encode`."""
        header = npy_header(kind)
        crc = zlib.crc32(payload, zlib.crc32(header))
        before, after = _zip_around(f"{name}{_SUFFIX}".encode(), crc, len(header) + payload.nbytes)
        return [before + header, payload, after]


def _read_deflated(packed: memoryview, member: Member, room: Room, field: str) -> Placed:
    if member.size_bytes > _MAX_RATIO * (member.packed_bytes + 1):
        raise InvalidRequest(f"{field}: {member.packed_bytes} bytes cannot inflate to {member.size_bytes}")
    if member.size_bytes == 0:
        raise InvalidRequest(f"{field}: not an npy file; it is empty")
    offset, view = room.take(member.size_bytes)
    try:
        done = _inflate(packed, view)
    except zlib.error:
        raise InvalidRequest(f"{field}: its deflated bytes are damaged") from None
    if done != member.size_bytes or zlib.crc32(view) != member.crc:
        raise InvalidRequest(f"{field}: does not inflate to the {member.size_bytes} bytes and the CRC that it declares")
    return read_npy(view, offset, field)


def _inflate(packed: memoryview, into: memoryview) -> int:
    """Inflates until the stream ends or `into` overflows; returns the bytes inflated, more than fit on overflow."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    read = done = 0
    while not inflater.eof:
        source: bytes | memoryview = inflater.unconsumed_tail
        if not source:
            source = packed[read : read + _IN_BYTES]
            read += source.nbytes
        piece = inflater.decompress(source, _OUT_BYTES)
        if done + len(piece) > into.nbytes or not (piece or source):
            return done + len(piece)
        into[done : done + len(piece)] = piece
        done += len(piece)
    # Bytes after the end of the stream belong to nobody.
    return done if read >= packed.nbytes and not inflater.unused_data else -1


def _zip_around(name: bytes, crc: int, size: int) -> tuple[bytes, bytes]:
    """The bytes before and after one stored member of `size` bytes, with zip64 fields when it needs them."""
    is_wide = size >= _ZIP64_FROM_BYTES
    shown = _ZIP64_FROM_BYTES if is_wide else size
    extra = struct.pack("<HHQQ", 1, 16, size, size) if is_wide else b""
    # Version 4.5 or 2.0, UTF-8 name, stored, 1980-01-01: no clock in an answer.
    shared = struct.pack(
        "<HHHHHIIIHH", 45 if is_wide else 20, 1 << 11, 0, 0, 0x21, crc, shown, shown, len(name), len(extra)
    )
    before = MAGIC + shared + name + extra
    central = b"PK\x01\x02" + struct.pack("<H", 45) + shared + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name + extra
    start = len(before) + size
    after = central
    if is_wide:
        after += b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, len(central), start)
        after += b"PK\x06\x07" + struct.pack("<IQI", 0, start + len(central), 1)
    after += b"PK\x05\x06" + struct.pack(
        "<HHHHIIH", 0, 0, 1, 1, len(central), _ZIP64_FROM_BYTES if is_wide else start, 0
    )
    return before, after
