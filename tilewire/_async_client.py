"""The asyncio client. Owns one connection pool, the retries and their waits; `_wire` knows what is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import count
from types import TracebackType
from typing import Any, Self, Unpack, overload

import httpx
import numpy.typing as npt

from tilewire import _wire
from tilewire._arrays import Array
from tilewire._client import DEFAULT_TIMEOUT_S, DEFAULT_URL, POLL_S
from tilewire._errors import ConnectionFailed, Unavailable
from tilewire._types import AddOptions, Answer, MatmulOptions, Operand, SoftmaxOptions, TensorInfo


class AsyncClient:
    """Calls a Tilewire server from asyncio; the same surface as `Client`, where the docs of each method are.

    Args:
        base_url: Of the server.
        api_key: Sent as `Authorization: Bearer …`.
        timeout: Seconds without progress on the connection, or httpx's own value object.
        max_retries: How often a request that the server refused as busy or unavailable is sent again, after the wait
            that it asked for.
        headers: Sent with every request.
        transport: Replaces the network, as in httpx.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._max_retries = max_retries
        shared = _wire.client_headers(api_key, headers)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, headers=shared, transport=transport)
        http = self._http
        self._url_of = _wire.Urls(lambda call: http.build_request("GET", call.path, params=call.query).url)

    @overload
    async def matmul(self, a: Operand, b: Operand, *, store: str, **options: Unpack[MatmulOptions]) -> TensorInfo: ...
    @overload
    async def matmul(
        self, a: Operand, b: Operand, *, store: None = None, **options: Unpack[MatmulOptions]
    ) -> Array: ...
    async def matmul(
        self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[MatmulOptions]
    ) -> Array | TensorInfo:
        """See `Client.matmul`."""
        return (await self.run("matmul", {"a": a, "b": b}, store=store, **options)).result

    @overload
    async def softmax(self, x: Operand, *, store: str, **options: Unpack[SoftmaxOptions]) -> TensorInfo: ...
    @overload
    async def softmax(self, x: Operand, *, store: None = None, **options: Unpack[SoftmaxOptions]) -> Array: ...
    async def softmax(
        self, x: Operand, *, store: str | None = None, **options: Unpack[SoftmaxOptions]
    ) -> Array | TensorInfo:
        """See `Client.softmax`."""
        return (await self.run("softmax", {"x": x}, store=store, **options)).result

    @overload
    async def add(self, a: Operand, b: Operand, *, store: str, **options: Unpack[AddOptions]) -> TensorInfo: ...
    @overload
    async def add(self, a: Operand, b: Operand, *, store: None = None, **options: Unpack[AddOptions]) -> Array: ...
    async def add(
        self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[AddOptions]
    ) -> Array | TensorInfo:
        """See `Client.add`."""
        return (await self.run("add", {"a": a, "b": b}, store=store, **options)).result

    async def run(
        self, op: str, operands: Mapping[str, Operand | None], *, store: str | None = None, **options: Any
    ) -> Answer:
        """See `Client.run`."""
        return _wire.parse_answer(_wire.checked(await self._send(_wire.op_call(op, operands, options, store))))

    async def put(self, name: str, array: npt.ArrayLike) -> TensorInfo:
        """See `Client.put`."""
        return _wire.parse_put(_wire.checked(await self._send(_wire.put_call(name, array))), name, array)

    async def get(self, name: str) -> Array:
        """See `Client.get`."""
        return _wire.parse_array(_wire.checked(await self._send(_wire.tensor_call("GET", name))))

    async def head(self, name: str) -> TensorInfo | None:
        """See `Client.head`."""
        return _wire.parse_head(await self._send(_wire.tensor_call("HEAD", name)), name)

    async def delete(self, name: str) -> None:
        """See `Client.delete`."""
        _wire.checked(await self._send(_wire.tensor_call("DELETE", name)))

    async def tensors(self) -> list[TensorInfo]:
        """See `Client.tensors`."""
        return _wire.parse_list(_wire.checked(await self._send(_wire.LIST)))

    async def live(self) -> bool:
        """See `Client.live`."""
        return await self._is_ok(_wire.LIVE)

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self._is_ok(_wire.READY)

    async def wait_ready(self, timeout_s: float = 120.0) -> None:
        """See `Client.wait_ready`."""
        until = time.monotonic() + timeout_s
        while not await self.ready():
            if time.monotonic() >= until:
                raise Unavailable(f"{self._http.base_url}: not ready within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def aclose(self) -> None:
        """See `Client.close`."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _is_ok(self, call: _wire.Call) -> bool:
        try:
            return (await self._exchange(call)).status == 200
        except ConnectionFailed:
            return False

    async def _send(self, call: _wire.Call) -> _wire.Reply:
        for attempt in count():
            reply = await self._exchange(call)
            wait_s = _wire.wait_before_retry_s(reply, attempt, self._max_retries)
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
        return reply

    async def _exchange(self, call: _wire.Call) -> _wire.Reply:
        content = _async(call.chunks()) if call.parts else None
        body = bytearray()
        try:
            async with self._http.stream(
                call.method, self._url_of(call), headers=call.headers, content=content
            ) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
        except httpx.TransportError as error:
            raise ConnectionFailed(_wire.unreachable(self._http.base_url, error)) from error
        return _wire.Reply(response.status_code, response.headers, body)


async def _async(chunks: Iterator[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk
