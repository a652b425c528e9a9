"""Reads files of the settings again when they change: those of API keys and of certificates."""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UnusableFile(Exception):
    """A file of the settings that cannot be used; the message says which and why."""


def check_regular(path: str | Path) -> None:
    """Checks that a path is that of a regular file: reading a pipe waits for who writes it, and a device may have no end.

    Raises:
        OSError: It is something else, or cannot be found.
    """
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


class FileWatch:
    """Notices when files change. Those that cannot be used change nothing; they are tried, and complained about, once.

    To be made before the files are read first, so that no change between the two is missed.

    Args:
        what: Words for the log, with their verbs: `the certificate stays as it was`.
        paths: The files.
        report: Called with whether what runs is what the files say: at once, and behind each try.
    """

    def __init__(self, what: str, paths: Iterable[str | Path], report: Callable[[bool], object]) -> None:
        self._what = what
        self._paths = [Path(path) for path in paths]
        self._report = report
        self._version = self._find_version()
        report(True)

    def take(self, read: Callable[[], T]) -> T | None:
        """Returns what `read` makes of files that have changed; None for none, and for files that cannot be used."""
        version = self._find_version()
        if version == self._version:
            return None
        self._version = version
        try:
            found = read()
        except (UnusableFile, OSError) as error:
            self._report(False)
            logger.error("%s: %s", self._what, error)  # noqa: TRY400  (the reason is the whole story)
            return None
        self._report(True)
        return found

    def _find_version(self) -> list[object]:
        return [_version_of(path) for path in self._paths]


def _version_of(path: Path) -> object:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    # The time of the inode: rights that were mended are a change, too.
    return found.st_ino, found.st_ctime_ns, found.st_size
