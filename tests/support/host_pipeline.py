"""A pipeline whose streams and events do nothing: launch plans run on the CPU, in the interpreter."""

from __future__ import annotations

from typing import Any, cast

from tilewire.service.engine.backends.gpu.pipeline import Pipeline


class HostStream:
    """Runs at once what is queued on it."""

    def wait_event(self, event: object) -> None:
        """Nothing is to be waited for."""


class HostEvent:
    """Has happened as soon as it is recorded."""

    def __init__(self) -> None:
        self.is_recorded = False

    def record(self, stream: object) -> None:
        assert isinstance(stream, HostStream)
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded

    def synchronize(self) -> None:
        assert self.is_recorded, "Waiting for an event that nothing records."

    def elapsed_time(self, end: HostEvent) -> float:
        assert self.is_recorded
        assert end.is_recorded
        return 0.0


def host_pipeline() -> Pipeline:
    """Three streams of the host."""
    one, two, three = (cast("Any", HostStream()) for _ in range(3))
    return Pipeline(one, two, three, use=lambda _stream: None, new_event=cast("Any", HostEvent))
