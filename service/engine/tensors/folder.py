"""Reads and writes the folder of `--store`: versions of tensors, as files that several hosts share.

A version of a name is one file, `name@version.safetensors`, and a deletion is one without a tensor. Files are complete and on
disk before they get that name, and are never changed. The name is made by `link`, which fails where it is taken, and
each version is the next after the last one. So of two hosts that change a name at once, one comes first for all.

Replaced versions are removed, the oldest first, and their names are free again. So a writer looks once more behind `link`: if
the version before its own is gone, its own was given before, and it begins again. The temporary file, a second link of
the version, tells others that its writer has not looked yet; they keep the version before it.

A change that nobody awaits any more is not linked: where the filesystem did not answer for a while, it would replace what
others have written since.

All functions block, and are for threads that may wait.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tilewire.service.dtypes import BY_SAFETENSORS, DTYPES
from tilewire.service.errors import PreconditionFailed, StoreFull, TilewireError, Unavailable
from tilewire.service.match import Match, check_match
from tilewire.service.ops.op import TensorType, can_be_shape
from tilewire.service.placement import PLACEMENTS, Placement

logger = logging.getLogger(__name__)

# File that every folder of a store has.
MARK = ".tilewire-store"
BUCKETS = 256
# Length of a file name (NAME_MAX), without `@`, sixteen digits and the suffix.
MAX_STEM = 255 - 1 - 16 - len(".safetensors")
SUFFIX, TEMPORARY = ".safetensors", ".tmp"
# Numbers that JSON carries exactly.
MAX_VERSION = 2**53 - 1
PREFIX_BYTES, MAX_HEADER_BYTES, ALIGNMENT = 8, 2**16, 64
METADATA, NAME, PLACEMENT = "__metadata__", "name", "placement"
# Versions that were replaced and are kept for hosts which are reading them: that many, and that long.
MAX_REPLACED, REPLACED_S = 8, 60.0
# A deletion is remembered for longer than any host goes without a look at the folder.
DELETED_S = 24 * 3600.0
# A temporary file of this age has no writer any more.
TEMPORARY_S = 3600.0
# A folder whose time of change is younger may change again without a new time: filesystems count in steps of up to 2 s.
SETTLED_S = 3.0
# From one number that a first version may have to the next: more than changes that others make between two looks.
FIRST_STEP = 1000
# Times that others may be quicker before a writer or a reader gives up.
MAX_ATTEMPTS = 100
PIECE_BYTES = 2**24
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GONE = (errno.ENOENT, errno.ESTALE)

_ENTRY = re.compile(r"(.+)@([1-9]\d{0,15})\.safetensors")
_ASIDE = str.maketrans({"/": "+", ":": "="})


class Entry(NamedTuple):
    """A file with the name of a version.

    Attributes:
        is_file: Whether it is a regular file, as all are that this module writes.
        inode: Tells it from another file that had the name.
    """

    version: int
    path: Path
    is_file: bool
    inode: int


class StoredVersion(NamedTuple):
    """A version of a tensor in the folder.

    Attributes:
        type: Dtype and shape; None for a deletion.
        placement: Engines that shall hold it, as its uploader chose; None for those that suit its size.
        created: Unix time in seconds of its file.
    """

    version: int
    type: TensorType | None
    placement: Placement | None
    created: float


class Base(NamedTuple):
    """Condition of a change that replaces a result without a file: the last version of the name is still this one.

    Attributes:
        version: As `TensorInfo.base`.
    """

    version: int


class Written(NamedTuple):
    """A version that was written.

    Attributes:
        replaced: Whether there was a tensor before it.
        is_last: Whether it is still the last one.
    """

    version: int
    replaced: bool
    is_last: bool


class Damaged(Unavailable):
    """A file of the folder is not what this module writes."""


def _always() -> bool:
    return True


class _Shape(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoreFolder:
    """The folder of `--store`.

    Args:
        path: The folder, which was created.
        clock: Unix time in seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def create(self) -> None:
        """Marks the folder as a store, so that its place is never taken for an empty one while it is not mounted.

        Raises:
            OSError: There is no such folder, or it cannot be read.
        """
        with os.scandir(self._path):
            pass
        try:
            os.close(os.open(self._path / MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except OSError as error:
            # One that cannot be written was marked by those who write it.
            if error.errno not in (errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS):
                raise

    # ── reading ───────────────────────────────────────────────────────────────────────────────────

    def load(self, name: str, have: int, make_room: Callable[[StoredVersion], int]) -> tuple[StoredVersion | None, int]:
        """Reads the last version of a name.

        Args:
            name: Name of the tensor.
            have: Version that need not be read; 0 for none.
            make_room: Makes a file for its bytes; returns the descriptor, which the caller owns.

        Returns:
            Its description, None without any; and the descriptor, -1 for a deletion and for the version `have`.

        Raises:
            Unavailable: The folder cannot be read, or the file is damaged.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                return self._load_last(name, have, make_room)
            except OSError as error:
                # It was replaced and removed meanwhile.
                if error.errno not in GONE or attempt == MAX_ATTEMPTS - 1:
                    raise _unavailable(name, error) from error
        raise AssertionError("This is a bug: the last attempt raises.")

    def _load_last(
        self, name: str, have: int, make_room: Callable[[StoredVersion], int]
    ) -> tuple[StoredVersion | None, int]:
        last = self._last_file(name)
        if last is None:
            return None, -1
        with _closing(_open(last.path)) as source:
            stored, offset = _read_head(source, name, last)
            if stored.type is None or stored.version == have:
                return stored, -1
            fd = make_room(stored)
            try:
                _copy(source, fd, stored.type.nbytes, offset)
            except BaseException:
                os.close(fd)
                raise
            return stored, fd

    def last_version(self, name: str) -> int:
        """Returns the last version of a name; 0 without any.

        Raises:
            Unavailable: The folder cannot be read.
        """
        with _as_unavailable(name):
            return self.last_versions(bucket_of(name), [stem_of(name)]).get(stem_of(name), 0)

    def last_versions(self, bucket: int, stems: Sequence[str]) -> dict[str, int]:
        """Returns the last version of each of these stems that has one.

        Raises:
            OSError: The folder cannot be read.
        """
        wanted, versions = frozenset(stems), dict[str, int]()
        for stem, entry in self._entries(self._bucket(bucket)):
            if stem in wanted and entry.is_file:
                versions[stem] = max(entry.version, versions.get(stem, 0))
        return versions

    def changed_ns(self, bucket: int) -> int:
        """Returns the time of the last change of a bucket.

        Raises:
            OSError: The folder cannot be read.
        """
        return self._bucket(bucket).stat().st_mtime_ns

    # ── writing ───────────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        name: str,
        kind: TensorType,
        placement: Placement | None,
        fd: int,
        match: Match | None = None,
        is_awaited: Callable[[], bool] = _always,
    ) -> Written:
        """Writes the next version of a name, from the bytes of `fd`; it is on disk when this returns.

        The condition is on the version before it; it is a `Base` for what replaces a result without a file.

        Raises:
            PreconditionFailed: The version before it is another.
            StoreFull: No room.
            Unavailable: The folder cannot be written, or nobody awaits the change any more.
        """
        written = self._append(name, kind, placement, fd, match, is_awaited)
        assert written is not None, "This is a bug."
        return written

    def delete(self, name: str, match: Match | None = None, is_awaited: Callable[[], bool] = _always) -> Written | None:
        """Writes that a name has no tensor any more; None when it has none.

        Raises:
            PreconditionFailed: The version is another.
            StoreFull: No room.
            Unavailable: The folder cannot be written, or nobody awaits the change any more.
        """
        with _as_unavailable(name):
            last = self._last_file(name)
            has_tensor = last is not None and not self._is_deletion(last)
        return self._append(name, None, None, -1, match, is_awaited) if has_tensor else None

    def _append(
        self,
        name: str,
        kind: TensorType | None,
        placement: Placement | None,
        fd: int,
        match: Match | None,
        is_awaited: Callable[[], bool],
    ) -> Written | None:
        with _as_unavailable(name):
            temporary = self._create_temporary(self._bucket(bucket_of(name)))
            try:
                with _closing(os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)) as target:
                    _write_all(target, _head_of(name, kind, placement))
                    if kind is not None:
                        _copy(fd, target, kind.nbytes, 0)
                    os.fsync(target)
                written = self._link(temporary, name, match, is_awaited, is_deletion=kind is None)
            finally:
                _remove(temporary)
            if written is not None:
                self._remove_replaced(self._entries_of(temporary.parent, stem_of(name)))
            return written

    def _link(
        self, temporary: Path, name: str, match: Match | None, is_awaited: Callable[[], bool], *, is_deletion: bool
    ) -> Written | None:
        """Gives a complete file the name of the next version."""
        bucket, stem = self._bucket(bucket_of(name)), stem_of(name)
        for _attempt in range(MAX_ATTEMPTS):
            # The temporary file was made in this folder before: an NFS client has dropped what it remembered of the folder.
            entries = self._entries_of(bucket, stem)
            before = next((one for one in reversed(entries) if one.is_file), None)
            was_there = before is not None and not self._is_deletion(before)
            if is_deletion and not was_there:
                return None
            if not isinstance(match, Base):
                check_match(name, match, before.version if before is not None and was_there else None)
            elif match.version != (0 if before is None else before.version):
                raise PreconditionFailed(f"if-match: another host has changed {name!r}")
            version = entries[-1].version + 1 if entries else int(self._clock() * 1e6) // FIRST_STEP * FIRST_STEP
            if version > MAX_VERSION:
                raise Unavailable(f"store: {entries[-1].path.name} leaves no version; remove it")
            path = bucket / f"{stem}@{version}{SUFFIX}"
            if not is_awaited():
                raise Unavailable(f"store: {name}: it took too long, and is not changed")
            if not _linked(temporary, path):
                continue
            after = self._entries_of(bucket, stem)
            # Without a condition, two first versions are two changes of which one came after the other.
            if _is_next(version, entries, after) or (match is None and not entries):
                _sync_folder(bucket)
                return Written(version, was_there, all(one.version <= version for one in after))
            _remove(path)
        raise Unavailable(f"store: {stem} is being changed by too many at once; look at it before you try again")

    def _create_temporary(self, bucket: Path) -> Path:
        """Makes an empty file with a name of its own beside the files that it will be one of."""
        temporary = bucket / f"@{os.urandom(12).hex()}{TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            os.close(os.open(temporary, flags, 0o666))
        except FileNotFoundError:
            self._check_there()
            with contextlib.suppress(FileExistsError):
                bucket.mkdir()
            _sync_folder(self._path)
            os.close(os.open(temporary, flags, 0o666))
        return temporary

    # ── cleaning ──────────────────────────────────────────────────────────────────────────────────

    def clean(self, bucket: int) -> None:
        """Removes what nobody needs any more: replaced versions, old deletions, files of writers that died.

        Raises:
            OSError: The folder cannot be read.
        """
        folder = self._bucket(bucket)
        by_stem: dict[str, list[Entry]] = {}
        for stem, entry in self._entries(folder):
            if entry.is_file:
                by_stem.setdefault(stem, []).append(entry)
        for entries in by_stem.values():
            entries.sort()
            self._remove_replaced(entries)
            last = entries[-1]
            if self._age_s(last.path) > DELETED_S and self._is_deletion(last):
                _remove(last.path)
        for one in folder.glob(f"@*{TEMPORARY}"):
            if self._age_s(one) > TEMPORARY_S:
                _remove(one)

    def _remove_replaced(self, entries: Sequence[Entry]) -> None:
        """Removes replaced versions in order, but none whose successor's writer has not looked yet (`_is_next`)."""
        files = [one for one in entries if one.is_file]
        for index, (one, newer) in enumerate(itertools.pairwise(files)):
            # A list may lack the successor, where it was linked meanwhile.
            surplus = index < len(files) - 1 - MAX_REPLACED and not _has_writer(_path_of(one, one.version + 1))
            if self._age_s(newer.path) <= REPLACED_S and not surplus:
                break
            _remove(one.path)

    def _age_s(self, path: Path) -> float:
        try:
            return self._clock() - path.lstat().st_mtime
        except OSError:
            return 0.0

    # ── files ─────────────────────────────────────────────────────────────────────────────────────

    def _check_there(self) -> None:
        if not (self._path / MARK).exists():
            reason = "the folder is gone, its filesystem is not mounted, or nobody who may write there has served it"
            raise OSError(errno.ENODEV, reason)

    def _bucket(self, bucket: int) -> Path:
        return self._path / f"{bucket:02x}"

    def _last_file(self, name: str) -> Entry | None:
        entries = self._entries_of(self._bucket(bucket_of(name)), stem_of(name))
        return next((one for one in reversed(entries) if one.is_file), None)

    def _entries_of(self, bucket: Path, stem: str) -> list[Entry]:
        """Files with the name of a version of one stem, by version."""
        return sorted(entry for of, entry in self._entries(bucket) if of == stem)

    def _entries(self, bucket: Path) -> Iterator[tuple[str, Entry]]:
        try:
            files = os.scandir(bucket)
        except FileNotFoundError:
            # Nobody has written there yet.
            self._check_there()
            return
        with files:
            for file in files:
                found = _ENTRY.fullmatch(file.name)
                if found is not None and int(found[2]) <= MAX_VERSION:
                    is_file = file.is_file(follow_symlinks=False)
                    yield found[1], Entry(int(found[2]), Path(file.path), is_file, file.inode())

    @staticmethod
    def _is_deletion(entry: Entry) -> bool:
        """Whether a file says that a tensor was deleted; a damaged one does not."""
        try:
            with _closing(_open(entry.path)) as source:
                return _read_head(source, None, entry)[0].type is None
        except Damaged:
            return False
        except OSError as error:
            if error.errno in GONE:
                return False
            raise


def stem_of(name: str) -> str:
    """Returns the part of a resident's file names in front of `@`."""
    stem = name.translate(_ASIDE)
    # No name begins with "/": the short form of a long one cannot be that of another.
    return stem if len(stem) <= MAX_STEM else f"+{hashlib.sha256(name.encode()).hexdigest()}+{stem[:100]}"


def bucket_of(name: str) -> int:
    """Returns the number of the folder that has the files of a name."""
    return zlib.crc32(name.encode()) % BUCKETS


def _head_of(name: str, kind: TensorType | None, placement: Placement | None) -> bytes:
    """Prefix and header of a safetensors file; without a tensor it is a deletion."""
    metadata = {NAME: name} if placement is None else {NAME: name, PLACEMENT: placement}
    header: dict[str, object] = {METADATA: metadata}
    if kind is not None:
        header[_key_of(name)] = {
            "dtype": DTYPES[kind.dtype].safetensors, "shape": kind.shape, "data_offsets": (0, kind.nbytes)
        }  # fmt: skip
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + PREFIX_BYTES) % ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _key_of(name: str) -> str:
    """Key of a tensor in the header of its file: its name, but where that is the key of the metadata."""
    return "tensor" if name == METADATA else name


def _read_head(source: int, name: str | None, entry: Entry) -> tuple[StoredVersion, int]:
    """Reads a file's header, and checks it against the name and the file's length; None for any name.

    Returns:
        The description, and the offset of the first byte of the tensor.

    Raises:
        Damaged: It is not what `_head_of` writes.
    """
    try:
        return _parse_head(source, name, entry.version)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        file = entry.path.name
        logger.error("store: %s is damaged: %s", file, error)  # noqa: TRY400  (the reason is the whole story)
        raise Damaged(f"store: {file} is damaged: {error}") from error


def _parse_head(source: int, name: str | None, version: int) -> tuple[StoredVersion, int]:
    facts = os.fstat(source)
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("not a regular file")
    length = int.from_bytes(os.pread(source, PREFIX_BYTES, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = msgspec.json.decode(os.pread(source, length, PREFIX_BYTES), type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header.pop(METADATA, b"{}"), type=dict[str, str])
    own_name = metadata.get(NAME, "")
    if name is not None and own_name != name:
        raise ValueError(f"of another name, {own_name[:64]!r}")
    kind, offset = None, PREFIX_BYTES + length
    if header:
        key = _key_of(own_name)
        if list(header) != [key]:
            raise ValueError(f"with other tensors than {own_name[:64]!r}")
        kind = _type_of(msgspec.json.decode(header[key], type=_Shape))
    expected_bytes = offset + (0 if kind is None else kind.nbytes)
    if facts.st_size != expected_bytes:
        raise ValueError(f"{facts.st_size} bytes instead of {expected_bytes}")
    return StoredVersion(version, kind, PLACEMENTS.get(metadata.get(PLACEMENT, "")), facts.st_mtime), offset


def _type_of(entry: _Shape) -> TensorType:
    dtype = BY_SAFETENSORS.get(entry.dtype)
    if dtype is None or not can_be_shape(entry.shape):
        raise ValueError("dtype and shape that are not served")
    kind = TensorType(dtype.name, entry.shape)
    if entry.data_offsets != (0, kind.nbytes):
        raise ValueError("offsets that do not fit dtype and shape")
    return kind


def _open(path: Path) -> int:
    # Neither a link is followed nor a pipe's writer waited for.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _copy(source: int, target: int, nbytes: int, offset: int) -> None:
    """Copies bytes from a place in a file to the place where another one is written next."""
    left = nbytes
    while left:
        num_copied = os.sendfile(target, source, offset, min(left, PIECE_BYTES))
        if not num_copied:
            raise Damaged("store: a file became shorter while it was read")
        offset, left = offset + num_copied, left - num_copied


def _write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def _linked(temporary: Path, path: Path) -> bool:
    """Gives a file a second name; False where that is taken.

    Raises:
        OSError: The filesystem does not.
    """
    try:
        os.link(temporary, path, follow_symlinks=False)
    except OSError as error:
        # NFS: the answer to the first try may have been lost, and the second finds the name taken by the first.
        if temporary.lstat().st_nlink == 2:
            return True
        if error.errno != errno.EEXIST:
            raise
        return False
    return True


def _is_next(version: int, before: Sequence[Entry], after: Sequence[Entry]) -> bool:
    """Whether a version that was linked between these two looks follows the last one of the first look.

    If the version had been given before, and removed, that last one would have been removed before it. A first version has to
    be the only one: another writer may have had another time.
    """
    if before:
        return before[-1] in after
    return bool(after) and all(version <= one.version < version + FIRST_STEP for one in after)


def _path_of(entry: Entry, version: int) -> Path:
    """Path of another version of the same name."""
    return entry.path.with_name(f"{entry.path.name.rpartition('@')[0]}@{version}{SUFFIX}")


def _has_writer(path: Path) -> bool:
    """Whether the writer of a version, if it is there, has its temporary file still."""
    try:
        return path.lstat().st_nlink > 1
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    with _closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def _remove(path: Path) -> None:
    # Another host may have been quicker, and may do what this one may not.
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _as_unavailable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unavailable(name, error) from error


def _unavailable(name: str, error: OSError) -> TilewireError:
    kind = StoreFull if error.errno in FULL else Unavailable
    return kind(f"store: {name}: {error.strerror}")
