"""A server that keeps its port over its lives: it is stopped, killed and started again behind a proxy."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from tests.support.exposition import scrape, total
from tests.support.live_server import STOP_TIMEOUT_S, LiveServer


class Replica:
    """A server on a port of its own.

    Args:
        folder: Folder of its logs.
        port: Port of every life.
        flags: Flags of `tilewire serve`, besides the port.
    """

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.folder = folder
        self.port = port
        self.flags = flags
        self.server = self.start()

    def start(self) -> LiveServer:
        """Starts it, or the next one in its place."""
        log = self.folder / f"log-{len(list(self.folder.iterdir()))}"
        self.server = LiveServer(log, *self.flags, "--port", str(self.port))
        return self.server

    def answered(self) -> float:
        """Number of products that this life has answered."""
        with self.server.client() as client:
            return total(scrape(client), "tilewire_requests_total", op="matmul", code="200")

    def kill(self) -> None:
        """As when its machine is lost: every process at once, the supervisor first, so that none is replaced.

        Returns when all have ended: a process that dies takes connections until its memory is given back.
        """
        pids = [self.server.process.pid, *self.server.gateways(), *self.server.engines()]
        ends = [os.pidfd_open(pid) for pid in pids]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for end in ends:
                poll = select.poll()
                poll.register(end, select.POLLIN)
                assert poll.poll(STOP_TIMEOUT_S * 1e3)
        finally:
            for end in ends:
                os.close(end)
        self.server.process.wait()
        assert self.server.process.stdout is not None
        self.server.process.stdout.close()
