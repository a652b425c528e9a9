"""Watches a server's processes from outside during a soak: memory, descriptors, and who was killed when."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import numpy as np

from tests.support.exposition import scrape
from tests.support.live_server import LiveServer

SAMPLE_S = 1.0
# What a process takes in the first part of its life is no slope: buffers and caches fill.
SETTLING_SHARE = 0.4
MIN_LIFE_S = 60.0
# Before a kill is noted and after everybody has seen the end of the outage.
BEFORE_S, AFTER_S = 0.5, 2.0
MB = 1e6


@dataclass
class Life:
    """One process.

    Attributes:
        role: `supervisor`, `gateway` or `engine`.
        samples: (seconds, bytes of anonymous memory, open descriptors), in order.
    """

    role: str
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it was watched."""
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0

    def slope(self, column: int) -> float | None:
        """Growth a minute by least squares, behind the settling part; None for a short life."""
        if self.seconds < MIN_LIFE_S:
            return None
        points = np.array(self.samples[int(len(self.samples) * SETTLING_SHARE) :], dtype=np.float64)
        return float(np.polyfit(points[:, 0], points[:, column], 1)[0] * 60)

    def summary(self) -> dict[str, object]:
        """For the report."""
        memory, descriptors = self.slope(1), self.slope(2)
        return {
            "role": self.role,
            "seconds": round(self.seconds, 1),
            "first_mb": round(self.samples[0][1] / MB, 2),
            "last_mb": round(self.samples[-1][1] / MB, 2),
            "mb_per_min": None if memory is None else round(memory / MB, 3),
            "descriptors": self.samples[-1][2],
            "descriptors_per_min": None if descriptors is None else round(descriptors, 2),
        }


class Watcher(threading.Thread):
    """Samples every process of a server until it is stopped."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._ending = threading.Event()
        self.lives: dict[int, Life] = {}

    def run(self) -> None:
        """Samples."""
        while not self._ending.wait(SAMPLE_S):
            server = self._server
            roles = [(server.process.pid, "supervisor")]
            roles += [(pid, "gateway") for pid in server.gateways()] + [(pid, "engine") for pid in server.engines()]
            for pid, role in roles:
                if (sample := _sample(pid)) is not None:
                    self.lives.setdefault(pid, Life(role)).samples.append((time.monotonic(), *sample))

    def stop(self) -> None:
        """Ends."""
        self._ending.set()
        self.join()


def _sample(pid: int) -> tuple[int, int] | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  (names alone; nothing is opened)
    except OSError:
        return None
    if "RssAnon:" not in status:
        return None
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024, descriptors


@dataclass(frozen=True)
class Outage:
    """One kill, and when the service had everything again.

    Attributes:
        role: Who was killed.
        killed_s: By `time.monotonic`.
        ready_s: Likewise.
    """

    role: str
    killed_s: float
    ready_s: float


class Killer(threading.Thread):
    """Kills an engine, then a gateway, by turns; the oldest gateway is spared, so that one life is as long as the soak.

    Args:
        server: The server.
        every_s: Time between kills.
        roles: Who is killed, by turns.
    """

    POLL_S = 0.05
    NUM_LOOKS = 10

    def __init__(self, server: LiveServer, every_s: float, roles: tuple[str, ...] = ("engine", "gateway")) -> None:
        super().__init__(daemon=True)
        self._server, self._every_s, self._roles = server, every_s, roles
        self._ending = threading.Event()
        self._killed_s: float | None = None
        self.outages: list[Outage] = []

    def run(self) -> None:
        """Kills."""
        number = 0
        while not self._ending.wait(self._every_s):
            role = self._roles[number % len(self._roles)]
            number += 1
            before = self._pids(role)
            if not before or (role == "gateway" and len(before) == 1):
                continue
            self._killed_s = time.monotonic()
            os.kill(max(before), signal.SIGKILL)
            while self._pids(role) == before or len(self._pids(role)) < len(before) or not self._is_ready():
                if self._ending.wait(self.POLL_S) and time.monotonic() > self._killed_s + 60:
                    break
            self.outages.append(Outage(role, self._killed_s, time.monotonic()))
            self._killed_s = None

    def _pids(self, role: str) -> list[int]:
        return self._server.gateways() if role == "gateway" else self._server.engines()

    def _is_ready(self) -> bool:
        try:
            return all(self._asks_ready() for _ in range(self.NUM_LOOKS)) and self._has_every_engine()
        except Exception:  # noqa: BLE001  (whatever it is, it is not ready)
            return False

    def _asks_ready(self) -> bool:
        """Over a connection of its own: any gateway may take it, and each finds its engines by itself."""
        with self._server.client() as client:
            return client.get("/readyz", timeout=2.0).status_code == HTTPStatus.OK

    def _has_every_engine(self) -> bool:
        """Without one the service is ready, but what that engine alone holds or orders is 503."""
        with self._server.client() as client:
            up = [value for (name, _), value in scrape(client).items() if name == "tilewire_engine_up"]
        return bool(up) and all(up)

    def explains(self, began_s: float, ended_s: float) -> bool:
        """Whether a kill may be why a request within this time failed."""
        if self._killed_s is not None and ended_s >= self._killed_s - BEFORE_S:
            return True
        return any(
            began_s <= outage.ready_s + AFTER_S and ended_s >= outage.killed_s - BEFORE_S for outage in self.outages
        )

    def stop(self) -> None:
        """Ends, once what was killed is back."""
        self._ending.set()
        self.join(90)
