"""The members of a zip archive in memory: where each lies, checked against every other. Inflates nothing, knows no npy.

Stricter than the zip tools: central directory and local headers must agree, members may not overlap (the trick of the
strongest bombs), and only stored and deflated, unencrypted members of one disk are read.

Source: PKWARE's APPNOTE.TXT 6.3, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tilewire.service.errors import InvalidRequest

STORED, DEFLATED = 0, 8
MAX_MEMBERS = 64
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_CENTRAL, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_MAX_COMMENT_BYTES = 0xFFFF
_ASK_ZIP64 = 0xFFFFFFFF
_ENCRYPTED, _DESCRIPTOR_FOLLOWS, _UTF8 = 1 << 0, 1 << 3, 1 << 11
# What makes a member unreadable without a key: encryption, strong encryption, masked headers.
_SECRET = _ENCRYPTED | 1 << 6 | 1 << 13


@dataclass(frozen=True, slots=True)
class Member:
    """One file of the archive.

    Attributes:
        name: As in the directory.
        method: STORED or DEFLATED.
        crc: CRC-32 of the inflated bytes, as declared.
        packed_bytes: Bytes in the archive.
        size_bytes: Bytes when inflated, as declared.
        offset: Of the packed bytes in the archive.
    """

    name: str
    method: int
    crc: int
    packed_bytes: int
    size_bytes: int
    offset: int


def read_members(archive: memoryview) -> Sequence[Member]:
    """Reads the directory of a whole archive.

    Raises:
        InvalidRequest: Not a plain zip archive; the detail names the member or the field.
    """
    try:
        count, start, end = _directory(archive)
        members, position, names = [], start, set()
        for _ in range(count):
            member, position = _central_entry(archive, position, end, start)
            if member.name in names:
                raise InvalidRequest(f"{member.name[:64]!r}: twice in the archive")
            names.add(member.name)
            members.append(member)
    except struct.error:
        raise InvalidRequest("npz: a zip header is cut off") from None
    if position != end:
        raise InvalidRequest("npz: the zip directory is longer than its entries")
    _check_overlaps(members)
    return members


def _directory(archive: memoryview) -> tuple[int, int, int]:
    """Returns number of entries, start and end of the central directory."""
    tail_start = max(0, archive.nbytes - 22 - _MAX_COMMENT_BYTES)
    tail = bytes(archive[tail_start:])
    at = tail.rfind(_END)
    if at < 0:
        raise InvalidRequest("npz: no end of a zip directory; is the archive cut off?")
    disk, directory_disk, here, count, size, start, comment = struct.unpack_from("<HHHHIIH", tail, at + 4)
    end = tail_start + at
    if end + 22 + comment != archive.nbytes:
        raise InvalidRequest("npz: bytes after the end of the zip directory")
    if end >= 20 and archive[end - 20 : end - 16] == _LOCATOR64:
        _, end, _ = struct.unpack_from("<IQI", archive, end - 16)
        if archive[end : end + 4] != _END64:
            raise InvalidRequest("npz: the zip64 locator points nowhere")
        disk, directory_disk, here, count, size, start = struct.unpack_from("<IIQQQQ", archive, end + 16)
    if disk or directory_disk or here != count:
        raise InvalidRequest("npz: archives of several disks are not read")
    if count > MAX_MEMBERS:
        raise InvalidRequest(f"npz: {count} members; at most {MAX_MEMBERS} are read")
    if start + size != end:
        raise InvalidRequest("npz: the zip directory does not end where it says")
    return count, start, end


def _central_entry(archive: memoryview, at: int, end: int, data_end: int) -> tuple[Member, int]:
    """Reads one entry of the directory and the local header that it points to."""
    fields = struct.unpack_from("<4s4xHH4xIIIHHHHHII", archive, at)
    signature, flags, method, crc, packed, size, name_len, extra_len, comment_len, disk, _, _, local = fields
    after = at + 46 + name_len + extra_len + comment_len
    if signature != _CENTRAL or after > end:
        raise InvalidRequest("npz: a zip directory entry is broken")
    raw_name = bytes(archive[at + 46 : at + 46 + name_len])
    name = _member_name(raw_name, flags)
    if flags & _SECRET:
        raise InvalidRequest(f"{name[:64]!r}: encrypted")
    if method not in (STORED, DEFLATED) or disk not in (0, 0xFFFF):
        raise InvalidRequest(f"{name[:64]!r}: zip method {method}; expected stored or deflated")
    extra = archive[at + 46 + name_len : at + 46 + name_len + extra_len]
    size, packed, local = _widen(extra, (size, packed, local), name)
    offset = _data_offset(archive, local, data_end, (raw_name, method, packed, size))
    if method == STORED and packed != size:
        raise InvalidRequest(f"{name[:64]!r}: stored, but of {packed} and {size} bytes at once")
    if offset + packed > data_end:
        raise InvalidRequest(f"{name[:64]!r}: reaches beyond the archive")
    return Member(name, method, crc, packed, size, offset), after


def _member_name(raw: bytes, flags: int) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        raise InvalidRequest(f"npz: member name {raw[:64]!r} is not UTF-8") from None
    if not name or "\0" in name or name.startswith("/") or ".." in name.replace("\\", "/").split("/"):
        raise InvalidRequest(f"npz: member name {name[:64]!r} is not a plain name")
    return name


def _widen(extra: memoryview, values: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Replaces the values that ask for zip64 by those of its extra field, in its order."""
    asking = [value == _ASK_ZIP64 for value in values]
    if not any(asking):
        return values
    position = 0
    while position + 4 <= extra.nbytes:
        kind, length = struct.unpack_from("<HH", extra, position)
        field = extra[position + 4 : position + 4 + length]
        if kind == 1 and field.nbytes >= 8 * sum(asking):
            wide = iter(struct.unpack_from(f"<{sum(asking)}Q", field))
            return tuple(next(wide) if asks else value for asks, value in zip(asking, values, strict=True))
        position += 4 + length
    raise InvalidRequest(f"{name[:64]!r}: its zip64 field is missing or short")


def _data_offset(archive: memoryview, at: int, data_end: int, expected: tuple[bytes, int, int, int]) -> int:
    """Checks the local header against the directory; returns where the data starts."""
    raw_name, method, packed, size = expected
    if at + 30 > data_end:
        raise InvalidRequest(f"{raw_name[:64]!r}: its local header lies beyond the archive")
    fields = struct.unpack_from("<4s2xHH4x4xIIHH", archive, at)
    signature, flags, local_method, local_packed, local_size, name_len, extra_len = fields
    name_end: int = at + 30 + name_len
    data_start: int = name_end + extra_len
    sizes: tuple[int, ...] = (local_size, local_packed)
    if not flags & _DESCRIPTOR_FOLLOWS:
        sizes = _widen(archive[name_end : name_end + extra_len], sizes, str(raw_name, "latin-1"))
    agree = flags & _DESCRIPTOR_FOLLOWS or sizes == (size, packed)
    if signature != _LOCAL or archive[at + 30 : name_end] != raw_name or local_method != method or not agree:
        raise InvalidRequest(f"{raw_name[:64]!r}: local header and zip directory disagree")
    return data_start


def _check_overlaps(members: Sequence[Member]) -> None:
    reached = 0
    for member in sorted(members, key=lambda member: member.offset):
        if member.offset < reached:
            raise InvalidRequest(f"{member.name[:64]!r}: overlaps another member")
        reached = member.offset + member.packed_bytes
