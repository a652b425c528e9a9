"""A client's shared-memory object: which keys may be opened, and its bytes read and written through a descriptor.

Nothing here maps the object, since a client may cut it at any moment. A process that touches a mapping beyond the end
dies of SIGBUS; a read through the descriptor is merely short.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from tilewire.service.errors import InvalidRequest

# Where POSIX shared memory lives on Linux.
FOLDER = Path("/dev/shm")  # noqa: S108  (clients make their objects there; nothing of ours is)

MAX_NAME_BYTES = 255

_WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
# Not blocking: opening must not wait for the other end of a FIFO that somebody put there.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def file_name(key: str, prefix: str) -> str:
    """The file of a key, as `shm_open` finds it: leading slashes do not count. Allowed keys begin with `prefix`.

    Raises:
        InvalidRequest: Not the key of an object that clients may name.
    """
    name = key.lstrip("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InvalidRequest(f"key: expected a shared-memory key without inner slashes; got {key[:64]!r}")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise InvalidRequest(f"key: longer than {MAX_NAME_BYTES} bytes")
    if not name.startswith(prefix.lstrip("/")):
        raise InvalidRequest(f"key: {key[:64]!r} is not among those that this server allows")
    return name


class SharedFile:
    """An open shared-memory object.

    Args:
        fd: Descriptor of the object; closed with it.

    Attributes:
        inode: Distinguishes it from another object under the same key.
        is_writable: Results may go there.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        found = os.fstat(fd)
        self.inode = found.st_ino
        is_open_for_both = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        # Root may write what says that it is not to be written; we do as it says.
        self.is_writable = is_open_for_both and bool(found.st_mode & _WRITE_BITS)

    @classmethod
    def open(cls, key: str, prefix: str, folder: Path = FOLDER) -> SharedFile:
        """Opens the object of a key.

        Raises:
            InvalidRequest: No such key, not allowed, or no ordinary file.
        """
        path = folder / file_name(key, prefix)
        try:
            fd = _open(path)
        except (OSError, ValueError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a name"
            raise InvalidRequest(f"key: {key[:64]!r} cannot be opened: {reason}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidRequest(f"key: {key[:64]!r} is no shared-memory object")
        return cls(fd)

    @property
    def nbytes(self) -> int:
        """Its size now."""
        return os.fstat(self.fd).st_size

    def read(self, into: memoryview, offset: int) -> None:
        """Fills `into` with the bytes at `offset`.

        Raises:
            InvalidRequest: The object ends before.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self.fd, [into[done:]], offset + done)
            if not count:
                raise InvalidRequest(f"the object was cut: {self.nbytes} bytes, {offset + len(into)} are needed")
            done += count

    def write(self, data: memoryview, offset: int) -> None:
        """Writes `data` at `offset`; an object that was cut is not made longer.

        Raises:
            InvalidRequest: The object ends before, or has no room.
        """
        if self.nbytes < offset + len(data):
            raise InvalidRequest(f"the object was cut: {self.nbytes} bytes, {offset + len(data)} are needed")
        done = 0
        try:
            while done < len(data):
                done += os.pwritev(self.fd, [data[done:]], offset + done)
        except OSError as error:
            raise InvalidRequest(f"the object cannot be written: {os.strerror(error.errno or 0)}") from None

    def close(self) -> None:
        """Closes the descriptor; the object is the client's."""
        os.close(self.fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | _FLAGS)
    except PermissionError:
        return os.open(path, os.O_RDONLY | _FLAGS)
