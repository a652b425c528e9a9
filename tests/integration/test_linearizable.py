"""Residents behave as one register each, over many gateways, engines and hosts, while engines and gateways are killed.

The whole history is linearizable, whichever engine answers. Over several hosts with one store, changes are; reads may be as old
as the interval between two looks at the store. Values are uploaded, or stored results.

`LINEARIZABLE_SECONDS` says how long each run is, and `LINEARIZABLE_OPERATIONS` how many operations a name gets before another
one takes its place: the fewer, the more histories. `TEST_DEVICE=cuda` runs the service with one engine on a GPU.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak_watch import Killer
from tests.conftest import StartServer
from tests.support.linearizability import DELETE, READ, WRITE, Operation, first_violation, relaxed
from tests.support.live_server import LiveServer
from tests.support.raw_http import Answer, ConnectionEnded, RawConnection, head, post
from tests.support.tensor_bodies import TYPES, from_safetensors, to_npy, to_safetensors

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("LINEARIZABLE_SECONDS", "15"))
OPERATIONS = int(os.environ.get("LINEARIZABLE_OPERATIONS", "10000"))
NUM_CLIENTS, NUM_NAMES = 8, 2
# Every so often nobody changes anything for a while; at the end, for longer.
BUSY_S, CALM_S, LAST_CALM_S = 0.5, 0.15, 1.5
KILL_EVERY_S = 4.0
# Values are as many times the same number, so that parts of two of them show.
WIDTH = 6
PLACEMENTS = ("auto", "single", "shard")
# A store has whole tensors.
IN_STORE = ("auto", "single")
ONE = to_safetensors({"a": np.ones((1, 1), np.float32)})
SHARES = {WRITE: 0.2, "store": 0.1, DELETE: 0.05, "get": 0.3, "product": 0.35}
# Hosts on one store look this often at what others have changed. A look takes that much longer on a busy machine.
CHECK_S, LATE_S = 0.5, 0.5
# Nothing happened, and nothing was read.
REFUSED = (429,)


class Writer(threading.Thread):
    """One client: writes, deletes, reads and multiplies by the names at random, and notes what it saw."""

    values = itertools.count(1)
    operations = itertools.count()

    def __init__(
        self, servers: Sequence[LiveServer], seed: int, ending: threading.Event, calm: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._servers, self._ending, self._calm = servers, ending, calm
        self._rng = np.random.default_rng(seed)
        self._connections: dict[int, RawConnection] = {}
        self.seen: dict[str, list[Operation]] = defaultdict(list)
        self.trouble: list[str] = []

    def run(self) -> None:
        while not self._ending.is_set():
            kind = str(self._rng.choice(list(SHARES), p=list(SHARES.values())))
            if self._calm.is_set() and kind in (WRITE, "store", DELETE):
                kind = "product"
            name = f"register/{next(self.operations) // (NUM_NAMES * OPERATIONS)}-{self._rng.integers(NUM_NAMES)}"
            value = next(self.values)
            began_s = time.monotonic()
            answer = self._ask(kind, name, value)
            operation = self._noted(kind, value, answer, began_s)
            if operation is not None:
                self.seen[name].append(operation)
            if answer is None or answer.status >= 400:
                self._ending.wait(0.1 if answer is None or answer.status == 503 else 0.01)
        for host in list(self._connections):
            self._drop(host)

    def _ask(self, kind: str, name: str, value: int) -> Answer | None:
        path = f"/v1/tensors/{name}"
        body = to_npy(np.full((1, WIDTH), value, np.float32))
        placement = self._rng.choice(PLACEMENTS if len(self._servers) == 1 else IN_STORE)
        data = {
            WRITE: head("PUT", f"{path}?placement={placement}", content_length=str(len(body))) + body,
            # Durable: what was lost with an engine would not be a register.
            "store": post(
                f"/v1/matmul?store=@{name}&durable=true",
                to_safetensors({"a": np.full((1, 1), value, np.float32), "b": np.ones((1, WIDTH), np.float32)}),
            ),
            DELETE: head("DELETE", path),
            "get": head("GET", path, accept=TYPES["safetensors"]),
            "product": post(f"/v1/matmul?b=@{name}", ONE),
        }[kind]
        host = int(self._rng.integers(len(self._servers)))
        try:
            if host not in self._connections:
                self._connections[host] = RawConnection(self._servers[host].connect())
            self._connections[host].send(data)
            answer = self._connections[host].answer()
        except (ConnectionEnded, OSError):
            self._drop(host)
            return None
        if self._rng.random() < 0.02:
            # Another gateway, perhaps.
            self._drop(host)
        return answer

    def _noted(self, kind: str, value: int, answer: Answer | None, began_s: float) -> Operation | None:
        ended_s = time.monotonic()
        if answer is None or answer.status == 503:
            # It may have been done, or may yet be.
            if kind in ("get", "product"):
                return None
            return Operation(DELETE if kind == DELETE else WRITE, value, began_s, math.inf)
        if answer.status in REFUSED:
            return None
        if kind in (WRITE, "store") and answer.status in (200, 201):
            return Operation(WRITE, value, began_s, ended_s)
        if kind == DELETE and answer.status in (204, 404):
            return Operation(DELETE, answer.status == 204, began_s, ended_s)
        if kind in ("get", "product") and answer.status == 404:
            return Operation(READ, None, began_s, ended_s)
        if kind in ("get", "product") and answer.status == 200:
            (array,) = from_safetensors(answer.body).values()
            if len(np.unique(array)) > 1:
                self.trouble.append(f"{kind}: parts of several values, {array}")
            return Operation(READ, int(array.reshape(-1)[0]), began_s, ended_s)
        self.trouble.append(f"{kind}: {answer.status} {answer.body[:200]!r}")
        return None

    def _drop(self, host: int) -> None:
        connection = self._connections.pop(host, None)
        if connection is not None:
            connection.sock.close()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--gateways", "8"), id="eight gateways"),
        pytest.param(("--device", "cpu:0,1", "--gateways", "4"), id="two engines"),
        pytest.param(("--device", "cpu:0,1,2", "--gateways", "4"), id="three engines"),
    ],
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_killed", [False, True], ids=["quiet", "killed"])
def test_names_are_registers(start_server: StartServer, flags: tuple[str, ...], is_killed: bool) -> None:
    check_registers([start_server(*flags, "--arena-bytes", "64MiB")], is_killed=is_killed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_hosts", "device"),
    [pytest.param(3, "cpu", id="three hosts"), pytest.param(2, "cpu:0,1", id="two hosts of two engines")],
)
@pytest.mark.parametrize("is_killed", [False, True], ids=["quiet", "killed"])
def test_names_are_registers_over_hosts(
    start_server: StartServer, tmp_path: Path, num_hosts: int, device: str, is_killed: bool
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    shared = ("--store", str(store), "--store-check-s", str(CHECK_S))
    flags = ("--device", device, "--gateways", "1", "--arena-bytes", "64MiB", *shared)
    check_registers([start_server(*flags) for _ in range(num_hosts)], is_killed=is_killed, staleness_s=CHECK_S + LATE_S)


def check_registers(servers: Sequence[LiveServer], *, is_killed: bool, staleness_s: float = 0.0) -> None:
    """Works on some names by many clients, and checks that an order explains all answers."""
    server = servers[0]
    ending, calm = threading.Event(), threading.Event()
    writers = [Writer(servers, seed, ending, calm) for seed in range(NUM_CLIENTS)]
    killer = Killer(server, KILL_EVERY_S if is_killed else 10 * SECONDS)
    for thread in (killer, *writers):
        thread.start()
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        time.sleep(BUSY_S)
        calm.set()
        time.sleep(CALM_S)
        calm.clear()
    calm.set()
    killer.stop()
    time.sleep(CALM_S + LAST_CALM_S)
    ending.set()
    for writer in writers:
        writer.join(60)
        assert not writer.is_alive()
        assert writer.trouble == []
    assert len(killer.outages) >= is_killed
    histories = {
        name: relaxed([one for writer in writers for one in writer.seen[name]], staleness_s)
        for name in sorted(set().union(*(writer.seen for writer in writers)))
    }
    num_operations = sum(map(len, histories.values()))
    num_reads = sum(one.kind == READ for history in histories.values() for one in history)
    assert len(histories) >= NUM_NAMES
    assert num_reads > 0.3 * num_operations > 10
    for name, history in histories.items():
        violation = first_violation(history)
        assert not violation, f"{name}, {len(history)} operations:\n" + "\n".join(map(str, violation))
    print(f"{len(histories)} histories, {num_operations} operations, {len(killer.outages)} kills")
