"""ModelInfer and ModelStreamInfer: each message is a request of the request path. Runs in the gateway's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from tilewire.service.errors import ClientGone, InvalidRequest, TilewireError
from tilewire.service.gateway.connection.driving import Driven
from tilewire.service.gateway.grpc.call import RpcCall, Servicer, finish
from tilewire.service.gateway.grpc.calls import RpcApi
from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferResponse, ModelStreamInferResponse
from tilewire.service.gateway.grpc.paths import INFER, STREAM_INFER
from tilewire.service.gateway.grpc.stalls import STALLED, Stalls
from tilewire.service.gateway.grpc.stream import RpcStream, Window
from tilewire.service.gateway.grpc.wire import STEP_BYTES, Frame, Inflater, frame_of, is_compressed
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.body import stalled
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.handle import handle
from tilewire.service.gateway.request.head import HeadKey
from tilewire.service.gateway.request.offload import offload
from tilewire.service.gateway.request.response import respond_error
from tilewire.service.ops.registry import OPS, PROGRAM_FAMILY

# Part of the arena that the answers of one stream take ahead of its client.
AHEAD_SHARE = 8
# The library cancels the call of a client that left some turns of the loop after the end of its messages: two were seen.
LEAVING_TURNS = 8
# Messages that are inflated at once, but for their first steps: each holds what it has come to, and two threads do the work.
MAX_INFLATING = 2
_OPS = {name.encode(): op for name, op in OPS.items()}


class Answering(Driven):
    """Runs the work that answers one message. A cancelled call does not cancel it.

    Attributes:
        context: The request, once its message is read.
        model: Name of its model; empty before its message is read.
        id: Its id, likewise.
    """

    context: RequestContext
    model = id = b""

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: RpcStream) -> None:
        self._loop = loop
        self.stream = stream
        self._error: Exception | None = None

    async def result(self) -> RequestContext:
        """Returns the request when it is answered; its slots are held until its stream has sent the answer.

        Raises:
            Exception: It could not be answered: a bug.
        """
        if self.is_waiting and not self.stream.is_answered:
            await self.stream.answered(self._loop)
        if self._error is not None:
            raise self._error
        return self.context

    def ended(self, error: Exception | None) -> None:
        """Keeps the error of the computation, if any, and wakes the call."""
        self._error = error
        self.stream.end_waiting()


class Reading(Driven):
    """Reads one message. It ends with the library's read, also where the call was cancelled.

    A read that nobody waits for any more leaves 96 bytes in the library, 1.81, for ever (https://github.com/grpc/grpc/issues/43360).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Servicer) -> None:
        self._came: asyncio.Future[bytes] = loop.create_future()
        self.drive(self._read(call))

    async def message(self) -> bytes:
        """Returns the message when it has come; `grpc.aio.EOF` at the end.

        Raises:
            Exception: The library could not read.
        """
        return await self._came

    async def _read(self, call: Servicer) -> None:
        message = await call.read()
        if not self._came.done():
            self._came.set_result(message)

    def ended(self, error: Exception | None) -> None:
        """Hands an error over."""
        if self._came.done():
            return
        if error is None:
            self._came.cancel()
        else:
            self._came.set_exception(error)
            # The call may be cancelled before it reads the error, which would be logged then.
            self._came.exception()


class InferCalls:
    """The calls that compute."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._stalls = Stalls(gateway.settings.max_body_s)
        self._inflating = asyncio.Semaphore(MAX_INFLATING)

    async def infer(self, _requests: AsyncIterator[bytes], call: Servicer) -> bytes:
        """Answers ModelInfer; its message is read only when the call may be answered."""
        opened = RpcCall(INFER, call)
        stream = RpcStream(opened.client_flow)
        try:
            opened.check(self._gateway)
            # Under no name here, so that it is given up when it is in its slot.
            answer = self._start(opened, stream, await self._read(call))
        except TilewireError as error:
            return await finish(call, self._refuse(opened, stream, 0, error), stream)
        except asyncio.CancelledError:
            self._refuse(opened, stream, 0, ClientGone("the client left before its message was read"))
            raise
        try:
            context = await answer.result()
        except asyncio.CancelledError:
            # The engine may still write into the request's slots: the work goes on until it has answered.
            stream.leave()
            raise
        # The library sends what this returns within the call's task.
        self._task().add_done_callback(stream.end_sending)
        return await finish(call, context, stream)

    async def infer_stream(self, _requests: AsyncIterator[bytes], call: Servicer) -> None:
        """Answers ModelStreamInfer: one answer a request, in their order."""
        opened = RpcCall(STREAM_INFER, call)
        stream = RpcStream(opened.client_flow)
        try:
            opened.check(self._gateway)
        except TilewireError as error:
            await finish(call, self._refuse(opened, stream, 0, error), stream)
            return
        answers: asyncio.Queue[Answering | None] = asyncio.Queue()
        streams: set[RpcStream] = set()
        window = Window(self._gateway.arena.capacity // AHEAD_SHARE)
        reading = asyncio.create_task(self._read_stream(call, answers, streams, window))
        try:
            while (answer := await answers.get()) is not None:
                context = await answer.result()
                message = await _streamed(context, answer)
                window.note(len(message))
                await call.write(message)
                # Or a stream that idles would keep it.
                del message
                answer.stream.end_sending()
                streams.discard(answer.stream)
                window.leave()
            await reading
        finally:
            reading.cancel()
            for left in streams:
                left.leave()

    async def _read_stream(
        self, call: Servicer, answers: asyncio.Queue[Answering | None], streams: set[RpcStream], window: Window
    ) -> None:
        """Begins the requests of a stream; its end, or a bug, is the end of its answers."""
        try:
            while True:
                await window.enter()
                if (message := await Reading(self._loop, call).message()) is grpc.aio.EOF:
                    return
                # Each request of the stream begins when it is read.
                opened = RpcCall(STREAM_INFER, call)
                stream = RpcStream(opened.client_flow, is_streamed=True)
                streams.add(stream)
                answer = self._start(opened, stream, message)
                del message
                answers.put_nowait(answer)
        finally:
            answers.put_nowait(None)

    async def _read(self, call: Servicer) -> bytes:
        """Reads the only message of a call.

        Raises:
            InvalidRequest: None came, or it came too slowly.
        """
        task = self._task()
        self._stalls.begin(task)
        try:
            message = await Reading(self._loop, call).message()
        except asyncio.CancelledError as error:
            if error.args != (STALLED,):
                raise
            task.uncancel()
            raise InvalidRequest(stalled(self._gateway.settings.max_body_s, 0)) from None
        finally:
            self._stalls.end(task)
        if message is grpc.aio.EOF:
            for _ in range(LEAVING_TURNS):
                await asyncio.sleep(0)
            raise InvalidRequest("request: the call ended without a message")
        return message

    def _task(self) -> asyncio.Task[object]:
        """The task of the call."""
        # With the loop given, this costs no system call.
        task = asyncio.current_task(self._loop)
        assert task is not None, "This is a bug."
        return task

    def _start(self, opened: RpcCall, stream: RpcStream, message: bytes) -> Answering:
        """Begins to answer a message."""
        answer = Answering(self._loop, stream)
        stream.received_bytes = len(message)
        work = self._inflated if is_compressed(message) else self._work
        answer.drive(work(answer, opened, stream, message))
        return answer

    async def _inflated(self, answer: Answering, opened: RpcCall, stream: RpcStream, message: bytes) -> None:
        """Answers a compressed message."""
        inflater = Inflater(message, self._gateway.settings.max_body_bytes)
        try:
            if await offload(len(message), inflater.step):
                async with self._inflating:
                    # A little may inflate to much: all but the first step counts as long.
                    while await offload(STEP_BYTES, inflater.step):
                        stream.check_connected()
        except Exception as error:  # noqa: BLE001  (what is no error of ours is logged and answered)
            answer.context = self._refuse(opened, stream, len(message), error)
            return
        work = self._work(answer, opened, stream, inflater.inflated)
        del message, inflater
        if work is not None:
            await work

    def _work(
        self, answer: Answering, opened: RpcCall, stream: RpcStream, message: bytes | bytearray
    ) -> Coroutine[Any, Any, None] | None:
        """Returns what answers a message, on success and on error; None when it is answered."""
        gateway = self._gateway
        try:
            stream.frame = frame = frame_of(message)
        except Exception as error:  # noqa: BLE001  (what is no error of ours is logged and answered)
            answer.context = self._refuse(opened, stream, len(message), error)
            return None
        answer.model, answer.id = frame.model, frame.id
        key = _key_of(opened, frame)
        cached = gateway.templates.find(key)
        if cached is not None:
            context = answer.context = opened.context(cached.head, stream)
            context.cached = cached
            return handle(gateway, context, cached.api, cached.op)
        context = answer.context = opened.context(opened.head(frame.nbytes), stream)
        context.key = HeadKey(key, 0, opened.own)
        model, version = (one.decode("utf-8", "replace") for one in (frame.model, frame.version))
        api = RpcApi(gateway.settings, gateway.programs, model, version)
        return handle(gateway, context, api, _OPS.get(frame.model, PROGRAM_FAMILY))

    def _refuse(self, opened: RpcCall, stream: RpcStream, nbytes: int, error: Exception) -> RequestContext:
        """Answers a call whose request, of that many bytes, is not known."""
        context = opened.context(opened.head(nbytes), stream)
        context.access = opened.access
        written = respond_error(self._gateway, context, error)
        assert written is None, "This is a bug: an answer is kept for its call."
        report(self._gateway, context)
        return context


def _key_of(opened: RpcCall, frame: Frame) -> bytes:
    """Bytes that are equal for requests whose heads mean the same: no value in them can run into the next."""
    model, version = frame.model, frame.version
    key = b"%b %d %d %d %b%b" % (opened.path.encode(), frame.nbytes, len(model), len(version), model, version)
    for name, value in opened.identity.items():
        key += f" {name} {len(value)} {value}".encode()
    return key


async def _streamed(context: RequestContext, answered: Answering) -> bytes:
    """The message of a stream that answers one request."""
    error = context.error
    if error is None:
        return await answered.stream.take_message()
    model, request_id = (one.decode("utf-8", "replace") for one in (answered.model, answered.id))
    answer = ModelInferResponse(model_name=model, id=request_id)
    message: bytes = ModelStreamInferResponse(error_message=error.detail, infer_response=answer).SerializeToString()
    return message
