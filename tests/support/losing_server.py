"""HTTP servers that do what a request asks for and lose their first answer: the connection breaks instead."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.support.threaded_server import ThreadedServer

READY = "/readyz"


@dataclass
class Losses:
    """What became of requests, over all servers that share it.

    Attributes:
        seen: Method, target and length of the body of each request, but for those of readiness.
        num_to_lose: Number of the next requests whose answer is lost.
        status: Status of the next requests that are answered.
    """

    seen: list[tuple[str, str, int]] = field(default_factory=list)
    num_to_lose: int = 0
    status: int = 200


class _Server(ThreadedServer):
    def __init__(self, losses: Losses) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.losses = losses


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path == READY:
            self.answer(200)
            return
        losses = self.server.losses
        losses.seen.append((self.command, self.path, len(body)))
        if losses.num_to_lose > 0:
            losses.num_to_lose -= 1
            self.close_connection = True
            return
        self.answer(losses.status)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def losing(losses: Losses) -> AbstractContextManager[str]:
    """Runs one; yields its address, `name:port`."""
    return _Server(losses).running()
