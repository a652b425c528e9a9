"""A server as a user starts it: a process tree on a free port of the loopback, and what the system knows of it.

Owns starting, finding its processes and stopping; knows no request.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import httpx

from tilewire.service.cli.launch import ending_with_us

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-m", "tilewire", "serve"]
# Where servers run whose tests name no device; `cuda:0` asks a GPU the same questions.
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
BACKEND = "cpu" if DEVICE.startswith("cpu") else "gpu"
# Tests stop engines for a moment, which may be long on a busy machine.
# A spare engine would import torch beside each test.
FOR_TESTS = ("--engine-timeout-s", "60", "--no-spare-engine")
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 45
POLL_S = 0.02
ANSWER_TIMEOUT_S = 30.0
TRY_S = 0.3


class LiveServer:
    """One running server.

    Args:
        log: Where its standard error goes.
        flags: As on the command line, besides the port.
        before: Command that runs the server's command, such as `prlimit`.
        tls: Of a client that trusts its certificate; None for plain HTTP.
        key: API key of its clients; empty for none.

    Attributes:
        logs: Logs of the servers of this process that run.
    """

    logs: ClassVar[list[Path]] = []

    def __init__(
        self, log: Path, *flags: str, tls: ssl.SSLContext | None = None, key: str = "", before: Sequence[str] = ()
    ) -> None:
        self.log = log
        self.tls = tls
        self.key = key
        self._is_stopped = False
        env = {name: value for name, value in os.environ.items() if not name.startswith("TILEWIRE_")}
        env["PYTHONPATH"] = path_with(ROOT)
        # Spans leave in a batch, by default each 5 s.
        env.setdefault("OTEL_BSP_SCHEDULE_DELAY", "100")
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                ending_with_us([*before, *COMMAND, "--port", "0", "--device", DEVICE, *FOR_TESTS, *flags]),
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=ROOT,
            )
        self.url = self._announced()
        self.host, port = self.url.partition("://")[2].rsplit(":", 1)
        self.port = int(port)
        for pid in self.gateways():
            self.wait_ready(pid)

    def _announced(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        text = b""
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        end_s = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(rb"(https?://[\d.]+:\d+)/v1/matmul", text)) is None:
            # Unlike `select`, `poll` takes any descriptor of a process that has more than a thousand.
            piece = os.read(stdout.fileno(), 65536) if poll.poll(max(0.0, end_s - time.monotonic()) * 1e3) else b""
            if not piece:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"no address printed; it said {text!r} and\n{self.log.read_text()}")
            text += piece
        return found[1].decode()

    def connections_of_gateways(self) -> list[int]:
        """Number of established connections of each gateway."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{self.port:04X}") and row[3] == "01"}
        counts = []
        for pid in self.gateways():
            links = []
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    links.append(str(fd.readlink()))
            counts.append(sum(link in ours for link in links))
        return counts

    def gateways(self) -> list[int]:
        """Process ids of the gateways."""
        return self._children("tilewire.service.gateway")

    def grpc_gateway(self) -> int:
        """Process id of the gateway that speaks gRPC."""
        (pid,) = self._children("tilewire.service.gateway.grpc")
        return pid

    @property
    def grpc_address(self) -> str:
        """Host and port of `--grpc-port 0`."""
        (line,) = (line for line in self.log.read_text().splitlines() if "gRPC is served" in line)
        found = re.search(r"127\.0\.0\.1:\d+", line)
        assert found is not None, line
        return found[0]

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        return self._children("tilewire.service.engine")

    def _children(self, module: str) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if module.encode() in _command_of(child).split(b"\0")]

    def connect(self, timeout_s: float = ANSWER_TIMEOUT_S) -> socket.socket:
        """A connection to whichever gateway takes it."""
        plain = socket.create_connection((self.host, self.port), timeout=timeout_s)
        return plain if self.tls is None else self.tls.wrap_socket(plain, server_hostname=self.host)

    def connect_to(self, gateway: int) -> socket.socket:
        """A connection to this gateway, whose id is given: the others are held up until it is made.

        Where each gateway has a socket of its own, the system decides which gets a connection: then it takes several.
        """
        others = [pid for pid in self.gateways() if pid != gateway]
        with held(others):
            end_s = time.monotonic() + START_TIMEOUT_S
            while time.monotonic() < end_s:
                connection = self.connect(TRY_S if others else START_TIMEOUT_S)
                try:
                    _check_alive(connection)
                except TimeoutError:
                    connection.close()
                else:
                    connection.settimeout(ANSWER_TIMEOUT_S)
                    return connection
        raise AssertionError(f"no connection to gateway {gateway}:\n{self.log.read_text()}")

    def wait_ready(self, gateway: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when this gateway says that it is ready."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            with self.connect_to(gateway) as connection:
                connection.sendall(b"GET /readyz HTTP/1.1\r\nhost: tests\r\n\r\n")
                if b" 200 " in connection.recv(65536).partition(b"\r\n")[0]:
                    return
            time.sleep(POLL_S)
        raise AssertionError(f"not ready:\n{self.log.read_text()}")

    def client(self) -> httpx.Client:
        """An HTTP client with this server's address and key; no proxies."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else None
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=self.tls or True, headers=headers)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tells it to end, once: twice would mean at once."""
        if not self._is_stopped and self.process.poll() is None:
            self.process.send_signal(number)
        self._is_stopped = True

    def stop(self) -> int:
        """SIGTERM, as an orchestrator does; returns the exit status."""
        self.terminate()
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it did not stop:\n{self.log.read_text()}") from None
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
        return status


@contextlib.contextmanager
def held(pids: list[int]) -> Iterator[None]:
    """Stops processes and lets them go on at the end; what they are sent meanwhile, they see no sooner."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        # The signal waits for a core like anything else; until one thread has taken it, the others work on.
        end_s = time.monotonic() + STOP_TIMEOUT_S
        while not all(_is_stopped(pid) for pid in pids):
            assert time.monotonic() < end_s, f"{pids} do not stop"
            time.sleep(POLL_S / 10)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Whether no thread of it runs any more; true for one that is gone."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


@contextlib.contextmanager
def serving(
    log: Path, *flags: str, tls: ssl.SSLContext | None = None, key: str = "", before: Sequence[str] = ()
) -> Iterator[LiveServer]:
    """A server that must end in order: exit status 0 after SIGTERM."""
    LiveServer.logs.append(log)
    try:
        server = LiveServer(log, *flags, tls=tls, key=key, before=before)
        try:
            yield server
        finally:
            status = server.stop()
    finally:
        LiveServer.logs.remove(log)
    assert status == 0, server.log.read_text()


def path_with(root: Path) -> str:
    """A `PYTHONPATH` for children: this folder first, and then what we have."""
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))


def _check_alive(connection: socket.socket) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: tests\r\n\r\n")
    answer = connection.recv(65536)
    while b'{"live":true}' not in answer:
        more = connection.recv(65536)
        assert more, answer
        answer += more


def _command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
