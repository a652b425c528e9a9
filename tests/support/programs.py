"""Finds programs that tests run and pip does not install: Prometheus, nginx. Knows nothing of what they do."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.02
# Below it are ports of well-known services.
FIRST_PORT = 10_240


def find_program(name: str) -> str:
    """Where a program is: in the environment of the tests, on the path, or among the system's.

    A machine without it skips the test; CI installs it, so there a missing one is a failure.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(name, path=places)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"{name} is not installed; .ci/run has to install it")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def free_port() -> int:
    """A port of the loopback that nobody has at this moment, and that the system gives to nobody who asks for any."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(FIRST_PORT, first_given)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A program that serves on a port; at the end it gets a signal, and must stop."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        wait_listening(process, log, port)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def wait_listening(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    """Returns when the port takes connections."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(POLL_S)
    raise AssertionError(f"nothing listens on {port}:\n{log.read_text()}")
