"""Prepares an engine before it is ready, and reports its progress.

residents → kernels compiled, loaded, run → every op once from slot to slot, against a known answer

Owns the order and the checks. Runs before the loop, in the loop thread, which has the device. Gateways that connect
meanwhile receive its progress. Their arenas are mapped at once, and they are welcomed when it is over.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

import torch

from tilewire.service.engine.backends.contract import Backend, CannotStart, HostBytes, Report
from tilewire.service.engine.backends.host import bytes_of, tensor_of
from tilewire.service.engine.loop.batching import launch_of
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Attached, Client, Event, Lost, Stop
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Warming
from tilewire.service.ops.op import AnyOp, Limits, TensorType
from tilewire.service.ops.planning import parse_options, plan
from tilewire.service.ops.registry import OPS

logger = logging.getLogger(__name__)

LOG_EVERY_S = 1.0
REPORT_EVERY_S = 0.1

# Of each operand and result of a check.
SLOT_BYTES = 4096


class Interrupted(Exception):
    """The service is being stopped before the engine was ready."""


class WarmupClients:
    """Holds gateways that connect while the engine warms up.

    Args:
        mailbox: Source of the gateways.
        device: Device of the engine.
        on_arrival: Called with each gateway: to begin to map its arena, which takes as long as the kernels do.

    Attributes:
        events: All other events that came meanwhile, in order, to be handled when it is over.
    """

    def __init__(self, mailbox: Mailbox, device: str, on_arrival: Callable[[Client], None]) -> None:
        self._mailbox = mailbox
        self._on_arrival = on_arrival
        self._device = device
        self._clients: list[Client] = []
        self._stage = ""
        self._began_s = self._reported_s = self._logged_s = 0.0
        self.events: list[Event] = []

    def report(self, stage: str, done: int, total: int) -> None:
        """Reports the progress of a stage to the gateways and the log; to be called several times a second.

        Raises:
            Interrupted: The service is being stopped.
        """
        now_s = time.monotonic()
        if stage != self._stage:
            self._end_stage(now_s)
            self._stage, self._began_s, self._logged_s, self._reported_s = stage, now_s, now_s, 0.0
        arrived = self._take()
        if arrived or now_s - self._reported_s >= REPORT_EVERY_S or done == total:
            self._reported_s = now_s
            for client in self._clients:
                client.send(Warming(self._device, stage, done, total))
        self._mailbox.flush()
        for client in arrived:
            self._on_arrival(client)
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.info("warming up: %s %d of %d", stage, done, total)

    def close(self) -> None:
        """Ends the last stage."""
        self._end_stage(time.monotonic())
        self._stage = ""

    def _end_stage(self, now_s: float) -> None:
        if self._stage:
            logger.info("warmed up: %s in %.2f s", self._stage, now_s - self._began_s)

    def _take(self) -> list[Client]:
        """Takes what has come; returns the gateways among it."""
        events = self._mailbox.take(0)
        self.events += [event for event in events if not isinstance(event, Attached)]
        if any(isinstance(event, Stop) for event in events):
            raise Interrupted
        arrived = [event.client for event in events if isinstance(event, Attached)]
        gone = {id(event.client) for event in events if isinstance(event, Lost)}
        self._clients = [client for client in (*self._clients, *arrived) if id(client) not in gone]
        return arrived


def check_ops(backend: Backend, report: Report) -> None:
    """Runs each op once, from slot to slot, and compares with an answer worked out by hand.

    Raises:
        CannotStart: An answer is wrong.
    """
    segment = Segment.create("tilewire-warmup", 2**16)
    mapped = backend.attach(segment)
    for number, op in enumerate(OPS.values()):
        report("check", number, len(OPS))
        for result, expected in zip(_run(backend, mapped, op), op.warmup.outputs, strict=True):
            if not torch.allclose(result, torch.tensor(expected, dtype=result.dtype), rtol=1e-4):
                raise CannotStart(f"{op.name} gave {result.tolist()} for {op.warmup.inputs}, not {expected}")
    report("check", len(OPS), len(OPS))
    backend.detach(mapped)
    del mapped
    segment.close()


def _run(backend: Backend, mapped: torch.Tensor, op: AnyOp) -> list[torch.Tensor]:
    values = {name: torch.tensor(rows, dtype=torch.float32) for name, rows in op.warmup.inputs.items()}
    types = {name: TensorType("float32", tuple(one.shape)) for name, one in values.items()}
    options = parse_options(op, op.warmup.options)
    ends = itertools.count(0, SLOT_BYTES)
    placed: dict[str, HostBytes | torch.Tensor] = {}
    for name, one in values.items():
        source = placed[name] = HostBytes(mapped, types[name], next(ends))
        tensor_of(source).copy_(one)
    outs = [HostBytes(mapped, kind, next(ends)) for kind in plan(op, types, options, Limits()).outputs]
    for out in outs:
        bytes_of(out).fill_(0xFF)
    backend.begin([launch_of(op, options, placed, outs)]).wait()
    return [tensor_of(out).clone() for out in outs]


Prepare = Callable[[Report], None]
