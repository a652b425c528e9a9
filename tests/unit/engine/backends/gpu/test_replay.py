"""Replays of launches, with a graph of our own at the Protocol."""

from __future__ import annotations

import logging

import pytest

from tilewire.service.engine.backends.gpu.replay import Replay
from tilewire.service.engine.ops.op import Operands


class Recorder:
    """Launches and graphs, in the order of what happens."""

    def __init__(self, *, can_capture: bool = True) -> None:
        self.events: list[str] = []
        self._can_capture = can_capture

    def compute(self, _operands: Operands) -> None:
        self.events.append("launch")

    def capture_begin(self, *, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.events.append("begin")

    def capture_end(self) -> None:
        self.events.append("end")
        if not self._can_capture:
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        self.events.append("replay")


def test_the_second_call_is_captured_and_every_call_launches_once() -> None:
    recorder = Recorder()
    replay = Replay(recorder.compute, lambda: recorder)
    for _ in range(4):
        replay(Operands({}, {}))
    assert recorder.events == ["launch", "begin", "launch", "end", "replay", "replay", "replay"]


def test_what_cannot_be_captured_is_launched_each_time(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(can_capture=False)
    replay = Replay(recorder.compute, lambda: recorder)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            replay(Operands({}, {}))
    assert recorder.events == ["launch", "begin", "launch", "end", "launch", "launch"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
