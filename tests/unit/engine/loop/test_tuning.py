"""Tuning while the device is idle: never beside a job, in turns between which jobs are taken, and its errors end it alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.engine_loop import WAIT_S, GatewayEnd, engine_of
from tests.support.jobs import template_of
from tilewire.service.engine.backends.contract import LaunchSpec, Running
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.ipc.messages import (
    DescribeKernels,
    Done,
    Job,
    Kernels,
    ToGateway,
)
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions


class TunedBackend(CpuBackend):
    """Has so many turns of tuning, and learns something in the last one.

    Args:
        num_turns: Number of turns after each time that the device was busy.
        on_turn: Called in each.
    """

    def __init__(self, num_turns: int, on_turn: Callable[[int], object] = lambda _number: None) -> None:
        super().__init__("cpu")
        self._num_turns = self._num_left = num_turns
        self._on_turn = on_turn
        self._num_learned = 0
        self.events: list[str] = []
        self.is_through = threading.Event()

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        self.events.append("job")
        self._num_left = self._num_turns
        self.is_through.clear()
        return super().begin(launches)

    def tune(self) -> bool:
        self.events.append("turn")
        self._num_left -= 1
        self._on_turn(self._num_turns - self._num_left)
        if self._num_left:
            return True
        self._num_learned += 1
        self.is_through.set()
        return False

    @property
    def num_learned(self) -> int:
        return self._num_learned

    def kernels(self) -> dict[str, object]:
        return {"learned": self._num_learned}


class Scene:
    """An engine with a gateway that sends it jobs."""

    def __init__(self, backend: CpuBackend) -> None:
        mailbox = Mailbox()
        self.engine, store = engine_of(mailbox, backend)
        store.describe_kernels()
        self._gateway = GatewayEnd(mailbox)
        self.engine.start()
        self.receive()
        template = template_of("softmax", SoftmaxOptions(), {"x": TensorType("float32", (2, 4))})
        self._gateway.send(template)

    def receive(self) -> ToGateway:
        return self._gateway.receive()

    def send(self, number: int) -> None:
        self._gateway.send(Job(number, 1, (0, 64)))

    def run(self, number: int) -> None:
        self.send(number)
        answer = self.receive()
        assert isinstance(answer, Done)
        assert answer.id == number

    def learned(self) -> bytes:
        self._gateway.send(DescribeKernels(99))
        answer = self.receive()
        assert isinstance(answer, Kernels)
        return answer.report

    def close(self) -> None:
        self.engine.stop()
        self._gateway.close()


StartScene = Callable[[CpuBackend], Scene]


@pytest.fixture
def start_scene() -> Iterator[StartScene]:
    scenes: list[Scene] = []

    def start(backend: CpuBackend) -> Scene:
        scenes.append(Scene(backend))
        return scenes[-1]

    yield start
    for scene in scenes:
        scene.close()


def test_a_device_is_tuned_when_it_has_been_idle_and_until_nothing_is_left(start_scene: StartScene) -> None:
    backend = TunedBackend(5)
    scene = start_scene(backend)
    for number in range(3):
        scene.run(number)
    assert backend.is_through.wait(WAIT_S)
    assert scene.learned() == b'{"learned":1}'
    assert backend.events == ["job"] * 3 + ["turn"] * 5
    # The next job may leave something to tune.
    scene.run(3)
    assert backend.is_through.wait(WAIT_S)
    assert scene.learned() == b'{"learned":2}'
    assert backend.events[8:] == ["job"] + ["turn"] * 5


def test_before_the_first_job_there_is_nothing_to_tune(start_scene: StartScene) -> None:
    backend = TunedBackend(1)
    scene = start_scene(backend)
    for _ in range(3):
        assert scene.learned() == b'{"learned":0}'
    assert backend.events == []


def test_a_job_that_comes_meanwhile_is_next(start_scene: StartScene) -> None:
    is_tuning, may_go_on = threading.Event(), threading.Event()

    def on_turn(number: int) -> None:
        if number == 2:
            is_tuning.set()
            assert may_go_on.wait(WAIT_S)

    backend = TunedBackend(100, on_turn)
    scene = start_scene(backend)
    scene.run(1)
    assert is_tuning.wait(WAIT_S)
    # A turn that hangs is seen by whoever watches the engine.
    assert scene.engine.launched_ns > 0
    scene.send(2)
    may_go_on.set()
    assert isinstance(scene.receive(), Done)
    assert backend.events[:4] == ["job", "turn", "turn", "job"]


def test_an_error_ends_tuning_and_nothing_else(start_scene: StartScene, caplog: pytest.LogCaptureFixture) -> None:
    has_failed = threading.Event()

    def on_turn(_number: int) -> None:
        has_failed.set()
        raise RuntimeError("no memory")

    backend = TunedBackend(3, on_turn)
    with caplog.at_level(logging.ERROR):
        scene = start_scene(backend)
        scene.run(1)
        assert has_failed.wait(WAIT_S)
        for number in range(2, 5):
            scene.run(number)
    assert backend.events == ["job", "turn", "job", "job", "job"]
    (record,) = caplog.records
    assert record.getMessage() == "online tuning is off until the next start"


def test_a_backend_without_choices_is_asked_once_for_each_pause(start_scene: StartScene) -> None:
    class Counting(CpuBackend):
        num_asked = 0
        asked = threading.Event()

        def tune(self) -> bool:
            self.num_asked += 1
            self.asked.set()
            return super().tune()

    backend = Counting("cpu")
    scene = start_scene(backend)
    scene.run(1)
    assert backend.asked.wait(WAIT_S)
    for _ in range(20):
        scene.learned()
    assert backend.num_asked == 1
