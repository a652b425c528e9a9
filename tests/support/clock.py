"""A clock that stands until a test sets it."""

from __future__ import annotations


class Clock:
    """Unix time in seconds.

    Args:
        now_s: The time.
    """

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time."""
        return self.now_s
