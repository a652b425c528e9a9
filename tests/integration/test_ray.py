"""Services on the nodes of a Ray cluster: how many, where, and what a lost node costs behind a real HAProxy."""

from __future__ import annotations

import os
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deploy.ray.fleet import (
    CALM_S,
    RELOAD_S,
    Fleet,
    Limits,
    ProxyList,
    State,
    get,
    metrics_address,
    parse_arguments,
    queue_depth,
    signal_from,
)
from tests.support.haproxy import TEMPLATE, servers_up
from tests.support.live_server import ROOT, serving
from tests.support.programs import find_program, free_port, running
from tests.support.tensor_bodies import from_safetensors, to_safetensors
from tilewire.service.keys import entry_for, make_key

LIMITS = Limits(min_hosts=1, max_hosts=4, queue_per_host=10)


@dataclass
class FakeCluster:
    """A cluster whose hosts are answers.

    Attributes:
        alive: Nodes that live.
        answers: State of each host that answers, by node.
        started: Nodes on which a host was started, in order.
        stopped: Hosts that were stopped, in order.
        requests: Numbers of nodes that were asked for.
    """

    alive: set[str] = field(default_factory=lambda: {"n1", "n2", "n3"})
    answers: dict[str, State] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    stopped: list[Any] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    def nodes(self) -> set[str]:
        return set(self.alive)

    def start(self, node: str) -> str:
        self.started.append(node)
        self.answers[node] = State(f"{node}:8000", True, 0.0, 1, 0)
        return f"host on {node}"

    def states(self, hosts: Mapping[str, Any]) -> dict[str, State]:
        return {node: self.answers[node] for node in hosts if node in self.answers}

    def stop(self, host: Any) -> None:
        self.stopped.append(host)

    def request(self, num_hosts: int) -> None:
        self.requests.append(num_hosts)

    def wait_in(self, node: str, queue_depth: float | None) -> None:
        """Lets so many requests wait in a host; None for one without metrics."""
        self.answers[node] = replace(self.answers[node], queue_depth=queue_depth)


def fleet_of(num_hosts: int) -> tuple[FakeCluster, Fleet]:
    cluster = FakeCluster()
    fleet = Fleet(cluster, replace(LIMITS, min_hosts=num_hosts))
    fleet.step(0.0)
    return cluster, fleet


def test_each_host_is_started_once_and_listed_when_it_answers() -> None:
    cluster, fleet = fleet_of(2)
    assert cluster.started == ["n1", "n2"]
    assert cluster.requests == [2]
    assert fleet.step(1.0) == {1: "n1:8000", 2: "n2:8000"}
    assert cluster.started == ["n1", "n2"]


def test_a_host_that_does_not_answer_once_stays_listed() -> None:
    cluster, fleet = fleet_of(2)
    fleet.step(1.0)
    del cluster.answers["n1"]
    assert fleet.step(2.0) == {1: "n1:8000", 2: "n2:8000"}


def test_a_host_in_the_place_of_a_lost_one_gets_its_id() -> None:
    cluster, fleet = fleet_of(2)
    fleet.step(1.0)
    cluster.alive.remove("n1")
    assert fleet.step(2.0) == {2: "n2:8000"}
    assert fleet.step(3.0) == {1: "n3:8000", 2: "n2:8000"}
    assert cluster.stopped == []


def test_more_hosts_come_at_once_and_go_one_at_a_time_after_a_calm_time() -> None:
    cluster, fleet = fleet_of(1)
    fleet.step(1.0)
    cluster.wait_in("n1", 25)
    fleet.step(2.0)
    assert set(fleet.step(3.0).values()) == {"n1:8000", "n2:8000", "n3:8000"}
    assert cluster.requests == [1, 3]
    cluster.wait_in("n1", 0)
    fleet.step(4.0)
    assert fleet.step(3.0 + CALM_S).keys() == {1, 2, 3}
    assert fleet.step(4.0 + CALM_S).keys() == {1, 2}
    assert fleet.step(5.0 + CALM_S).keys() == {1, 2}
    assert fleet.step(4.0 + 2 * CALM_S).keys() == {1}
    assert cluster.stopped == ["host on n3", "host on n2"]
    assert cluster.requests == [1, 3, 2, 1]


def test_a_burst_ends_the_calm_time() -> None:
    cluster, fleet = fleet_of(1)
    fleet.step(1.0)
    cluster.wait_in("n1", 15)
    fleet.step(2.0)
    cluster.wait_in("n1", 0)
    fleet.step(3.0)
    cluster.wait_in("n1", 15)
    fleet.step(4.0)
    cluster.wait_in("n1", 0)
    fleet.step(3.0 + CALM_S)
    assert fleet.step(4.0 + CALM_S).keys() == {1, 2}


def test_no_more_hosts_than_the_limit_and_the_nodes_allow() -> None:
    cluster, fleet = fleet_of(1)
    fleet.step(1.0)
    cluster.wait_in("n1", 10_000)
    fleet.step(2.0)
    assert fleet.step(3.0).keys() == {1, 2, 3}
    assert cluster.requests == [1, 4]


def test_a_host_without_metrics_is_told_and_counts_as_empty() -> None:
    cluster, fleet = fleet_of(2)
    fleet.step(1.0)
    assert fleet.unread == set()
    cluster.wait_in("n1", None)
    cluster.wait_in("n2", 25)
    fleet.step(2.0)
    assert fleet.unread == {"n1:8000"}
    assert fleet.wanted == 3
    cluster.answers["n1"] = replace(cluster.answers["n1"], is_ready=False)
    fleet.step(3.0)
    assert fleet.unread == set()


def test_the_queue_is_read_where_the_metrics_are() -> None:
    assert metrics_address(["serve", "--gateways", "8"], {}) is None
    assert metrics_address(["serve", "--metrics-port", "9090"], {}) == "127.0.0.1:9090"
    assert metrics_address(["serve", "--metrics-port=9090", "--metrics-host=10.0.0.1"], {}) == "10.0.0.1:9090"
    assert metrics_address(["serve"], {"TILEWIRE_METRICS_PORT": "9", "TILEWIRE_METRICS_HOST": "::"}) == "127.0.0.1:9"


def test_the_queue_of_a_service_with_keys_is_read_with_one(tmp_path: Path) -> None:
    key, entry = make_key(), tmp_path / "keys.toml"
    entry.write_text(entry_for("scraper", key))
    entry.chmod(0o600)
    with serving(
        tmp_path / "log", "--api-keys-file", str(entry), "--gateways", "1", "--arena-bytes", "64MiB"
    ) as server:
        assert get(f"{server.url}/readyz") is not None
        assert queue_depth(get(f"{server.url}/metrics")) is None
        assert queue_depth(get(f"{server.url}/metrics", key)) == 0.0


@pytest.mark.parametrize("text", ["0", "-1", "nan", "many"])
def test_a_queue_per_host_that_cannot_be_ends_with_2(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--template", "x", "--out", "y", "--queue-per-host", text])
    assert ended.value.code == 2
    assert "--queue-per-host: " in capsys.readouterr().err


@pytest.fixture
def shown() -> Iterator[tuple[Path, dict[int, str]]]:
    """The stats socket of a proxy, and the hosts that it shows."""
    hosts: dict[int, str] = {}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            assert self.rfile.readline() == b"show servers state residents\n"
            rows = [f"{key} {value.replace(':', ' ')} -\n" for key, value in hosts.items()]
            self.wfile.write(f"1\n# srv_id srv_addr srv_port srv_fqdn\n{''.join(rows)}\n".encode())

    # The name of a socket must be short.
    with tempfile.TemporaryDirectory() as folder, socketserver.UnixStreamServer(f"{folder}/s", Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Path(folder, "s"), hosts
        server.shutdown()
        thread.join()


def test_the_proxy_is_signalled_until_it_shows_the_hosts(shown: tuple[Path, dict[int, str]], tmp_path: Path) -> None:
    admin, hosts = shown
    signals: list[float] = []
    now_s = 0.0
    text = TEMPLATE.read_text().replace("/run/haproxy/admin.sock", str(admin))
    proxy = ProxyList(text, tmp_path / "haproxy.cfg", lambda: signals.append(now_s))
    wanted = {1: "10.0.0.1:8000", 2: "10.0.0.2:8000"}
    assert proxy.update(wanted, now_s)
    hosts[1] = wanted[1]
    for second in range(1, 8):
        now_s = float(second)
        assert not proxy.update(wanted, now_s)
    assert signals == [0.0, RELOAD_S]
    hosts[2] = wanted[2]
    for second in range(8, 20):
        now_s = float(second)
        assert not proxy.update(wanted, now_s)
    assert signals == [0.0, RELOAD_S]


@pytest.mark.parametrize("text", [None, "", f"{2**22 + 1}\n"], ids=["no file", "empty", "of a dead process"])
def test_a_proxy_that_does_not_run_is_not_signalled(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "haproxy.pid"
    if text is not None:
        path.write_text(text)
    signal_from(path)


def test_a_proxy_that_runs_is_signalled(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.pid"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        path.write_text(f"{process.pid}\n")
        signal_from(path)
        assert process.wait(30) == -signal.SIGUSR2


# ── a real cluster ────────────────────────────────────────────────────────────────────────────────

NAME, SIZE, NUM_NODES, NUM_CLIENTS = "weights/w", 16, 3, 3
WEIGHT = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE) % 7
WAIT_S, POLL_S, RECOVERY_S, SLACK_S = 120.0, 0.1, 60.0, 0.5
FLAGS = (
    "--device",
    "cpu",
    "--gateways",
    "1",
    "--arena-bytes",
    "64MiB",
    "--max-body-bytes",
    "16MiB",
    "--no-spare-engine",
)


@dataclass
class Load:
    """Clients that multiply by one resident without a pause, and upload it to a host that lacks it.

    Attributes:
        url: Address of the proxy.
        ending: Set at the end.
        answered: End of each right answer.
        failures: Begin, end and trouble of each request that failed.
    """

    url: str
    ending: threading.Event = field(default_factory=threading.Event)
    answered: list[float] = field(default_factory=list)
    failures: list[tuple[float, float, str]] = field(default_factory=list)

    def run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self.ending.is_set():
                # Half of the requests name a resident, the others go to any host.
                a = rng.integers(-8, 8, (2, SIZE)).astype(np.float32)
                query, body = (f"?b=@{NAME}", {"a": a}) if rng.integers(2) else ("", {"a": a, "b": WEIGHT})
                begin_s = time.monotonic()
                try:
                    answer = client.post(f"/v1/matmul{query}", content=to_safetensors(body))
                    if answer.status_code == 404:
                        client.put(f"/v1/tensors/{NAME}", content=to_safetensors({"w": WEIGHT}))
                        continue
                    is_right = answer.status_code == 200 and np.array_equal(
                        from_safetensors(answer.content)["out"], a @ WEIGHT
                    )
                    trouble = "" if is_right else f"{answer.status_code} {answer.text[:200] or 'wrong'}"
                except httpx.HTTPError as error:
                    trouble = repr(error)
                if trouble:
                    self.failures.append((begin_s, time.monotonic(), trouble))
                else:
                    self.answered.append(time.monotonic())


def services_with(flag: str) -> list[int]:
    """Processes of `tilewire serve` that were given a flag, supervisors only."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:5] == [b"-P", b"-m", b"tilewire", b"serve"] and flag.encode() in words:
                found.append(int(folder.name))
    return found


def wait_until(holds: Any, why: Any = str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s, why()
        time.sleep(POLL_S)


@dataclass
class Running:
    """A cluster, the proxy in front of it, and the process that keeps its list.

    Attributes:
        cluster: The Ray cluster.
        url: Address of the proxy.
        config: The proxy's configuration.
        log: Output of the fleet's process.
        proxy_log: Output of the proxy.
        admin: Stats socket of the proxy.
        mark: Flag that its services alone have.
    """

    cluster: Any
    url: str
    config: Path
    log: Path
    proxy_log: Path
    admin: Path
    mark: str

    def services(self) -> list[int]:
        return services_with(self.mark)

    def hosts(self) -> set[str]:
        return {
            line.split()[2]
            for line in self.config.read_text().splitlines()
            if line.startswith("    server ") and "track" in line
        }


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Running]:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(NUM_NODES):
        cluster.add_node(
            num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, dashboard_agent_listen_port=0
        )
    port, config, pid_file, log = (
        free_port(),
        tmp_path / "haproxy.cfg",
        tmp_path / "haproxy.pid",
        tmp_path / "fleet.log",
    )
    template = tmp_path / "template.cfg"
    text = TEMPLATE.read_text()
    for place, ours in {
        "bind :8080": f"bind 127.0.0.1:{port}",
        "/run/haproxy/admin.sock": str(tmp_path / "admin.sock"),
        "maxconn 20000": "maxconn 1000",
    }.items():
        assert place in text
        text = text.replace(place, ours)
    template.write_text(text)
    config.write_text(text.replace("host-1:8000", "127.0.0.1:1").replace("host-2:8000", "127.0.0.1:2"))
    command = [sys.executable, str(ROOT / "deploy/ray/fleet.py"), "--template", str(template), "--out", str(config)]
    command += ["--reload-pid-file", str(pid_file), "--min-hosts", str(NUM_NODES), "--port", "0"]
    mark = str(tmp_path / "tensors")
    Path(mark).mkdir()
    command += ["--address", cluster.address, "--", *FLAGS, "--tensors-dir", mark]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TILEWIRE_")} | {
        "PYTHONPATH": str(ROOT)
    }
    with (
        running([find_program("haproxy"), "-W", "-f", str(config)], tmp_path / "haproxy.log", port) as proxy,
        log.open("wb") as output,
    ):
        pid_file.write_text(str(proxy.pid))
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        try:
            url, admin = f"http://127.0.0.1:{port}", tmp_path / "admin.sock"
            yield Running(cluster, url, config, log, tmp_path / "haproxy.log", admin, mark)
        finally:
            process.terminate()
            status = process.wait(WAIT_S)
            cluster.shutdown()
    assert status == 0, log.read_text()
    wait_until(lambda: services_with(mark) == [])


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_node_is_killed_under_load_and_another_takes_its_place(fleet: Running) -> None:
    wait_until(lambda: len(fleet.hosts()) == NUM_NODES and len(fleet.services()) == NUM_NODES, fleet.log.read_text)
    wait_until(lambda: len(servers_up(fleet.admin)) == NUM_NODES, fleet.proxy_log.read_text)
    first = fleet.hosts()
    load = Load(fleet.url)
    threads = [threading.Thread(target=load.run, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(load.answered) > 200)
        assert load.failures == []
        # As when the machine is lost: the service first, so that it does not drain, then the node.
        node = fleet.cluster.list_all_nodes()[-1]
        killed_s = time.monotonic()
        (service,) = [pid for pid in fleet.services() if is_below(pid, node)]
        for pid in (service, *children_of(service)):
            os.kill(pid, signal.SIGKILL)
        fleet.cluster.remove_node(node, allow_graceful=False)
        count = len(load.answered)
        wait_until(lambda: len(load.answered) > count + 200)
        fleet.cluster.add_node(
            num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, dashboard_agent_listen_port=0
        )
        wait_until(
            lambda: len(first & fleet.hosts()) == NUM_NODES - 1 and len(fleet.hosts()) == NUM_NODES, fleet.log.read_text
        )
        replaced_s = time.monotonic() - killed_s
        count = len(load.answered)
        wait_until(lambda: len(load.answered) > count + 200)
    finally:
        load.ending.set()
        for thread in threads:
            thread.join()
    print(
        f"{len(load.answered)} right answers, {len(load.failures)} failed with the node, replaced after {replaced_s:.1f} s"
    )
    assert not [failure for failure in load.failures if "wrong" in failure[2]]
    others = [failure for failure in load.failures if not failure[0] - SLACK_S <= killed_s <= failure[1] + SLACK_S]
    assert others == [], (others[0], len(others), killed_s, fleet.proxy_log.read_text(), fleet.log.read_text())
    assert replaced_s <= RECOVERY_S


def children_of(pid: int) -> list[int]:
    """Processes below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children_of(child)]
    return found


def is_below(pid: int, node: Any) -> bool:
    """Whether the raylet of a node is an ancestor of a process."""
    raylet = node.all_processes["raylet"][0].process.pid
    while pid > 1:
        if pid == raylet:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False
