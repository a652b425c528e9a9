"""Tensors from files and to files: npy, npz and safetensors, mapped where the format allows it. No HTTP."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from tilewire._arrays.host import CONTENT_TYPE, HostArray, from_safetensors

_SUFFIXES = (".npy", ".npz", ".safetensors")
# First bytes of the files that NumPy reads.
_MAGIC = {".npy": np.lib.format.MAGIC_PREFIX, ".npz": b"PK"}
_CONTENT_TYPES = {".npy": "application/x-npy", ".safetensors": CONTENT_TYPE}


@dataclass(frozen=True, slots=True)
class Source:
    """A file of tensors to send.

    Attributes:
        path: Its place; the ending says the format.
    """

    path: Path

    def arrays(self, name: str) -> dict[str, HostArray]:
        """Reads the tensors; npy and safetensors stay in the file until they are sent.

        Args:
            name: Name of the tensor where the file holds one; else the prefix of each, as `name/tensor`.

        Raises:
            OSError: The file cannot be read.
            ValueError: Not a file of one of these formats; the message begins with the path.
        """
        try:
            arrays = self._read()
        except (TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{self.path}: {error}") from error
        if not arrays:
            raise ValueError(f"{self.path}: holds no tensors")
        if len(arrays) == 1:
            return {name: next(iter(arrays.values()))}
        return {f"{name}/{inner}": array for inner, array in arrays.items()}

    def _read(self) -> dict[str, HostArray]:
        suffix = self.path.suffix
        # Files are mapped, or opened twice: a pipe would wait for a second writer for ever.
        if suffix in _SUFFIXES and stat.S_IFMT(self.path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise ValueError("no regular file; copy it to one first")
        if suffix in _MAGIC:
            with self.path.open("rb") as file:
                # NumPy takes what begins otherwise for Python objects, and advises to trust it.
                if not file.read(len(_MAGIC[suffix])) == _MAGIC[suffix]:
                    raise ValueError(f"no {suffix} file: it begins otherwise, or is empty")
        if suffix == ".npy":
            return {"tensor": HostArray.of(np.load(self.path, mmap_mode="r", allow_pickle=False))}
        if suffix == ".npz":
            # NumPy leaves a file open whose archive is damaged.
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as members:
                return {name: HostArray.of(members[name]) for name in members.files}
        if suffix == ".safetensors":
            with self.path.open("rb") as file:
                return from_safetensors(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        raise ValueError(f"expected a file that ends in {', '.join(_SUFFIXES)}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a place to write a file at, which gets its name when the block ends. A block that fails leaves nothing.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    partial = _partial_of(path)
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _partial_of(path: Path) -> Path:
    """Returns a place beside a file that nobody else writes at, whatever replaces the file at the same time."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


class CannotWriteError(Exception):
    """A file cannot be written. Transports take an `OSError` for a broken connection, so this is none.

    Attributes:
        reason: The system's error.
    """

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(slots=True)
class Destination:
    """A file that an answer is received into, without a copy in this process's memory. Replaced whole or not at all.

    Attributes:
        path: Its place; the ending says the format, .npy or .safetensors.
    """

    path: Path
    _partial: Path = field(init=False)
    _map: mmap.mmap | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.path.suffix not in _CONTENT_TYPES:
            raise ValueError(f"{self.path}: expected a file that ends in {', '.join(_CONTENT_TYPES)}")
        self._partial = _partial_of(self.path)

    @property
    def content_type(self) -> str:
        """Content type of the format."""
        return _CONTENT_TYPES[self.path.suffix]

    def make_buffer(self, num_bytes: int) -> memoryview:
        """Returns memory that is the file's.

        Raises:
            CannotWriteError: There is no room for it, or it cannot be written at all.
        """
        try:
            # Told before the download, and not at its end.
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            with self._partial.open("w+b") as file:
                if not num_bytes:
                    return memoryview(b"")
                file.truncate(num_bytes)
                # Writing to memory of a hole ends the process when the disk is full. macOS and Windows have no such call.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                self._map = mmap.mmap(file.fileno(), num_bytes)
                return memoryview(self._map)
        except OSError as error:
            raise self._cannot_write(error) from error

    def finish(self, body: memoryview) -> Path:
        """Gives the whole file its name.

        Args:
            body: What was received; an answer whose length was not said is not in the file yet. It is released.

        Raises:
            CannotWriteError: There is no room for it, or it cannot get that name.
        """
        if not self._partial.exists():
            self.make_buffer(body.nbytes)[:] = body
        body.release()
        self._unmap()
        try:
            self._partial.replace(self.path)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self.path

    def _cannot_write(self, error: OSError) -> CannotWriteError:
        """Returns an error with the name that the user gave, not that of the part."""
        return CannotWriteError(OSError(error.errno, error.strerror, str(self.path)))

    def _unmap(self) -> None:
        """Closes the map: Windows neither renames nor removes a file that is mapped."""
        if self._map is not None:
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Removes what was received of a download that failed.

        Raises:
            OSError: The download failed because the file cannot be written.
        """
        # An error that is on its way may hold what was received.
        with contextlib.suppress(OSError, BufferError):
            self._unmap()
        with contextlib.suppress(OSError):
            self._partial.unlink()
        if isinstance(error, CannotWriteError):
            raise error.reason from None
