"""Runs a `http.server` in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer


class ThreadedServer(ThreadingHTTPServer):
    """A server whose connections may be reset without a word."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Says nothing of connections that a proxy resets."""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serves until left; yields the address, `name:port`."""
        with self:
            thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield f"127.0.0.1:{self.server_port}"
            finally:
                self.shutdown()
                thread.join()
