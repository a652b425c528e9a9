"""Runs one service on each node of a Ray cluster, and keeps HAProxy's list of them current. Needs `pip install ray`.

    ray job submit --working-dir . -- python deploy/ray/fleet.py \
        --template deploy/haproxy/haproxy.cfg --out /etc/haproxy/haproxy.cfg --reload-pid-file /run/haproxy.pid \
        --min-hosts 2 --max-hosts 8 -- --gateways 8 --store /mnt/tensors

Ray starts, places and replaces hosts, and asks for nodes. It stays off the way of the bytes: clients reach the services
through HAProxy. What follows `--` goes to `tilewire serve`.

The queue of a service is in its metrics. Where API keys guard them, give one as `--key` or TILEWIRE_KEY, or `--metrics-port`
behind `--`; a queue that cannot be read counts as empty, and a line says so.

An actor on each node holds the node's GPUs, starts the service, and starts it again when it ends. This process asks every
actor once a second for its address, its readiness and its queue; it writes the addresses of those that live into HAProxy's
configuration. HAProxy's own checks take a lost host out within a second; a host in its place gets its id, and with it its keys.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.haproxy.hosts import listed, number, render, write

# Seconds between two rounds, and how long an actor may take to answer in one.
PERIOD_S, ANSWER_S = 1.0, 5.0
# Seconds for which fewer hosts must have been enough before one is stopped: an autoscaler's usual five minutes.
CALM_S = 300.0
DRAIN_S = 40.0
# Seconds in which HAProxy reads its configuration; then it is asked again. A signal that comes while it starts anew is lost.
RELOAD_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class State:
    """State of a host.

    Attributes:
        address: `name:port` of the service.
        is_ready: Whether it takes requests.
        queue_depth: Requests that wait in its engines, or None when its metrics cannot be had.
        pid: Process of the service.
        restarts: Number of times that the service has ended and was started again.
    """

    address: str
    is_ready: bool
    queue_depth: float | None
    pid: int
    restarts: int


class Host:
    """One service on the node of this process; an actor.

    Args:
        command: Command that starts a service; `--host` and `--port` are added.
        address: Address of the node.
        port: Port of the service; 0 for a free one, where several nodes share a machine.
        key: API key for its metrics.
    """

    def __init__(self, command: Sequence[str], address: str, port: int, key: str | None) -> None:
        self._address = f"{address}:{port or _free_port(address)}"
        self._command = [*command, "--host", address, "--port", self._address.rpartition(":")[2]]
        self._watched = metrics_address(command, os.environ) or self._address
        self._key = key
        self._restarts = 0
        self._service = self._start()

    def state(self) -> State:
        """Returns the state of the service, which is started again here when it has ended."""
        if self._service.poll() is not None:
            self._restarts += 1
            self._service = self._start()
        is_ready = get(f"http://{self._watched}/readyz") is not None
        depth = queue_depth(get(f"http://{self._watched}/metrics", self._key)) if is_ready else None
        return State(self._address, is_ready, depth, self._service.pid, self._restarts)

    def stop(self) -> int | None:
        """Drains the service and waits for its end; returns its exit status, or None when it had to be killed."""
        self._service.terminate()
        try:
            return self._service.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            self._service.kill()
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        # An actor's methods run in its main thread, which is the parent that the kernel watches: a service ends with its actor.
        libc = ctypes.CDLL(None, use_errno=True)
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509 - no lock is taken in between
        )


class Cluster(Protocol):
    """Nodes, and hosts on them."""

    def nodes(self) -> set[str]:
        """Returns the ids of the nodes that live."""

    def start(self, node: str) -> Any:
        """Starts a host on a node; returns its handle."""

    def states(self, hosts: Mapping[str, Any]) -> dict[str, State]:
        """Returns the states of the hosts that answer, by node."""

    def stop(self, host: Any) -> None:
        """Drains and ends a host; returns at once."""

    def request(self, num_hosts: int) -> None:
        """Asks the autoscaler for as many nodes."""


@dataclass(frozen=True)
class Limits:
    """Limits of a fleet.

    Attributes:
        min_hosts: Smallest number of hosts.
        max_hosts: Largest number of hosts.
        queue_per_host: Requests that wait in a host on average, above which there are too few hosts.
    """

    min_hosts: int
    max_hosts: int
    queue_per_host: float


@dataclass
class Fleet:
    """All hosts of a cluster.

    Attributes:
        cluster: The cluster.
        limits: Limits of the fleet.
        hosts: Handle of each host, by node.
        addresses: Address of each host that has answered, by node.
        ids: Id of each address in HAProxy's ring.
        wanted: Number of hosts that the load asks for.
        unread: Addresses of the hosts that take requests and whose queue cannot be read.
    """

    cluster: Cluster
    limits: Limits
    hosts: dict[str, Any] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    wanted: int = 0
    unread: frozenset[str] = frozenset()
    _calm_since_s: float = math.inf

    def step(self, now_s: float) -> dict[int, str]:
        """Starts and stops hosts as nodes and load ask for it.

        Args:
            now_s: Monotonic time.

        Returns:
            Addresses for the proxy, by id: every host that has answered, ready or not; the proxy checks that itself.
        """
        nodes = self.cluster.nodes()
        for node in self.hosts.keys() - nodes:
            self._forget(node)
        states = self.cluster.states(self.hosts)
        self.addresses |= {node: state.address for node, state in states.items()}
        self.unread = frozenset(one.address for one in states.values() if one.is_ready and one.queue_depth is None)
        self._scale(states, now_s)
        for node in sorted(nodes - self.hosts.keys())[: max(0, self.wanted - len(self.hosts))]:
            self.hosts[node] = self.cluster.start(node)
        for node in self._surplus():
            self.cluster.stop(self.hosts[node])
            self._forget(node)
        self.ids = number(self.ids, self.addresses.values())
        return {server_id: address for address, server_id in self.ids.items()}

    def _forget(self, node: str) -> None:
        del self.hosts[node]
        self.addresses.pop(node, None)

    def _scale(self, states: Mapping[str, State], now_s: float) -> None:
        """Decides the number of hosts by the requests that wait: at once for more, for fewer after a calm time."""
        limits, before = self.limits, self.wanted
        needed = math.ceil(sum(state.queue_depth or 0.0 for state in states.values()) / limits.queue_per_host)
        needed = min(max(needed, limits.min_hosts), limits.max_hosts)
        if needed >= before:
            self.wanted, self._calm_since_s = needed, math.inf
        elif now_s - self._calm_since_s >= CALM_S:
            # One at a time: its keys move to the others.
            self.wanted, self._calm_since_s = before - 1, now_s
        else:
            self._calm_since_s = min(self._calm_since_s, now_s)
        if self.wanted != before:
            self.cluster.request(self.wanted)

    def _surplus(self) -> list[str]:
        """Returns the nodes whose hosts are too many: those with the largest ids, so that the ring keeps the others."""

        def place(node: str) -> int:
            return self.ids.get(self.addresses.get(node, ""), sys.maxsize)

        return sorted(self.hosts, key=place, reverse=True)[: max(0, len(self.hosts) - self.wanted)]


class RayCluster:
    """A running Ray cluster.

    Args:
        command: Command that starts a service.
        port: Port of the services; 0 for free ones.
        label: Custom resource of the nodes that may have a host; empty for every node.
        key: API key for the services' metrics.
    """

    def __init__(self, command: Sequence[str], port: int, label: str, key: str | None) -> None:
        self._command = list(command)
        self._port = port
        self._label = label
        self._key = key

    def nodes(self) -> set[str]:
        return {node["NodeID"] for node in self._alive()}

    def start(self, node: str) -> Any:
        found = next(one for one in self._alive() if one["NodeID"] == node)
        actor = ray.remote(Host).options(
            num_cpus=0,
            num_gpus=found["Resources"].get("GPU", 0),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_restarts=-1,
        )
        return actor.remote(self._command, found["NodeManagerAddress"], self._port, self._key)

    def states(self, hosts: Mapping[str, Any]) -> dict[str, State]:
        asked = {node: host.state.remote() for node, host in hosts.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else None
        found = {}
        for node, answer in asked.items():
            try:
                found[node] = ray.get(answer, timeout=0)
            except (ray.exceptions.RayError, TimeoutError):
                continue
        return found

    def stop(self, host: Any) -> None:
        host.stop.remote()

    def request(self, num_hosts: int) -> None:
        request_resources(bundles=[{self._label: 1.0} if self._label else {"CPU": 1.0}] * num_hosts)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"] and (not self._label or self._label in node["Resources"])]


def metrics_address(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Returns the address at which a service has its metrics and its health apart from the rest, without keys.

    Args:
        command: Command that starts it.
        environment: Variables that it reads.

    Returns:
        `name:port`, or None when it has no such port.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--metrics-port", default=environment.get("TILEWIRE_METRICS_PORT"))
    parser.add_argument("--metrics-host", default=environment.get("TILEWIRE_METRICS_HOST"))
    found, _ = parser.parse_known_args(command)
    if not found.metrics_port:
        return None
    host = found.metrics_host if found.metrics_host not in (None, "0.0.0.0", "::") else "127.0.0.1"
    return f"[{host}]:{found.metrics_port}" if ":" in host else f"{host}:{found.metrics_port}"


def get(url: str, key: str | None = None) -> str | None:
    """Returns the text at an address, or None when it cannot be had."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_S / 2) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def queue_depth(exposition: str | None) -> float | None:
    """Sums the jobs that wait over the engines of a host; None without its metrics."""
    if exposition is None:
        return None
    lines = [line for line in exposition.splitlines() if line.startswith("tilewire_queue_depth")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


class ProxyList:
    """List of hosts in the configuration of HAProxy.

    Args:
        template: Text of `haproxy.cfg`.
        out: Configuration that HAProxy reads.
        reload: Has HAProxy read its configuration again.
    """

    def __init__(self, template: str, out: Path, reload: Callable[[], None]) -> None:
        self._template = template
        self._out = out
        self._reload = reload
        self._reloaded_s = -math.inf

    def update(self, addresses: dict[int, str], now_s: float) -> bool:
        """Writes the hosts, and has them read until the proxy shows them; returns whether they changed.

        Args:
            addresses: Address of each host, by id.
            now_s: Monotonic time.
        """
        text = render(self._template, addresses)
        is_changed = write(self._out, text)
        if is_changed or (now_s - self._reloaded_s >= RELOAD_S and listed(text) not in (None, addresses)):
            self._reloaded_s = now_s
            self._reload()
        return is_changed


def signal_from(path: Path | None) -> None:
    """Has HAProxy read its configuration again. One that is not running, or is only just starting, reads it by itself."""
    try:
        if path is not None:
            os.kill(int(path.read_text().split()[0]), signal.SIGUSR2)
    except (FileNotFoundError, IndexError, ProcessLookupError):
        pass


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; one that cannot be right ends the process with status 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--template", type=Path, required=True, help="haproxy.cfg of deploy/haproxy, with your ports")
    parser.add_argument("--out", type=Path, required=True, help="configuration that HAProxy reads")
    parser.add_argument("--reload-pid-file", type=Path, help="file with the process id of haproxy -W")
    parser.add_argument("--min-hosts", type=int, default=1)
    parser.add_argument("--max-hosts", type=int, default=1000)
    parser.add_argument(
        "--queue-per-host", type=_positive, default=32.0, help="waiting requests that ask for another host"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: free ones, for several nodes on one machine")
    parser.add_argument("--label", default="", help="custom resource of the nodes that may have a host")
    parser.add_argument("--key", default=os.environ.get("TILEWIRE_KEY"), help="API key for the metrics of the services")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("serve", nargs="*", help="after --: flags of tilewire serve")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM, then drains every host; returns the exit status."""
    arguments = parse_arguments(argv)
    ray.init(address=arguments.address, log_to_driver=False)
    command = [sys.executable, "-P", "-m", "tilewire", "serve", *arguments.serve]
    limits = Limits(arguments.min_hosts, arguments.max_hosts, arguments.queue_per_host)
    fleet = Fleet(RayCluster(command, arguments.port, arguments.label, arguments.key), limits)
    proxy = ProxyList(
        arguments.template.read_text(encoding="utf-8"), arguments.out, lambda: signal_from(arguments.reload_pid_file)
    )
    ending: list[int] = []
    unread: frozenset[str] = frozenset()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _frame: ending.append(number))
    while not ending:
        begin_s = time.monotonic()
        addresses = fleet.step(begin_s)
        # HAProxy needs a server; before the first host answers, the template's own stay.
        if addresses and proxy.update(addresses, begin_s):
            sys.stdout.write(f"hosts: {' '.join(f'{key}={value}' for key, value in sorted(addresses.items()))}\n")
            sys.stdout.flush()
        if fleet.unread - unread:
            sys.stdout.write(
                f"no metrics: {' '.join(sorted(fleet.unread))}: their queues count as empty, so no host is added for them; "
                "give --key KEY, or --metrics-port behind --\n"
            )
            sys.stdout.flush()
        unread = fleet.unread
        time.sleep(max(0.0, PERIOD_S - (time.monotonic() - begin_s)))
    ray.wait([host.stop.remote() for host in fleet.hosts.values()], num_returns=len(fleet.hosts), timeout=DRAIN_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
