"""Simulates residents on many hosts behind a proxy that hashes with bounded load: hits, spread of load, bytes moved.

    python -m benchmarks.bench_ring --out benchmarks/results

A closed loop: each client sends its next request when its last was answered. Residents have the popularity of a Zipf law.
A host answers one request after the other. A request whose resident the host lacks first loads it, and the host forgets the
residents that it has not used for longest, or keeps those that it has. The clock counts service times of a request that hits.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

from benchmarks.command import command_of
from benchmarks.ring import Ring, hash_of

ROUND_ROBIN = "round robin"
RING = "ring"


@dataclass(frozen=True)
class Scenario:
    """One row to simulate.

    Attributes:
        hosts: Number of hosts.
        residents: Number of residents, all of one size.
        requests: Number of requests of each phase.
        clients_per_host: Number of clients for each host; each has one request under way.
        zipf: Exponent of the popularity: the r-th resident is used in proportion to r^-zipf.
        room: Residents that fit on a host, in shares of residents / hosts.
        weight: Weight of each server in the proxy; 16 points a unit.
        balance_factor: Largest load of a host in percent of the mean; 0 for no limit.
        load_cost: Time to load a missing resident, in service times.
        changed: Number of hosts that go, and later come back empty.
        policy: `ring` or `round robin`.
        forgets: Whether a full host makes room for a resident that it lacks; else it keeps those that it has.
        seed: Of the random numbers.
    """

    hosts: int
    residents: int
    requests: int
    clients_per_host: int = 8
    zipf: float = 1.0
    room: float = 1.5
    weight: int = 16
    balance_factor: int = 200
    load_cost: float = 20.0
    changed: int = 1
    policy: str = RING
    forgets: bool = True
    seed: int = 1


@dataclass
class Phase:
    """Counts of one phase: before a change, after hosts went, after they came back.

    Attributes:
        name: `steady`, `gone` or `back`.
        requests: Number of requests.
        hits: Number of requests whose resident was there.
        elapsed: Time that the phase took, in service times.
        by_host: Number of requests of each host, by server id.
        loads: Number of residents that were loaded.
    """

    name: str
    requests: int = 0
    hits: int = 0
    elapsed: float = 0.0
    by_host: dict[int, int] = field(default_factory=dict)
    loads: int = 0

    def row(self, num_hosts: int, residents: int) -> dict[str, float | str]:
        """Figures of the phase, in shares that do not depend on its length."""
        mean = self.requests / num_hosts
        return {
            "phase": self.name,
            "hit_rate": self.hits / self.requests,
            "max_over_mean": max(self.by_host.values()) / mean,
            "min_over_mean": (min(self.by_host.values()) if len(self.by_host) == num_hosts else 0) / mean,
            "utilization": self.requests / (self.elapsed * num_hosts),
            "loaded_share": self.loads / residents,
        }


class Fleet:
    """Hosts behind a proxy, and the clients that use them.

    Args:
        scenario: See `Scenario`.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._random = random.Random(scenario.seed)
        self._cumulative = list(accumulate(rank**-scenario.zipf for rank in range(1, scenario.residents + 1)))
        self._hashes = [hash_of(f"weights/{number}") for number in range(scenario.residents)]
        self._capacity = max(1, round(scenario.room * scenario.residents / scenario.hosts))
        self._held: dict[int, dict[int, None]] = {}
        self._free_at: dict[int, float] = {}
        self._turn = 0
        self._now = 0.0
        self.join(list(range(1, scenario.hosts + 1)))
        # Forgetful hosts get the most popular ones last: they are then the last to be forgotten.
        order = range(scenario.residents)
        for resident in reversed(order) if scenario.forgets else order:
            home = [self.ids[self.owner(resident)]]
            for server_id in home if scenario.policy == RING or scenario.forgets else self.ids:
                self._keep(self._held[server_id], resident)

    def join(self, ids: Sequence[int]) -> None:
        """Makes these hosts the ones that are up; new ones are empty.

        Args:
            ids: Server ids.
        """
        self.ids = list(ids)
        self._held = {server_id: self._held.get(server_id, {}) for server_id in self.ids}
        self._free_at = {server_id: self._free_at.get(server_id, self._now) for server_id in self.ids}
        self._ring = Ring(self.ids, self.scenario.weight, self.scenario.balance_factor)
        self._starts = [self._ring.start(key_hash) for key_hash in self._hashes]

    def owner(self, resident: int) -> int:
        """Index of the host of a resident while no host is at its limit."""
        return self._ring.owner(self._hashes[resident])

    def copies(self) -> int:
        """Number of residents on all hosts, copies counted."""
        return sum(len(held) for held in self._held.values())

    def run(self, name: str) -> Phase:
        """Sends the requests of one phase and waits for all of them."""
        phase = Phase(name, requests=self.scenario.requests)
        drawn = self._random.choices(
            range(self.scenario.residents), cum_weights=self._cumulative, k=self.scenario.requests
        )
        began = self._now
        under_way = [0] * len(self.ids)
        clients = min(self.scenario.clients_per_host * len(self.ids), self.scenario.requests)
        ends: list[tuple[float, int]] = []
        for number, resident in enumerate(drawn):
            if number >= clients:
                self._now, done = heappop(ends)
                under_way[done] -= 1
            host = self._host_for(resident, under_way, len(ends))
            under_way[host] += 1
            heappush(ends, (self._serve(phase, host, resident), host))
        self._now = max(ends)[0]
        phase.elapsed = self._now - began
        return phase

    def _host_for(self, resident: int, under_way: Sequence[int], total: int) -> int:
        if self.scenario.policy == ROUND_ROBIN:
            self._turn += 1
            return self._turn % len(self.ids)
        return self._ring.choose(self._starts[resident], under_way, total)

    def _serve(self, phase: Phase, host: int, resident: int) -> float:
        """Answers one request; returns when it ends."""
        server_id = self.ids[host]
        held = self._held[server_id]
        cost = 1.0
        if resident in held:
            phase.hits += 1
            del held[resident]
            held[resident] = None
        else:
            phase.loads += 1
            cost += self.scenario.load_cost
            self._keep(held, resident)
        phase.by_host[server_id] = phase.by_host.get(server_id, 0) + 1
        end = self._free_at[server_id] = max(self._now, self._free_at[server_id]) + cost
        return end

    def _keep(self, held: dict[int, None], resident: int) -> None:
        if len(held) >= self._capacity:
            if not self.scenario.forgets:
                return
            del held[next(iter(held))]
        held[resident] = None


def simulate(scenario: Scenario) -> dict[str, object]:
    """Runs one scenario: some requests, then some hosts go, then they come back empty.

    Returns:
        The scenario and, for each phase, hit rate, spread of load and share of the residents that were loaded; the share
        of residents whose host changed; copies of a resident in the mean.
    """
    fleet = Fleet(scenario)
    every = fleet.ids
    owners = [every[fleet.owner(resident)] for resident in range(scenario.residents)]
    phases = [fleet.run("warm-up"), fleet.run("steady")]
    copies = fleet.copies() / scenario.residents
    # Spread over the ids, so that neighbours in the list are not the ones that go.
    gone = set(random.Random(scenario.seed).sample(every, scenario.changed))
    fleet.join([server_id for server_id in every if server_id not in gone])
    moved = sum(fleet.ids[fleet.owner(resident)] != owner for resident, owner in enumerate(owners))
    phases.append(fleet.run("gone"))
    fleet.join(every)
    phases.append(fleet.run("back"))
    rows = [
        phase.row(scenario.hosts - (scenario.changed if phase.name == "gone" else 0), scenario.residents)
        for phase in phases[1:]
    ]
    return {
        **asdict(scenario),
        "phases": rows,
        "rehomed_share": moved / scenario.residents,
        "copies": copies,
    }


def scenarios(requests: int) -> list[Scenario]:
    """Rows of the committed result.

    Args:
        requests: Number of requests of each phase in the largest rows.
    """
    large = Scenario(1000, 100_000, requests, changed=10)
    hundred = replace(large, hosts=100, residents=10_000, requests=requests // 2, changed=1)
    ten = Scenario(10, 1_000, requests // 5)
    return [
        large,
        replace(large, balance_factor=150),
        replace(large, room=3.0),
        replace(large, room=3.0, balance_factor=150),
        replace(large, balance_factor=0),
        replace(large, room=3.0, weight=1),
        replace(large, policy=ROUND_ROBIN, room=3.0),
        *(replace(hundred, room=room, balance_factor=limit) for room in (1.5, 3.0) for limit in (125, 150, 200)),
        replace(hundred, policy=ROUND_ROBIN, room=3.0),
        ten,
        replace(ten, room=3.0),
        replace(ten, policy=ROUND_ROBIN, room=3.0),
    ]


def run(argv: Sequence[str]) -> int:
    """Simulates every row, prints a table, and writes `ring.json`; returns the exit status.

    Args:
        argv: Arguments after the benchmark's name.
    """
    parser = argparse.ArgumentParser(prog="bench ring", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=300_000, help="of each phase in the largest rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    rows = [replace(scenario, seed=arguments.seed) for scenario in scenarios(arguments.requests)]
    return run_scenarios(rows, argv, arguments.out)


def run_scenarios(asked: Sequence[Scenario], argv: Sequence[str], out: Path | None) -> int:
    """Simulates these rows.

    Args:
        asked: Rows.
        argv: Arguments that the result names.
        out: Folder of the result; None for none.
    """
    began_s = time.monotonic()
    rows = []
    print("| hosts | residents | policy | points | limit | room | phase | hits | busiest | rehomed | loaded | copies |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for scenario in asked:
        row = simulate(scenario)
        rows.append(row)
        print_row(row)
    result = {
        "question": "residents on a ring of hosts with bounded load, simulated",
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": command_of("benchmarks.bench_ring", argv),
        "seconds": round(time.monotonic() - began_s, 1),
        "rows": rows,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ring.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def print_row(row: dict[str, object]) -> None:
    """Prints one scenario, a line a phase."""
    phases = row["phases"]
    assert isinstance(phases, list), "This is a bug."
    for phase in phases:
        print(
            f"| {row['hosts']} | {row['residents']} | {row['policy']} | {row['weight']} × 16 | {row['balance_factor']} "
            f"| {row['room']} | {phase['phase']} | {phase['hit_rate']:.4f} | {phase['max_over_mean']:.2f} "
            f"| {row['rehomed_share']:.4f} | {phase['loaded_share']:.4f} | {row['copies']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
