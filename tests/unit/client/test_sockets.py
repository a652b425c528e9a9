"""The client's own connections: broken ones are tried again, stale ones replaced, early answers read."""

from __future__ import annotations

import asyncio
import gc
import inspect
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

import tilewire
from tests.unit.client.scripted_server import answers, closes, read_request, resets, scripted, together
from tests.unit.client.speaking_server import SpeakingServer, on_a_socket
from tilewire._arrays.host import HostArray, to_safetensors
from tilewire._transport.answers import STEP_BYTES
from tilewire._transport.async_sockets import AsyncSocketTransport
from tilewire._transport.retry import Retries
from tilewire._transport.sockets import SocketTransport
from tilewire._transport.wire import Call

X = np.arange(6, dtype=np.float32).reshape(2, 3)
BODY = b"".join(to_safetensors({"out": HostArray.of(X)}))
KINDS = [tilewire.Client, tilewire.AsyncClient]
# Seconds over connections of the client's own, and over httpx.
TIMEOUTS = [60, httpx.Timeout(60)]
# More than httpx opens by default.
NUM_TOGETHER = 110


def reply(body: bytes = BODY, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def softmax(kind: Callable[..., Any], url: str, *, timeout_ms: float | None = None, **settings: Any) -> Any:
    if kind is tilewire.Client:
        with kind(url, **settings) as client:
            return client.softmax(X, timeout_ms=timeout_ms)

    async def use() -> Any:
        async with kind(url, **settings) as client:
            return await client.softmax(X, timeout_ms=timeout_ms)

    return asyncio.run(use())


def wait(result: Any) -> Any:
    async def awaited() -> Any:
        return await result

    return asyncio.run(awaited()) if inspect.isawaitable(result) else result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("breaks", [resets, closes, answers(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")])
def test_a_connection_that_breaks_is_tried_again(kind: Callable[..., Any], breaks: Any) -> None:
    with scripted(breaks, answers(reply())) as url:
        np.testing.assert_array_equal(softmax(kind, url), X)


@pytest.mark.parametrize("settings", [{}, {"transport": httpx.HTTPTransport()}])
def test_a_result_in_the_place_of_an_operand_is_not_sent_again(settings: Any) -> None:
    with (
        scripted(closes, answers(reply())) as url,
        tilewire.Client(url, **settings) as client,
        pytest.raises(tilewire.ConnectionFailed),
    ):
        client.softmax("@x", store="x")


def test_a_deletion_whose_answer_was_lost_is_done() -> None:
    gone = answers(reply(b"{}", "404 Not Found"))
    with scripted(closes, gone) as url, tilewire.Client(url) as client:
        client.delete("x")
    # One that was refused has not been done: there was nothing to remove.
    unavailable = answers(reply(b"{}", "503 Service Unavailable", "Retry-After: 0"))
    with scripted(unavailable, gone) as url, tilewire.Client(url) as client, pytest.raises(tilewire.NotFound):
        client.delete("x")


@pytest.mark.parametrize("settings", [{}, {"transport": httpx.HTTPTransport()}])
def test_it_is_sent_again_where_no_connection_came_about(settings: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    call = Call("POST", "/v1/softmax", {"x": "@x", "store": "@x"})
    with tilewire.Client(url, max_retries=0, **settings) as client, pytest.raises(tilewire.ConnectionFailed) as raised:
        client.softmax("@x", store="x")
    assert Retries(call, 1).wait_s(raised.value) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_connection_is_tried_again(kind: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    servers: list[Any] = []

    def start() -> None:
        with socket.create_server(("127.0.0.1", port)) as late:
            connection, _ = late.accept()
            with connection:
                read_request(connection)
                connection.sendall(reply())
                servers.append(connection)

    began = threading.Timer(0.05, start)
    began.start()
    np.testing.assert_array_equal(softmax(kind, f"http://127.0.0.1:{port}", max_retries=10), X)
    began.join()
    assert servers


@pytest.mark.parametrize("kind", KINDS)
def test_broken_connections_end_in_an_error(kind: Callable[..., Any]) -> None:
    with (
        scripted(resets, resets) as url,
        pytest.raises(tilewire.ConnectionFailed, match=r"127\.0\.0\.1"),
    ):
        softmax(kind, url, max_retries=1)
    with scripted(resets) as url, pytest.raises(tilewire.ConnectionFailed) as raised:
        softmax(kind, url, max_retries=0)
    assert raised.value.was_broken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("breaks", [resets, closes])
def test_a_conditional_change_whose_answer_is_lost_is_in_doubt(kind: Callable[..., Any], breaks: Any) -> None:
    late = answers(reply(b'{"detail": "if-match: version 18"}', "412 Precondition Failed"))

    with scripted(breaks, late) as url, pytest.raises(tilewire.ConnectionFailed):
        wait(kind(url).put("w", X, if_match=17))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout_ms", [0, -5, float("nan"), float("inf")])
def test_a_limit_that_leaves_no_time_is_refused_here(kind: Callable[..., Any], timeout_ms: float) -> None:
    with pytest.raises(ValueError, match="timeout_ms: expected more than 0"):
        softmax(kind, "http://127.0.0.1:9", timeout_ms=timeout_ms)
    with pytest.raises(TypeError, match="timeout_ms: expected milliseconds"):
        softmax(kind, "http://127.0.0.1:9", timeout_ms="soon")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_no_retry_past_the_deadline(kind: Callable[..., Any]) -> None:
    began = time.monotonic()
    busy = reply(b"{}", "503 Service Unavailable", "Retry-After: 30")
    with scripted(answers(busy)) as url, pytest.raises(tilewire.Unavailable):
        softmax(kind, url, timeout_ms=5000, max_retries=5)
    with scripted(resets, resets) as url, pytest.raises(tilewire.ConnectionFailed):
        softmax(kind, url, timeout_ms=60, max_retries=5)
    assert time.monotonic() - began < 4


def test_the_deadline_shrinks_with_each_try() -> None:
    heads: list[bytes] = []

    def note(connection: socket.socket) -> None:
        heads.append(read_request(connection))
        if len(heads) == 2:
            connection.sendall(reply())

    with scripted(note, note) as url:
        softmax(tilewire.Client, url, timeout_ms=60_000)
    sent = [int(head.lower().partition(b"x-timeout-ms: ")[2].partition(b"\r\n")[0]) for head in heads]
    assert sent[0] == 60_000
    assert 58_000 < sent[1] < 60_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_connection_that_the_server_closed_is_replaced(kind: Callable[..., Any]) -> None:
    with scripted(answers(reply()), answers(reply())) as url:
        client = kind(url, max_retries=0)
        for _ in range(2):
            np.testing.assert_array_equal(wait(client.softmax(X)), X)
            # Returns once the end of the connection has come.
            for idle in client._transport.get()._idle.kept:
                idle.setblocking(True)
                assert idle.recv(1, socket.MSG_PEEK) == b""


def test_connections_are_kept_and_shared_between_threads() -> None:
    server = SpeakingServer()
    with on_a_socket(server) as url, tilewire.Client(url) as client:
        wrong: list[int] = []

        def work(number: int) -> None:
            x = np.full(3, number, np.float32)
            wrong.extend(number for _ in range(20) if client.add(x, 1).tolist() != [number + 1] * 3)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert 1 <= len(client._transport.get()._idle.kept) <= 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_an_early_answer_is_read_although_the_body_was_not(kind: Callable[..., Any]) -> None:
    def refuse(connection: socket.socket) -> None:
        got = b""
        while b"\r\n\r\n" not in got:
            got += connection.recv(4096)
        connection.sendall(reply(b'{"detail": "too large"}', "413 Content Too Large", "Connection: close"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**20):
            pass

    with scripted(refuse) as url, pytest.raises(tilewire.TooLarge, match="too large"):
        wait(kind(url).put("w", np.zeros(2**22, np.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_answers(kind: Callable[..., Any]) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (10, BODY[:10], len(BODY) - 10, BODY[10:])
    with scripted(answers(chunked)) as url:
        got = softmax(kind, url)
    np.testing.assert_array_equal(got, X)
    got[0, 0] = 1  # writable


@pytest.mark.parametrize("kind", KINDS)
def test_answers_without_a_length_end_with_the_connection(kind: Callable[..., Any]) -> None:
    with scripted(answers(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + BODY)) as url:
        np.testing.assert_array_equal(softmax(kind, url), X)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_http_is_a_failed_connection(kind: Callable[..., Any]) -> None:
    with scripted(answers(b"SSH-2.0-OpenSSH\r\n\r\n")) as url, pytest.raises(tilewire.ConnectionFailed):
        softmax(kind, url, max_retries=0)


def test_a_cancelled_call_closes_its_connection() -> None:
    ended = threading.Event()

    def hold(connection: socket.socket) -> None:
        read_request(connection)
        if connection.recv(1) == b"":
            ended.set()

    async def use(url: str) -> None:
        client = tilewire.AsyncClient(url)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.softmax(X), 0.1)

    with scripted(hold) as url:
        asyncio.run(use(url))
        assert ended.wait(10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_server_is_a_failed_connection_and_not_tried_again(kind: Callable[..., Any]) -> None:
    release = threading.Event()
    tries: list[int] = []

    def hold(connection: socket.socket) -> None:
        tries.append(1)
        release.wait(10)

    with scripted(hold) as url:
        with pytest.raises(tilewire.ConnectionFailed, match="timed out") as raised:
            softmax(kind, url, timeout=0.05)
        release.set()
    assert not raised.value.was_broken
    assert tries == [1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_waiting_for_ready_ends_where_a_server_says_nothing(kind: Callable[..., Any], timeout: Any) -> None:
    release = threading.Event()

    def hold(_connection: socket.socket) -> None:
        release.wait(20)

    async def use(url: str) -> None:
        async with kind(url, timeout=timeout) as client:
            await client.wait_ready(0.2)

    with scripted(hold, hold, hold, hold) as url:
        begun_s = time.monotonic()
        with pytest.raises(tilewire.Unavailable, match=r"not ready within 0\.2 s: .*(timed out|ReadTimeout)"):
            asyncio.run(use(url)) if kind is tilewire.AsyncClient else kind(url, timeout=timeout).wait_ready(0.2)
        assert time.monotonic() - begun_s < 10
        release.set()


class AlwaysReadable(asyncio.SelectorEventLoop):
    """A loop whose connections bring bytes as fast as they are received, so that nobody waits for them."""

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        select.select([sock], [], [])
        return sock.recv_into(buf)


def test_a_large_answer_leaves_turns_to_others() -> None:
    body = b"".join(to_safetensors({"w": HostArray.of(np.zeros(2**22, np.float32))}))
    turns = [0]

    async def count_turns() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def use(url: str) -> int:
        counting = asyncio.create_task(count_turns())
        async with tilewire.AsyncClient(url) as client:
            await client.softmax(X)
            before = turns[0]
            await client.get("w")
        counting.cancel()
        return turns[0] - before

    with (
        scripted(answers(reply(), reply(body))) as url,
        asyncio.Runner(loop_factory=AlwaysReadable) as runner,
    ):
        assert runner.run(use(url)) >= len(body) // STEP_BYTES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_no_call_waits_for_another(kind: Callable[..., Any], timeout: Any) -> None:
    async def use(url: str) -> Any:
        async with kind(url, timeout=timeout, max_retries=0) as client:
            return await asyncio.gather(*(client.softmax(X) for _ in range(NUM_TOGETHER)))

    with together(NUM_TOGETHER, reply()) as url:
        if kind is tilewire.AsyncClient:
            answers = asyncio.run(use(url))
        else:
            with kind(url, timeout=timeout, max_retries=0) as client, ThreadPoolExecutor(NUM_TOGETHER) as threads:
                answers = list(threads.map(lambda _: client.softmax(X), range(NUM_TOGETHER)))
    np.testing.assert_array_equal(answers, [X] * NUM_TOGETHER)


# Loops that end without `aclose` leave connections open, as with httpx alone.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_one_client_serves_several_event_loops(timeout: Any, url: str) -> None:
    async def use(client: tilewire.AsyncClient) -> None:
        for _ in range(5):
            for answer in await asyncio.gather(*(client.add(X, X) for _ in range(3))):
                np.testing.assert_array_equal(answer, X + X)

    client = tilewire.AsyncClient(url, timeout=timeout)
    # One after the other, none of which closes the client, and in threads beside each other.
    for _ in range(3):
        asyncio.run(use(client))
    with ThreadPoolExecutor(4) as threads:
        for running in [threads.submit(asyncio.run, use(client)) for _ in range(8)]:
            running.result(60)
    del client
    gc.collect()


@pytest.mark.parametrize("kind", KINDS)
def test_https_to_a_server_of_http_says_so(kind: Callable[..., Any], url: str) -> None:
    with pytest.raises(tilewire.ConnectionFailed, match=r"is it a server of http:// rather than https://\?$"):
        softmax(kind, url.replace("http:", "https:"), max_retries=0)


@pytest.mark.parametrize("kind", KINDS)
def test_causes_of_a_broken_connection_come_to_an_end(kind: Callable[..., Any]) -> None:
    with scripted(closes) as url, pytest.raises(tilewire.ConnectionFailed) as raised:
        softmax(kind, url, max_retries=0)
    causes: list[BaseException] = []
    cause: BaseException | None = raised.value
    while cause is not None:
        assert cause not in causes
        causes.append(cause)
        cause = cause.__cause__
    assert len(causes) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_proxy_that_does_not_answer_is_named(
    kind: Callable[..., Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(tilewire.ConnectionFailed) as raised:
        softmax(kind, url, max_retries=0)
    assert raised.value.detail.startswith(f"{url} through the proxy 127.0.0.1:9: ")
    for hosts in ("127.0.0.1", "*"):
        monkeypatch.setenv("no_proxy", hosts)
        assert softmax(kind, url, max_retries=0).shape == X.shape


def test_prefixes_and_keys_stand_in_the_request() -> None:
    heads: list[bytes] = []

    def note(connection: socket.socket) -> None:
        heads.append(read_request(connection))
        connection.sendall(reply())

    with scripted(note) as url, tilewire.Client(f"{url}/gpu/", api_key="secret", headers={"X-Team": "blue"}) as client:
        client.matmul(X, "@a/b", out_dtype="float32")
    head = heads[0].partition(b"\r\n\r\n")[0].decode()
    assert head.startswith("POST /gpu/v1/matmul?out_dtype=float32&b=@a/b HTTP/1.1\r\n")
    lines = head.split("\r\n")
    assert f"Host: {url.removeprefix('http://')}" in lines
    assert {"Authorization: Bearer secret", "X-Team: blue", "X-Tilewire-Key: a/b"} <= set(lines)


@pytest.mark.parametrize("kind", [SocketTransport, AsyncSocketTransport])
@pytest.mark.parametrize("num_bytes", [0, 10, 5 * 2**20])
def test_bodies_arrive_whole_and_progress_is_told(kind: Callable[..., Any], num_bytes: int) -> None:
    body = np.random.default_rng(0).bytes(num_bytes)
    got: list[bytes] = []
    steps: list[tuple[int, int]] = []

    def echo(connection: socket.socket) -> None:
        got.append(read_request(connection).partition(b"\r\n\r\n")[2])
        connection.sendall(reply(got[0]))

    with scripted(echo) as url:
        transport = kind(url, 5.0, {})
        parts = (body[: num_bytes // 3], memoryview(body)[num_bytes // 3 :])
        headers = {"Content-Length": str(num_bytes)}
        call = Call("PUT", "/x", headers=headers, parts=parts, progress=lambda *step: steps.append(step))
        answer = wait(transport.exchange(call))
    assert bytes(answer.body) == got[0] == body
    assert (steps[-1] if steps else (num_bytes, num_bytes)) == (num_bytes, num_bytes)
    assert all(done <= total == num_bytes for done, total in steps)


def test_both_are_coroutines_or_not() -> None:
    for name in ("matmul", "put", "trace", "program", "search"):
        assert inspect.iscoroutinefunction(getattr(tilewire.AsyncClient, name))
        assert not inspect.iscoroutinefunction(getattr(tilewire.Client, name))
