"""A pipeline whose streams and events do nothing: launch plans run on the CPU, in the interpreter.

What happens on another stream may take any time. So an event counts as over only if that follows from what was waited for.
"""

from __future__ import annotations

from typing import Any, cast

from tilewire.service.engine.backends.gpu.pipeline import Pipeline


class Moment:
    """One recording of an event.

    Args:
        before: Moments that are over when this one is.
    """

    def __init__(self, before: set[Moment]) -> None:
        self.before = frozenset(before)
        self.is_over = False


class HostStream:
    """Runs at once what is queued on it."""

    def __init__(self) -> None:
        self.passed: set[Moment] = set()

    def wait_event(self, event: HostEvent) -> None:
        """What comes after is after the event."""
        assert event.moment is not None, "Waiting for an event that nothing records."
        self.passed |= {event.moment, *event.moment.before}


class HostEvent:
    """Is over when the host has waited for it, or for one that cannot be over before."""

    def __init__(self) -> None:
        self.moment: Moment | None = None

    def record(self, stream: object) -> None:
        assert isinstance(stream, HostStream)
        self.moment = Moment(stream.passed)
        stream.passed.add(self.moment)

    def query(self) -> bool:
        return self.moment is not None

    def synchronize(self) -> None:
        assert self.moment is not None, "Waiting for an event that nothing records."
        for moment in (self.moment, *self.moment.before):
            moment.is_over = True

    def elapsed_time(self, end: HostEvent) -> float:
        for event in (self, end):
            assert event.moment is not None
            assert event.moment.is_over, "The time of an event that need not be over."
        return 0.0


def host_pipeline() -> Pipeline:
    """Three streams of the host."""
    one, two, three = (cast("Any", HostStream()) for _ in range(3))
    return Pipeline(one, two, three, use=lambda _stream: None, new_event=cast("Any", HostEvent))
