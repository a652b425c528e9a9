"""From a request's bytes to the job and back to the answer's bytes, with an engine of our own at the Protocol."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.types import Message, Scope

from tests.support.jobs import SentJob
from tests.support.local_totals import LocalTotals
from tests.support.oip_bodies import LENGTH, binary_input, from_answer, to_binary
from tests.support.tensor_bodies import Array
from tilewire.service.config.process import Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.errors import BY_CODE, InvalidRequest, TilewireError
from tilewire.service.gateway.app import create_app
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import NOT_RESIDING, Reply
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.room import Room
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.messages import (
    Command,
    DescribeTensor,
    Done,
    Stale,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    Warming,
    Welcome,
)
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType

SEGMENT_BYTES = 2**20
A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)


class AddingEngine:
    """Writes ones as every result, and knows one resident whose shape changes once."""

    def __init__(self, arena: Arena) -> None:
        self.residing = NOT_RESIDING
        self.welcome: Welcome | None = Welcome(0, "cpu", "cpu", "", "", "")
        self.warming: Warming | None = None
        self.outstanding = 0
        self.jobs: list[SentJob] = []
        self.resident = TensorType("float32", (5, 4))
        # Jobs that come too late, as another shape has taken its place.
        self.changes = 0
        self._arena = arena

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.set_result(self._reply(request))
        return 1, future

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        raise AssertionError

    def _reply(self, request: Command) -> Reply:
        info = TensorInfo("w", self.resident, 0.0)
        if isinstance(request, DescribeTensor):
            # What this gateway learns is out of date as soon as it has learned it.
            self.resident = TensorType("float32", (3, 4))
            return Tensors(1, (info,))
        raise AssertionError(request)

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.set_result(self._computed(SentJob(template, offsets, caller.deadline_ns, caller.priority)))
        return 1, future

    def _computed(self, request: SentJob) -> Reply:
        if self.changes:
            self.changes -= 1
            self.resident = TensorType("float32", (3, 5 + self.changes))
        info = TensorInfo("w", self.resident, 0.0)
        self.jobs.append(request)
        if any(one.resident is not None and one.type != self.resident for one in request.operands.values()):
            return Stale(1, (info,))
        ones = np.ones(request.out.shape, request.out.dtype).tobytes()
        self._arena.segment.view[request.out_offset : request.out_offset + len(ones)] = ones
        return Done(1, Timings(1000, 0, 2000, 0), 3)


class Bench:
    """A gateway without its server."""

    def __init__(self) -> None:
        self.segment = Segment.create("tests", SEGMENT_BYTES)
        self.arena = Arena(self.segment)
        self.engine = AddingEngine(self.arena)
        whole = Settings(gateways=1, arena_bytes=SEGMENT_BYTES, max_body_bytes=2**19, max_json_bytes=2**16)
        settings = whole.gateway(0, Inherited(-1), [])
        admission = Admission(Room(self.arena, 0.0), 8, settings.max_body_bytes)
        metrics = GatewayMetrics(LocalTotals())
        self.gateway = Gateway(settings, "0", Engines([self.engine]), self.arena, admission, metrics)

    async def call(self, op: str, body: bytes, headers: dict[str, str]) -> tuple[dict[str, str], bytes]:
        """One request; returns the answer's headers and body."""
        headers = {"content-length": str(len(body)), **{name.lower(): value for name, value in headers.items()}}
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": f"/v2/models/{op}/infer",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await asyncio.Future()

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await create_app(self.gateway)(scope, receive, send)
        assert self.arena.used_bytes == 0
        content = b"".join(message["body"] for message in sent[1:])
        status = sent[0]["status"]
        if status != 200:
            raise next(kind for kind in BY_CODE.values() if kind.status == status)(json.loads(content)["error"])
        return {name.decode(): value.decode() for name, value in sent[0]["headers"]}, content

    def run(self, op: str, body: bytes, headers: dict[str, str]) -> tuple[dict[str, str], Array]:
        """One request that must succeed; returns the answer's headers and its output."""
        given, content = asyncio.run(self.call(op, body, headers))
        return given, from_answer(content, given.get(LENGTH.lower()))[1]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.segment.close()


def test_the_job_says_what_the_request_says(bench: Bench) -> None:
    parameters: dict[str, Any] = {"activation": "gelu", "priority": 2, "timeout": 5_000_000, "binary_data_output": True}
    before_ns = time.monotonic_ns()
    headers, out = bench.run("matmul", *to_binary({"a": A, "b": B}, parameters=parameters))
    (job,) = bench.engine.jobs
    assert (job.op, job.options, job.priority) == ("matmul", MatmulOptions(activation="gelu"), 2)
    assert before_ns < job.deadline_ns - 5_000_000_000 < time.monotonic_ns()
    assert job.out == TensorType("float32", (2, 4))
    assert job.operands["a"].type == TensorType("float32", (2, 3))
    np.testing.assert_array_equal(out, np.ones((2, 4)))
    assert headers["x-batch-size"] == "3"
    assert "kernel;dur=0.002" in headers["server-timing"]


@pytest.mark.parametrize("pad", range(0, 70, 7))
@pytest.mark.parametrize("coding", [None, "gzip"])
def test_payloads_begin_aligned_whatever_the_length_of_the_json(bench: Bench, pad: int, coding: str | None) -> None:
    body, headers = to_binary({"x": A}, id="x" * (pad + 1))
    if coding is not None:
        body, headers = gzip.compress(body), {**headers, "content-encoding": coding}
    bench.run("softmax", body, headers)
    (job,) = bench.engine.jobs
    assert job.operands["x"].offset % 64 == 0


def test_no_timeout_is_no_deadline(bench: Bench) -> None:
    bench.run("softmax", *to_binary({"x": A}, parameters={"timeout": 0}))
    assert (bench.engine.jobs[0].deadline_ns, bench.engine.jobs[0].priority) == (0, 0)


def test_a_resident_that_changes_is_planned_again(bench: Bench) -> None:
    _, out = bench.run("matmul", *to_binary({"a": A}, parameters={"b": "@w"}))
    assert bench.engine.jobs[-1].operands["b"].resident == "w"
    assert out.shape == (2, 4)


def test_a_resident_may_change_ten_times_while_a_request_waits(bench: Bench) -> None:
    bench.engine.changes = 10
    _, out = bench.run("matmul", *to_binary({"a": A}, parameters={"b": "@w"}))
    assert out.shape == (2, 5)
    assert len(bench.engine.jobs) > 10


@pytest.mark.parametrize("place", ["inputs", "outputs"])
def test_shared_memory_is_off(bench: Bench, place: str) -> None:
    region = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 24}}
    document: dict[str, Any] = {"inputs": [binary_input("x", A)]}
    if place == "inputs":
        document["inputs"] = [{"name": "x", "datatype": "FP32", "shape": [2, 3], **region}]
    else:
        document["outputs"] = [{"name": "out", **region}]
    text = json.dumps(document).encode()
    tail = b"" if place == "inputs" else A.tobytes()
    with pytest.raises(InvalidRequest, match="shared memory is off"):
        asyncio.run(bench.call("softmax", text + tail, {LENGTH: str(len(text))}))
    assert bench.arena.used_bytes == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": str(2**20), LENGTH: "0"}, 413),
        ({"content-length": str(2**17)}, 413),
        ({"content-length": str(2**18), LENGTH: str(2**17)}, 413),
        ({"content-length": "10", LENGTH: "11"}, 400),
        ({"content-encoding": "br"}, 415),
    ],
)
def test_what_can_be_refused_by_its_head_is_refused_unread(bench: Bench, headers: dict[str, str], status: int) -> None:
    with pytest.raises(TilewireError) as caught:
        asyncio.run(bench.call("softmax", b"never looked at", headers))
    assert caught.value.status == status
    assert not bench.engine.jobs
