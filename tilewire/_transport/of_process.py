"""What a forked process must not share with its parent: connections, and locks that a thread of the parent may hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OfProcess(Generic[T]):
    """A value of this process. A process that was forked makes its own, and leaves the parent's alone; so does a copy.

    On connections that both have, each would read answers to what the other asked.

    Args:
        make: Makes the value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._pid, self._made = os.getpid(), make()

    def __reduce__(self) -> tuple[type[OfProcess[T]], tuple[Callable[[], T]]]:
        return type(self), (self._make,)

    def get(self) -> T:
        """Returns it."""
        if self._pid != os.getpid():
            self._made = self._make()
            self._pid = os.getpid()
        return self._made
