"""What an engine does before it is ready: gateways get reports of how far it is, and wait; a wrong answer ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.engine_loop import GatewayEnd, engine_of
from tilewire.service.engine.backends.contract import CannotStart, LaunchSpec, Running
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Client, Lost, Stop
from tilewire.service.engine.loop.warmup import Interrupted, WarmupClients, check_ops
from tilewire.service.ipc.messages import (
    DescribeKernels,
    Kernels,
    Warming,
    Welcome,
)
from tilewire.service.ops.registry import OPS


class ForgetfulBackend(CpuBackend):
    """Leaves results as they were."""

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        running = super().begin(launches)
        for launch in launches:
            for places, _ in launch.outputs:
                for place in places:
                    tensor_of(place).zero_()
        return running


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


def warmup_clients_of(mailbox: Mailbox, on_arrival: Callable[[Client], None] = lambda _client: None) -> WarmupClients:
    return WarmupClients(mailbox, "cuda:0", on_arrival)


def test_a_gateway_is_told_how_far_it_is(mailbox: Mailbox) -> None:
    arrived: list[Client] = []
    clients = warmup_clients_of(mailbox, arrived.append)
    gateway = GatewayEnd(mailbox)
    clients.report("load", 3, 10)
    assert gateway.receive() == Warming("cuda:0", "load", 3, 10)
    clients.report("load", 10, 10)
    assert gateway.receive() == Warming("cuda:0", "load", 10, 10)
    assert [client.name for client in arrived] == ["gateway-0"]
    assert not clients.events
    gateway.close()


def test_reports_that_follow_closely_are_not_all_sent(mailbox: Mailbox) -> None:
    clients = warmup_clients_of(mailbox)
    gateway = GatewayEnd(mailbox)
    for done in range(1000):
        clients.report("load", done, 1000)
    clients.report("load", 1000, 1000)
    messages = [gateway.receive()]
    while messages[-1] != Warming("cuda:0", "load", 1000, 1000):
        messages.append(gateway.receive())
    assert len(messages) < 100
    gateway.close()


def test_a_gateway_that_left_is_told_nothing_and_its_end_is_kept(mailbox: Mailbox) -> None:
    clients = warmup_clients_of(mailbox)
    gateway = GatewayEnd(mailbox)
    clients.report("load", 1, 10)
    gateway.close()
    clients.report("load", 2, 10)
    clients.report("load", 10, 10)
    assert [type(event) for event in clients.events] == [Lost]


def test_each_stage_is_logged_with_its_time(mailbox: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    clients = warmup_clients_of(mailbox)
    with caplog.at_level(logging.INFO):
        clients.report("load", 0, 1)
        clients.report("run", 0, 1)
        clients.close()
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == ["warmed up: load", "warmed up: run"]


def test_a_stop_ends_the_warm_up(mailbox: Mailbox) -> None:
    mailbox.post(Stop())
    with pytest.raises(Interrupted):
        warmup_clients_of(mailbox).report("compile", 1, 10)


def test_a_wrong_answer_ends_the_engine() -> None:
    with pytest.raises(CannotStart, match=r"matmul gave \[\[0.0, 0.0\], \[0.0, 0.0\]\]"):
        check_ops(ForgetfulBackend("cpu"), lambda *_progress: None)


def test_the_checks_are_reported() -> None:
    reports: list[tuple[str, int, int]] = []
    check_ops(CpuBackend("cpu"), lambda *progress: reports.append(progress))
    assert reports == [("check", number, len(OPS)) for number in range(len(OPS) + 1)]


def test_gateways_are_welcomed_when_the_warm_up_is_over() -> None:
    mailbox = Mailbox()
    engine, store = engine_of(mailbox)
    may_end, ready = threading.Event(), threading.Event()
    gateway = GatewayEnd(mailbox)

    def prepare(report: Callable[[str, int, int], None]) -> None:
        report("load", 1, 2)
        may_end.wait()
        store.describe_kernels()

    engine.start(prepare, ready.set)
    assert isinstance(gateway.receive(), Warming)
    assert not ready.is_set()
    may_end.set()
    assert isinstance(gateway.receive(), Welcome)
    assert ready.wait(10)
    gateway.send(DescribeKernels(7))
    answer = gateway.receive()
    assert isinstance(answer, Kernels)
    assert answer.id == 7
    assert b'"backend":"cpu"' in answer.report
    engine.stop()
    gateway.close()


def test_an_engine_that_is_stopped_while_it_warms_up_ends() -> None:
    mailbox = Mailbox()
    engine, _ = engine_of(mailbox)
    began = threading.Event()

    def prepare(report: Callable[[str, int, int], None]) -> None:
        while True:
            report("compile", 0, 100)
            began.set()

    engine.start(prepare)
    assert began.wait(10)
    engine.stop()
