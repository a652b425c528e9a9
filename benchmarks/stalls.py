"""Notices when a machine stands still: processes that do next to nothing, and keep when that took long. Knows no server.

A virtual machine's cores are taken away now and then, its memory is given to it as it is used, and whatever ran there
waits. A request that took long while such a process waited as long says little about the server.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Self

# Shorter ones are the scheduler's everyday work.
MIN_S = 0.002
_LOOK_EVERY_S = 0.01
_MEMORY_BYTES = 2**18

Stall = tuple[float, float]


def _nothing() -> None:
    """Reads the clock only: what takes long is that the core was elsewhere."""


def _memory() -> None:
    """Takes memory from the system, touches it and gives it back."""
    with mmap.mmap(-1, _MEMORY_BYTES) as memory:
        for place in range(0, _MEMORY_BYTES, mmap.PAGESIZE):
            memory[place] = 1


def _pipe() -> None:
    """Sends itself a byte through the system."""
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    os.read(ours, 1)
    os.close(ours)
    os.close(theirs)


KINDS: dict[str, Callable[[], None]] = {"clock": _nothing, "memory": _memory, "pipe": _pipe}


class Stalls:
    """Watches from `with` to its end. Each kind of watcher takes a core.

    Args:
        kinds: of `KINDS`.

    Attributes:
        found: by kind, (begin, end) by `time.monotonic` of what took `MIN_S` or longer, in order; filled at the end.
    """

    def __init__(self, kinds: tuple[str, ...] = tuple(KINDS)) -> None:
        self.found: dict[str, list[Stall]] = {kind: [] for kind in kinds}
        self._watchers: dict[str, tuple[SpawnProcess, Connection]] = {}

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for kind in self.found:
            ours, theirs = context.Pipe()
            process = context.Process(target=_watch, args=(theirs, kind), daemon=True)
            process.start()
            theirs.close()
            self._watchers[kind] = process, ours
        for _, ours in self._watchers.values():
            # It says that it watches.
            ours.recv()
        return self

    def __exit__(self, *_exc: object) -> None:
        for _, ours in self._watchers.values():
            ours.send(None)
        for kind, (process, ours) in self._watchers.items():
            self.found[kind] = ours.recv()
            process.join()

    def longest_s(self, begin_s: float, end_s: float) -> float:
        """The longest of any kind that overlaps the time from `begin_s` to `end_s` by `time.monotonic`; 0 without one."""
        every = (stall for stalls in self.found.values() for stall in stalls)
        return max((end - begin for begin, end in every if begin < end_s and end > begin_s), default=0.0)

    def summary(self) -> dict[str, dict[str, float]]:
        """By kind: how often, and the longest in milliseconds."""
        return {
            kind: {
                "times": len(stalls),
                "most_ms": round(max((end - begin for begin, end in stalls), default=0.0) * 1e3, 3),
            }
            for kind, stalls in self.found.items()
        }


def _watch(pipe: Connection, kind: str) -> None:
    act = KINDS[kind]
    found: list[Stall] = []
    before = looked = time.monotonic()
    pipe.send(None)
    while True:
        act()
        now = time.monotonic()
        if now - before >= MIN_S:
            found.append((before, now))
        if now - looked >= _LOOK_EVERY_S:
            if pipe.poll():
                break
            looked = now
        before = now
    pipe.send(found)
