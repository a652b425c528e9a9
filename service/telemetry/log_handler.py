"""Writes lines of the log to a descriptor. One whose reader stalls costs lines, and holds up no request.

Owns the lines that wait. The thread that logs a line writes it at once, where the descriptor takes it without a wait. Else a
thread of its own writes it, and what is logged behind it: only that thread waits for the reader.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import select
import stat
import termios
import threading
from collections import deque
from typing import TextIO

logger = logging.getLogger(__name__)

# Lines that wait: some 5,000. A reader that is slow for a moment, as a log file that is rotated, loses none.
MAX_WAITING_BYTES = 2**20
# How long the end of a process waits for its last lines to be read.
FLUSH_S = 1.0


class LogHandler(logging.Handler):
    """Writes to a descriptor.

    Args:
        fd: Descriptor of a file, a pipe, a socket or a terminal; it stays the caller's.
        encoding: Encoding of the lines. What it lacks is escaped.
    """

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        super().__init__()
        self._fd = fd
        self._encoding = encoding
        kind = os.fstat(fd).st_mode
        self._is_file, self._is_pipe = stat.S_ISREG(kind), stat.S_ISFIFO(kind)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._num_lost = 0
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        try:
            self.write(self.format(record))
        except Exception:  # noqa: BLE001  (as every handler of the standard library)
            self.handleError(record)

    def write(self, text: str) -> None:
        """Writes lines, or has them wait where the descriptor takes no more.

        Raises:
            OSError: Nobody reads there any more, or the disk is full.
        """
        data = self._bytes_of(text)
        with self._changed:
            # Behind a gap half of the room, so that a reader who is too slow for all finds few gaps.
            if self._waiting_bytes + len(data) > MAX_WAITING_BYTES // (2 if self._num_lost else 1):
                self._num_lost += 1
                return
            if self._num_lost:
                data = self._bytes_of(self.format(_gap_of(self._num_lost))) + data
                self._num_lost = 0
            if not self._waiting_bytes and self._takes(len(data)):
                self._write(data)
            else:
                self._wait(data)

    def flush(self) -> None:
        """Waits until what waits is written, for no longer than `FLUSH_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, FLUSH_S)

    def _takes(self, nbytes: int) -> bool:
        """Whether so many bytes can be written without a wait, whatever other processes write there meanwhile."""
        if self._is_file:
            return True
        if not self._poll.poll(0):
            return False
        if not self._is_pipe:
            # A terminal takes a line, or is stopped. A socket has three quarters of its room left, or says that it has none.
            return True
        unread = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, unread)
        size = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
        # A page of a pipe may be half empty: with a fourth of its bytes, half of its pages may be taken.
        return 4 * unread[0] <= size and 4 * nbytes <= size

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                # Whoever started the service shares its descriptor, and may have set that it never waits.
                select.select([], [self._fd], [])

    def _bytes_of(self, text: str) -> bytes:
        return f"{text}\n".encode(self._encoding, "backslashreplace")

    def _wait(self, line: bytes) -> None:
        if self._writer is None:
            # A daemon: the end of a process does not wait for a reader that stalls.
            writer = threading.Thread(target=self._write_waiting, name="log", daemon=True)
            try:
                writer.start()
            except RuntimeError:
                # The system allows no more threads now: the next line tries again.
                self._num_lost += 1
                return
            self._writer = writer
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self._changed.notify_all()

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                line = self._waiting.popleft()
            # Nobody reads any more, or the disk is full: there is no other place to say so.
            with contextlib.suppress(OSError):
                self._write(line)
            with self._changed:
                self._waiting_bytes -= len(line)
                self._changed.notify_all()


def _gap_of(num_lost: int) -> logging.LogRecord:
    text = "%d lines of the log were left out here: it was not read in time"
    return logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, (num_lost,), None)


def handler_of(stream: TextIO) -> LogHandler:
    """Returns a handler of standard output or standard error."""
    return LogHandler(stream.fileno(), stream.encoding)
