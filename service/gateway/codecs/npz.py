"""NumPy's npz format: npy files in a zip archive, tensors by name. Owns the bounds on archives; `zipfile` reads them.

Stored members stay where they were received. Deflated ones are inflated into more of the arena: exactly the declared
bytes are leased before a byte is inflated, and inflation stops there.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.npy import npy_header, read_npy
from tilewire.service.gateway.codecs.protocol import Codec, Placed, Room, check_count, field_of
from tilewire.service.ops.op import TensorType

MAGIC = b"PK\x03\x04"
# Longest read that `zipfile` is let: it looks for the end of the archive in that much, reads the directory at once, and makes
# an object of each entry.
MAX_READ_BYTES = 2**16 + 22
_SUFFIX = ".npy"
_IN_BYTES, _OUT_BYTES = 2**14, 2**18
# Deflate cannot expand further than 1032:1; a declared size beyond that is a lie.
_MAX_RATIO = 1032
_ZIP64_FROM_BYTES = 0xFFFFFFFF
_ZIP64_COUNT = 0xFFFF
_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26
# Bytes of a CRC that take as long as one of text.
_CRC_BYTES = 64
# Encryption, strong encryption, masked headers.
_SECRET = 1 << 0 | 1 << 6 | 1 << 13


class Npz(Codec):
    """Codec of `application/x-npz`: tensors by name; no bfloat16 and no float8."""

    name = "npz"
    content_type = "application/x-npz"

    def begins(self, first: bytes) -> bool:
        return first.startswith(MAGIC)

    def decode(
        self, body: memoryview, offset: int, room: Room, *, beside: Collection[str] = ()
    ) -> Mapping[str, Placed]:
        tensors: dict[str, Placed] = {}
        with _opened(body) as archive:
            for member, data_at in _members(archive, body):
                name = member.filename.removesuffix(_SUFFIX)
                if name in tensors:
                    raise InvalidRequest(f"{_field_of(member)}: twice in the archive")
                packed = body[data_at : data_at + member.compress_size]
                if member.compress_type == zipfile.ZIP_STORED:
                    # First: reading a big-endian payload swaps it in place.
                    if zlib.crc32(packed) != member.CRC:
                        raise InvalidRequest(f"{_field_of(member)}: does not have the CRC that it declares")
                    tensors[name] = read_npy(packed, offset + data_at, _field_of(member))
                else:
                    tensors[name] = _read_deflated(packed, member, room)
        return tensors

    def work_bytes(self, body: memoryview) -> int:
        """Bytes to inflate, as the archive declares them, and a share of those whose CRC is checked."""
        with _opened(body) as archive:
            return sum(
                one.file_size // (_CRC_BYTES if one.compress_type == zipfile.ZIP_STORED else 1)
                for one in archive.infolist()
            )

    def encode_work_bytes(self, nbytes: int) -> int:
        """A share of the tensors: their CRC is computed."""
        return nbytes // _CRC_BYTES

    def writes(self, dtypes: Sequence[str]) -> bool:
        """Whether NumPy has the dtypes."""
        return all(DTYPES[dtype].npy is not None for dtype in dtypes)

    def encode(self, outputs: Mapping[str, TensorType], payloads: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        chunks: list[bytes | memoryview] = []
        central, at = [], 0
        for (name, kind), payload in zip(outputs.items(), payloads, strict=True):
            header = npy_header(kind)
            crc = zlib.crc32(payload, zlib.crc32(header))
            local, entry = _zip_member(f"{name}{_SUFFIX}".encode(), crc, len(header) + payload.nbytes, at)
            chunks += [local + header, payload]
            central.append(entry)
            at += len(local) + len(header) + payload.nbytes
        return [*chunks, _zip_end(central, at)]


class _View(io.RawIOBase):
    """A memoryview as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._data.nbytes}[whence]
        if base + offset < 0:
            raise OSError("before the begin of the archive")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        piece = self._data[self._at :] if size < 0 else self._data[self._at : self._at + size]
        if piece.nbytes > MAX_READ_BYTES:
            raise InvalidRequest(f"npz: a zip directory of more than {MAX_READ_BYTES} bytes")
        self._at += piece.nbytes
        return bytes(piece)


def _field_of(member: zipfile.ZipInfo) -> str:
    """Returns how the detail of an error about a member begins."""
    return field_of(member.filename.removesuffix(_SUFFIX))


def _opened(body: memoryview) -> zipfile.ZipFile:
    tail = bytes(body[-MAX_READ_BYTES:])
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or end + 22 > len(tail):
        raise InvalidRequest("npz: no end of a zip directory; is the archive cut off?")
    if end + 22 + int.from_bytes(tail[end + 20 : end + 22], "little") != len(tail):
        raise InvalidRequest("npz: bytes after the end of the zip directory")
    disk, directory_disk, here, count = struct.unpack_from("<HHHH", tail, end + 4)
    if disk or directory_disk or here != count:
        raise InvalidRequest("npz: archives of several disks are not read")
    try:
        archive = zipfile.ZipFile(_View(body))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, OSError) as error:
        raise InvalidRequest(f"npz: {str(error)[:128]}") from None
    if count not in (len(archive.infolist()), _ZIP64_COUNT):
        raise InvalidRequest(f"npz: the zip directory has {len(archive.infolist())} entries; its end says {count}")
    return archive


def _members(archive: zipfile.ZipFile, body: memoryview) -> list[tuple[zipfile.ZipInfo, int]]:
    """Every member and where its data begin, checked against all others."""
    members = archive.infolist()
    check_count(len(members), "npz")
    names = set()
    placed = []
    for member in members:
        name = member.filename
        _check_member(member)
        if name in names:
            raise InvalidRequest(f"{_field_of(member)}: twice in the archive")
        names.add(name)
        placed.append((member, _data_at(body, member)))
    reached = 0
    for member, data_at in sorted(placed, key=lambda one: one[1]):
        if member.header_offset < reached:
            raise InvalidRequest(f"{_field_of(member)}: overlaps another member")
        reached = data_at + member.compress_size
        if reached > archive.start_dir:
            raise InvalidRequest(f"{_field_of(member)}: reaches beyond the archive")
    return placed


def _check_member(member: zipfile.ZipInfo) -> None:
    name = member.filename
    parts = name.replace("\\", "/").split("/")
    if not name or name != member.orig_filename or name.startswith("/") or ".." in parts:
        raise InvalidRequest(f"npz: member name {member.orig_filename[:64]!r} is not a plain name")
    if member.flag_bits & _SECRET:
        raise InvalidRequest(f"{_field_of(member)}: encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidRequest(f"{_field_of(member)}: zip method {member.compress_type}; expected stored or deflated")
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        raise InvalidRequest(
            f"{_field_of(member)}: stored, but of {member.compress_size} and {member.file_size} bytes at once"
        )


def _data_at(body: memoryview, member: zipfile.ZipInfo) -> int:
    """Returns the begin of a member's data, behind a local header that agrees with the directory."""
    header = bytes(body[member.header_offset : member.header_offset + _LOCAL_HEADER_BYTES])
    if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(MAGIC):
        raise InvalidRequest(f"{_field_of(member)}: no local header where the zip directory says")
    (flags, method), lengths = struct.unpack_from("<HH", header, 6), struct.unpack_from("<HH", header, _LENGTHS_AT)
    begin = member.header_offset + _LOCAL_HEADER_BYTES
    raw_name = bytes(body[begin : begin + lengths[0]])
    coding = "utf-8" if flags & 1 << 11 else "cp437"
    packed, size = struct.unpack_from("<II", header, 18)
    # Sizes follow the data, or stand in a zip64 field.
    is_elsewhere = bool(flags & 1 << 3) or 0xFFFFFFFF in (packed, size)
    agree = is_elsewhere or (packed, size) == (member.compress_size, member.file_size)
    if method != member.compress_type or not agree or raw_name.decode(coding, "replace") != member.orig_filename:
        raise InvalidRequest(f"{_field_of(member)}: local header and zip directory disagree")
    return int(begin + sum(lengths))


def _read_deflated(packed: memoryview, member: zipfile.ZipInfo, room: Room) -> Placed:
    field, size = _field_of(member), member.file_size
    if size > _MAX_RATIO * (member.compress_size + 1):
        raise InvalidRequest(f"{field}: {member.compress_size} bytes cannot inflate to {size}")
    if not size:
        raise InvalidRequest(f"{field}: not an npy file; it is empty")
    offset, view = room.take(size)
    try:
        done = _inflate(packed, view)
    except zlib.error:
        raise InvalidRequest(f"{field}: its deflated bytes are damaged") from None
    if done != size or zlib.crc32(view) != member.CRC:
        raise InvalidRequest(f"{field}: does not inflate to the {size} bytes and the CRC that it declares")
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


def _zip_member(name: bytes, crc: int, size: int, at: int) -> tuple[bytes, bytes]:
    """Local header and directory entry of a stored member at `at`, with zip64 fields when it needs them."""
    is_wide, is_far = size >= _ZIP64_FROM_BYTES, at >= _ZIP64_FROM_BYTES
    shown = _ZIP64_FROM_BYTES if is_wide else size
    sizes = struct.pack("<QQ", size, size) if is_wide else b""
    local_extra = _zip64_field(sizes)
    extra = _zip64_field(sizes + (struct.pack("<Q", at) if is_far else b""))
    # Version 4.5 or 2.0, UTF-8 name, stored, 1980-01-01: no clock in an answer.
    shared = struct.pack("<HHHHHIII", 45 if is_wide else 20, 1 << 11, 0, 0, 0x21, crc, shown, shown)
    local = MAGIC + shared + struct.pack("<HH", len(name), len(local_extra)) + name + local_extra
    entry = b"PK\x01\x02" + struct.pack("<H", 45) + shared + struct.pack("<HH", len(name), len(extra))
    entry += struct.pack("<HHHII", 0, 0, 0, 0, _ZIP64_FROM_BYTES if is_far else at) + name + extra
    return local, entry


def _zip64_field(values: bytes) -> bytes:
    return struct.pack("<HH", 1, len(values)) + values if values else b""


def _zip_end(entries: Sequence[bytes], start: int) -> bytes:
    """The directory, which begins at `start`, and its end."""
    central, count = b"".join(entries), len(entries)
    end = b""
    if start >= _ZIP64_FROM_BYTES:
        end = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(central), start)
        end += b"PK\x06\x07" + struct.pack("<IQI", 0, start + len(central), 1)
    shown = min(start, _ZIP64_FROM_BYTES)
    return central + end + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(central), shown, 0)
