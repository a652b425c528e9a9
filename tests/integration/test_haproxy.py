"""Hosts behind a real HAProxy with the configuration of `deploy/haproxy`: where keys land, and what a lost host costs."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.ring import Ring, hash_of
from deploy.haproxy import hosts
from tests.support.haproxy import TEMPLATE, Proxy, proxying
from tests.support.live_server import LiveServer
from tests.support.programs import free_port
from tests.support.replica import Replica
from tests.support.tensor_bodies import from_safetensors, to_safetensors
from tilewire.service.config.settings import Settings

# Several services and a proxy.
pytestmark = pytest.mark.slow

FLAGS = ("--gateways", "1", "--arena-bytes", "64MiB", "--max-body-bytes", "16MiB")
IDS = (1, 2)
NAMES = [f"weights/layer-{number}" for number in range(24)]
SIZE = 16
NUM_CLIENTS = 6
ENOUGH = 150
# Requests whose body comes behind the headers: half of them meet the host that drains.
NUM_APART = 40
WAIT_S = 90.0
POLL_S = 0.02
RECOVERY_S = 10.0


def weight(name: str) -> np.ndarray:
    """A weight of small integers, so that products are exact; a name stands for one value."""
    rng = np.random.default_rng(NAMES.index(name))
    return rng.integers(-8, 8, (SIZE, SIZE)).astype(np.float32)


def names_on(server: LiveServer) -> set[str]:
    with server.client() as client:
        return {one["name"] for one in client.get("/v1/tensors").json()}


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(POLL_S)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two hosts; each must end in order."""
    fleet: list[Replica] = []
    try:
        for server_id in IDS:
            folder = tmp_path_factory.mktemp(f"host-{server_id}")
            fleet.append(Replica(folder, free_port(), *FLAGS))
        yield fleet
    finally:
        statuses = [replica.server.stop() for replica in fleet]
    assert statuses == [0] * len(IDS)


@pytest.fixture(scope="module")
def proxy(fleet: list[Replica], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with proxying(tmp_path_factory.mktemp("haproxy"), addresses(fleet)) as proxy:
        yield proxy


def addresses(fleet: list[Replica]) -> dict[int, str]:
    return {server_id: f"127.0.0.1:{replica.port}" for server_id, replica in zip(IDS, fleet, strict=True)}


def multiply(
    client: httpx.Client, name: str, *, query: str | None = None, headers: dict[str, str] | None = None
) -> bool:
    """Whether a product with a resident is right."""
    a = np.arange(SIZE, dtype=np.float32)[None]
    params = f"b=@{name}" if query is None else query
    answer = client.post(f"/v1/matmul?{params}", content=to_safetensors({"a": a}), headers=headers)
    assert answer.status_code == 200, answer.text
    return np.array_equal(from_safetensors(answer.content)["out"], a @ weight(name))


# ── where keys land ───────────────────────────────────────────────────────────────────────────────


def test_a_name_lands_on_the_host_that_the_ring_says(fleet: list[Replica], proxy: Proxy) -> None:
    ring = Ring(IDS, 16, 200)
    with proxy.client() as client:
        for name in NAMES:
            client.put(f"/v1/tensors/{name}", content=to_safetensors({"w": weight(name)})).raise_for_status()
        expected = [{name for name in NAMES if ring.owner(hash_of(name)) == index} for index in range(len(fleet))]
        assert [names_on(replica.server) for replica in fleet] == expected
        assert all(expected)
        for name in NAMES:
            assert multiply(client, name)
            assert multiply(client, name, query=f"b=%40{name.replace('/', '%2F')}")
            assert client.get(f"/v1/tensors/{name}").status_code == 200
            assert client.head(f"/v1/tensors/{name.replace('/', '%2F')}").status_code == 200


def test_the_header_wins(fleet: list[Replica], proxy: Proxy) -> None:
    ring = Ring(IDS, 16, 200)
    name = NAMES[0]
    there, other = (next(key for key in NAMES if ring.owner(hash_of(key)) == index) for index in range(2))
    with proxy.client() as client:
        for key, index in ((there, 0), (other, 1)):
            headers = {"X-Tilewire-Key": key}
            body = to_safetensors({"w": weight(name)})
            client.put(f"/v1/tensors/keyed/{index}", content=body, headers=headers).raise_for_status()
            assert f"keyed/{index}" in names_on(fleet[index].server)
            assert f"keyed/{index}" not in names_on(fleet[1 - index].server)
            assert multiply(client, name, query=f"b=@keyed/{index}", headers=headers)
            assert client.delete(f"/v1/tensors/keyed/{index}", headers=headers).status_code == 204


def test_requests_without_a_resident_go_to_any_host(fleet: list[Replica], proxy: Proxy) -> None:
    a, b = np.eye(4, dtype=np.float32), np.ones((4, 4), dtype=np.float32)
    before = [replica.answered() for replica in fleet]
    with proxy.client() as client:
        for _ in range(8):
            answer = client.post("/v1/matmul", content=to_safetensors({"a": a, "b": b}))
            assert np.array_equal(from_safetensors(answer.content)["out"], b)
        assert client.get("/metrics").status_code == 404
    after = [replica.answered() for replica in fleet]
    assert all(later > earlier for later, earlier in zip(after, before, strict=True))


def test_a_host_that_is_taken_away_and_given_back_moves_its_own_keys(fleet: list[Replica], tmp_path: Path) -> None:
    both = addresses(fleet)
    with proxying(tmp_path / "haproxy", both) as proxy:
        with proxy.client() as client:
            for name in NAMES:
                client.put(f"/v1/tensors/{name}", content=to_safetensors({"w": weight(name)})).raise_for_status()
        for left in IDS:
            proxy.reload({left: both[left]})
            with proxy.client() as client:
                statuses = {name: client.head(f"/v1/tensors/{name}").status_code for name in NAMES}
            here = names_on(fleet[IDS.index(left)].server)
            assert {name for name, status in statuses.items() if status == 200} == here & set(NAMES)
            proxy.reload(both)


def test_hosts_answer_when_the_checks_of_all_fail(fleet: list[Replica], tmp_path: Path) -> None:
    ring = Ring(IDS, 16, 200)
    check = ("option httpchk GET /readyz", "option httpchk GET /no-such-page")
    with proxying(tmp_path / "haproxy", addresses(fleet), check) as proxy, proxy.client() as client:
        wait_until(lambda: "backend 'residents' has no server available" in proxy.log.read_text())
        for name in NAMES[:8]:
            assert multiply(client, name)
        expected = [{name for name in NAMES if ring.owner(hash_of(name)) == index} for index in range(len(fleet))]
        assert all(names <= names_on(replica.server) for names, replica in zip(expected, fleet, strict=True))
        answer = client.post("/v1/softmax", content=to_safetensors({"x": np.zeros((1, 4), np.float32)}))
        assert np.allclose(from_safetensors(answer.content)["out"], 0.25)


class Draining(BaseHTTPRequestHandler):
    """A host that has begun to drain, before a check has noticed it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(503)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()


def test_a_body_behind_its_headers_is_sent_to_the_next_host_when_one_drains(
    fleet: list[Replica], tmp_path: Path
) -> None:
    """As many clients send it: HAProxy repeats only what it had whole when it began to send."""
    body = to_safetensors({"x": np.zeros((1, 4), np.float32)})
    with ThreadingHTTPServer(("127.0.0.1", 0), Draining) as draining:
        serving = threading.Thread(target=draining.serve_forever)
        serving.start()
        hosts_of = {1: f"127.0.0.1:{fleet[0].port}", 2: f"127.0.0.1:{draining.server_port}"}
        try:
            with proxying(tmp_path / "haproxy", hosts_of) as proxy:
                client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=WAIT_S)
                for _ in range(NUM_APART):
                    client.putrequest("POST", "/v1/softmax")
                    client.putheader("content-length", str(len(body)))
                    client.endheaders()
                    client.send(body)
                    answer = client.getresponse()
                    assert answer.status == 200, answer.read()
                    answer.read()
                client.close()
        finally:
            draining.shutdown()
            serving.join()


def test_a_running_proxy_shows_its_hosts(fleet: list[Replica], tmp_path: Path) -> None:
    both = addresses(fleet)
    with proxying(tmp_path / "haproxy", both) as proxy:
        assert hosts.listed(proxy.text(both)) == both
        proxy.reload({2: both[1]})
        assert hosts.listed(proxy.text(both)) == {2: both[1]}
    assert hosts.listed(proxy.text(both)) is None


# ── a host is lost ────────────────────────────────────────────────────────────────────────────────


@dataclass
class Load:
    """Clients that multiply by residents, and upload those that a host lacks.

    Attributes:
        url: Address of the proxy.
        ending: Set at the end.
        answered: End of each right answer, by name.
        uploads: Number of uploads after a 404.
        failures: Begin, end and trouble of each request that failed.
    """

    url: str
    ending: threading.Event = field(default_factory=threading.Event)
    answered: list[tuple[float, str]] = field(default_factory=list)
    uploads: int = 0
    failures: list[tuple[float, float, str]] = field(default_factory=list)

    def client(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self.ending.is_set():
                name = NAMES[rng.integers(len(NAMES))]
                began_s = time.monotonic()
                try:
                    trouble = self.request(client, name, rng.integers(-8, 8, (2, SIZE)).astype(np.float32))
                except httpx.HTTPError as error:
                    trouble = repr(error)
                if trouble is None:
                    self.answered.append((time.monotonic(), name))
                else:
                    self.failures.append((began_s, time.monotonic(), trouble))

    def request(self, client: httpx.Client, name: str, a: np.ndarray) -> str | None:
        answer = client.post(f"/v1/matmul?b=@{name}", content=to_safetensors({"a": a}))
        if answer.status_code == 404:
            uploaded = client.put(f"/v1/tensors/{name}", content=to_safetensors({"w": weight(name)}))
            self.uploads += 1
            # The product is tried by the next turn of this client.
            return None if uploaded.status_code in (200, 201) else f"upload: {uploaded.status_code} {uploaded.text}"
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:200]}"
        return None if np.array_equal(from_safetensors(answer.content)["out"], a @ weight(name)) else "a wrong product"

    def names_since(self, begin_s: float) -> set[str]:
        return {name for end_s, name in list(self.answered) if end_s > begin_s}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_is_killed_under_load_and_added_again(fleet: list[Replica], proxy: Proxy) -> None:
    kill_under_load(fleet[0], Load(proxy.url))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_a_store_a_lost_host_loses_no_name(tmp_path: Path) -> None:
    store, fleet = tmp_path / "store", list[Replica]()
    store.mkdir()
    try:
        for server_id in IDS:
            folder = tmp_path / f"host-{server_id}"
            folder.mkdir()
            fleet.append(Replica(folder, free_port(), *FLAGS, "--store", str(store)))
        with proxying(tmp_path / "haproxy", addresses(fleet)) as proxy:
            with proxy.client() as client:
                for name in NAMES:
                    client.put(f"/v1/tensors/{name}", content=to_safetensors({"w": weight(name)})).raise_for_status()
            load = Load(proxy.url)
            kill_under_load(fleet[0], load)
            # A client uploads what it finds missing: nothing was, not even on the fresh host.
            assert load.uploads == 0
    finally:
        statuses = [replica.server.stop() for replica in fleet]
    assert statuses == [0] * len(IDS)


def kill_under_load(one: Replica, load: Load) -> None:
    """Kills a host and starts another in its place, while clients work; few requests fail, and none is answered wrong."""
    threads = [threading.Thread(target=load.client, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(load.answered) > ENOUGH and one.answered() > 0)
        assert load.failures == []
        killed_s = time.monotonic()
        one.kill()
        dead_s = time.monotonic()
        wait_until(lambda: load.names_since(killed_s) == set(NAMES))
        lost_s = time.monotonic() - killed_s
        one.start()
        started_s = time.monotonic()
        wait_until(lambda: one.answered() > ENOUGH)
        back_s = time.monotonic() - started_s
        wait_until(lambda: load.names_since(started_s) == set(NAMES))
    finally:
        load.ending.set()
        for thread in threads:
            thread.join()
    print(
        f"{len(load.answered)} answers, {load.uploads} uploads; all names again {lost_s:.1f} s after the kill, "
        f"{ENOUGH} products on the new host after {back_s:.1f} s; {len(load.failures)} requests failed with the host"
    )
    assert not [failure for failure in load.failures if "wrong" in failure[2]]
    assert not [failure for failure in load.failures if failure[1] < killed_s]
    # Dying processes still take connections, so a client may lose several requests meanwhile, and none that it sends later.
    assert not [failure for failure in load.failures if failure[0] > dead_s]
    assert lost_s <= RECOVERY_S
    assert back_s <= RECOVERY_S


# ── the list of hosts ─────────────────────────────────────────────────────────────────────────────


def test_servers_take_the_place_of_the_templates() -> None:
    text = hosts.render(TEMPLATE.read_text(encoding="utf-8"), {7: "10.0.0.7:8000", 3: "[::1]:8001"})
    servers = [line.strip() for line in text.splitlines() if line.startswith("    server ")]
    assert servers == [
        "server host-3 [::1]:8001 id 3",
        "server host-7 10.0.0.7:8000 id 7",
        "server host-3 [::1]:8001 id 3 track residents/host-3",
        "server host-7 10.0.0.7:8000 id 7 track residents/host-7",
        "server host-3 [::1]:8001 id 3",
        "server host-7 10.0.0.7:8000 id 7",
    ]
    assert hosts.render(text, {1: "host-1:8000", 2: "host-2:8000"}) == TEMPLATE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({0: "a:1"}, "id 0"),
        ({1: "no port"}, "host 1"),
        ({1: "a:1\n    server b"}, "host 1"),
        ({1: "a:99999"}, "host 1: 'a:99999' is no address"),
        ({1: "a:0"}, "host 1"),
    ],
)
def test_a_host_that_cannot_be_is_refused(wrong: dict[int, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hosts.render(TEMPLATE.read_text(encoding="utf-8"), wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1=a:1", "1=b:1"), "id 1 is given twice: a:1 and b:1"),
        (("1=a:1", "01=b:1"), "id 1 is given twice"),
        (("a:1",), "'a:1': expected ID=HOST:PORT"),
        (("-x=a:1",), "ID=HOST:PORT"),
        (("1=a:99999",), "'a:99999' is no address"),
        (("1=a:1", "--reload", "0"), "--reload: 0 is no process id"),
    ],
)
def test_arguments_of_the_list_that_cannot_be_end_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        hosts.main([str(TEMPLATE), str(tmp_path / "out.cfg"), *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_list_that_cannot_be_written_or_read_again_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, dead = tmp_path / "out.cfg", 2**22 + 1
    for arguments, words in (
        ((tmp_path / "none.cfg", out), "none.cfg"),
        ((TEMPLATE, tmp_path / "none" / "out.cfg"), "none"),
        ((TEMPLATE, out, "--reload", dead), f"{out} is written, but --reload {dead}: "),
    ):
        assert hosts.main([*map(str, arguments), "1=a:1"]) == 1
        printed = capsys.readouterr().err
        assert words in printed
        assert printed.count("\n") == 1
    assert out.exists()


def test_a_host_keeps_its_id_and_a_new_one_takes_that_of_one_that_is_gone() -> None:
    first = hosts.number({}, ["b:1", "a:1", "c:1"])
    assert first == {"a:1": 1, "b:1": 2, "c:1": 3}
    second = hosts.number(first, ["c:1", "d:1", "a:1"])
    assert second == {"a:1": 1, "c:1": 3, "d:1": 2}


def test_a_file_is_replaced_only_when_its_text_changed(tmp_path: Path) -> None:
    place = tmp_path / "haproxy.cfg"
    assert [hosts.write(place, text) for text in ("a", "a", "b")] == [True, False, True]
    assert [one.name for one in tmp_path.iterdir()] == ["haproxy.cfg"]


def test_idle_connections_are_closed_by_the_proxy_first() -> None:
    (kept_s,) = [line.split()[2] for line in TEMPLATE.read_text().splitlines() if "timeout http-keep-alive" in line]
    assert float(kept_s.removesuffix("s")) < Settings.model_fields["keep_alive_s"].default
