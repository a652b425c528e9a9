"""What the engine logs of a failure names the requests that it struck, as their clients know them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest

from tests.support.engine_loop import GatewayEnd, engine_of
from tests.support.jobs import template_of
from tilewire.service.config.process import LogSettings
from tilewire.service.engine.backends.contract import LaunchSpec, Running
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import ids_of
from tilewire.service.ipc.messages import (
    Cancel,
    Done,
    Failed,
    Hello,
    Job,
    ListTensors,
    Welcome,
)
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions
from tilewire.service.telemetry import log

KIND = TensorType("float32", (2, 4))


class BrokenBackend(CpuBackend):
    """Fails every launch."""

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        raise RuntimeError("the device has had enough")


def job(number: int, request_id: str) -> Job:
    return Job(number, 1, (0, 64), request_id=request_id)


def test_the_console_obeys_no_client(capfd: pytest.CaptureFixture[str]) -> None:
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
    shown = capfd.readouterr().err
    assert not set(shown) & {chr(code) for code in (*range(10), *range(11, 32), 127, *range(128, 160))}
    assert "\\x1b[31mred\\x0d\\x0a\\x9b2J" in shown
    assert "ünïcode" in shown
    assert "Traceback (most recent call last):\n" in shown


def test_a_batch_that_fails_names_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    mailbox = Mailbox()
    engine, _ = engine_of(mailbox, BrokenBackend("cpu"))
    template = template_of("softmax", SoftmaxOptions(), {"x": KIND})
    gateway = GatewayEnd(mailbox)
    with caplog.at_level(logging.WARNING):
        engine.start()
        welcome = gateway.receive()
        # Both come at once, so they share a launch.
        gateway.send(template, *(job(number, name) for number, name in enumerate(("first", "second"))))
        failures = [gateway.receive() for _ in range(2)]
        engine.stop()
    gateway.close()
    assert isinstance(welcome, Welcome)
    assert all(isinstance(one, Failed) and one.code == "internal" for one in failures)
    shared, *alone = caplog.records
    assert shared.__dict__["request_ids"] == ["first", "second"]
    assert [record.__dict__["request_id"] for record in alone] == ["first", "second"]
    assert all(record.exc_info is not None for record in alone)


def test_a_template_that_cannot_be_planned_fails_its_own_jobs_alone(caplog: pytest.LogCaptureFixture) -> None:
    mailbox = Mailbox()
    engine, _ = engine_of(mailbox)
    good = template_of("softmax", SoftmaxOptions(), {"x": KIND}, number=2)
    bad = msgspec.structs.replace(good, id=1, inputs=())
    gateway = GatewayEnd(mailbox)
    with caplog.at_level(logging.WARNING):
        engine.start()
        assert isinstance(gateway.receive(), Welcome)
        gateway.send(bad, job(7, "struck"), good, Job(8, 2, (0, 64), request_id="spared"))
        answers = [gateway.receive() for _ in range(2)]
        engine.stop()
    gateway.close()
    assert {answer.id: type(answer) for answer in answers if isinstance(answer, Failed | Done)} == {7: Failed, 8: Done}
    planned, struck = caplog.records
    assert planned.exc_info is not None
    assert struck.__dict__["request_id"] == "struck"


def test_messages_without_a_request_name_none() -> None:
    assert ids_of(ListTensors(1, request_id="asked")) == {"request_id": "asked"}
    assert ids_of(Hello(0, 0), Cancel(1)) == {"request_ids": []}
