"""An HTTP server that answers what reached it: the target and the Host, as they were sent."""

from __future__ import annotations

import contextlib
import json
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler

from tests.support.threaded_server import ThreadedServer


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"target": self.path, "host": self.headers["host"]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        # A proxy that checks whether this lives may leave before it has read the answer.
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def echoing() -> AbstractContextManager[str]:
    """Runs it; yields its address, `name:port`."""
    return ThreadedServer(("127.0.0.1", 0), _Echo).running()
