"""What clients of `/v2` do on the wire: chunks, early ends, compressed and huge bodies, deadlines; and sums over processes.

After each of them the server answers the next request and holds no memory for the last one.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.float64_oracle import assert_close, matmul, random_array, softmax
from tests.support.live_server import LiveServer
from tests.support.oip_bodies import LENGTH, bad_products, binary_input, from_answer, to_binary, to_text
from tests.support.raw_http import ConnectionEnded, RawConnection, head, post

Raw = Callable[[], RawConnection]

SOFTMAX, MATMUL, ADD = (f"/v2/models/{name}/infer" for name in ("softmax", "matmul", "add"))
X = random_array("float32", (32, 33), 1)
BODY, HEADERS = to_binary({"x": X}, parameters={"binary_data_output": True})
EXPECTED = softmax(X)
# As `tests.support.raw_http` takes headers.
GIVEN = {"inference_header_content_length": HEADERS[LENGTH]}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(client: httpx.Client) -> Iterator[None]:
    yield
    check_softmax(client.post(SOFTMAX, content=BODY, headers=HEADERS))
    assert client.get("/v2/health/ready").status_code == 200
    assert settles(client, is_idle), scrape(client)


def check_softmax(response: httpx.Response) -> None:
    assert response.status_code == 200, response.text
    _, out = from_answer(response.content, response.headers.get(LENGTH))
    assert_close(out, *EXPECTED)


def check_raw(connection: RawConnection) -> None:
    answer = connection.answer()
    assert answer.status == 200, answer.body
    assert_close(from_answer(answer.body, answer.headers[LENGTH.lower()])[1], *EXPECTED)


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_chunked_bodies(raw: Raw, size: int) -> None:
    connection = raw()
    connection.send(head("POST", SOFTMAX, transfer_encoding="chunked", **GIVEN))
    pieces = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    connection.send(b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
    check_raw(connection)


def test_a_chunked_body_that_grows(client: httpx.Client) -> None:
    x = random_array("float32", (1024, 1025), 2)
    body, headers = to_binary({"x": x}, parameters={"binary_data_output": True})
    pieces = (body[at : at + 2**17] for at in range(0, len(body), 2**17))
    response = client.post(SOFTMAX, content=pieces, headers=headers)
    assert_close(from_answer(response.content, response.headers[LENGTH])[1], *softmax(x))


def test_a_compressed_chunked_body(client: httpx.Client) -> None:
    packed = gzip.compress(BODY)
    pieces = (packed[at : at + 100] for at in range(0, len(packed), 100))
    check_softmax(client.post(SOFTMAX, content=pieces, headers={**HEADERS, "content-encoding": "gzip"}))


def test_expect_continue(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", SOFTMAX, content_length=str(len(BODY)), expect="100-continue", **GIVEN))
    assert connection.answer().status == 100
    connection.send(BODY)
    check_raw(connection)


def test_a_refusal_comes_instead_of_continue(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", SOFTMAX, content_length=str(2**40), expect="100-continue", **GIVEN))
    answer = connection.answer()
    assert answer.status == 413
    assert answer.json().keys() == {"error"}


def test_pipelined_requests(raw: Raw) -> None:
    connection = raw()
    connection.send(post(SOFTMAX, BODY, **GIVEN) * 5 + head("GET", "/v2/models/add/ready"))
    for _ in range(5):
        check_raw(connection)
    assert connection.answer().json() == {"name": "add", "ready": True}


def test_a_body_in_small_pieces(raw: Raw) -> None:
    connection = raw()
    whole = post(SOFTMAX, BODY, **GIVEN)
    connection.send(*(whole[at : at + 97] for at in range(0, len(whole), 97)))
    check_raw(connection)


def test_clients_that_leave_half_way(raw: Raw) -> None:
    whole = post(SOFTMAX, BODY, **GIVEN)
    generator = random.Random(1)
    for _ in range(30):
        connection = raw()
        connection.send(whole[: generator.randrange(len(whole))])
        connection.sock.close()


def test_a_broken_chunk_gets_the_protocols_error(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", SOFTMAX, transfer_encoding="chunked", **GIVEN) + b"5\r\nabcde\r\nzz\r\n")
    answer = connection.answer()
    assert answer.status == 400
    assert answer.json().keys() == {"error"}
    with pytest.raises(ConnectionEnded):
        connection.answer()


def test_many_large_compressed_answers_at_once(client: httpx.Client, server: LiveServer) -> None:
    x = np.round(random_array("float32", (256, 1024), 5), 1)
    body, headers = to_binary({"x": x}, parameters={"binary_data_output": True})
    expected = softmax(x)

    def call(number: int) -> None:
        coding = ("gzip", "deflate")[number % 2]
        response = client.post(SOFTMAX, content=body, headers={**headers, "accept-encoding": coding})
        assert response.headers["content-encoding"] == coding
        assert_close(from_answer(response.content, response.headers[LENGTH])[1], *expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(24)))


@pytest.mark.slow
def test_a_full_queue_is_429(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "4MiB", "--max-in-flight", "1")
    with server.client() as client, RawConnection(server.connect()) as first:
        first.send(head("POST", SOFTMAX, content_length="1000", **GIVEN) + b"x")
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
        response = client.post(SOFTMAX, content=BODY, headers=HEADERS)
        assert response.status_code == 429
        assert "queue" in response.json()["error"]
        assert int(response.headers["retry-after"]) >= 1
        assert client.get("/v2/health/ready").status_code == 200
        first.sock.close()
        assert settles(client, is_idle)
        check_softmax(client.post(SOFTMAX, content=BODY, headers=HEADERS))


@pytest.mark.slow
def test_a_stalled_body_is_400(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--body-timeout-s", "0.3")
    with RawConnection(server.connect()) as connection:
        connection.send(head("POST", SOFTMAX, content_length=str(len(BODY)), **GIVEN) + BODY[:100])
        answer = connection.answer()
        assert answer.status == 400
        assert "no byte" in answer.json()["error"]


JOINING = ("--gateways", "1", "--arena-bytes", "64MiB", "--max-queue-delay-us", "100000")

# ── statistics ────────────────────────────────────────────────────────────────────────────────────


def statistics(client: httpx.Client, model: str) -> dict[str, Any]:
    (found,) = client.get(f"/v2/models/{model}/stats").json()["model_stats"]
    assert found["name"] == model
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_statistics_are_summed_over_gateways_and_engines(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--device", "cpu:0,1", "--arena-bytes", "64MiB")
    body, headers = to_binary({"a": X, "b": X})
    began_ms = time.time_ns() // 10**6
    for gateway in server.gateways():
        with RawConnection(server.connect_to(gateway)) as connection:
            for number in range(20):
                connection.send(post(ADD, body, inference_header_content_length=headers[LENGTH]))
                assert connection.answer().status == 200
                if not number % 5:
                    connection.send(post(ADD, b"nonsense"))
                    assert connection.answer().status == 400
    with server.client() as client:
        # Calls of `/v1` are the same model's.
        client.post("/v1/add", json={"a": [1], "b": [2]}).raise_for_status()
        end_s = time.monotonic() + 10
        while (stats := statistics(client, "add"))["inference_count"] < 41 or stats["inference_stats"]["fail"][
            "count"
        ] < 8:
            assert time.monotonic() < end_s, stats
            time.sleep(0.02)
        assert stats["inference_count"] == 41
        assert stats["execution_count"] == sum(one["compute_infer"]["count"] for one in stats["batch_stats"])
        assert sum(one["batch_size"] * one["compute_infer"]["count"] for one in stats["batch_stats"]) == 41
        parts = stats["inference_stats"]
        assert parts.keys() == {
            "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
        }  # fmt: skip
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            assert parts[part]["count"] == 41, part
        assert parts["fail"]["count"] == 8
        assert parts["cache_hit"] == parts["cache_miss"] == {"count": 0, "ns": 0}
        assert parts["success"]["ns"] > parts["compute_infer"]["ns"] + parts["queue"]["ns"] > 0
        assert began_ms <= stats["last_inference"] <= time.time_ns() // 10**6
        assert stats["version"] == "1"
        # Whichever gateway answers, and in every spelling of the call, they are the same.
        for path in ("/v2/models/stats", "/v2/models/add/versions/1/stats"):
            found = [one for one in client.get(path).json()["model_stats"] if one["name"] == "add"]
            assert found == [stats]
        assert statistics(client, "matmul")["inference_count"] == 0
        assert "statistics_" not in client.get("/metrics").text


@pytest.mark.slow
def test_statistics_survive_an_engine(shared_server: StartServer) -> None:
    server = shared_server(*JOINING)
    with server.client() as client:
        check_softmax(client.post(SOFTMAX, content=BODY, headers=HEADERS))
        end_s = time.monotonic() + 10
        while statistics(client, "softmax")["execution_count"] < 1:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        os.kill(server.engines()[0], signal.SIGKILL)
        while (refused := client.get("/v2/models/softmax/ready")).status_code == 200:
            assert time.monotonic() < end_s
        assert refused.status_code == 503
        assert refused.json()["ready"] is False
        assert not client.get("/v2/models/softmax").is_error
        end_s = time.monotonic() + 60
        while client.get("/v2/models/softmax/ready").status_code != 200:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert statistics(client, "softmax")["execution_count"] >= 1
        check_softmax(client.post(SOFTMAX, content=BODY, headers=HEADERS))


def test_requests_share_launches_and_the_statistics_say_so(shared_server: StartServer) -> None:
    server = shared_server(*JOINING)
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        before = statistics(client, "softmax")
        calls = [pool.submit(client.post, SOFTMAX, content=BODY, headers=HEADERS) for _ in range(8)]
        for call in calls:
            check_softmax(call.result())
        end_s = time.monotonic() + 10
        while (stats := statistics(client, "softmax"))["inference_count"] < before["inference_count"] + 8:
            assert time.monotonic() < end_s, stats
            time.sleep(0.02)
        assert stats["execution_count"] < before["execution_count"] + 8
        assert max(one["batch_size"] for one in stats["batch_stats"]) > 1


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_body_over_two_gibibytes(start_server: StartServer) -> None:
    """Two vectors of 1.1 GiB to one number: lengths of 64 bits all the way."""
    server = start_server("--gateways", "1", "--arena-bytes", "3GiB", "--max-body-bytes", "3GiB")
    k = 9 * 2**25
    kind = {"datatype": "FP32", "parameters": {"binary_data_size": 4 * k}}
    document = {"inputs": [{"name": "a", "shape": [1, k], **kind}, {"name": "b", "shape": [k, 1], **kind}]}
    header = json.dumps(document).encode()
    assert len(header) + 8 * k > 2**31
    # Pages of zeros that take no memory, but for one number at the end of each vector.
    with mmap.mmap(-1, 4 * k) as vector, RawConnection(server.connect(120)) as connection:
        vector[-4:] = np.float32(3).tobytes()
        length = str(len(header) + 8 * k)
        connection.send(head("POST", MATMUL, content_length=length, inference_header_content_length=str(len(header))))
        connection.send(header, vector, vector)  # type: ignore[arg-type]
        answer = connection.answer()
        assert answer.status == 200, answer.body
        _, out = from_answer(answer.body, None)
        assert out.tolist() == [[9.0]]


def test_many_shapes_in_a_row(client: httpx.Client) -> None:
    for rows in range(1, 40):
        arrays = {"a": random_array("float32", (rows, rows + 3), rows), "b": random_array("float32", (rows + 3, 5), 1)}
        body, headers = to_binary(arrays)
        response = client.post(MATMUL, content=body, headers=headers)
        assert_close(from_answer(response.content, response.headers.get(LENGTH))[1], *matmul(arrays, {}))


@pytest.mark.slow
def test_bad_requests_leave_no_memory_behind(shared_server: StartServer) -> None:
    server = shared_server(*JOINING)
    (gateway,) = server.gateways()
    bombs = {"bomb": (gzip.compress(bytes(2**29)), {"content-encoding": "gzip", LENGTH: "0"})}
    with server.client() as client:

        def storm(times: int) -> None:
            for _ in range(times):
                for body, headers in {**bad_products(), **bombs}.values():
                    response = client.post(MATMUL, content=body, headers=headers)
                    assert response.status_code in (400, 413)
                    assert response.json().keys() == {"error"}
                assert client.get("/v2/health/live").status_code == 200

        storm(2)
        before = private_bytes(gateway)
        storm(8)
        assert settles(client, is_idle)
        assert private_bytes(gateway) - before < 16 * 2**20


def private_bytes(pid: int) -> int:
    """Memory of a process that is no file's and no arena's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_inputs_of_odd_lengths_in_odd_places(client: httpx.Client) -> None:
    """Headers of every length modulo 64, and a second input behind a first one of one byte."""
    a, b = random_array("int8", (1, 1), 1), random_array("int8", (1, 9), 2)
    for pad in range(0, 64, 3):
        document = {"id": "x" * (pad + 1), "inputs": [binary_input("a", a), binary_input("b", b)]}
        header = json.dumps(document).encode()
        response = client.post(MATMUL, content=header + a.tobytes() + b.tobytes(), headers={LENGTH: str(len(header))})
        _, out = from_answer(response.content, response.headers.get(LENGTH))
        np.testing.assert_array_equal(out, a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.slow
def test_text_near_the_limit(client: httpx.Client) -> None:
    x = np.ones(10**6, np.float32)
    response = client.post(SOFTMAX, content=to_text({"x": x}))
    assert response.status_code == 200
    np.testing.assert_allclose(from_answer(response.content, None)[1], 1e-6, rtol=1e-4)
