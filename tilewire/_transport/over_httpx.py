"""Transports on httpx: TLS, proxies, asyncio, and whatever a user passes as `transport=`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any

import httpx

from tilewire._errors import ConnectionFailed
from tilewire._transport.sockets import MAX_IDLE
from tilewire._transport.wire import Call, Reply, failed, memory_for, proxy_of

# As over connections of our own: a call waits for the server alone. httpx would make all above 100 wait for one another.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE)
# Refused, reset, or closed in the middle: what a restart of the server looks like.
_BROKEN = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class HttpxTransport:
    """Sends by an `httpx.Client`.

    Args:
        base_url: Address of the server.
        timeout: Seconds without progress on the connection, or httpx's own value object.
        headers: Headers of every request.
        transport: Replaces the network, as in httpx.
    """

    def __init__(
        self,
        base_url: str,
        timeout: float | httpx.Timeout | None,
        headers: Mapping[str, str],
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._place = _place_of(base_url, is_network=transport is None)
        self._urls = _Urls(base_url)
        self._http = httpx.Client(timeout=timeout, headers=headers, transport=transport, limits=_LIMITS)

    def exchange(self, call: Call) -> Reply:
        """Sends a request and waits for the whole answer.

        Raises:
            ConnectionFailed: No answer.
        """
        content = call.whole() if call.is_small else call.chunks()
        try:
            with self._http.stream(
                call.method,
                self._urls.of(call),
                headers=call.headers,
                content=content,
                timeout=_bounded(call, self._http.timeout),
            ) as response:
                body = _Body(call, response)
                for chunk in response.iter_bytes():
                    body.add(chunk)
        except httpx.TransportError as error:
            raise _failed(self._place, error) from error
        return body.reply()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()


class AsyncHttpxTransport:
    """Sends by an `httpx.AsyncClient` for each event loop, whose its connections are; the arguments are `HttpxTransport`'s."""

    def __init__(
        self,
        base_url: str,
        timeout: float | httpx.Timeout | None,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._place = _place_of(base_url, is_network=transport is None)
        self._urls = _Urls(base_url)
        self._make = partial(httpx.AsyncClient, timeout=timeout, headers=headers, transport=transport, limits=_LIMITS)
        self._by_loop: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}

    async def exchange(self, call: Call) -> Reply:
        """Sends a request and waits for the whole answer.

        Raises:
            ConnectionFailed: No answer.
        """
        content = call.whole() if call.is_small else _async(call.chunks())
        try:
            http = self._http()
            async with http.stream(
                call.method,
                self._urls.of(call),
                headers=call.headers,
                content=content,
                timeout=_bounded(call, http.timeout),
            ) as response:
                body = _Body(call, response)
                async for chunk in response.aiter_bytes():
                    body.add(chunk)
        except httpx.TransportError as error:
            raise _failed(self._place, error) from error
        return body.reply()

    async def aclose(self) -> None:
        """Closes the connections of this event loop."""
        http = self._by_loop.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()

    def _http(self) -> httpx.AsyncClient:
        """Returns the client of the running loop; those of loops that are closed can do nothing more."""
        loop = asyncio.get_running_loop()
        http = self._by_loop.get(loop)
        if http is None:
            for other in [*self._by_loop]:
                if other.is_closed():
                    self._by_loop.pop(other, None)
            http = self._by_loop[loop] = self._make()
        return http


class _Urls:
    """Parsed addresses by path and query: httpx takes 60 µs to parse one."""

    max_urls = 256

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._known: dict[str, httpx.URL] = {}

    def of(self, call: Call) -> httpx.URL:
        """Returns the address of a call."""
        target = call.target
        url = self._known.get(target)
        if url is None:
            if len(self._known) >= self.max_urls:
                self._known.clear()
            url = self._known[target] = httpx.URL(self._base_url + target)
        return url


class _Body:
    """Receives one answer's body, where its length is known into memory of that size."""

    def __init__(self, call: Call, response: httpx.Response) -> None:
        self._call = call
        self._response = response
        length = response.headers.get("content-length", "")
        self.is_sized = length.isdecimal() and "content-encoding" not in response.headers and call.method != "HEAD"
        self._received = 0
        self._grown = bytearray()
        self._memory = memoryview(b"")
        if self.is_sized:
            self._memory = memory_for(call, response.status_code, response.headers, int(length))

    def add(self, chunk: bytes) -> None:
        """Keeps the next piece."""
        if not self.is_sized:
            self._grown += chunk
            return
        end = self._received + len(chunk)
        self._memory[self._received : end] = chunk
        self._received = end
        if self._call.progress is not None:
            self._call.progress(end, self._memory.nbytes)

    def reply(self) -> Reply:
        """Returns the whole answer."""
        body = self._memory if self.is_sized else memoryview(self._grown)
        return Reply(self._response.status_code, self._response.headers, body)


def _place_of(base_url: str, *, is_network: bool) -> str:
    """Returns the address for messages, with the proxy before it: that may be what does not answer."""
    proxy = proxy_of(base_url) if is_network else None
    return base_url if proxy is None else f"{base_url} through the proxy {proxy}"


def _failed(place: str, error: httpx.TransportError) -> ConnectionFailed:
    was_refused = isinstance(error, httpx.ConnectError)
    return failed(place, error, was_broken=isinstance(error, _BROKEN), was_refused=was_refused)


def _bounded(call: Call, timeout: httpx.Timeout) -> httpx.Timeout:
    return httpx.Timeout(**{kind: call.bounded(seconds) for kind, seconds in timeout.as_dict().items()})


async def _async(chunks: Iterator[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk
