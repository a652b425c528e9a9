"""Lines of the log come in order and whole, whether or not somebody reads them in time, and nobody who logs waits for that."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.no_threads import no_more_threads
from tilewire.service.telemetry import log_handler
from tilewire.service.telemetry.log_handler import FLUSH_S, MAX_WAITING_BYTES, LogHandler

PAGE_BYTES = 4096
LINE = "x" * 999


@pytest.fixture(params=["pipe", "pipe that never waits", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Where to read and where to write; few bytes fit between."""
    if request.param == "socket":
        one, other = socket.socketpair()
        reader, writer = one.detach(), other.detach()
    else:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PAGE_BYTES)
        os.set_blocking(writer, request.param == "pipe")
    yield reader, writer
    os.close(writer)
    os.close(reader)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("tests", logging.INFO, __file__, 1, text, None, None)


def read_lines(reader: int, num_lines: int) -> list[str]:
    text = b""
    while text.count(b"\n") < num_lines:
        text += os.read(reader, 65536)
    return text.decode().splitlines()


@pytest.mark.timeout(20)
def test_lines_wait_for_a_reader_and_those_who_log_do_not(ends: tuple[int, int]) -> None:
    reader, writer = ends
    handler = LogHandler(writer)
    texts = [f"{number} {LINE}" for number in range(800)]
    for text in texts:
        handler.handle(record(text))
    assert read_lines(reader, len(texts)) == texts
    handler.flush()
    # What comes behind them waits for nothing.
    handler.handle(record("last"))
    assert read_lines(reader, 1) == ["last"]


@pytest.mark.timeout(20)
def test_lines_that_find_no_thread_are_counted_and_later_ones_wait(ends: tuple[int, int]) -> None:
    reader, writer = ends
    handler = LogHandler(writer)
    texts = [f"{number} {LINE}" for number in range(400)]
    with no_more_threads():
        for text in texts:
            handler.handle(record(text))
    handler.handle(record("last"))
    read = read_lines(reader, 1)
    while read[-1] != "last":
        read += read_lines(reader, 1)
    assert set(read) < {*texts, "last"} | {line for line in read if "were left out here" in line}
    assert any("were left out here" in line for line in read)


@pytest.mark.timeout(20)
def test_lines_that_find_no_room_are_counted_where_they_are_missing(ends: tuple[int, int]) -> None:
    reader, writer = ends
    handler = LogHandler(writer)
    num_lines = 2 * MAX_WAITING_BYTES // len(LINE)
    for number in range(num_lines):
        handler.handle(record(f"{number} {LINE}"))
    last = threading.Thread(target=_log_behind, args=(handler, "last"))
    last.start()
    text = ""
    while not text.endswith("last\n"):
        text += os.read(reader, 65536).decode()
    last.join()
    *kept, gap, _ = text.splitlines()
    assert [line.split()[0] for line in kept] == [str(number) for number in range(len(kept))]
    assert gap == f"{num_lines - len(kept)} lines of the log were left out here: it was not read in time"


def _log_behind(handler: LogHandler, text: str) -> None:
    handler.flush()
    handler.handle(record(text))


@pytest.mark.timeout(20)
def test_an_end_waits_for_its_last_lines_and_not_for_ever(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_handler, "FLUSH_S", 0.01)
    reader, writer = ends
    handler = LogHandler(writer)
    for number in range(800):
        handler.handle(record(f"{number} {LINE}"))
    handler.flush()
    monkeypatch.setattr(log_handler, "FLUSH_S", FLUSH_S * 20)
    reading = threading.Thread(target=read_lines, args=(reader, 800))
    reading.start()
    handler.flush()
    reading.join()


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        LogHandler(file.fileno(), "ascii").handle(record("ü"))
    assert (tmp_path / "log").read_text() == "\\xfc\n"
