"""Draining, dying and coming back: what clients see when processes end, in order or not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import Scrape, is_idle, scrape, settles, total
from tests.support.float64_oracle import random_array
from tests.support.live_server import POLL_S, START_TIMEOUT_S, LiveServer, held, serving
from tests.support.raw_http import ConnectionEnded, RawConnection, head, post
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors

TENSOR = to_npy(np.ones((4, 4), np.float32))
TENSOR_A = to_safetensors({"a": np.ones((4, 4), np.float32)})
ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
PLAIN = ("--gateways", "1", "--arena-bytes", "16MiB")
# For what a server takes before requests come.
FRESH = ("--gateways", "2", "--arena-bytes", "256MiB")


def wait_for_status(server: LiveServer, path: str, status: int) -> httpx.Response:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        with server.client() as client:
            response = client.get(path)
        if response.status_code == status:
            return response
        time.sleep(POLL_S)
    raise AssertionError(f"{path} never answered {status}:\n{server.log.read_text()}")


# ── drain ─────────────────────────────────────────────────────────────────────────────────────────


def load(server: LiveServer, is_ending: threading.Event) -> tuple[Counter[int], list[str]]:
    """Posts on one keep-alive connection until the server closes it; returns the answers and what was no answer."""
    statuses: Counter[int] = Counter()
    with RawConnection(server.connect()) as connection:
        for _ in range(20_000):
            try:
                connection.send(post("/v1/matmul", ONES))
            except (BrokenPipeError, ConnectionResetError):
                return statuses, []
            try:
                answer = connection.answer()
            except (ConnectionEnded, ConnectionResetError) as error:
                # The door closed before this request was read: nothing of an answer may have come.
                is_cut = isinstance(error, ConnectionEnded) and error.args[0] != b""
                is_early = not is_ending.is_set()
                return statuses, [f"cut: {error}"] if is_cut or is_early else []
            statuses[answer.status] += 1
            if answer.status == 200:
                (out,) = from_safetensors(answer.body).values()
                assert np.all(out == 4)
            else:
                assert answer.status == 503
                assert answer.headers["content-type"] == "application/problem+json"
                assert "retry-after" in answer.headers
            if answer.headers.get("connection") == "close":
                return statuses, []
    return statuses, ["never told to go"]


def test_sigterm_under_load_answers_what_was_accepted(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", "16MiB")
    is_ending = threading.Event()
    with ThreadPoolExecutor(24) as pool:
        loads = [pool.submit(load, server, is_ending) for _ in range(24)]
        with server.client() as client:
            assert settles(client, lambda now: total(now, "tilewire_requests_total", code="200") > 200)
        is_ending.set()
        assert server.stop() == 0
        outcomes = [one.result() for one in loads]
    assert [reason for _, reasons in outcomes for reason in reasons] == []
    answered = sum((statuses for statuses, _ in outcomes), Counter())
    assert answered[200] > 200


@pytest.mark.slow
def test_a_body_under_way_at_sigterm_is_still_answered(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB")
    with RawConnection(server.connect()) as slow, RawConnection(server.connect()) as late:
        late.send(head("GET", "/readyz"))
        assert late.answer().status == 200
        slow.send(head("POST", "/v1/matmul", content_length=str(len(ONES))) + ONES[:50])
        with server.client() as client:
            assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
        server.terminate()
        is_draining = False
        for _ in range(1000):
            late.send(head("GET", "/readyz"))
            answer = late.answer()
            if answer.status == 503:
                is_draining = True
                break
            time.sleep(POLL_S)
        assert is_draining
        assert "retry-after" in answer.headers
        slow.send(ONES[50:])
        answer = slow.answer()
        assert answer.status == 200
        assert answer.headers["connection"] == "close"
    assert server.stop() == 0


@pytest.mark.slow
def test_a_large_answer_under_way_at_sigterm_arrives_whole(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "64MiB")
    x = random_array("float32", (2**22,))
    with RawConnection(server.connect()) as connection:
        connection.send(post("/v1/add", to_safetensors({"a": x, "b": np.zeros(1, np.float32)})))
        # The answer has begun, and most of it waits in the server.
        connection.sock.recv(1)
        server.terminate()
        received = 1
        while piece := connection.sock.recv(2**20):
            received += len(piece)
    assert received > x.nbytes
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "closed-terminal"])
def test_other_signals_drain_too(tmp_path: Path, number: signal.Signals) -> None:
    # These tests may run where it is ignored.
    with serving(tmp_path / "log", *PLAIN, before=("env", f"--default-signal={number.name}")) as server:
        server.terminate(number)
    assert "draining" in server.log.read_text()


@pytest.mark.slow
def test_a_drain_while_a_gateway_is_to_be_started_again_is_clean(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", "16MiB")
    os.kill(server.gateways()[0], signal.SIGKILL)
    end_s = time.monotonic() + START_TIMEOUT_S
    while "a process died" not in server.log.read_text():
        assert time.monotonic() < end_s
    assert server.stop() == 0


@pytest.mark.slow
def test_descriptors_that_are_few_are_left_for_the_next_engine(tmp_path: Path) -> None:
    region = {"key": "/tilewire-few", "offset": 0, "byte_size": 64}
    Path("/dev/shm/tilewire-few").write_bytes(bytes(64))
    before = ("prlimit", "--nofile=256:256")
    try:
        with serving(tmp_path / "log", *PLAIN, "--allow-shared-memory", before=before) as server:
            with server.client() as client:
                uploads = [client.put(f"/v1/tensors/t{number}", content=TENSOR).status_code for number in range(150)]
                regions = [
                    client.post(f"/v2/systemsharedmemory/region/r{number}/register", json=region).status_code
                    for number in range(40)
                ]
            (engine,) = server.engines()[:1]
            os.kill(engine, signal.SIGKILL)
            wait_for_status(server, "/readyz", 503)
            wait_for_status(server, "/readyz", 200)
            with server.client() as client:
                assert len(client.get("/v1/tensors").json()) == uploads.count(201)
                assert len(client.get("/v2/systemsharedmemory/status").json()) == regions.count(200)
                assert client.post("/v1/matmul?b=@t1", content=TENSOR_A).status_code == 200
    finally:
        Path("/dev/shm/tilewire-few").unlink()
    assert sorted(set(uploads)) == [201, 507]
    assert sorted(set(regions)) == [200, 422]
    assert uploads.count(201) > 64
    assert regions.count(200) >= 16


@pytest.mark.slow
def test_an_engine_that_does_not_end_is_killed_and_named(tmp_path: Path) -> None:
    """After the drain's own time, and not after the silence that ends one which serves."""
    server = LiveServer(tmp_path / "log", *PLAIN, "--engine-timeout-s", "3")
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)
    assert server.stop() == 1
    (line,) = (line for line in server.log.read_text().splitlines() if "a process does not end" in line)
    assert "name=engine-0" in line
    assert "timeout_s=5.0" in line


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_server_and_it_can_be_started_again_at_once(tmp_path: Path) -> None:
    """Even while a client of the old one has sent half a body, which would have a drain's time-out to come."""
    flags = ("--gateways", "2", "--arena-bytes", "16MiB")
    killed = LiveServer(tmp_path / "killed", *flags)
    children = killed.gateways() + killed.engines()
    assert len(children) == 3
    with RawConnection(killed.connect()) as slow:
        slow.send(head("POST", "/v1/matmul", content_length=str(len(ONES))) + ONES[:50])
        with killed.client() as client:
            assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
        killed.process.kill()
        killed.process.wait()
        assert killed.process.stdout is not None
        killed.process.stdout.close()
        with serving(tmp_path / "next", *flags, "--port", str(killed.port)) as server, server.client() as client:
            assert server.port == killed.port
            assert client.post("/v1/matmul", content=ONES).status_code == 200
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s and any(is_running(pid) for pid in children):
            time.sleep(POLL_S)
        assert not any(is_running(pid) for pid in children)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] != "Z"


# ── death ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def preloaded(shared_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Two gateways, and three residents from a file."""
    folder = tmp_path_factory.mktemp("tensors")
    names = ("kept", "deleted", "changed")
    (folder / "file.safetensors").write_bytes(to_safetensors({name: np.ones(3, np.float32) for name in names}))
    return shared_server("--gateways", "2", "--arena-bytes", "16MiB", "--tensors-dir", str(folder))


@pytest.mark.slow
def test_a_killed_gateway_is_replaced_and_others_do_not_notice(preloaded: LiveServer) -> None:
    server = preloaded
    victim, other = server.gateways()
    with RawConnection(server.connect_to(other)) as connection, RawConnection(server.connect_to(victim)) as doomed:
        body = to_npy(np.ones(4))
        connection.send(head("PUT", "/v1/tensors/noticed", content_length=str(len(body))) + body)
        assert connection.answer().status == 201
        os.kill(victim, signal.SIGKILL)
        assert doomed.is_closed()
        for _ in range(50):
            connection.send(post("/v1/matmul", ONES))
            assert connection.answer().status == 200
    end_s = time.monotonic() + START_TIMEOUT_S
    while len(server.gateways()) < 2 and time.monotonic() < end_s:
        time.sleep(POLL_S)
    replaced = server.gateways()
    assert len(replaced) == 2
    assert victim not in replaced
    for pid in replaced:
        server.wait_ready(pid)
    with server.client() as client:
        assert client.delete("/v1/tensors/noticed").status_code == 204
        assert settles(client, is_idle), scrape(client)
        # A dead gateway's arena is no longer counted.
        assert total(scrape(client), "tilewire_arena_bytes") == 16 * 2**20


@pytest.mark.slow
def test_no_connection_reaches_a_gateway_that_is_not_ready_while_others_are(start_server: StartServer) -> None:
    server = start_server("--gateways", "3", "--arena-bytes", "48MiB")
    statuses: Counter[int] = Counter()
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            # Those of the gateway that is killed break.
            with contextlib.suppress(OSError, ConnectionEnded), RawConnection(server.connect()) as connection:
                connection.send(post("/v1/matmul", ONES))
                statuses[connection.answer().status] += 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        victim = server.gateways()[0]
        os.kill(victim, signal.SIGKILL)
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s and (len(replaced := server.gateways()) < 3 or victim in replaced):
            time.sleep(POLL_S)
        for pid in replaced:
            server.wait_ready(pid)
    is_over.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}, statuses


def test_a_killed_engine_comes_back_with_its_residents(preloaded: LiveServer) -> None:
    server = preloaded
    weight = random_array("float32", (5, 6), 3)
    half = random_array("bfloat16", (3, 2), 4)
    with server.client() as client:
        assert total(scrape(client), "tilewire_engine_restarts_total") == 0
        client.put("/v1/tensors/w", content=to_npy(np.zeros((9, 9), np.float32)))
        client.put("/v1/tensors/w", content=to_npy(np.asfortranarray(weight)))
        client.put("/v1/tensors/half", content=to_safetensors({"x": half}))
        client.put("/v1/tensors/short-lived", content=to_npy(weight))
        client.put("/v1/tensors/file/changed", content=to_npy(np.zeros(3, np.float32)))
        assert client.delete("/v1/tensors/short-lived").status_code == 204
        assert client.delete("/v1/tensors/file/deleted").status_code == 204
        before = {one["name"]: one for one in client.get("/v1/tensors").json()}
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        response = wait_for_status(server, "/readyz", 503)
        assert "retry-after" in response.headers
        assert response.json()["ready"] is False
        assert client.get("/healthz").status_code == 200
        response = client.post("/v1/matmul", content=ONES)
        if response.status_code != 200:
            assert response.status_code == 503
            assert response.headers["content-type"] == "application/problem+json"
            assert int(response.headers["retry-after"]) >= 1
        wait_for_status(server, "/readyz", 200)
    for pid in server.gateways():
        server.wait_ready(pid)
    with server.client() as client:
        after = {one["name"]: one for one in client.get("/v1/tensors").json()}
        assert after.keys() == before.keys() == {"w", "half", "file/kept", "file/changed"}
        assert all(after[name]["shape"] == before[name]["shape"] for name in after)
        (got,) = from_safetensors(client.get("/v1/tensors/w").content).values()
        np.testing.assert_array_equal(got, weight)
        (got,) = from_safetensors(client.get("/v1/tensors/half").content).values()
        assert got.tobytes() == half.tobytes()
        (got,) = from_safetensors(client.get("/v1/tensors/file/changed").content).values()
        np.testing.assert_array_equal(got, np.zeros(3, np.float32))
        now = scrape(client)
        assert total(now, "tilewire_engine_restarts_total", device="cpu") == 1
        assert total(now, "tilewire_engine_up", device="cpu") == 1
        assert total(now, "tilewire_resident_tensors") == 4
        assert client.post("/v1/matmul", content=ONES).status_code == 200
        assert settles(client, is_idle), scrape(client)


@pytest.mark.slow
@pytest.mark.alone
def test_a_spare_engine_takes_over_at_once(start_server: StartServer) -> None:
    """Most of a start is importing torch, which the spare one has done."""
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--spare-engine")
    body = to_npy(np.arange(4, dtype=np.float32))
    with server.client() as client:
        for number in range(300):
            assert client.put(f"/v1/tensors/{number}", content=body).status_code == 201
        for _ in range(2):
            end_s = time.monotonic() + START_TIMEOUT_S
            # The older one serves.
            while len(server.engines()) < 2 or not is_waiting(max(server.engines(), key=started)):
                assert time.monotonic() < end_s
                time.sleep(POLL_S)
            engine, spare = sorted(server.engines(), key=started)
            os.kill(engine, signal.SIGKILL)
            began_s = time.monotonic()
            while client.get("/readyz").status_code == 200:
                assert time.monotonic() < end_s
            wait_for_status(server, "/readyz", 200)
            took_s = time.monotonic() - began_s
            print(f"ready again after {took_s:.2f} s")
            assert took_s < 2
            assert spare in server.engines()
            for number in range(300):
                assert client.head(f"/v1/tensors/{number}").status_code == 200
        assert client.post("/v1/matmul", content=ONES).status_code == 200


def started(pid: int) -> int:
    """When a process was started, in the system's ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])


def is_waiting(pid: int) -> bool:
    """Whether an engine process has imported torch and does nothing for a moment."""
    if "libtorch_python" not in Path(f"/proc/{pid}/maps").read_text():
        return False
    times = set()
    for _ in range(20):
        times.add(tuple(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]))
        time.sleep(POLL_S)
    return len(times) == 1


@pytest.mark.slow
def test_requests_in_a_dying_engine_are_answered_503(shared_server: StartServer) -> None:
    server = shared_server(*PLAIN)
    (engine,) = server.engines()
    with RawConnection(server.connect()) as connection, server.client() as client:
        with held([engine]):
            connection.send(post("/v1/matmul", ONES))
            assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
            os.kill(engine, signal.SIGKILL)
            answer = connection.answer()
        assert answer.status == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert "retry-after" in answer.headers
        wait_for_status(server, "/readyz", 200)
        connection.send(post("/v1/matmul", ONES))
        assert connection.answer().status == 200
        assert settles(client, is_idle)


def test_a_deadline_that_passes_in_the_queue_is_504_and_never_computed(shared_server: StartServer) -> None:
    server = shared_server(*PLAIN)
    (engine,) = server.engines()
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        num_flops = total(scrape(client), "tilewire_flops_total", op="add")
        for headers, query in (
            ({"x-timeout-ms": "30"}, ""),
            ({}, "?timeout_ms=30"),
            ({"x-timeout-ms": "60000"}, "?timeout_ms=30"),
        ):
            before = scrape(client)
            with held([engine]):
                answer: Future[httpx.Response] = pool.submit(
                    httpx.post,
                    f"{server.url}/v1/add{query}",
                    content=ONES,
                    headers=headers,
                    trust_env=False,
                    timeout=60,
                )
                assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
                time.sleep(0.05)  # The deadline itself: nothing else ends it.
            response = answer.result()
            assert response.status_code == 504, response.text
            assert response.json()["title"] == "Deadline passed"
            expired = 1 + total(before, "tilewire_requests_total", op="add", code="504")
            assert settles(client, partial(counts_504, expired))
        # A job that is computed after them is the only one that was.
        response = client.post("/v1/add", content=ONES, headers={"x-timeout-ms": "60000"})
        assert response.status_code == 200
        assert settles(client, lambda now: total(now, "tilewire_flops_total", op="add") == num_flops + 16)


def test_a_hung_engine_keeps_no_deadline_and_keeps_its_slots(shared_server: StartServer) -> None:
    server = shared_server(*PLAIN)
    (engine,) = server.engines()
    with server.client() as client:
        with held([engine]):
            began_s = time.monotonic()
            response = client.post("/v1/matmul?timeout_ms=500", content=ONES)
            assert 0.5 <= time.monotonic() - began_s < 5
            assert response.status_code == 504, response.text
            assert response.json()["title"] == "Deadline passed"
            now = scrape(client)
            assert total(now, "tilewire_arena_bytes", state="used") > 0
            assert total(now, "tilewire_in_flight_requests") == 1
        assert settles(client, is_idle)
        assert client.post("/v1/matmul", content=ONES).status_code == 200


@pytest.mark.slow
def test_a_hung_engine_is_replaced(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--engine-timeout-s", "1.5")
    (engine,) = server.engines()
    with RawConnection(server.connect()) as waits, server.client() as client:
        assert client.put("/v1/tensors/w", content=to_npy(np.ones(4))).status_code == 201
        with held([engine]):
            waits.send(post("/v1/matmul", ONES))
            assert waits.answer().status == 503
        wait_for_status(server, "/readyz", 200)
        assert server.engines() != [engine]
        assert client.head("/v1/tensors/w").status_code == 200
        assert client.post("/v1/matmul", content=ONES).status_code == 200
    assert "a process hangs: it is ended" in server.log.read_text()


@pytest.mark.slow
def test_a_hung_gateway_is_replaced_and_a_suspended_service_is_not(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--engine-timeout-s", "1")
    (engine,), (gateway,) = server.engines(), server.gateways()
    with held([server.process.pid, engine, gateway]):
        time.sleep(2.5)  # The silence itself, as of a machine that sleeps: nothing else ends it.
    with server.client() as client:
        assert client.post("/v1/matmul", content=ONES).status_code == 200
    with RawConnection(server.connect()) as its_own:
        its_own.send(head("GET", "/readyz"))
        assert its_own.answer().status == 200
        with held([gateway]), RawConnection(server.connect()) as waits:
            its_own.send(post("/v1/matmul", ONES))
            assert its_own.is_closed()
            # One that nobody had taken is the next gateway's.
            waits.send(head("GET", "/healthz"))
            assert waits.answer().status == 200
    wait_for_status(server, "/readyz", 200)
    assert server.engines() == [engine]
    assert server.gateways() != [gateway]
    with server.client() as client:
        now = scrape(client)
        assert total(now, "tilewire_process_deaths_total", process="gateway-0") == 1
        assert total(now, "tilewire_process_deaths_total") == 1
    assert server.log.read_text().count("a process hangs: it is ended") == 1


def counts_504(number: float, now: Scrape) -> bool:
    return total(now, "tilewire_requests_total", op="add", code="504") == number


def test_a_job_whose_client_left_the_queue_is_not_computed(shared_server: StartServer) -> None:
    server = shared_server(*PLAIN)
    (engine,), (gateway,) = server.engines(), server.gateways()
    with server.client() as client:
        assert settles(client, is_idle)
        before = scrape(client)
        num_left = total(before, "tilewire_requests_total", op="add", code="499")
        num_flops = total(before, "tilewire_flops_total", op="add")
        num_sockets = sockets_of(gateway)
        with held([engine]), RawConnection(server.connect()) as connection:
            connection.send(post("/v1/add", ONES))
            assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
            assert sockets_of(gateway) == num_sockets + 1
            connection.sock.close()
            # The gateway has noticed when its connection is gone from its files; until then the job may still run.
            assert settles(client, lambda now: sockets_of(gateway) == num_sockets)
        assert settles(client, lambda now: total(now, "tilewire_requests_total", op="add", code="499") == num_left + 1)
        assert client.post("/v1/add", content=ONES).status_code == 200
        assert settles(client, lambda now: total(now, "tilewire_flops_total", op="add") == num_flops + 16)
        assert settles(client, is_idle)


def sockets_of(pid: int) -> int:
    """Sockets that a process has open."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(fd.readlink()).startswith("socket:")
    return count


@pytest.mark.slow
def test_a_gateway_is_light_and_knows_no_torch(shared_server: StartServer) -> None:
    server = shared_server(*FRESH)
    with server.client() as client:
        assert client.post("/v1/softmax", json={"x": [[1, 2]]}).status_code == 200
    for pid in server.gateways():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "triton" not in maps
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        # What it holds itself; the arena's touched pages are shared memory.
        own_kib = int(status["RssAnon"].split()[0]) + int(status["RssFile"].split()[0])
        assert own_kib < 90 * 1024, own_kib
