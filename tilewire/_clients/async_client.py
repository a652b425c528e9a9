"""The asyncio client: its connections, and the waits of its retries. `async_programs` holds what it can call."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from tilewire._arrays.dlpack import as_here
from tilewire._arrays.lists import work_bytes_of
from tilewire._clients import requests
from tilewire._clients.async_programs import AsyncProgramCalls
from tilewire._clients.requests import Rules
from tilewire._errors import ConnectionFailed, Unavailable
from tilewire._transport import wire
from tilewire._transport.async_sockets import AsyncSocketTransport
from tilewire._transport.of_process import OfProcess
from tilewire._transport.retry import Retries
from tilewire._transport.wire import DEFAULT_TIMEOUT_S, DEFAULT_URL, LOOK_S, POLL_S, READY_TIMEOUT_S, proxy_of

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

# Bytes of arrays that are converted or copied in about the time of the way to a thread and back, 0.1 ms.
OFFLOAD_BYTES = 2**18


class AsyncClient(AsyncProgramCalls):
    """Calls a Tilewire server from asyncio, in any event loops, one after the other or in several threads.

    A copy has connections of its own, also in another process.

    Plain HTTP goes over connections of the client's own; TLS, proxies and `transport=` go through httpx. Large arrays
    and long lists are converted, copied from other devices and brought into C order in a thread, and so are answers for
    other devices. Do not change an array or a list before its call has returned.

    The proxies of HTTP_PROXY, HTTPS_PROXY and ALL_PROXY are used, but not for the hosts of NO_PROXY, `*` for all; a
    `transport=` uses its own alone.

    Results carry no gradient: torch's autograd does not see the call, also where an operand requires one.

    Args:
        base_url: Address of the server, `http://…` or `https://…`.
        api_key: Sent as `Authorization: Bearer …`.
        timeout: Seconds without progress on the connection, or httpx's own value object.
        max_retries: Number of times that a request is sent again after a busy or unavailable server, or a refused or
            reset connection. Waits double, or are as long as the server says. An op whose `store` is one of its own
            operands is sent again only where nothing was done, or with `if_match`: twice would be another result.
        headers: Sent with every request.
        cast: Dtype for arrays of a dtype that an op does not take, or a program does not declare, as "float32" for
            float64 arrays. None makes them an error, for an op before anything is sent.
        transport: Replaces the network, as in httpx.

    Raises:
        TypeError: An address or a time of another type.
        ValueError: An address without a scheme, or with a name and password, a query or a fragment; no positive time.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        cast: Any = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base_url = wire.checked_url(base_url)
        wire.check_timeout(timeout)
        wire.check_retries(max_retries)
        self._max_retries = max_retries
        super().__init__(Rules.of(cast))
        shared = wire.client_headers(api_key, headers)
        self._transport = OfProcess(partial(make_transport, self._base_url, timeout, shared, transport))

    async def live(self) -> bool:
        """Whether a server answers."""
        return await self._why_not("live") is None

    async def ready(self) -> bool:
        """Whether the server answers and takes requests."""
        return await self._why_not("ready") is None

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns as soon as the server takes requests.

        Raises:
            Unavailable: It does not within `timeout_s` seconds; the message has the last reason.
        """
        until = time.monotonic() + timeout_s
        while (reason := await self._why_not("ready", max(until - time.monotonic(), LOOK_S))) is not None:
            if time.monotonic() >= until:
                raise Unavailable(f"{self._base_url}: not ready within {timeout_s:g} s: {reason}")
            await asyncio.sleep(POLL_S)

    async def exchange(self, method: str, path: str) -> wire.Reply:
        """Sends a request without a body to any path, and returns the answer whatever its status.

        Raises:
            ConnectionFailed: No answer.
        """
        return await self._send(wire.Call(method, path))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._transport.get().aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._base_url!r})"

    async def _why_not(self, kind: Literal["live", "ready"], max_silence_s: float | None = None) -> str | None:
        request = requests.why_not(kind, max_silence_s)
        try:
            return request.parse(await self._transport.get().exchange(request.call), self._handle)
        except ConnectionFailed as error:
            return error.detail

    async def _offload(self, work: Callable[[], T], _find: Callable[[], Sequence[Any]]) -> T:
        arrays = _find()
        if sum(map(work_bytes_of, arrays)) <= OFFLOAD_BYTES:
            return work()
        return await asyncio.to_thread(as_here(work, arrays))

    async def _send(self, call: wire.Call) -> wire.Reply:
        retries = Retries(call, self._max_retries)
        while True:
            outcome: wire.Reply | ConnectionFailed
            try:
                outcome = await self._transport.get().exchange(retries.next_call())
            except ConnectionFailed as error:
                outcome = error
            wait_s = retries.wait_s(outcome)
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
        settled = retries.settled(outcome)
        if isinstance(settled, ConnectionFailed):
            raise settled
        return settled


def make_transport(
    base_url: str,
    timeout: float | httpx.Timeout | None,
    headers: Mapping[str, str],
    own: httpx.AsyncBaseTransport | None,
) -> wire.AsyncTransport:
    """Returns the transport for an address: of one's own for plain HTTP, on httpx for the rest."""
    is_plain = own is None and base_url.startswith("http://") and proxy_of(base_url) is None
    if is_plain and (timeout is None or isinstance(timeout, int | float)):
        return AsyncSocketTransport(base_url, timeout, headers)
    # By name: loading httpx takes longer than all the rest of the client.
    made: wire.AsyncTransport = importlib.import_module("tilewire._transport.over_httpx").AsyncHttpxTransport(
        base_url, timeout, headers, own
    )
    return made
