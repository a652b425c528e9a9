"""`Mappings` without a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tilewire.service.engine.tensors.host_mappings import Mappings

T = TypeVar("T")


class MappedAtOnce(Mappings):
    """Does everything before `begin` returns."""

    def begin(self, work: Callable[[], T], end: Callable[[T], object]) -> None:
        end(work())

    def close(self) -> None:
        pass


class MappedWhenAsked(Mappings):
    """Does nothing until `step` is called."""

    def __init__(self) -> None:
        self._begun: deque[Callable[[], object]] = deque()

    def begin(self, work: Callable[[], T], end: Callable[[T], object]) -> None:
        self._begun.append(lambda: end(work()))

    def step(self) -> bool:
        """Does one piece of work; whether there was one."""
        if self._begun:
            self._begun.popleft()()
            return True
        return False

    def close(self) -> None:
        while self.step():
            pass
