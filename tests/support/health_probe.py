"""Asks for `/healthz` again and again from a process of its own, and tells the longest wait.

`python -m tests.support.health_probe PORT`: says that it has begun, ends with its input, then prints the seconds.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.support.raw_http import RawConnection, head

PAUSE_S = 0.001


class Probe:
    """Outcome of a probe.

    Attributes:
        longest_s: Longest wait for an answer; 0 while the probe runs.
    """

    longest_s = 0.0


@contextlib.contextmanager
def probing(port: int) -> Iterator[Probe]:
    """Probes a gateway for as long as the block runs."""
    probe = Probe()
    command = [sys.executable, "-m", "tests.support.health_probe", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield probe
        finally:
            probe.longest_s = float(process.communicate()[0])


def main() -> None:
    """Runs the probe."""
    longest_s = 0.0
    with RawConnection(socket.create_connection(("127.0.0.1", int(sys.argv[1])))) as connection:
        print("begun", flush=True)
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            began_s = time.perf_counter()
            connection.send(head("GET", "/healthz"))
            assert connection.answer().status == 200
            longest_s = max(longest_s, time.perf_counter() - began_s)
    print(longest_s)


if __name__ == "__main__":
    main()
