"""Runs work in workers that may crash or hang without harm to the others.

Each worker is a fresh process with a pipe of its own and one item at a time. So the item that ended it can be named.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from tilewire.kernels.build.workers import end_with_parent

T = TypeVar("T")
R = TypeVar("R")
_POLL_S = 1.0
_START_S = 300.0


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    reason: str


class Crew(Generic[T, R]):
    """Processes that apply a function to items. Use as a context manager; it ends them.

    Args:
        function: importable by name; runs in the workers.
        num_workers: processes; 0 for one on each core that this process may use.
        timeout_s: how long one item may take.
    """

    def __init__(self, function: Callable[[T], R], *, num_workers: int = 0, timeout_s: float = 120.0) -> None:
        self._function = function
        self._num_workers = num_workers or len(os.sched_getaffinity(0))
        self._timeout_s = timeout_s
        self._idle: list[_Worker] = []

    def __enter__(self) -> Crew[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._idle:
            worker.end()
        self._idle.clear()

    def run(self, items: Sequence[T], on_done: Callable[[int, R | Failure], None], is_over: Callable[[], bool]) -> None:
        """Work through `items`, until `is_over`.

        Args:
            items: sent to the workers one by one.
            on_done: called in this thread with the number of an item and its result, or why it has none.
            is_over: called between results; when true, no item is begun any more and those at work are dropped.
        """
        waiting = deque(enumerate(items))
        busy: list[_Worker] = []
        try:
            while (waiting or busy) and not is_over():
                while waiting and len(busy) < self._num_workers:
                    worker = self._idle.pop() if self._idle else _Worker(self._function)
                    worker.begin(*waiting.popleft())
                    busy.append(worker)
                wait([worker.connection for worker in busy], timeout=_POLL_S)
                for worker in list(busy):
                    result = worker.result(self._timeout_s)
                    if result is not None:
                        busy.remove(worker)
                        if worker.is_alive:
                            self._idle.append(worker)
                        on_done(worker.number, result)
        finally:
            for worker in busy:
                worker.end()


class _Worker:
    """One process, and the item that it is at."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self._process.start()
        theirs.close()
        self.number = -1
        self._begun_s = 0.0
        self._is_up = False
        self.is_alive = True

    def begin(self, number: int, item: object) -> None:
        """Hand over one item."""
        self.number = number
        self._begun_s = time.monotonic()
        with contextlib.suppress(OSError):  # A worker that is gone is found so by `result`.
            self.connection.send(item)

    def result(self, timeout_s: float) -> Any:
        """Result of the item; None while it is worked on."""
        try:
            if self.connection.poll():
                if self._is_up:
                    return self.connection.recv()
                # Starting, which imports the compiler, is no item's time.
                self._is_up = self.connection.recv()
                self._begun_s = time.monotonic()
                return None
        except (EOFError, OSError):
            self._process.join()
            self.end()
            return Failure(f"the process ended with status {self._process.exitcode}")
        if time.monotonic() - self._begun_s > (timeout_s if self._is_up else _START_S):
            self.end()
            return Failure(f"took longer than {timeout_s:g} s")
        return None

    def end(self) -> None:
        """Stop the process, whatever it is doing."""
        self.is_alive = False
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    """In a worker: answer items until the other side is gone."""
    # The compiler's own messages would run across the progress on the terminal.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    end_with_parent()
    connection.send(True)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            answer = function(item)
        except Exception as error:  # noqa: BLE001 - whatever it raises only costs this item
            answer = Failure(f"{type(error).__name__}: {str(error)[:300]}")
        connection.send(answer)
