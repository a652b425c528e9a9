"""Limits that a server is started with: stalled and slow bodies, slow heads, full memory, full queues, too many connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.float64_oracle import random_array
from tests.support.gateway_bench import GatewayBench, until
from tests.support.live_server import serving
from tests.support.product import BODY, MATMUL, check_product
from tests.support.raw_http import ConnectionEnded, RawConnection, head, post
from tests.support.repeated_scenes import play
from tests.support.tensor_bodies import TYPES, decode, to_npy, to_safetensors

IMPATIENT = (
    "--gateways", "1", "--arena-bytes", "128MiB", "--body-timeout-s", "0.3", "--min-body-bytes-per-s", "4KiB",
)  # fmt: skip
# Of one request at a time, and of none.
NARROW = (
    "--gateways", "1", "--arena-bytes", "65MiB", "--max-body-bytes", "33MiB", "--room-timeout-s", "0",
    "--keep-alive-s", "0.3",
)  # fmt: skip


@pytest.mark.slow
def test_a_body_that_stalls_is_given_up(shared_server: StartServer) -> None:
    server = shared_server(*IMPATIENT)
    with RawConnection(server.connect()) as connection, server.client() as client:
        connection.send(head("POST", "/v1/matmul", content_length=str(len(BODY))) + BODY[:100])
        answer = connection.answer()
        assert answer.status == 400
        assert "100" in answer.json()["detail"]
        assert settles(client, is_idle)


@pytest.mark.slow
def test_a_head_that_trickles_in_is_given_up(shared_server: StartServer) -> None:
    server = shared_server(*IMPATIENT)
    with RawConnection(server.connect()) as connection:
        connection.send(b"POST /v1/matmul HTTP/1.1\r\nhost: x\r\n")
        answer = connection.answer()
        assert answer.status == 400
        assert "0.3 s" in answer.json()["detail"]
        assert connection.is_closed()


def test_an_idle_connection_is_not_taken_for_a_head_that_trickles_in(shared_server: StartServer) -> None:
    server = shared_server(*IMPATIENT)
    with RawConnection(server.connect()) as connection:
        connection.send(MATMUL)
        check_product(connection.answer().body)
        connection.sock.settimeout(0.9)
        with contextlib.suppress(TimeoutError):
            raise AssertionError(connection.answer())
        connection.send(MATMUL)
        check_product(connection.answer().body)


def test_a_client_that_never_reads_its_answer_loses_its_slots(shared_server: StartServer) -> None:
    server = shared_server(*IMPATIENT)
    x = np.ones((2048, 2048), np.float32)
    with RawConnection(server.connect()) as connection, server.client() as client:
        # More than the sockets' own buffers hold.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.send(post("/v1/softmax", to_safetensors({"x": x})))
        assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") > 0)
        assert settles(client, is_idle), scrape(client)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("pieces", [0, 20])
def test_an_answer_that_is_too_small_to_pause_writing_is_bounded_too(pieces: int, connection: str) -> None:
    """Nobody writes behind it on a connection that closes, or is idle. A client that reads now and then gets all of it."""
    array = np.ones(12_000, np.float32)
    request = post("/v1/add?b=@large", to_npy(array), connection=connection)

    async def scene(bench: GatewayBench) -> None:
        bench.engine.residents["large"] = array
        connections, loop = bench.server.server_state.connections, asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", bench.port))
            await until(lambda: len(connections) == 1)
            (ours,) = (one.transport.get_extra_info("socket") for one in connections)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await loop.sock_sendall(sock, request)
            read = b""
            for _ in range(pieces):
                await asyncio.sleep(0.1)
                read += await loop.sock_recv(sock, 2**11)
            while pieces and (piece := await loop.sock_recv(sock, 2**16)):
                read += piece
            assert not pieces or read.endswith(to_npy(2 * array))
            await until(lambda: not connections)

    play(scene, body_timeout_s=1.0, keep_alive_s=0.3)


@pytest.mark.slow
def test_a_client_that_reads_slowly_keeps_its_answer_and_one_that_leaves_is_499(start_server: StartServer) -> None:
    """What the system has taken for a client leaves in lumps: none may leave for longer than the time-out."""
    server = start_server(*IMPATIENT)
    x = np.ones((2048, 2048), np.float32)
    with server.client() as client, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect((server.host, server.port))
        with RawConnection(sock) as connection:
            connection.send(post("/v1/softmax", to_safetensors({"x": x})))
            end_s = time.monotonic() + 2.5
            while time.monotonic() < end_s:
                assert sock.recv(16 * 2**10), "the answer was cut"
                time.sleep(0.05)
            assert not total(scrape(client), "tilewire_requests_total", op="softmax")
        assert settles(client, is_idle)
        assert total(scrape(client), "tilewire_requests_total", op="softmax", code="499") == 1
        assert total(scrape(client), "tilewire_requests_total", op="softmax", code="200") == 0


@pytest.mark.slow
def test_full_memory_and_full_queue_are_429_before_the_body(start_server: StartServer) -> None:
    flags = ("--gateways", "1", "--arena-bytes", "1MiB", "--max-in-flight", "2", "--room-timeout-s", "0.2")
    server = start_server(*flags)
    with server.client() as client:
        with RawConnection(server.connect()) as first, RawConnection(server.connect()) as second:
            first.send(head("POST", "/v1/matmul", content_length=str(900_000)) + b"x")
            assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") > 0)
            second.send(head("POST", "/v1/matmul", content_length=str(300_000)) + b"x")
            answer = second.answer()
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert "no room for 300000 bytes within 0.2 s" in answer.json()["detail"]
            with RawConnection(server.connect()) as third, RawConnection(server.connect()) as fourth:
                third.send(head("POST", "/v1/matmul", content_length="1000") + b"x")
                assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 2)
                fourth.send(head("POST", "/v1/matmul", content_length="1000"))
                answer = fourth.answer()
                assert answer.status == 429
                assert "queue" in answer.json()["detail"]
                assert int(answer.headers["retry-after"]) >= 1
                # Health does not depend on load: an orchestrator would kill a busy server.
                assert client.get("/healthz").status_code == 200
                assert client.get("/readyz").status_code == 200
        assert settles(client, is_idle)
        response = client.post("/v1/matmul", content=bytes(2**21))
        assert response.status_code == 413
        assert settles(client, is_idle)
        assert client.post("/v1/matmul", content=BODY).status_code == 200


def test_a_body_that_trickles_in_is_given_up(shared_server: StartServer) -> None:
    """It never stalls, so only its rate gives it away; through the parser as chunks, and past it."""
    server = shared_server(*IMPATIENT)
    heads = (head("POST", "/v1/matmul", content_length="1000000"), head("POST", "/v1/add", transfer_encoding="chunked"))
    for sent, piece in zip(heads, (b"x" * 10, b"1\r\nx\r\n"), strict=True):
        with RawConnection(server.connect()) as connection, server.client() as client:
            connection.send(sent)
            connection.sock.settimeout(0.05)
            answer = None
            while answer is None:
                connection.send(piece)
                try:
                    answer = connection.answer()
                except TimeoutError:
                    continue
            assert answer.status == 400
            assert "slower than 4096 bytes/s" in answer.json()["detail"]
            assert settles(client, is_idle)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 20])
def test_large_bodies_that_trickle_in_leave_room_for_small_requests(shared_server: StartServer, count: int) -> None:
    server = shared_server("--gateways", "1", "--arena-bytes", "512MiB", "--room-timeout-s", "60")
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(server.client())
        slow = [stack.enter_context(RawConnection(server.connect())) for _ in range(count)]
        for connection in slow:
            connection.send(head("POST", "/v1/matmul", content_length=str(2**28)) + bytes(1500))
        assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") >= 2**28)
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == count)
        with RawConnection(server.connect()) as honest:
            for _ in range(20):
                for connection in slow:
                    connection.send(bytes(100))
                honest.send(MATMUL)
                answer = honest.answer()
                assert answer.status == 200, answer.body
                check_product(answer.body)
    with server.client() as client:
        assert settles(client, is_idle)


@pytest.mark.slow
def test_the_largest_body_and_its_result_have_room_while_nobody_else_is_there(shared_server: StartServer) -> None:
    server = shared_server(*NARROW)
    x = np.zeros((8, 2**20), np.float32)
    with server.client() as client:
        response = client.post("/v1/add", content=to_safetensors({"a": x, "b": np.ones((1, 1), np.float32)}))
        assert response.status_code == 200, response.text
        assert decode(TYPES["safetensors"], response.content).all()


@pytest.mark.slow
def test_requests_wait_for_room_in_turn(start_server: StartServer) -> None:
    """More large requests at once than there is room for: each waits, its body in the client's socket, and all are computed."""
    server = start_server("--gateways", "1", "--arena-bytes", "48MiB", "--room-timeout-s", "60")
    x = np.zeros((2, 2**20), np.float32)
    body = to_safetensors({"a": x, "b": np.ones((1, 1), np.float32)})

    def ask(_index: int) -> int:
        with server.client() as client:
            response = client.post("/v1/add", content=body)
            assert decode(TYPES["safetensors"], response.content).all()
            return response.status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(32))) == {200}
    with server.client() as client:
        assert settles(client, is_idle)
        assert total(scrape(client), "tilewire_rejected_total") == 0


@pytest.mark.slow
def test_the_least_rate_grows_with_the_declared_length(start_server: StartServer) -> None:
    flags = ("--gateways", "1", "--arena-bytes", "64MiB", "--body-timeout-s", "0.4", "--max-body-s", "10")
    server = start_server(*flags, "--min-body-bytes-per-s", "0")
    with RawConnection(server.connect()) as connection, server.client() as client:
        connection.send(head("POST", "/v1/matmul", content_length=str(10_000_000)))
        connection.sock.settimeout(0.05)
        answer = None
        while answer is None:
            # Some 20 kB/s; a body of a tenth of a megabyte would be in time.
            connection.send(bytes(1000))
            with contextlib.suppress(TimeoutError):
                answer = connection.answer()
        assert answer.status == 400
        assert "slower than 1000000 bytes/s" in answer.json()["detail"]
        assert settles(client, is_idle)


@pytest.mark.slow
def test_connections_over_the_limit_are_answered_503(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--max-connections", "2")
    with server.client() as client, RawConnection(server.connect()) as first, RawConnection(server.connect()) as second:
        for connection in (first, second):
            connection.send(MATMUL)
            check_product(connection.answer().body)
        with RawConnection(server.connect()) as third:
            third.send(MATMUL.replace(b"\r\n", b"\r\nX-Request-Id: third\r\n", 1))
            answer = third.answer()
            assert answer.status == 503
            assert answer.headers["x-request-id"] == answer.json()["request_id"] == "third"
            assert int(answer.headers["retry-after"]) >= 1
            assert "limit" in answer.json()["detail"]
            assert third.is_closed()
        # An orchestrator is answered all the same, and those who are in are not disturbed.
        assert client.get("/healthz").status_code == 200
        first.send(MATMUL)
        check_product(first.answer().body)
        first.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        figures = first.answer().body.decode()
        assert 'tilewire_rejected_total{reason="unavailable"} 1.0' in figures
        assert 'tilewire_requests_total{code="503",op="matmul"} 1.0' in figures


@pytest.mark.slow
def test_probes_are_answered_where_open_files_are_fewer_than_connections(tmp_path: Path) -> None:
    log, flags = tmp_path / "log", ("--gateways", "1", "--arena-bytes", "16MiB")
    with serving(log, *flags, before=("prlimit", "--nofile=200:200")) as server, contextlib.ExitStack() as stack:
        for _ in range(140):
            stack.enter_context(RawConnection(server.connect()))
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/v2", 503)):
            with RawConnection(server.connect()) as connection:
                connection.send(head("GET", path))
                assert connection.answer().status == status
    assert "the limit of open files allows fewer connections than --max-connections connections=100" in " ".join(
        log.read_text().split()
    )


@pytest.mark.slow
def test_connections_above_the_limit_that_ask_for_nothing_are_closed(tmp_path: Path) -> None:
    flags = ("--gateways", "1", "--arena-bytes", "16MiB", "--max-connections", "10")
    with (
        serving(tmp_path / "log", *flags, before=("prlimit", "--nofile=100:100")) as server,
        contextlib.ExitStack() as stack,
    ):
        # More than there are descriptors: they would leave none for an orchestrator.
        silent = [stack.enter_context(RawConnection(server.connect())) for _ in range(100)]
        with RawConnection(server.connect()) as connection:
            connection.send(head("GET", "/healthz"))
            assert connection.answer().status == 200
        assert silent[-1].is_closed()
        silent[0].send(MATMUL)
        check_product(silent[0].answer().body)


@pytest.mark.slow
def test_an_idle_client_that_never_sends_is_closed(shared_server: StartServer) -> None:
    server = shared_server(*NARROW)
    with RawConnection(server.connect()) as connection:
        assert connection.is_closed()


@pytest.mark.slow
def test_a_drain_answers_what_is_pipelined_behind_the_answered_request(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "64MiB")
    x = random_array("float32", (2**20,), 3)
    with RawConnection(server.connect()) as connection:
        connection.send(post("/v1/softmax", to_safetensors({"x": x})))
        sender = Thread(target=connection.send, args=(MATMUL * 2,))
        sender.start()
        server.terminate()
        statuses: list[int] = []
        with contextlib.suppress(ConnectionEnded, ConnectionResetError):
            while len(statuses) < 3:
                statuses.append(connection.answer().status)
        sender.join()
        # Each is answered or refused in order, as whole answers; nothing is cut in the middle.
        assert statuses
        assert set(statuses) <= {200, 503}
        assert statuses == sorted(statuses)


@pytest.mark.slow
def test_connections_spread_over_gateways(start_server: StartServer) -> None:
    server = start_server("--gateways", "3", "--arena-bytes", "48MiB")
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            connection = stack.enter_context(RawConnection(server.connect()))
            connection.send(MATMUL)
            check_product(connection.answer().body)
        taken = server.connections_of_gateways()
    assert sum(taken) == 24
    # Even, but for one that was kept from running meanwhile.
    assert max(taken) <= 16
