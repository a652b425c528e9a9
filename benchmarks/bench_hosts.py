"""Several services on one machine behind HAProxy, with weights that fit only once: hits, residents of each host, requests/s.

    python -m benchmarks.bench_hosts --hosts 2 3 4 --out benchmarks/results

Clients multiply by weights of Zipf popularity. A host that lacks a weight answers 404; the client uploads it through the
proxy and tries again. A host whose quota is full answers 507; the weight then travels with the request. Both count as
misses. Every answer is checked. The same loads run without keys, where the proxy takes the host with the fewest requests
under way, and beside each row stands what `bench_ring` simulates for it.

With `--store` the hosts share a folder. A host that lacks a weight loads it, which is the miss; nothing is uploaded twice.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import httpx
import numpy as np

from benchmarks.bench_ring import RING, ROUND_ROBIN, Scenario, simulate
from benchmarks.command import command_of
from benchmarks.machine import processor
from deploy.haproxy.hosts import render
from tilewire import Client, NotFound, QuotaExceeded
from tilewire._version import __version__
from tilewire.service.cli.launch import running_server

TEMPLATE = Path(__file__).resolve().parents[1] / "deploy" / "haproxy" / "haproxy.cfg"
LOADS = "tilewire_store_loads_total"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Weights:
    """Weights of small integers, so that products are exact.

    Attributes:
        count: Number of weights.
        size: Rows and columns of each.
    """

    count: int
    size: int

    def name(self, number: int) -> str:
        """Name as a resident, as `bench_ring` calls it."""
        return f"weights/{number}"

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        """Values of each, (size, size) float32."""
        shape = (self.size, self.size)
        return [np.random.default_rng(number).integers(-4, 5, shape).astype(np.float32) for number in range(self.count)]

    @property
    def nbytes(self) -> int:
        """Bytes of one weight."""
        return self.size * self.size * 4


@dataclass
class Counts:
    """What the clients counted.

    Attributes:
        requests: Number of products asked for.
        misses: Number of those whose first try found no resident.
        sent: Number of weights that travelled with a request.
        wrong: Number of wrong products.
        failures: Text of each error.
    """

    requests: int = 0
    misses: int = 0
    sent: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One measured load.

    Attributes:
        hosts: Number of services.
        policy: `ring` through the proxy, or `round robin` past it.
        has_store: Whether the hosts share a store.
        weights: Number of weights.
        room: Weights that fit on a host, in shares of weights / hosts.
        requests: Number of products.
        hit_rate: Share of the products whose resident was there at the first try.
        simulated_hit_rate: What `bench_ring` computes for it.
        per_s: Products per second.
        proxy_us: Processor time of the proxy for each product, uploads among them, in µs; 0 past the proxy.
        residents: Number of residents of each host at the end.
        wrong: Number of wrong products.
        failures: Number of requests that failed otherwise.
    """

    hosts: int
    policy: str
    has_store: bool
    weights: int
    room: float
    requests: int
    hit_rate: float
    simulated_hit_rate: float
    per_s: float
    proxy_us: float
    residents: list[int]
    wrong: int
    failures: int


def free_port() -> int:
    """A port of the loopback that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def proxy(urls: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Runs HAProxy with the project's configuration in front of these services; yields its address and process id.

    Raises:
        RuntimeError: HAProxy is missing or does not start.
    """
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise RuntimeError("haproxy is not installed; it is a package of Debian and of most others")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        text = TEMPLATE.read_text(encoding="utf-8")
        text = text.replace("bind :8080", f"bind 127.0.0.1:{port}").replace("/run/haproxy", folder)
        # The system has to allow twice as many open files.
        text = text.replace("maxconn 20000", "maxconn 1000")
        config = Path(folder, "haproxy.cfg")
        config.write_text(render(text, {number: url.partition("://")[2] for number, url in enumerate(urls, 1)}))
        process = subprocess.Popen([program, "-f", str(config), "-db"], stderr=subprocess.DEVNULL)
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                client.wait_ready(START_TIMEOUT_S)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, in user and in kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loads_of(url: str) -> float:
    """Number of tensors that a service has loaded from its store."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(LOADS))


def upload(weights: Weights, client: Client) -> None:
    """Uploads every weight that a host has room for, the most popular first."""
    for number in range(weights.count):
        with contextlib.suppress(QuotaExceeded):
            client.put(weights.name(number), weights.arrays[number])


def one_client(weights: Weights, clients: Sequence[Client], numbers: Sequence[int], seed: int, counts: Counts) -> None:
    """Multiplies by these weights one after the other; client i of the turn takes the i-th request."""
    rng = np.random.default_rng(seed)
    for turn, number in enumerate(numbers, seed):
        client = clients[turn % len(clients)]
        a = rng.integers(-4, 5, (1, weights.size)).astype(np.float32)
        counts.requests += 1
        try:
            out = product(weights, client, a, number, counts)
        except Exception as error:  # noqa: BLE001  (counted and reported, whatever it is)
            counts.failures.append(f"{type(error).__name__}: {error}")
            continue
        counts.wrong += not np.array_equal(out, a @ weights.arrays[number])


def product(weights: Weights, client: Client, a: np.ndarray, number: int, counts: Counts) -> np.ndarray:
    """One product: by the resident, after an upload, or with the weight in the request."""
    resident = f"@{weights.name(number)}"
    try:
        return np.asarray(client.matmul(a, resident))
    except NotFound:
        counts.misses += 1
    with contextlib.suppress(NotFound, QuotaExceeded):
        client.put(weights.name(number), weights.arrays[number])
        return np.asarray(client.matmul(a, resident))
    counts.sent += 1
    return np.asarray(client.matmul(a, weights.arrays[number]))


def measure(
    urls: Sequence[str], targets: Sequence[str], weights: Weights, scenario: Scenario, proxy_pid: int | None = None
) -> Row:
    """Uploads the weights, loads the services, and counts.

    Args:
        urls: Addresses of the services.
        targets: Addresses that the clients use in turn: the proxy alone, or the services.
        weights: The weights.
        scenario: What is simulated beside it.
        proxy_pid: Process of the proxy, if the clients use one.
    """
    with contextlib.ExitStack() as stack:
        direct = [stack.enter_context(Client(url)) for url in urls]
        for host in direct:
            for tensor in host.tensors():
                with contextlib.suppress(NotFound):
                    host.delete(tensor.name)
        through = [stack.enter_context(Client(url)) for url in targets]
        # By turns, every host gets every weight that it has room for.
        for client in through:
            upload(weights, client)
        drawn = random.Random(scenario.seed).choices(
            range(weights.count),
            cum_weights=list(accumulate(rank**-scenario.zipf for rank in range(1, weights.count + 1))),
            k=scenario.requests,
        )
        num_clients = scenario.clients_per_host * len(urls)
        counts = [Counts() for _ in range(num_clients)]
        threads = [
            threading.Thread(target=one_client, args=(weights, through, drawn[seed::num_clients], seed, counts[seed]))
            for seed in range(num_clients)
        ]
        began_s, loads = time.monotonic(), sum(map(loads_of, urls))
        used_s = cpu_seconds(proxy_pid) if proxy_pid else 0.0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed_s = time.monotonic() - began_s
        used_s = cpu_seconds(proxy_pid) - used_s if proxy_pid else 0.0
        loads = sum(map(loads_of, urls)) - loads
        residents = [len(host.tensors()) for host in direct]
    for failure in {failure for one in counts for failure in one.failures}:
        print("failed:", failure, flush=True)
    phases = simulate(scenario)["phases"]
    assert isinstance(phases, list), "This is a bug."
    return Row(
        hosts=len(urls),
        policy=scenario.policy,
        has_store=scenario.forgets,
        weights=weights.count,
        room=scenario.room,
        requests=sum(one.requests for one in counts),
        hit_rate=1 - (sum(one.misses for one in counts) + loads) / scenario.requests,
        simulated_hit_rate=phases[0]["hit_rate"],
        per_s=scenario.requests / elapsed_s,
        proxy_us=used_s / scenario.requests * 1e6,
        residents=residents,
        wrong=sum(one.wrong for one in counts),
        failures=sum(len(one.failures) for one in counts),
    )


def rows_of(hosts: int, weights: Weights, scenario: Scenario, flags: Sequence[str]) -> list[Row]:
    """Measures both policies over this number of services."""
    quota = max(1, round(scenario.room * weights.count / hosts)) * weights.nbytes
    with contextlib.ExitStack() as stack:
        if scenario.forgets:
            flags = [*flags, "--store", stack.enter_context(tempfile.TemporaryDirectory())]
        urls = [stack.enter_context(running_server("--resident-bytes", str(quota), *flags)) for _ in range(hosts)]
        address, pid = stack.enter_context(proxy(urls))
        rows = [measure(urls, [address], weights, scenario, pid)]
        rows.append(measure(urls, urls, weights, replace(scenario, policy=ROUND_ROBIN)))
    return rows


def run(argv: Sequence[str]) -> int:
    """Measures every number of hosts, prints a table, and writes `hosts.json`; returns the exit status.

    Args:
        argv: Arguments after the benchmark's name.
    """
    parser = argparse.ArgumentParser(prog="bench hosts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--weights", type=int, default=48)
    parser.add_argument("--size", type=int, default=256, help="of the square weights")
    parser.add_argument("--room", type=float, default=1.5, help="of a host, in shares of weights / hosts")
    parser.add_argument("--clients", type=int, default=8, help="for each host")
    parser.add_argument("--requests", type=int, default=4_000, help="of each row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", action="store_true", help="a folder that the hosts share")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    weights = Weights(arguments.weights, arguments.size)
    flags = ("--device", arguments.device, "--gateways", "1", "--arena-bytes", str(2**27))
    rows: list[Row] = []
    print("| hosts | policy | hits | simulated | requests/s | proxy µs | residents | wrong | failed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for hosts in arguments.hosts:
        scenario = Scenario(
            hosts,
            arguments.weights,
            arguments.requests,
            arguments.clients,
            room=arguments.room,
            # What a store has gives way.
            forgets=arguments.store,
            policy=RING,
        )
        for row in rows_of(hosts, weights, scenario, flags):
            rows.append(row)
            print(
                f"| {row.hosts} | {row.policy} | {row.hit_rate:.4f} | {row.simulated_hit_rate:.4f} | {row.per_s:,.0f} "
                f"| {row.proxy_us:.0f} | {row.residents} | {row.wrong} | {row.failures} |",
                flush=True,
            )
    result = {
        "question": "services behind HAProxy, with weights that fit only once",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"tilewire": __version__, "python": platform.python_version(), "haproxy": haproxy_version()},
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": command_of("benchmarks.bench_hosts", argv),
        "rows": [asdict(row) for row in rows],
    }
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / ("hosts_store.json" if arguments.store else "hosts.json")).write_text(
            json.dumps(result, indent=1) + "\n"
        )
    return 0 if all(row.wrong == row.failures == 0 for row in rows) else 1


def haproxy_version() -> str:
    """Version of the proxy."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "haproxy"
    shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout
    return shown.partition("version ")[2].partition(" ")[0]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
