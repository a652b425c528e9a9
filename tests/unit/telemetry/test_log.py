"""What the engine logs of a failure names the requests that it struck, as their clients know them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import msgspec
import pytest

from tests.support.jobs import template_of
from tests.support.local_totals import LocalTotals
from tilewire.service.config.process import LogSettings
from tilewire.service.engine.backends.contract import LaunchSpec
from tilewire.service.engine.backends.cpu import CpuBackend, Finished
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import ids_of
from tilewire.service.engine.loop.loop import EngineLoop
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.host_copies import HostCopies
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import (
    Cancel,
    Done,
    Failed,
    FrameDecoder,
    Hello,
    Job,
    ListTensors,
    ToGateway,
    Welcome,
    encode_frame,
)
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions
from tilewire.service.supervisor.vault import VaultWriter
from tilewire.service.telemetry import log

SEGMENT_BYTES = 2**16
KIND = TensorType("float32", (2, 4))


class BrokenBackend(CpuBackend):
    """Fails every launch."""

    def begin(self, launches: Sequence[LaunchSpec]) -> Finished:
        raise RuntimeError("the device has had enough")


def job(number: int, request_id: str) -> Job:
    return Job(number, 1, (0, 64), request_id=request_id)


def test_the_console_obeys_no_client(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.root.handlers, logging.root.level
    try:
        logger = log.configure(LogSettings(), process="tests")
        logger.info("request", path="/v1/\x1b[31mred\r\n\x9b2J", request_id="ünïcode")
        logger.error("\x1b]0;title\x07")
        try:
            int("a trace keeps its lines")
        except ValueError:
            logger.exception("failed")
    finally:
        logging.root.handlers, logging.root.level = before
    shown = capsys.readouterr().err
    assert not set(shown) & {chr(code) for code in (*range(10), *range(11, 32), 127, *range(128, 160))}
    assert "\\x1b[31mred\\x0d\\x0a\\x9b2J" in shown
    assert "ünïcode" in shown
    assert "Traceback (most recent call last):\n" in shown


def receive(sock: socket.socket, count: int) -> list[ToGateway]:
    decoder: FrameDecoder[ToGateway] = FrameDecoder(ToGateway)
    messages: list[ToGateway] = []
    while len(messages) < count:
        messages += decoder.feed(sock.recv(2**16))
    return messages


@pytest.fixture(scope="module")
def metrics() -> EngineMetrics:
    return EngineMetrics(LocalTotals(), CpuBackend("cpu").identity, version="0", restarts=0)


def engine_for(mailbox: Mailbox, backend: CpuBackend, metrics: EngineMetrics) -> EngineLoop:
    vault = VaultWriter(-1)
    regions = Regions(backend, vault, max_bytes=2**20, max_copied_bytes=2**20)
    store = TensorStore(backend, Residents(backend, 2**20, vault), regions, metrics, HostCopies(backend, vault))
    return EngineLoop(0, mailbox, backend, store, metrics)


def connect(mailbox: Mailbox) -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    mailbox.connect(theirs, Hello(0, SEGMENT_BYTES), Segment.create("tests", SEGMENT_BYTES))
    return ours


def test_a_batch_that_fails_names_its_requests(metrics: EngineMetrics, caplog: pytest.LogCaptureFixture) -> None:
    mailbox = Mailbox()
    engine = engine_for(mailbox, BrokenBackend("cpu"), metrics)
    template = template_of("softmax", SoftmaxOptions(), {"x": KIND})
    ours = connect(mailbox)
    ours.sendall(encode_frame([template, *(job(number, name) for number, name in enumerate(("first", "second")))]))
    with caplog.at_level(logging.WARNING):
        # Both wait when the loop begins, so they share a launch.
        engine.start()
        welcome, *failures = receive(ours, 3)
        engine.stop()
    ours.close()
    assert isinstance(welcome, Welcome)
    assert all(isinstance(one, Failed) and one.code == "internal" for one in failures)
    shared, *alone = caplog.records
    assert shared.__dict__["request_ids"] == ["first", "second"]
    assert [record.__dict__["request_id"] for record in alone] == ["first", "second"]
    assert all(record.exc_info is not None for record in alone)


def test_a_template_that_cannot_be_planned_fails_its_own_jobs_alone(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    mailbox = Mailbox()
    engine = engine_for(mailbox, CpuBackend("cpu"), metrics)
    good = template_of("softmax", SoftmaxOptions(), {"x": KIND}, number=2)
    bad = msgspec.structs.replace(good, id=1, inputs=())
    ours = connect(mailbox)
    ours.sendall(encode_frame([bad, job(7, "struck"), good, Job(8, 2, (0, 64), request_id="spared")]))
    with caplog.at_level(logging.WARNING):
        engine.start()
        _, *answers = receive(ours, 3)
        engine.stop()
    ours.close()
    assert {answer.id: type(answer) for answer in answers if isinstance(answer, Failed | Done)} == {7: Failed, 8: Done}
    planned, struck = caplog.records
    assert planned.exc_info is not None
    assert struck.__dict__["request_id"] == "struck"


def test_messages_without_a_request_name_none() -> None:
    assert ids_of(ListTensors(1, request_id="asked")) == {"request_id": "asked"}
    assert ids_of(Hello(0, 0), Cancel(1)) == {"request_ids": []}
