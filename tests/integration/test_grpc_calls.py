"""Calls that end early, wait, or are refused: a gateway's gRPC server in this process, with an engine of ours."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import logging
import math
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.api_keys import entry, keys_file
from tests.support.gateway_bench import until
from tests.support.grpc_calls import out_of, request_of
from tests.support.rpc_bench import RpcBench, scene
from tilewire.service.errors import DeadlinePassed, TooBusy, Unavailable
from tilewire.service.gateway.auth.authenticator import Authenticator
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.infer import InferCalls
from tilewire.service.gateway.grpc.paths import INFER, REFLECTION_PATHS, SERVICE, STREAM_INFER
from tilewire.service.gateway.grpc.server import LIBRARY
from tilewire.service.gateway.grpc.status import PUSHBACK, RETRY_AFTER

A = np.arange(6, dtype=np.float32).reshape(2, 3)
MESSAGE = request_of("add", {"a": A, "b": A}).SerializeToString()
Code = grpc.StatusCode
RETRIES = """{"methodConfig": [{"name": [{"service": "inference.GRPCInferenceService"}], "retryPolicy": {"maxAttempts": 5,
"initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@scene
async def test_tensors_are_aligned_and_repeats_share_a_template() -> None:
    bench = RpcBench()
    async with bench.answering() as channel:
        for _ in range(3):
            answer = pb.ModelInferResponse.FromString(await channel.unary_unary(INFER)(MESSAGE))
            np.testing.assert_array_equal(out_of(answer), 2 * A)
    assert len({job.template.id for job in bench.engine.jobs}) == 1
    assert all(offset % 64 == 0 for job in bench.engine.jobs for offset in job.offsets)
    assert len(bench.gateway.templates) == 1


@scene
async def test_a_cancelled_call_cancels_its_job_and_keeps_its_slots_until_the_engine_answers() -> None:
    bench = RpcBench()
    bench.engine.is_held = True
    async with bench.answering() as channel:
        call = channel.unary_unary(INFER)(MESSAGE)
        await until(lambda: len(bench.engine.jobs) == 1)
        call.cancel()
        await until(lambda: len(bench.engine.cancelled) == 1)
        assert bench.arena.used_bytes > 0
        bench.engine.answer_all()
        await until(lambda: bench.arena.used_bytes == 0)


async def watched(watch: Any) -> int:
    """The next status that a health watcher is sent."""
    message = await asyncio.wait_for(watch.read(), 5)
    status: int = health_pb2.HealthCheckResponse.FromString(message).status
    return status


@scene
async def test_a_health_watcher_that_leaves_takes_no_news_from_the_others() -> None:
    bench = RpcBench()
    async with bench.answering() as channel:
        leaving, staying, unknown = (
            channel.unary_stream("/grpc.health.v1.Health/Watch")(
                health_pb2.HealthCheckRequest(service=name).SerializeToString()
            )
            for name in ("", "", "nonsense")
        )
        for watch in (leaving, staying):
            assert await watched(watch) == health_pb2.HealthCheckResponse.SERVING
        assert await watched(unknown) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        leaving.cancel()
        await until(leaving.done)
        await asyncio.sleep(0.1)
        bench.admission.is_draining = True
        bench.rpc.observe_readiness()
        assert await watched(staying) == health_pb2.HealthCheckResponse.NOT_SERVING
        for watch in (staying, unknown):
            watch.cancel()


class Kept:
    """Lives as long as the message that holds it."""


class Message(bytes):
    """A message that can be seen to be kept."""

    kept: Kept


class OneMessage:
    """A call with one message, as the library gives it; see `Servicer`.

    Args:
        data: The message.
        left_s: Time until the client gives up.
    """

    def __init__(self, data: bytes, left_s: float | None = None) -> None:
        self._left_s = left_s
        self._message: Message | None = Message(data)
        self._message.kept = Kept()
        self.kept = weakref.ref(self._message.kept)
        self.written: list[bytes] = []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return self._left_s

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        raise AssertionError("It named nothing.")

    async def read(self) -> Any:
        message, self._message = self._message, None
        return grpc.aio.EOF if message is None else message

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise AssertionError(details)


async def no_messages() -> AsyncIterator[bytes]:
    for message in list[bytes]():
        yield message


@pytest.mark.parametrize("is_streamed", [False, True])
@scene
async def test_a_message_is_given_up_when_it_is_in_its_slot(is_streamed: bool) -> None:
    """Or requests that wait for an engine would hold twice their memory, and only half of it would be bounded."""
    bench = RpcBench()
    bench.engine.is_held = True
    calls = InferCalls(bench.gateway)
    call = OneMessage(MESSAGE)
    work: Coroutine[Any, Any, bytes | None]
    work = calls.infer_stream(no_messages(), call) if is_streamed else calls.infer(no_messages(), call)
    task = asyncio.create_task(work)
    await until(lambda: len(bench.engine.jobs) == 1)
    assert call.kept() is None
    bench.engine.answer_all()
    answer = await task
    if is_streamed:
        answer = pb.ModelStreamInferResponse.FromString(call.written[0]).infer_response.SerializeToString()
    np.testing.assert_array_equal(out_of(pb.ModelInferResponse.FromString(answer)), 2 * A)


@scene
async def test_few_messages_are_inflated_at_once() -> None:
    """Each holds what it has come to: all at once, small messages would hold all that they inflate to."""
    nbytes, bench = 2**23, RpcBench(max_body_bytes=2**24)
    calls = InferCalls(bench.gateway)
    message = gzip.compress(bytes(nbytes))

    async def infer() -> None:
        with pytest.raises(AssertionError, match="request: more than 4096 fields"):
            await calls.infer(no_messages(), OneMessage(message))

    tracemalloc.start()
    try:
        await asyncio.gather(*(infer() for _ in range(8)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * nbytes


@pytest.mark.parametrize("left_s", [99_999_999 * 3600.0, 1e10, math.inf])
@scene
async def test_a_deadline_in_centuries_is_none(left_s: float) -> None:
    """The first is the longest that `grpc-timeout` can say. It is beyond the nanoseconds of a message to an engine."""
    bench = RpcBench()
    answer = await InferCalls(bench.gateway).infer(no_messages(), OneMessage(MESSAGE, left_s))
    np.testing.assert_array_equal(out_of(pb.ModelInferResponse.FromString(answer)), 2 * A)
    assert bench.engine.jobs[0].deadline_ns == 0


@scene
async def test_a_deadline_is_the_calls_own() -> None:
    bench = RpcBench()
    bench.engine.is_held = True
    async with bench.answering() as channel:
        before_ns = time.monotonic_ns()
        error = await refusal(channel.unary_unary(INFER)(MESSAGE, timeout=0.3))
        assert error.code() is Code.DEADLINE_EXCEEDED
        (job,) = bench.engine.jobs
        assert 0.2e9 < job.deadline_ns - before_ns < 0.5e9
        await until(lambda: len(bench.engine.cancelled) >= 1)
        assert bench.arena.used_bytes > 0
        bench.engine.answer_all()
        await until(lambda: bench.arena.used_bytes == 0)
        bench.engine.is_held = False
        await channel.unary_unary(INFER)(MESSAGE)
        assert bench.engine.jobs[-1].deadline_ns == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("the engine died"), Code.UNAVAILABLE),
        (TooBusy("full", retry_after_s=2), Code.UNAVAILABLE),
        (DeadlinePassed("late"), Code.DEADLINE_EXCEEDED),
        (ValueError("a secret"), Code.INTERNAL),
    ],
)
@scene
async def test_errors_of_the_engine(error: Exception, code: grpc.StatusCode) -> None:
    bench = RpcBench()
    bench.engine.error = error
    async with bench.answering() as channel:
        found = await refusal(channel.unary_unary(INFER)(MESSAGE))
        assert found.code() is code
        assert "secret" not in (found.details() or "")
        metadata = dict(found.trailing_metadata() or ())
        hints = {name: value for name, value in metadata.items() if name in (RETRY_AFTER, PUSHBACK)}
        match error:
            case DeadlinePassed():
                assert hints == {PUSHBACK: "-1"}
            case TooBusy() | Unavailable():
                assert hints == {RETRY_AFTER: str(error.retry_after_s), PUSHBACK: f"{error.retry_after_s}000"}
            case _:
                assert not hints
        assert len(metadata["x-request-id"]) == 32


@scene
async def test_a_client_with_a_retry_policy_waits_as_the_hint_says_and_does_not_notice() -> None:
    bench = RpcBench()
    bench.engine.error = Unavailable("the engine restarts")
    async with bench.answering(("grpc.service_config", RETRIES)) as channel:
        began_s = time.monotonic()
        call = asyncio.ensure_future(channel.unary_unary(INFER)(MESSAGE))
        await until(lambda: len(bench.engine.jobs) == 2)
        assert time.monotonic() - began_s > 0.9
        bench.engine.error = None
        np.testing.assert_array_equal(out_of(pb.ModelInferResponse.FromString(await call)), 2 * A)


@scene
async def test_a_retry_policy_does_not_repeat_a_request_whose_time_is_over() -> None:
    bench = RpcBench()
    bench.engine.error = DeadlinePassed("late")
    request = request_of("add", {"a": A, "b": A})
    request.parameters["timeout"].int64_param = 10_000_000
    message = request.SerializeToString()
    async with bench.answering(("grpc.service_config", RETRIES)) as channel:
        call = channel.unary_unary(INFER)
        assert (await refusal(call(message))).code() is Code.UNAVAILABLE
        assert (await refusal(call(message, timeout=60))).code() is Code.UNAVAILABLE
        # The call's own deadline is the earlier one.
        assert (await refusal(call(message, timeout=5))).code() is Code.DEADLINE_EXCEEDED
    assert len(bench.engine.jobs) == 3


@scene
async def test_a_full_gateway_refuses_before_it_reads() -> None:
    bench = RpcBench(max_in_flight=1)
    bench.engine.is_held = True
    async with bench.answering() as channel:
        first = channel.unary_unary(INFER)(MESSAGE)
        await until(lambda: len(bench.engine.jobs) == 1)
        # A message that never comes: what refuses it has not waited for it.
        silent = channel.stream_unary(INFER)()
        error = await refusal(silent)
        assert (error.code(), "queue is full" in (error.details() or "")) == (Code.UNAVAILABLE, True)
        assert dict(error.trailing_metadata() or ())[PUSHBACK] == "1000"
        bench.engine.answer_all()
        await first


@scene
async def test_a_message_that_never_comes_is_given_up() -> None:
    async with RpcBench(max_body_s=0.2).answering() as channel:
        error = await refusal(channel.stream_unary(INFER)())
        assert (error.code(), "no byte for 0.2 s" in (error.details() or "")) == (Code.INVALID_ARGUMENT, True)


@scene
async def test_each_message_that_never_comes_has_its_own_time() -> None:
    async with RpcBench(max_body_s=0.3).answering() as channel:
        began_s = time.monotonic()
        first = channel.stream_unary(INFER)()
        errors = [asyncio.ensure_future(refusal(first))]
        await asyncio.wait(errors, timeout=0.15)
        # While others are read, and one is answered in between.
        await channel.unary_unary(INFER)(MESSAGE)
        errors.append(asyncio.ensure_future(refusal(channel.stream_unary(INFER)())))
        await errors[0]
        assert time.monotonic() - began_s > 0.29
        assert not errors[1].done()
        assert (await errors[1]).code() is Code.INVALID_ARGUMENT
        assert time.monotonic() - began_s > 0.44
        # The next one is timed anew.
        assert (await refusal(channel.stream_unary(INFER)())).code() is Code.INVALID_ARGUMENT


@scene
async def test_a_draining_gateway_refuses_and_says_so() -> None:
    bench = RpcBench()
    check = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    async with bench.answering() as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(check)
        read = health_pb2.HealthCheckResponse.FromString
        assert read(await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        bench.admission.is_draining = True
        bench.rpc.observe_readiness()
        assert read(await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        error = await refusal(channel.unary_unary(INFER)(MESSAGE))
        assert (error.code(), "draining" in (error.details() or "")) == (Code.UNAVAILABLE, True)
        ready = await channel.unary_unary(f"/{SERVICE}/ServerReady")(b"")
        assert not pb.ServerReadyResponse.FromString(ready).ready
        assert pb.ServerLiveResponse.FromString(await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")).live
        ready = await channel.unary_unary(f"/{SERVICE}/ModelReady")(
            pb.ModelReadyRequest(name="add").SerializeToString()
        )
        assert not pb.ModelReadyResponse.FromString(ready).ready


@scene
async def test_clients_that_leave_are_no_errors_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The library logs the ones whose answer was on its way, each with a traceback."""
    bench = RpcBench()
    async with bench.answering():
        logger = logging.getLogger(LIBRARY)
        logger.error("ExecuteBatchError raised in core by servicer method [%s]", INFER)
        logger.error("Unexpected [%s] raised by servicer method [%s]", "ValueError", INFER)
    assert [one.partition(" ")[0] for one in caplog.messages] == ["Unexpected"]


async def begun(channel: grpc.aio.Channel) -> Any:
    """A stream whose first request is answered: only then are several under way at once."""
    stream = channel.stream_stream(STREAM_INFER)()
    await stream.write(MESSAGE)
    await asyncio.wait_for(stream.read(), 10)
    return stream


@scene
async def test_a_stream_that_is_left_gives_everything_back() -> None:
    bench = RpcBench()
    async with bench.answering() as channel:
        stream = await begun(channel)
        bench.engine.is_held = True
        for _ in range(4):
            await stream.write(MESSAGE)
        await until(lambda: len(bench.engine.jobs) == 5)
        stream.cancel()
        await until(lambda: len(bench.engine.cancelled) == 4)
        bench.engine.answer_all()
        await until(lambda: bench.arena.used_bytes == 0)


@scene
async def test_a_stream_reads_no_further_than_it_may_work() -> None:
    bench = RpcBench()
    async with bench.answering() as channel:
        stream = await begun(channel)
        bench.engine.is_held = True
        for _ in range(40):
            await stream.write(MESSAGE)
        await stream.done_writing()
        await until(lambda: len(bench.engine.jobs) == 17)
        await asyncio.sleep(0.1)
        assert len(bench.engine.jobs) == 17
        bench.engine.is_held = False
        bench.engine.answer_all()
        for _ in range(40):
            assert await stream.read() is not grpc.aio.EOF
        assert await stream.read() is grpc.aio.EOF


@scene
async def test_a_stream_reads_one_request_before_it_knows_how_large_answers_are() -> None:
    bench = RpcBench()
    bench.engine.is_held = True
    async with bench.answering() as channel:
        stream = channel.stream_stream(STREAM_INFER)()
        for _ in range(3):
            await stream.write(MESSAGE)
        await until(lambda: len(bench.engine.jobs) == 1)
        await asyncio.sleep(0.1)
        assert len(bench.engine.jobs) == 1
        bench.engine.answer_all()
        await until(lambda: len(bench.engine.jobs) == 3)
        bench.engine.answer_all()
        assert [await stream.read() is not grpc.aio.EOF for _ in range(3)] == [True] * 3
        stream.cancel()


# The client's library takes 64 KiB of a stream ahead of its reader, and these answers have 256 KiB.
NO_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
LARGE = np.ones((2, 2**15), np.float32)
LARGE_MESSAGE = request_of("add", {"a": LARGE, "b": LARGE}).SerializeToString()


@scene
async def test_answers_of_a_stream_hold_their_slots_until_the_client_reads() -> None:
    """Else a client that reads nothing would fill the process's memory, and no limit would see it."""
    bench = RpcBench()
    async with bench.answering(*NO_AHEAD) as channel:
        stream = channel.stream_stream(STREAM_INFER)()

        async def write_all() -> None:
            for _ in range(12):
                await stream.write(LARGE_MESSAGE)
            await stream.done_writing()

        # Beside the reader: what the server does not read yet may be more than lies on the way.
        writing = asyncio.create_task(write_all())
        # An eighth of the arena has room for three of them.
        await until(lambda: bench.admission.in_flight == 3)
        await asyncio.sleep(0.2)
        assert bench.admission.in_flight == 3
        assert len(bench.engine.jobs) < 12
        assert bench.arena.used_bytes >= 3 * LARGE.nbytes
        answers = [pb.ModelStreamInferResponse.FromString(answer) async for answer in stream]
        for answer in answers:
            np.testing.assert_array_equal(out_of(answer.infer_response), 2 * LARGE)
        assert len(answers) == 12
        await writing
        await until(lambda: bench.arena.used_bytes == 0)


@scene
async def test_unread_answers_of_a_stream_that_is_left_give_their_slots_back() -> None:
    bench = RpcBench()
    async with bench.answering(*NO_AHEAD) as channel:
        stream = channel.stream_stream(STREAM_INFER)()
        for _ in range(4):
            await stream.write(LARGE_MESSAGE)
        await until(lambda: bench.admission.in_flight == 3)
        stream.cancel()
        await until(lambda: bench.arena.used_bytes == 0 and not bench.admission.in_flight)


class Unread(OneMessage):
    """A call whose client reads nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.is_sending = asyncio.Event()

    async def write(self, message: bytes) -> None:
        self.is_sending.set()
        await asyncio.Event().wait()


@scene
async def test_a_cancelled_stream_is_given_up_without_the_garbage_collector() -> None:
    """It holds answers, and an idle process does not collect."""
    bench = RpcBench()
    call = Unread(MESSAGE)
    task = asyncio.create_task(InferCalls(bench.gateway).infer_stream(no_messages(), call))
    await call.is_sending.wait()
    kept = weakref.ref(call)
    gc.disable()
    try:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        del task, call
        await asyncio.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()
    assert bench.arena.used_bytes == 0


@pytest.mark.parametrize("is_streamed", [False, True])
@scene
async def test_a_read_ends_also_where_its_call_was_cancelled(is_streamed: bool) -> None:
    """The library keeps what a read that nobody waits for any more was given."""
    came = asyncio.get_running_loop().create_future()
    is_reading = asyncio.Event()

    class Slow(OneMessage):
        async def read(self) -> Any:
            is_reading.set()
            await came
            return await super().read()

    calls, call = InferCalls(RpcBench().gateway), Slow(MESSAGE)
    work: Coroutine[Any, Any, bytes | None]
    work = calls.infer_stream(no_messages(), call) if is_streamed else calls.infer(no_messages(), call)
    task = asyncio.create_task(work)
    await is_reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not came.cancelled()
    came.set_result(None)
    await until(lambda: call.kept() is None)


@scene
async def test_a_bug_while_a_stream_is_read_ends_it() -> None:
    class Broken(OneMessage):
        async def read(self) -> Any:
            raise ValueError("a bug")

    work = InferCalls(RpcBench().gateway).infer_stream(no_messages(), Broken(MESSAGE))
    with pytest.raises(ValueError, match="a bug"):
        await asyncio.wait_for(work, 5)


@pytest.mark.parametrize("is_cancelled", [False, True])
@scene
async def test_an_answer_holds_its_slots_until_the_client_reads(is_cancelled: bool) -> None:
    bench = RpcBench()
    async with bench.answering(*NO_AHEAD) as channel:
        # The library reads the message of a call with one; of a stream it reads none before it is asked to.
        call = channel.stream_stream(INFER)()
        await call.write(LARGE_MESSAGE)
        await call.done_writing()
        await until(lambda: len(bench.engine.jobs) == 1)
        await asyncio.sleep(0.2)
        assert bench.admission.in_flight == 1
        assert bench.arena.used_bytes >= LARGE.nbytes
        if is_cancelled:
            call.cancel()
        else:
            np.testing.assert_array_equal(out_of(pb.ModelInferResponse.FromString(await call.read())), 2 * LARGE)
        await until(lambda: bench.arena.used_bytes == 0 and not bench.admission.in_flight)


def authenticator(folder: Path) -> Authenticator:
    keys = keys_file(
        folder, entry("all", "tw_all", 'ops = ["*"]\nread = ["*"]'), entry("some", "tw_some", 'ops = ["softmax"]')
    )
    return Authenticator(keys)


@scene
async def test_keys(tmp_path: Path) -> None:
    bench = RpcBench(authenticator(tmp_path))
    bearer = [("authorization", "Bearer tw_all")]
    async with bench.answering() as channel:
        for call in (
            channel.unary_unary(INFER)(MESSAGE),
            channel.unary_unary(INFER)(MESSAGE, metadata=[("authorization", "Bearer wrong")]),
            channel.unary_unary(f"/{SERVICE}/ServerMetadata")(b""),
            # No message: the library calls one that is sent after the refusal an error of its own.
            channel.stream_stream(STREAM_INFER)().read(),
        ):
            assert (await refusal(call)).code() is Code.UNAUTHENTICATED
        for metadata in (bearer, [("x-api-key", "tw_all")]):
            for _ in range(2):
                await channel.unary_unary(INFER)(MESSAGE, metadata=metadata)
        error = await refusal(channel.unary_unary(INFER)(MESSAGE, metadata=[("x-api-key", "tw_some")]))
        assert error.code() is Code.PERMISSION_DENIED
        error = await refusal(
            channel.unary_unary(INFER)(MESSAGE, metadata=[*bearer, ("authorization", "Bearer other")])
        )
        assert (error.code(), "given twice" in (error.details() or "")) == (Code.INVALID_ARGUMENT, True)
        # A key that was cached with a request opens nothing for the next one.
        assert (await refusal(channel.unary_unary(INFER)(MESSAGE))).code() is Code.UNAUTHENTICATED
        # Probes have no keys.
        assert pb.ServerLiveResponse.FromString(await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")).live
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")


@scene
async def test_calls_that_end_before_their_message_count_for_their_key(tmp_path: Path) -> None:
    bench = RpcBench(authenticator(tmp_path), max_body_s=0.5)
    key = [("x-api-key", "tw_all")]

    async def counted(code: int) -> bool:
        text, _ = await bench.metrics.expose("")
        return f'tilewire_key_requests_total{{code="{code}",key="all"}}' in text.decode()

    async with bench.answering() as channel, asyncio.timeout(20):
        # It never comes; the other client leaves.
        assert (await refusal(channel.stream_unary(INFER)(metadata=key))).code() is Code.INVALID_ARGUMENT
        assert await counted(400)
        while not await counted(499):
            silent = channel.stream_unary(INFER)(metadata=key)
            # Behind it on the same connection, so the server has both.
            await channel.unary_unary(INFER)(MESSAGE, metadata=key)
            silent.cancel()


@pytest.mark.parametrize("path", sorted(REFLECTION_PATHS))
@scene
async def test_reflection_needs_a_key_where_documents_do(tmp_path: Path, path: str) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    keys = keys_file(tmp_path, entry("all", "tw_all", 'ops = ["*"]'))
    async with RpcBench(Authenticator(keys)).answering() as channel:
        error = await refusal(channel.stream_stream(path)().read())
        assert error.code() is Code.UNAUTHENTICATED
        assert await channel.stream_stream(path)(iter([question]), metadata=[("x-api-key", "tw_all")]).read()
    async with RpcBench(Authenticator(keys, keyless=["docs"])).answering() as channel:
        assert await channel.stream_stream(path)(iter([question])).read()


@scene
async def test_many_calls_at_once_get_their_own() -> None:
    bench = RpcBench()
    async with bench.answering() as channel:
        call = channel.unary_unary(INFER)

        async def work(number: int) -> None:
            array = np.full((2, 3 + number % 5), number, np.float32)
            request = request_of("add", {"a": array, "b": array}, id=str(number))
            answer = pb.ModelInferResponse.FromString(await call(request.SerializeToString()))
            assert answer.id == str(number)
            np.testing.assert_array_equal(out_of(answer), 2 * array)

        await asyncio.gather(*(work(number) for number in range(300)))


@scene
async def test_ids_are_echoed_where_they_are_given() -> None:
    async with RpcBench().answering() as channel:
        call = channel.unary_unary(INFER)(MESSAGE, metadata=[("x-request-id", "mine")])
        await call
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        call = channel.unary_unary(INFER)(MESSAGE)
        await call
        assert "x-request-id" not in dict(await call.trailing_metadata())
