"""Repeated requests to whole servers: real engines, several gateways, keys, TLS, drains, logs, spans and metrics."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest

import tilewire
from tests.conftest import StartServer
from tests.support.api_keys import entry, keys_file
from tests.support.collector import Collector, attributes_of
from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.float64_oracle import random_array
from tests.support.live_server import LiveServer, held, serving
from tests.support.raw_http import Answer, RawConnection, post
from tests.support.tensor_bodies import TYPES, decode, encode, from_safetensors, to_npy, to_safetensors
from tests.support.tls_server import make_certificates

FLAGS = ("--gateways", "1", "--arena-bytes", "16MiB")
VARYING = ("date", "x-request-id", "server-timing")
REQUESTS = "tilewire_requests_total"

W = random_array("float32", (16, 8), 1)
X = random_array("float32", (4, 16), 2)
SENT = post("/v1/matmul?b=@w", to_npy(X))
KEY = "tw_repeated"


@pytest.fixture(scope="module")
def repeated_server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One gateway that tells everything; its resident `w` stays."""
    told = ("--access-log", "--log-format", "json", "--otlp-endpoint", collector.url, "--trace-ratio", "1")
    with serving(tmp_path_factory.mktemp("repeated") / "log", *FLAGS, *told) as server:
        with server.client() as client:
            put(client, "w", W)
        yield server


@pytest.fixture
def repeated_client(repeated_server: LiveServer) -> Iterator[httpx.Client]:
    with repeated_server.client() as client:
        yield client
        assert settles(client, is_idle), scrape(client)


def put(client: httpx.Client, name: str, array: np.ndarray[Any, np.dtype[Any]], **headers: str) -> None:
    response = client.put(f"/v1/tensors/{name}", content=to_safetensors({name: array}), headers=headers)
    assert response.status_code in (200, 201)


def ask(connection: RawConnection, sent: bytes) -> Answer:
    connection.send(sent)
    return connection.answer()


def fixed(answer: Answer) -> tuple[int, list[str], dict[str, str], bytes]:
    """An answer without what differs each time; the order of its headers belongs to it."""
    kept = {name: value for name, value in answer.headers.items() if name not in VARYING}
    return answer.status, list(answer.headers), kept, answer.body


OPERANDS = [
    ("matmul", form, dtype, is_resident)
    for form, dtypes in (
        ("safetensors", ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn")),
        ("npy", ("float16", "float32", "int8")),
        ("npz", ("float32",)),
        ("json", ("float32",)),
    )
    for dtype in dtypes
    for is_resident in (True, False)
    if is_resident or form != "npy"
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "form", "dtype", "is_resident"), [*OPERANDS, ("softmax", "npy", "float32", False)])
def test_the_answers_are_those_of_fresh_connections(
    repeated_server: LiveServer, repeated_client: httpx.Client, op: str, form: str, dtype: str, is_resident: bool
) -> None:
    a, b = random_array(dtype, (4, 16), 3), random_array(dtype, (16, 8), 4)
    if op == "softmax":
        arrays, target = {"x": a}, "/v1/softmax"
    elif is_resident:
        put(repeated_client, "operand", b)
        arrays, target = {"a": a}, "/v1/matmul?b=@operand"
    else:
        arrays, target = {"a": a, "b": b}, "/v1/matmul"
    if form == "npy" and dtype == "int8":
        target += "&out_dtype=float32"
    body, headers = encode(form, arrays)
    sent = post(target, body, content_type=headers["content-type"])
    with RawConnection(repeated_server.connect()) as fresh:
        expected = fixed(ask(fresh, sent))
    # int32 and bfloat16 results of int8 and float8 too, each in the format of its body.
    assert expected[0] == 200
    with RawConnection(repeated_server.connect()) as connection:
        for _ in range(7):
            assert fixed(ask(connection, sent)) == expected


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_bodies_from_small_to_many_reads(repeated_server: LiveServer, repeated_client: httpx.Client, rows: int) -> None:
    weight = random_array("float32", (512, 512), 5)
    put(repeated_client, "wide", weight)
    with RawConnection(repeated_server.connect()) as connection:
        for seed in range(8):
            x = random_array("float32", (rows, 512), seed)
            answer = ask(connection, post("/v1/matmul?b=@wide", to_npy(x)))
            expected = x.astype(np.float64) @ weight.astype(np.float64)
            np.testing.assert_allclose(decode(TYPES["npy"], answer.body), expected, rtol=1e-3, atol=1e-3)


def test_ordinary_clients(repeated_client: httpx.Client) -> None:
    """httpx sends head and body apart."""
    with httpx.Client(base_url=repeated_client.base_url, trust_env=False) as client:
        for seed in range(10):
            x = random_array("float32", (4, 16), seed)
            response = client.post("/v1/matmul?b=@w", content=to_npy(x))
            expected = x.astype(np.float64) @ W.astype(np.float64)
            np.testing.assert_allclose(decode(TYPES["npy"], response.content), expected, rtol=1e-4, atol=1e-4)


def test_our_own_client(repeated_server: LiveServer, repeated_client: httpx.Client) -> None:
    with tilewire.Client(repeated_server.url) as client:
        for number in range(6):
            np.testing.assert_array_equal(client.add(X * number, X, alpha=2), X * number + 2 * X)


def test_each_request_is_counted_logged_and_traced_once(
    repeated_server: LiveServer, repeated_client: httpx.Client, collector: Collector
) -> None:
    before = scrape(repeated_client)
    with RawConnection(repeated_server.connect()) as connection:
        answers = [ask(connection, SENT) for _ in range(10)]
    after_requests = total(before, REQUESTS, op="matmul", code="200") + 10
    assert settles(repeated_client, lambda now: total(now, REQUESTS, op="matmul", code="200") == after_requests)
    after = scrape(repeated_client)

    def gained(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert gained("tilewire_request_duration_seconds_count", op="matmul") == 10
    assert gained("tilewire_stage_duration_seconds_count", op="matmul", stage="receive") == 10
    assert gained("tilewire_stage_duration_seconds_count", op="matmul", stage="send") == 10
    assert gained("tilewire_request_bytes_total", op="matmul") == 10 * len(to_npy(X))
    assert gained("tilewire_response_bytes_total", op="matmul") == 10 * len(answers[0].body)
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 10
    lines = [json.loads(line) for line in repeated_server.log.read_text().splitlines() if line.startswith("{")]
    first, last = ([line for line in lines if line.get("request_id") == one] for one in (ids[0], ids[-1]))
    assert len(first) == len(last) == 1
    assert first[0].keys() == last[0].keys()
    for field in ("method", "path", "op", "status", "received_bytes", "sent_bytes"):
        assert first[0][field] == last[0][field]
    spans = [collector.trace(one) for one in (ids[0], ids[-1])]
    assert [[span.name for span in trace] for trace in spans] == [[span.name for span in spans[0]]] * 2
    assert {"receive", "kernel", "send"} <= {span.name for span in spans[1]}
    assert attributes_of(spans[0][0]).keys() == attributes_of(spans[1][0]).keys()


def test_statistics_of_the_protocol_count_repeated_requests(
    repeated_server: LiveServer, repeated_client: httpx.Client
) -> None:
    def success() -> dict[str, int]:
        (stats,) = repeated_client.get("/v2/models/matmul/stats").json()["model_stats"]
        return dict(stats["inference_stats"]["success"])

    before = success()
    with RawConnection(repeated_server.connect()) as connection:
        for _ in range(5):
            assert ask(connection, SENT).status == 200
    end_s = time.monotonic() + 10
    while success()["count"] != before["count"] + 5:
        assert time.monotonic() < end_s
    assert success()["ns"] > before["ns"]


@pytest.mark.slow
def test_a_resident_that_another_gateway_replaces_or_deletes(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", "16MiB")
    one, other = server.gateways()
    with (
        RawConnection(server.connect_to(one)) as connection,
        RawConnection(server.connect_to(other)) as changer,
        server.client() as client,
    ):
        for shape in ((16, 8), (16, 8), (16, 3), (2, 16, 5)):
            weight = random_array("float32", shape, 6)
            body = to_safetensors({"w": weight})
            changer.send(post("/v1/tensors/w", body).replace(b"POST", b"PUT", 1))
            assert changer.answer().status in (200, 201)
            for _ in range(5):
                expected = X.astype(np.float64) @ weight.astype(np.float64)
                got = decode(TYPES["npy"], ask(connection, SENT).body)
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        changer.send(b"DELETE /v1/tensors/w HTTP/1.1\r\nhost: tests\r\n\r\n")
        assert changer.answer().status == 204
        for _ in range(3):
            answer = ask(connection, SENT)
            assert answer.status == 404
            assert answer.json()["detail"].startswith("b: no resident tensor 'w'")
        assert settles(client, is_idle)


@pytest.mark.slow
def test_a_program_that_another_gateway_replaces_along_with_what_it_reads(start_server: StartServer) -> None:
    """A gateway that has run the one before would look for what that read, and nobody has it any more."""
    server = start_server("--gateways", "2", "--arena-bytes", "16MiB")
    one, other = server.gateways()
    with RawConnection(server.connect_to(one)) as connection, RawConnection(server.connect_to(other)) as changer:

        def change(method: str, target: str, body: bytes, content_type: str = TYPES["safetensors"]) -> int:
            changer.send(post(target, body, content_type=content_type).replace(b"POST", method.encode(), 1))
            return changer.answer().status

        for number in range(1, 4):
            assert change("PUT", f"/v1/tensors/w{number}", to_safetensors({"w": number * W})) == 201
            step = {"op": "matmul", "inputs": {"a": "x", "b": f"@w{number}"}, "as": "y"}
            text = {"inputs": {"x": {"dtype": "float32", "shape": [-1, len(W)]}}, "steps": [step], "outputs": ["y"]}
            kept = change("PUT", "/v1/programs/net", json.dumps(text).encode(), "application/json")
            assert kept == (201 if number == 1 else 200)
            if number > 1:
                assert change("DELETE", f"/v1/tensors/w{number - 1}", b"") == 204
            for _ in range(3):
                answer = ask(connection, post("/v1/programs/net", to_npy(X), content_type=TYPES["npy"]))
                assert answer.status == 200, answer.body
                got = decode(TYPES["npy"], answer.body)
                np.testing.assert_allclose(got, number * (X.astype(np.float64) @ W), rtol=1e-4, atol=1e-4)
        assert change("DELETE", "/v1/tensors/w3", b"") == 204
        answer = ask(connection, post("/v1/programs/net", to_npy(X), content_type=TYPES["npy"]))
        assert answer.status == 404
        assert "@w3" in answer.json()["detail"]


@pytest.mark.slow
def test_a_key_that_is_taken_out_or_may_less(start_server: StartServer, tmp_path: Path) -> None:
    everything = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'
    path = keys_file(tmp_path, entry("repeated", KEY, everything))
    server = start_server(*FLAGS, "--api-keys-file", str(path), "--keyless", "metrics")
    sent = post("/v1/matmul?b=@w", to_npy(X), x_api_key=KEY)

    def asks_until(connection: RawConnection, status: int) -> Answer:
        end_s = time.monotonic() + 20
        while (answer := ask(connection, sent)).status != status:
            assert answer.status == 200
            assert time.monotonic() < end_s
        return answer

    with server.client() as client, RawConnection(server.connect()) as connection:
        put(client, "w", W, **{"x-api-key": KEY})
        for _ in range(4):
            assert ask(connection, sent).status == 200
        keys_file(tmp_path, entry("repeated", KEY, 'ops = ["*"]\nread = ["other/*"]'))
        assert "may not read" in asks_until(connection, 403).json()["detail"]
        keys_file(tmp_path, entry("repeated", KEY, everything))
        end_s = time.monotonic() + 20
        while ask(connection, sent).status == 403:
            assert time.monotonic() < end_s
        keys_file(tmp_path)
        assert asks_until(connection, 401).headers["www-authenticate"]


@pytest.mark.slow
def test_a_quota_that_is_used_up(start_server: StartServer, tmp_path: Path) -> None:
    quota = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]\nrequests_per_s = 6'
    path = keys_file(tmp_path, entry("few", KEY, quota), entry("admin", "tw_admin", 'ops = ["*"]\nwrite = ["*"]'))
    server = start_server(*FLAGS, "--api-keys-file", str(path), "--keyless", "metrics")
    sent = post("/v1/matmul?b=@w", to_npy(X), x_api_key=KEY)
    with server.client() as client, RawConnection(server.connect()) as connection:
        put(client, "w", W, **{"x-api-key": "tw_admin"})
        before_s = time.monotonic()
        statuses = [ask(connection, sent).status for _ in range(12)]
        # A machine that takes a second for these has refused none yet.
        while 429 not in statuses and len(statuses) < 100:
            statuses.append(ask(connection, sent).status)
        took_s = time.monotonic() - before_s
        assert statuses[:5] == [200] * 5
        assert set(statuses) == {200, 429}
        # A burst of a second, and what came meanwhile.
        assert statuses.count(200) <= 6 * (1 + took_s) + 1
        assert settles(client, lambda now: total(now, "tilewire_key_requests_total", key="few") == len(statuses))
        assert total(scrape(client), "tilewire_rejected_total", reason="over_quota") == statuses.count(429)


@pytest.mark.slow
def test_over_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with (
        serving(tmp_path / "log", *FLAGS, *certificates.flags, tls=certificates.context()) as server,
        server.client() as client,
    ):
        for rows in (4, 900):
            sent = post("/v1/softmax", to_npy(random_array("float32", (rows, 64), 7)))
            with RawConnection(server.connect()) as connection:
                answers = [ask(connection, sent) for _ in range(6)]
            assert [fixed(answer) for answer in answers] == [fixed(answers[0])] * 6
            assert answers[0].status == 200
        assert settles(client, is_idle)


@pytest.mark.slow
def test_an_engine_that_dies_with_a_request(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    (engine,) = server.engines()
    with server.client() as client, RawConnection(server.connect()) as connection:
        put(client, "w", W)
        for _ in range(4):
            assert ask(connection, SENT).status == 200
        with held([engine]):
            connection.send(SENT)
            assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
            os.kill(engine, signal.SIGKILL)
            answer = connection.answer()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        end_s = time.monotonic() + 60
        while ask(connection, SENT).status != 200:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert settles(client, is_idle)


def test_a_client_that_leaves_with_a_request(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    (engine,) = server.engines()
    with server.client() as client:
        put(client, "w", W)
        num_requests = total(scrape(client), REQUESTS, op="matmul")
        with RawConnection(server.connect()) as connection:
            for _ in range(4):
                assert ask(connection, SENT).status == 200
            with held([engine]):
                connection.send(SENT)
                assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
                connection.sock.close()
                # It is noticed while the engine has its slots.
                assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") > 0)
        assert settles(client, lambda now: total(now, REQUESTS, op="matmul") == num_requests + 5)
        assert settles(client, is_idle)


@pytest.mark.slow
def test_a_drain_loses_no_request(start_server: StartServer) -> None:
    server = start_server(*FLAGS)
    statuses: list[int] = []
    with server.client() as client:
        put(client, "w", W)
    with RawConnection(server.connect()) as connection:
        for _ in range(4):
            assert ask(connection, SENT).status == 200

        def ask_on() -> None:
            while not statuses or statuses[-1] == 200:
                answer = ask(connection, SENT)
                statuses.append(answer.status)
                if "connection" in answer.headers:
                    return

        asking = Thread(target=ask_on)
        asking.start()
        time.sleep(0.1)
        server.terminate()
        asking.join(30)
        assert not asking.is_alive()
        assert statuses[-1] in (200, 503)
        assert set(statuses[:-1]) == {200}


def test_answers_of_the_other_format(repeated_server: LiveServer, repeated_client: httpx.Client) -> None:
    sent = post("/v1/matmul?b=@w", to_npy(X), accept=TYPES["safetensors"])
    with RawConnection(repeated_server.connect()) as connection:
        for _ in range(4):
            answer = ask(connection, sent)
            assert answer.headers["content-type"] == TYPES["safetensors"]
            (out,) = from_safetensors(answer.body).values()
            np.testing.assert_allclose(out, X.astype(np.float64) @ W.astype(np.float64), rtol=1e-4, atol=1e-4)
