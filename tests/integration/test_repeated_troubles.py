"""What comes between repeated requests: changed residents, errors, full queues, drains, and clients that leave or wait."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest

from tests.support.gateway_bench import GatewayBench, read_answer, until
from tests.support.raw_http import post
from tests.support.repeated_scenes import ONES, SENT, WEIGHT, Answer, ask, check_sum, fixed, play, warmed
from tests.support.tensor_bodies import to_npy
from tilewire.service.errors import DeadlinePassed, TooBusy, Unavailable
from tilewire.service.gateway.auth.flows import NO_FLOW


@pytest.mark.parametrize("how", ["learned before", "told by the engine"])
def test_a_resident_of_another_shape(how: str) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        check_sum(await ask(stream, SENT[1]), ONES + WEIGHT)
        taller = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        bench.engine.residents["w"] = taller
        num_jobs = len(bench.engine.jobs)
        if how == "learned before":
            await bench.gateway.engines.describe("w")
        check_sum(await ask(stream, SENT[2]), ONES * 2 + taller)
        assert len(bench.engine.jobs) - num_jobs == (1 if how == "learned before" else 2)
        check_sum(await ask(stream, SENT[3]), ONES * 3 + taller)
        check_sum(await ask(stream, SENT[4]), ONES * 4 + taller)
        assert isinstance(bench.engine.jobs[-1].operands["b"].type.shape, tuple)
        bench.engine.residents["w"] = np.ones((5, 7), np.float32)
        assert (await ask(stream, SENT[5]))[0] == 400

    play(scene)


def test_a_stale_request_and_those_pipelined_behind_it_are_answered_in_order() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        bench.engine.is_held = True
        stream[1].write(SENT[1])
        await until(lambda: len(bench.engine.jobs) == 3)
        stream[1].write(SENT[2] + SENT[3])
        await asyncio.sleep(0.01)
        taller = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        bench.engine.residents["w"] = taller
        bench.engine.is_held = False
        bench.engine.answer_all()
        for number in (1, 2, 3):
            check_sum(await read_answer(stream[0]), ONES * number + taller)

    play(scene)


@pytest.mark.parametrize(
    "error", [Unavailable("the engine restarted"), TooBusy("the device is full"), ValueError("bug")]
)
def test_errors_of_the_engine_are_answered(error: Exception) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        bench.engine.error = error
        short = await ask(stream, SENT[1])
        long = await ask(await bench.connect(), SENT[1])

        def told(answer: Answer) -> tuple[int, list[str], bytes]:
            return answer[0], [name for name, _ in answer[1]], fixed(answer)[2]

        assert short[0] == getattr(error, "status", 500)
        assert told(short) == told(long)
        bench.engine.error = None
        check_sum(await ask(stream, SENT[2]), ONES * 2 + WEIGHT)

    play(scene)


@pytest.mark.parametrize("is_header", [False, True])
def test_each_request_has_a_deadline_of_its_own(is_header: bool) -> None:
    target, headers = ("/v1/add?b=@w", {"x_timeout_ms": "5000"}) if is_header else ("/v1/add?b=@w&timeout_ms=5000", {})
    sent = post(target, to_npy(ONES), **headers)

    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench, sent)
        for _ in range(3):
            before_ns = time.monotonic_ns()
            check_sum(await ask(stream, sent), ONES + WEIGHT)
            assert before_ns + 5e9 <= bench.engine.jobs[-1].deadline_ns <= time.monotonic_ns() + 5e9
        bench.engine.error = DeadlinePassed("too late")
        assert (await ask(stream, sent))[0] == 504

    play(scene)


def test_a_bug_is_500_and_gives_the_slots_back() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        bench.engine.bug = RuntimeError("a bug of ours")
        status, _, body = await ask(stream, SENT[1])
        assert status == 500
        assert b"a bug of ours" not in body
        assert bench.arena.used_bytes == bench.admission.in_flight == 0
        bench.engine.bug = None
        check_sum(await ask(stream, SENT[2]), ONES * 2 + WEIGHT)

    play(scene)


def test_an_engine_that_is_not_ready_is_503() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        welcome, bench.engine.welcome = bench.engine.welcome, None
        status, headers, _ = await ask(stream, SENT[1])
        assert status == 503
        assert "retry-after" in dict(headers)
        # While the body comes.
        bench.engine.welcome = welcome
        stream[1].write(SENT[1][:-4])
        await until(lambda: bench.admission.in_flight == 1)
        bench.engine.welcome = None
        stream[1].write(SENT[1][-4:])
        assert (await read_answer(stream[0]))[0] == 503
        bench.engine.welcome = welcome
        check_sum(await ask(stream, SENT[2]), ONES * 2 + WEIGHT)

    play(scene)


def test_a_full_queue_and_a_full_arena_are_429() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        leases = bench.admission.admit(NO_FLOW)
        assert (await ask(stream, SENT[1]))[0] == 429
        leases.release()
        with contextlib.closing(_Held(bench)):
            assert (await ask(stream, SENT[1]))[0] == 429
        check_sum(await ask(stream, SENT[2]), ONES * 2 + WEIGHT)

    play(scene, max_in_flight=1)


class _Held:
    """All of the arena."""

    def __init__(self, bench: GatewayBench) -> None:
        self._lease = bench.arena.lease(bench.arena.free_bytes)

    def close(self) -> None:
        self._lease.release()


def test_a_client_that_leaves_while_its_job_runs() -> None:
    async def scene(bench: GatewayBench) -> None:
        _reader, writer = await warmed(bench)
        bench.engine.is_held = True
        writer.write(SENT[1])
        await until(lambda: len(bench.engine.jobs) == 3)
        writer.transport.abort()
        await until(lambda: bool(bench.engine.cancelled))
        # The device may still write there.
        assert bench.arena.used_bytes > 0
        assert bench.admission.in_flight == 1
        bench.engine.answer_all()
        await until(lambda: bench.arena.used_bytes == 0)
        assert bench.admission.in_flight == 0

    play(scene)


def test_a_client_that_leaves_while_its_body_comes() -> None:
    async def scene(bench: GatewayBench) -> None:
        _reader, writer = await warmed(bench)
        writer.write(SENT[1][:-1])
        await until(lambda: bench.admission.in_flight == 1)
        assert bench.arena.used_bytes > 0
        writer.close()
        await until(lambda: bench.arena.used_bytes == 0)
        assert len(bench.engine.jobs) == 2

    play(scene)


def test_a_body_that_stalls_is_given_up() -> None:
    async def scene(bench: GatewayBench) -> None:
        reader, writer = await warmed(bench)
        writer.write(SENT[1][:-1])
        await until(lambda: bench.admission.in_flight == 1)
        status, headers, body = await read_answer(reader)
        assert status == 400
        assert b"no byte for 0.1 s" in body
        assert ("connection", "close") in headers
        assert await reader.read() == b""
        writer.close()

    play(scene, body_timeout_s=0.1)


def test_a_client_that_only_ended_its_side_is_answered() -> None:
    async def scene(bench: GatewayBench) -> None:
        reader, writer = await warmed(bench)
        bench.engine.is_held = True
        writer.write(SENT[1])
        writer.write_eof()
        await until(lambda: len(bench.engine.jobs) == 3)
        # The client is asked whether it is there, and reads an interim answer.
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        bench.engine.answer_all()
        answer = await read_answer(reader)
        check_sum(answer, ONES + WEIGHT)
        assert ("connection", "close") in answer[1]
        assert await reader.read() == b""
        writer.close()

    play(scene)


@pytest.mark.parametrize("what", ["admission", "connection"])
def test_a_drain_while_its_job_runs_makes_its_answer_the_last_one(what: str) -> None:
    async def scene(bench: GatewayBench) -> None:
        reader, writer = await warmed(bench)
        bench.engine.is_held = True
        writer.write(SENT[1])
        await until(lambda: len(bench.engine.jobs) == 3)
        if what == "admission":
            bench.admission.is_draining = True
        else:
            for connection in list(bench.server.server_state.connections):
                connection.shutdown()
        bench.engine.answer_all()
        answer = await read_answer(reader)
        check_sum(answer, ONES + WEIGHT)
        assert answer[1][-1] == ("connection", "close")
        assert await reader.read() == b""
        writer.close()

    play(scene)


def test_a_drain_between_two_requests_is_503() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        check_sum(await ask(stream, SENT[1]), ONES + WEIGHT)
        bench.admission.is_draining = True
        answer = await ask(stream, SENT[2])
        assert answer[0] == 503
        assert ("connection", "close") in answer[1]

    play(scene)


def test_an_idle_connection_is_closed_after_a_request() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        for number in range(3):
            check_sum(await ask(stream, SENT[number]), ONES * number + WEIGHT)
            await asyncio.sleep(0.15)
        async with asyncio.timeout(5):
            assert await stream[0].read() == b""

    play(scene, keep_alive_s=0.3)


def test_a_client_that_reads_nothing_is_waited_for() -> None:
    a = np.zeros((1, 60_000), np.float32)
    sent = post("/v1/add?b=@v", to_npy(a))

    async def scene(bench: GatewayBench) -> None:
        bench.engine.residents["v"] = a
        reader, writer = await warmed(bench, sent)
        transport = writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(60):
            writer.write(sent)
            await asyncio.sleep(0.001)
        await until(lambda: any(one.flow.write_paused for one in bench.server.server_state.connections))  # type: ignore[union-attr]
        assert bench.arena.used_bytes <= 2**20
        transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(60):
            check_sum(await read_answer(reader), a + a)

    play(scene)
