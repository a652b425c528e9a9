"""A launch that another thread computes: the loop answers meanwhile, is rung at its end, and lets short jobs pass long ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tests.support.engine_loop import WAIT_S, GatewayEnd, engine_of
from tests.support.jobs import template_of
from tilewire.service.engine.backends.contract import LaunchSpec, Running
from tilewire.service.engine.backends.cpu import SMALL_FLOPS, Computing, CpuBackend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.errors import BeyondLimit, TilewireError
from tilewire.service.ipc.messages import (
    Cancel,
    DescribeTensor,
    Done,
    Failed,
    Job,
    PutTensor,
    Started,
    Tensors,
    Timings,
    ToGateway,
    Upload,
)
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions

ROWS = TensorType("float32", (2, 4))
SOFTMAX = template_of("softmax", SoftmaxOptions(), {"x": ROWS})
W = TensorType("float32", (3,))
SQUARE = TensorType("float32", (1024, 1024))
LONG = template_of("matmul", MatmulOptions(), {"a": SQUARE, "b": SQUARE}, number=2)


class HeldBackend(CpuBackend):
    """Its thread computes a batch when a test says so.

    Attributes:
        batches: Those that were begun.
    """

    def __init__(self, ring: Callable[[], object]) -> None:
        super().__init__("cpu")
        self._bell = ring
        self.batches: list[tuple[Sequence[LaunchSpec], Computing]] = []

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        running = Computing()
        self.batches.append((launches, running))
        return running

    def end(self, number: int, error: Exception | None = None, *, rings: bool = True) -> None:
        launches, running = self.batches[number]
        if error is None:
            super().begin(launches).wait()
        running.end(Timings(kernel_ns=1), error)
        if rings:
            self._bell()


class Scene:
    """An engine with a gateway."""

    def __init__(self) -> None:
        mailbox = Mailbox()
        self.backend = HeldBackend(mailbox.ring)
        self.engine, _store = engine_of(mailbox, self.backend)
        self.gateway = GatewayEnd(mailbox, nbytes=2**20 + 2 * SQUARE.nbytes)
        self.engine.start()
        self.gateway.receive()
        self.gateway.send(SOFTMAX, LONG)

    def waits_for_batches(self, count: int) -> None:
        until_s = time.monotonic() + WAIT_S
        while len(self.backend.batches) < count:
            assert time.monotonic() < until_s
            time.sleep(0.001)

    def put(self, number: int) -> ToGateway:
        self.gateway.send(PutTensor(number, f"w{number}", Upload(W, 512)))
        return self.gateway.receive()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.engine.stop()
    scene.gateway.close()


def test_others_are_answered_while_a_batch_computes(scene: Scene) -> None:
    scene.gateway.send(Job(1, 1, (0, 64)))
    scene.waits_for_batches(1)
    assert isinstance(scene.put(2), Tensors)
    scene.gateway.send(DescribeTensor(3, "w2"))
    described = scene.gateway.receive()
    assert isinstance(described, Tensors)
    assert described.tensors[0].type == W
    # It may take as long as it takes: it does not hang.
    assert scene.engine.launched_ns == 0
    scene.backend.end(0)
    done = scene.gateway.receive()
    assert isinstance(done, Done)
    assert (done.id, done.timings.kernel_ns) == (1, 1)


def test_jobs_wait_together_behind_a_batch_that_computes(scene: Scene) -> None:
    scene.gateway.send(Job(1, 1, (0, 64)))
    scene.waits_for_batches(1)
    scene.gateway.send(*(Job(number, 1, (0, 64)) for number in range(2, 6)))
    assert isinstance(scene.put(9), Tensors)
    assert len(scene.backend.batches) == 1
    scene.backend.end(0)
    scene.waits_for_batches(2)
    scene.backend.end(1)
    answers = [scene.gateway.receive() for _ in range(5)]
    assert [answer.id for answer in answers if isinstance(answer, Done)] == [1, 2, 3, 4, 5]
    assert len(scene.backend.batches) == 2


def long_job(number: int) -> Job:
    return Job(number, 2, (2**20, 2**20, 2**20 + SQUARE.nbytes))


def test_short_jobs_pass_a_long_one_and_long_ones_wait(scene: Scene) -> None:
    scene.gateway.send(long_job(1))
    scene.waits_for_batches(1)
    scene.gateway.send(long_job(2), Job(3, 1, (0, 64)), long_job(4), Job(5, 1, (0, 64)))
    scene.waits_for_batches(2)
    scene.backend.end(1)
    passed = [scene.gateway.receive(), scene.gateway.receive()]
    assert [answer.id for answer in passed if isinstance(answer, Done)] == [3, 5]
    # One more passes, and what comes behind it waits for it.
    scene.gateway.send(Job(6, 1, (0, 64)))
    scene.waits_for_batches(3)
    scene.gateway.send(Job(7, 1, (0, 64)))
    assert isinstance(scene.put(9), Tensors)
    assert len(scene.backend.batches) == 3
    scene.backend.end(0)
    assert isinstance(done := scene.gateway.receive(), Done)
    assert done.id == 1
    assert len(scene.backend.batches) == 3
    scene.backend.end(2)
    for number in (3, 4, 5):
        scene.waits_for_batches(number + 1)
        scene.backend.end(number)
    ended = [scene.gateway.receive() for _ in range(4)]
    assert sorted(answer.id for answer in ended if isinstance(answer, Done)) == [2, 4, 6, 7]


def test_what_is_over_at_once_passes_a_long_launch() -> None:
    """By the backend itself, whose thread still computes."""
    mailbox, held = Mailbox(), threading.Event()

    class Waiting(CpuBackend):
        def begin(self, launches: Sequence[LaunchSpec]) -> Running:
            if launches[0].op.name == "softmax":
                return super().begin(launches)
            running = Computing()

            def compute() -> None:
                held.wait(WAIT_S)
                running.end(Timings())
                mailbox.ring()

            threading.Thread(target=compute).start()
            return running

    engine, _store = engine_of(mailbox, Waiting())
    gateway = GatewayEnd(mailbox, nbytes=2**20 + 2 * SQUARE.nbytes)
    engine.start()
    gateway.receive()
    gateway.send(SOFTMAX, LONG, long_job(1), *(Job(number, 1, (0, 64)) for number in range(2, 5)))
    for number in range(2, 5):
        assert isinstance(done := gateway.receive(), Done)
        assert done.id == number
    gateway.send(Job(5, 1, (0, 64)))
    assert isinstance(gateway.receive(), Done)
    held.set()
    assert isinstance(done := gateway.receive(), Done)
    assert done.id == 1
    engine.stop()
    gateway.close()


def test_a_job_that_has_started_is_not_cancelled_and_others_are(scene: Scene) -> None:
    far_ns = time.monotonic_ns() + 10**12
    scene.gateway.send(Job(1, 1, (0, 64), deadline_ns=far_ns))
    scene.waits_for_batches(1)
    scene.gateway.send(
        Job(2, 1, (0, 64), deadline_ns=far_ns), Job(3, 1, (0, 64), deadline_ns=far_ns), Job(4, 1, (0, 64))
    )
    # Timers are not exact: a gateway's may be early for the engine's clock.
    scene.gateway.send(Cancel(1, is_late=True), Cancel(2, is_late=True), Cancel(3))
    answers = [scene.gateway.receive() for _ in range(3)]
    assert answers[0] == Started(1)
    codes = [answer.code for answer in answers if isinstance(answer, Failed)]
    assert codes == ["deadline_passed", "client_gone"]
    scene.backend.end(0)
    scene.waits_for_batches(2)
    scene.backend.end(1)
    ended = [scene.gateway.receive(), scene.gateway.receive()]
    assert [answer.id for answer in ended if isinstance(answer, Done)] == [1, 4]
    # The answer to one that has ended comes behind its result.
    scene.gateway.send(Cancel(4))
    assert scene.gateway.receive() == Started(4)


@pytest.mark.parametrize(
    ("error", "code"), [(BeyondLimit("out: too large"), "beyond_limit"), (RuntimeError("no memory"), "internal")]
)
def test_a_batch_that_fails_in_its_thread_is_tried_job_by_job(scene: Scene, error: Exception, code: str) -> None:
    scene.gateway.send(Job(1, 1, (0, 64)), Job(2, 1, (0, 64)))
    scene.waits_for_batches(1)
    scene.backend.end(0, RuntimeError("both together"))
    scene.waits_for_batches(3)
    # Both are over when the loop hears of it.
    scene.backend.end(1, error, rings=False)
    scene.backend.end(2)
    failed, done = scene.gateway.receive(), scene.gateway.receive()
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code) == (1, code)
    assert failed.detail == (error.detail if isinstance(error, TilewireError) else "internal error")
    assert isinstance(done, Done)
    assert done.id == 2
    assert isinstance(scene.put(3), Tensors)


def test_a_gateway_that_leaves_while_its_batch_computes_is_detached_behind_it(scene: Scene) -> None:
    scene.gateway.send(Job(1, 1, (0, 64)))
    scene.waits_for_batches(1)
    scene.gateway.close()
    scene.backend.end(0)


def test_a_large_product_is_computed_by_the_thread_of_the_backend() -> None:
    size = 256
    assert 2 * size**3 > SMALL_FLOPS
    kind = TensorType("float32", (size, size))
    mailbox = Mailbox()
    backend = CpuBackend(ring=mailbox.ring)
    engine, _store = engine_of(mailbox, backend)
    gateway = GatewayEnd(mailbox, nbytes=2**20)
    engine.start()
    gateway.receive()
    a = np.random.default_rng(1).standard_normal((size, size), np.float32)
    gateway.segment.view[: a.nbytes] = a.tobytes()
    gateway.send(template_of("matmul", MatmulOptions(), {"a": kind, "b": kind}), Job(1, 1, (0, 0, a.nbytes)))
    assert isinstance(gateway.receive(), Done)
    out = np.frombuffer(bytes(gateway.segment.view[a.nbytes : 2 * a.nbytes]), np.float32).reshape(size, size)
    np.testing.assert_allclose(out, a.astype(np.float64) @ a, rtol=1e-4, atol=1e-4)
    engine.stop()
    gateway.close()
