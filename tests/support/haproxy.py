"""HAProxy with the configuration of `deploy/haproxy`: only addresses, the port and the place of its socket are a test's own."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from deploy.haproxy.hosts import render, write
from tests.support.programs import find_program, free_port, running

TEMPLATE = Path(__file__).resolve().parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
READY_TIMEOUT_S = 30.0
POLL_S = 0.05


class Proxy:
    """One running proxy.

    Args:
        folder: Folder of its configuration, socket and log.
        hosts: Address of each host, `name:port`, by its id.
        changes: Other lines of the template that this test replaces, and what takes their place.
    """

    def __init__(self, folder: Path, hosts: Mapping[int, str], *changes: tuple[str, str]) -> None:
        self._changes = dict(changes)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "haproxy.cfg"
        self.log = folder / "haproxy.log"
        self._socket = folder / "admin.sock"
        self.pid = 0
        self.write(hosts)

    def text(self, hosts: Mapping[int, str]) -> str:
        """The configuration for these hosts."""
        text = TEMPLATE.read_text(encoding="utf-8")
        places = {
            "bind :8080": f"bind 127.0.0.1:{self.port}",
            "/run/haproxy/admin.sock": str(self._socket),
            # Twice as many files have to be allowed.
            "maxconn 20000": "maxconn 1000",
        } | self._changes
        for place, ours in places.items():
            assert place in text
            text = text.replace(place, ours)
        return render(text, hosts)

    def write(self, hosts: Mapping[int, str]) -> bool:
        """Writes the configuration; returns whether it changed."""
        return write(self.config, self.text(hosts))

    def client(self) -> httpx.Client:
        """An HTTP client of the proxy."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def reload(self, hosts: Mapping[int, str]) -> None:
        """Replaces the hosts while it runs, and waits until the new ones answer."""
        assert self.write(hosts)
        seen = self._workers()
        os.kill(self.pid, signal.SIGUSR2)
        end_s = time.monotonic() + READY_TIMEOUT_S
        while not self._workers() - seen or self._workers() & seen:
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(POLL_S)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Returns when a host answers through it."""
        end_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError), self.client() as client:
                if client.get("/readyz").status_code == 200:
                    return
            time.sleep(POLL_S)
        raise AssertionError(f"no host answers:\n{self.log.read_text()}")

    def _workers(self) -> set[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return {int(child) for child in children}


def servers_up(admin: Path) -> set[str]:
    """Names of the servers whose last check passed.

    Args:
        admin: The proxy's stats socket.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(admin))
        client.sendall(b"show stat residents 4 -1\n")
        text = b"".join(iter(lambda: client.recv(65536), b"")).decode().removeprefix("# ")
    return {row["svname"] for row in csv.DictReader(io.StringIO(text)) if row["check_status"] == "L7OK"}


@contextlib.contextmanager
def proxying(folder: Path, hosts: Mapping[int, str], *changes: tuple[str, str]) -> Iterator[Proxy]:
    """Runs HAProxy in front of these hosts."""
    folder.mkdir(exist_ok=True)
    proxy = Proxy(folder, hosts, *changes)
    with running([find_program("haproxy"), "-W", "-f", str(proxy.config)], proxy.log, proxy.port) as process:
        proxy.pid = process.pid
        proxy.wait_ready()
        yield proxy
