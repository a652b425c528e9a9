"""Soaks a server: mixed calls, clients that leave, dawdle and attack, replaced residents, and kills; every answer is checked.

    python -m benchmarks.soak --minutes 20 --out soak.json

It starts the server itself, and fills the caches of its gateways first, so that what grows later is a leak. Status 1 says that
an answer was wrong, that a 5xx or a broken connection has no kill as its reason, or that slots were held at the end. Further
calls are entries of `CALLS` in `benchmarks/soak_calls.py`, further attacks of `Hostile.ATTACKS`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from benchmarks.soak_calls import keyed, upload
from benchmarks.soak_clients import MAX_KEPT, Client, Honest, Hostile, Leaver, Slow, Tally
from benchmarks.soak_watch import Killer, Watcher
from tests.support.api_keys import entry, keys_file
from tests.support.exposition import is_idle, settles
from tests.support.live_server import LiveServer, serving
from tests.support.raw_http import RawConnection, head
from tests.support.tensor_bodies import encode
from tests.support.tls_server import make_certificates
from tilewire.service.gateway.request.template import MAX_HEADS

FLAGS = (
    *("--gateways", "2", "--arena-bytes", "256MiB", "--max-body-bytes", "32MiB", "--max-result-bytes", "32MiB"),
    *("--body-timeout-s", "10", "--allow-shared-memory"),
)
RIGHTS = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]\nshared_memory = true'
STOP_S = 60.0
# Longest wait for outages past the time, and time between looks.
OUTAGES_S, LOOK_S = 90.0, 0.2
# Clients of each kind, and the time between kills.
NUM_CLIENTS: dict[type[Client], int] = {Honest: 8, Leaver: 1, Slow: 2, Hostile: 1}
KILL_EVERY_S = 60.0
# Each gateway has one of them with all but a chance of 1 in 100.
FILLING_CONNECTIONS, FILLING_TIMEOUT_S = 8, 60.0
PERCENTILES = (50, 99, 99.9)


@contextlib.contextmanager
def soaked_server(folder: Path, *flags: str, is_secure: bool = False) -> Iterator[LiveServer]:
    """A server to be soaked; a secure one serves HTTPS, to clients with a key.

    Args:
        folder: For its log, `log`, and its files.
        flags: Besides `FLAGS`.
        is_secure: Whether it is a secure one.
    """
    tls, key = None, ""
    if is_secure:
        certificates, key = make_certificates(folder), secrets.token_urlsafe()
        tls, file = certificates.context(), keys_file(folder, entry("soak", key, RIGHTS))
        flags += (*certificates.flags, "--api-keys-file", str(file), "--keyless", "metrics")
    with serving(folder / "log", *FLAGS, *flags, tls=tls, key=key) as server:
        yield server


def fill_caches(server: LiveServer, num: int = 2 * MAX_HEADS) -> None:
    """Sends requests of different heads and shapes on several connections, so that every gateway has met more than it caches.

    Args:
        server: The server.
        num: Number of requests of each connection.
    """

    def fill() -> None:
        with RawConnection(server.connect(FILLING_TIMEOUT_S)) as connection:
            for number in range(num):
                body, headers = encode("npy", {"x": np.zeros((1 + number % 64, 1 + number // 64 % 64), np.float16)})
                lines = {**headers, "content_length": str(len(body))}
                data = head("POST", f"/v1/softmax?timeout_ms={10**6 + number}", **lines) + body
                connection.send(keyed(data, server.key))
                assert connection.answer().status == HTTPStatus.OK

    with ThreadPoolExecutor(FILLING_CONNECTIONS) as pool:
        for work in [pool.submit(fill) for _ in range(FILLING_CONNECTIONS)]:
            work.result()


def soak(server: LiveServer, seconds: float, kill_every_s: float, seed: int, min_outages: int = 0) -> dict[str, object]:
    """Runs all clients for some time, and on until so many outages are over; returns the report."""
    tally, watcher, killer = Tally(), Watcher(server), Killer(server, kill_every_s)
    with server.client() as uploader:
        upload(uploader)
    kinds = [kind for kind, number in NUM_CLIENTS.items() for _ in range(number)]
    clients = [kind(server, killer, tally, seed * 1000 + number) for number, kind in enumerate(kinds, 1)]
    began_s = time.monotonic()
    for thread in (watcher, killer, *clients):
        thread.start()
    end_s = began_s + seconds
    while not tally.wrong and time.monotonic() < end_s + (OUTAGES_S if len(killer.outages) < min_outages else 0.0):
        time.sleep(LOOK_S)
    killer.stop()
    for client in clients:
        client.ending.set()
    end_s = time.monotonic() + STOP_S
    for client in clients:
        client.join(max(0.0, end_s - time.monotonic()))
    stuck = sum(client.is_alive() for client in clients)
    with server.client() as connection:
        is_free = settles(connection, is_idle)
    watcher.stop()
    outages = [
        {
            "role": outage.role,
            "at_s": round(outage.killed_s - began_s, 1),
            "back_after_s": round(outage.ready_s - outage.killed_s, 2),
        }
        for outage in killer.outages
    ]
    lives = [life.summary() for life in watcher.lives.values() if life.samples]
    return _report(tally, time.monotonic() - began_s) | {
        "clients_stuck": stuck,
        "slots_free_at_the_end": is_free,
        "outages": outages,
        "processes": lives,
    }


def _report(tally: Tally, seconds: float) -> dict[str, object]:
    times = {
        name: {f"p{percent:g}_ms": round(float(np.percentile(found, percent)) * 1e3, 2) for percent in PERCENTILES}
        | {"max_ms": round(max(found) * 1e3, 2), "requests": len(found)}
        for name, found in sorted(tally.seconds.items())
    }
    return {
        "seconds": round(seconds, 1),
        "counts": dict(sorted(tally.counts.items())),
        "right_by_call": dict(sorted(tally.by_call.items())),
        "num_wrong": len(tally.wrong),
        "wrong": tally.wrong[:MAX_KEPT],
        "num_unexplained": len(tally.unexplained),
        "unexplained": tally.unexplained[:MAX_KEPT],
        "failures_in_outages": dict(tally.explained),
        "latency_outside_outages": times,
    }


def is_good(report: dict[str, object]) -> bool:
    """Whether nothing was wrong, unexplained, stuck or held."""
    is_clean = not (report["num_wrong"] or report["num_unexplained"] or report["clients_stuck"])
    return is_clean and bool(report["slots_free_at_the_end"])


def text_of(report: dict[str, object]) -> str:
    """The report for people."""
    lines = [
        f"{name}: {report[name]}"
        for name in ("seconds", "counts", "num_wrong", "num_unexplained", "failures_in_outages")
    ]
    for name in ("wrong", "unexplained", "outages", "processes"):
        entries = report[name]
        assert isinstance(entries, list)
        lines += [f"  {name}: {entry}" for entry in entries]
    times = report["latency_outside_outages"]
    assert isinstance(times, dict)
    lines += [f"  {name}: {found}" for name, found in times.items()]
    lines += [f"{name}: {report[name]}" for name in ("clients_stuck", "slots_free_at_the_end")]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs; prints the report and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-every-s", type=float, default=KILL_EVERY_S)
    parser.add_argument("--device", default="cpu", help="of the server: cpu, cpu:0,1, cuda")
    parser.add_argument("--secure", action="store_true", help="over HTTPS, with an API key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the report as JSON")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        with soaked_server(Path(folder), "--device", arguments.device, is_secure=arguments.secure) as server:
            with server.client() as client:
                identity = client.get("/v2").json()
            fill_caches(server)
            report = soak(server, arguments.minutes * 60, arguments.kill_every_s, arguments.seed)
        errors = [line for line in Path(folder, "log").read_text().splitlines() if "Traceback" in line]
    report["about"] = describe(identity, "benchmarks.soak", list(argv))
    report["tracebacks_in_the_log"] = len(errors)
    print(text_of(report))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if is_good(report) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
