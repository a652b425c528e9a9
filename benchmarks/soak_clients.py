"""The clients of a soak: honest ones that check every answer, and those that leave, dawdle or attack."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.soak_calls import Call, Residents, Rng, draw, keyed
from benchmarks.soak_watch import Killer
from tests.support.live_server import LiveServer
from tests.support.raw_http import Answer, ConnectionEnded, RawConnection, head
from tests.support.tensor_bodies import to_npy

# Errors of one connection: the peer left, or said nothing for long.
BROKEN = (ConnectionEnded, OSError)
TIMEOUT_S = 30.0
BACK_OFF_S = 0.05
TOO_MANY, INTERNAL, UNAVAILABLE = 429, 500, 503
WRITE_SHARE, READ_SHARE = 0.06, 0.12
# Of the attacks where clients have a key.
KEYED_SHARE = 0.5
MAX_KEPT = 50


@dataclass
class Tally:
    """What became of the requests of all clients; safe to use from many threads.

    Attributes:
        counts: Requests by what became of them.
        by_call: Right answers by call.
        wrong: Descriptions of wrong answers.
        unexplained: Descriptions of 5xx and broken connections for which no kill is the reason.
        explained: 5xx and broken connections during an outage, by kind.
        seconds: Times of right answers outside outages, by call.
    """

    counts: Counter[str] = field(default_factory=Counter)
    by_call: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str) -> None:
        """Counts one."""
        with self._lock:
            self.counts[kind] += 1

    def right(self, name: str, seconds: float, *, is_quiet: bool) -> None:
        """Counts a right answer; its time counts when nobody was being killed."""
        with self._lock:
            self.counts["right"] += 1
            self.by_call[name] += 1
            if is_quiet:
                self.seconds[name].append(seconds)

    def failed(self, kind: str, text: str, *, is_explained: bool) -> None:
        """Counts a failure of the server."""
        with self._lock:
            self.counts["failed"] += 1
            if is_explained:
                self.explained[kind] += 1
            else:
                self.unexplained.append(f"{kind}: {text}"[:500])

    def is_wrong(self, text: str) -> None:
        """Counts a wrong answer."""
        with self._lock:
            self.counts["wrong"] += 1
            self.wrong.append(text[:500])


class Client(threading.Thread):
    """One client; `act` is repeated until the end."""

    def __init__(self, server: LiveServer, killer: Killer, tally: Tally, seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.killer, self.tally = server, killer, tally
        self.rng: Rng = np.random.default_rng(seed)
        self.ending = threading.Event()

    def run(self) -> None:
        """Acts."""
        while not self.ending.is_set():
            try:
                self.act()
            except BROKEN:
                self.tally.add(f"{type(self).__name__.lower()}: connection ended")
                self.ending.wait(BACK_OFF_S)
        self.close()

    def act(self) -> None:
        """One round."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what outlives a round."""

    def connect(self, timeout_s: float = TIMEOUT_S) -> RawConnection:
        """A connection of its own."""
        return RawConnection(self.server.connect(timeout_s))

    def keyed(self, call: Call) -> Call:
        """The call with the key of the server's clients."""
        return replace(call, data=keyed(call.data, self.server.key))

    def judge(self, status: int, text: str, began_s: float) -> None:
        """Counts an answer to what was not meant to be answered well: any but 500 will do."""
        self.tally.add(f"{type(self).__name__.lower()}: {status}")
        if status >= INTERNAL:
            is_explained = self.killer.explains(began_s, time.monotonic()) and status != INTERNAL
            self.tally.failed(f"{type(self).__name__.lower()} {status}", text, is_explained=is_explained)


class Honest(Client):
    """Sends one request after the other over one connection and checks each answer."""

    def __init__(self, server: LiveServer, killer: Killer, tally: Tally, seed: int) -> None:
        super().__init__(server, killer, tally, seed)
        self._residents = Residents(seed)
        self._connection: RawConnection | None = None

    def act(self) -> None:
        """One request."""
        kind = self.rng.random()
        ended: Callable[[bool], None] = lambda _is_done: None  # noqa: E731
        if kind < WRITE_SHARE:
            call, ended = self._residents.write(self.rng)
        elif kind < WRITE_SHARE + READ_SHARE:
            call = self._residents.read(self.rng)
        else:
            call = draw(self.rng)
        is_done = False
        try:
            is_done = self._send(self.keyed(call))
        finally:
            ended(is_done)

    def _send(self, call: Call) -> bool:
        began_s = time.monotonic()
        try:
            if self._connection is None:
                self._connection = self.connect()
            self._connection.send(call.data)
            answer = self._connection.answer(is_head=call.data.startswith(b"HEAD"))
        except BROKEN as error:
            self.close()
            is_explained = self.killer.explains(began_s, time.monotonic())
            self.tally.failed(type(error).__name__, f"{call.name}: {error}", is_explained=is_explained)
            self.ending.wait(BACK_OFF_S)
            return False
        if answer.headers.get("connection") == "close":
            self.close()
        return self._judge(call, answer, began_s)

    def _judge(self, call: Call, answer: Answer, began_s: float) -> bool:
        now_s = time.monotonic()
        is_quiet = not self.killer.explains(began_s, now_s)
        if answer.status == call.status or answer.status in call.or_statuses:
            if answer.status != call.status or call.check(answer):
                self.tally.right(call.name, now_s - began_s, is_quiet=is_quiet)
                return True
            self.tally.is_wrong(f"{call.name}: {answer.status} {answer.headers} {answer.body[:200]!r}")
        elif answer.status == TOO_MANY:
            self.tally.add("refused: 429")
            self.ending.wait(BACK_OFF_S)
        elif answer.status >= INTERNAL:
            self.tally.failed(
                str(answer.status),
                f"{call.name}: {answer.body[:300]!r}",
                is_explained=answer.status == UNAVAILABLE and not is_quiet,
            )
            self.ending.wait(BACK_OFF_S)
        else:
            self.tally.is_wrong(f"{call.name}: {answer.status}, not {call.status}: {answer.body[:300]!r}")
        return False

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.sock.close()
            self._connection = None


class Leaver(Client):
    """Leaves in the middle of a request, or without reading the answer."""

    def act(self) -> None:
        """One connection."""
        call = self.keyed(draw(self.rng))
        with self.connect(0.3) as connection, contextlib.suppress(TimeoutError):
            cut = int(self.rng.integers(1, len(call.data) + 1)) if self.rng.random() < 0.7 else len(call.data)
            connection.send(call.data[:cut])
            if self.rng.random() < 0.3:
                connection.sock.recv(1)
        self.tally.add("leaver: left")
        self.ending.wait(float(self.rng.random()) * 0.05)


class Slow(Client):
    """Sends its body, and reads its answer, a little at a time."""

    PIECE_BYTES, PAUSE_S = 4096, 0.1

    def act(self) -> None:
        """One request."""
        call = self.keyed(draw(self.rng))
        began_s = time.monotonic()
        with self.connect() as connection:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.send(call.data[: call.body_at])
            for begin in range(call.body_at, min(len(call.data), call.body_at + 2**18), self.PIECE_BYTES):
                connection.send(call.data[begin : begin + self.PIECE_BYTES])
                if self.ending.wait(self.PAUSE_S):
                    return
            if len(call.data) <= call.body_at + 2**18:
                answer = connection.answer(is_head=False)
                if answer.status == call.status and not call.check(answer):
                    self.tally.is_wrong(f"slow {call.name}: {answer.status} {answer.body[:200]!r}")
                self.judge(answer.status, str(answer.body[:200]), began_s)


def _bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", to_npy(np.zeros(2**21, np.float32)))
    return file.getvalue()


def mutated(rng: Rng) -> bytes:
    """One of the calls with a few bytes changed."""
    data = bytearray(draw(rng).data)
    for _ in range(int(rng.integers(1, 8))):
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
    return bytes(data)


class Hostile(Client):
    """Sends what no server should trust; each attack is one entry of `ATTACKS`."""

    ATTACKS: tuple[Callable[[Rng], bytes], ...] = (
        lambda rng: rng.bytes(int(rng.integers(1, 2000))),
        lambda rng: b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * int(rng.integers(2**15, 2**18)) + b"\r\n\r\n",
        lambda rng: head("POST", "/v1/softmax", content_length=str(2 ** int(rng.integers(20, 63)))),
        lambda rng: (
            head("POST", "/v1/softmax", transfer_encoding="chunked") + b"1\r\nx\r\n" * int(rng.integers(1, 5000))
        ),
        lambda _rng: (
            head("POST", "/v1/softmax", transfer_encoding="chunked") + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 20_000
        ),
        lambda _rng: _whole("/v1/softmax", _bomb()),
        lambda rng: _whole("/v1/softmax", b"[" * int(rng.integers(1, 10**5)), "application/json"),
        lambda _rng: _whole("/v1/softmax", b'{"x": [1e999]}', "application/json"),
        lambda rng: _whole("/v1/softmax", (2**62).to_bytes(8, "little") + rng.bytes(100)),
        lambda _rng: _whole(f"/v1/tensors/{'../' * 5}etc/passwd", to_npy(np.zeros(3)), method="PUT"),
        lambda _rng: _whole("/v2/models/matmul/infer", b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        mutated,
    )

    def act(self) -> None:
        """One attack on a connection of its own."""
        data = self.ATTACKS[int(self.rng.integers(len(self.ATTACKS)))](self.rng)
        if self.rng.random() < KEYED_SHARE:
            data = keyed(data, self.server.key)
        began_s = time.monotonic()
        with self.connect(2.0) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
                connection.send(data)
            with contextlib.suppress(TimeoutError):
                answer = connection.answer()
                self.judge(answer.status, str(answer.body[:200]), began_s)
        self.ending.wait(0.02)


def _whole(target: str, body: bytes, content_type: str = "application/octet-stream", method: str = "POST") -> bytes:
    return head(method, target, content_length=str(len(body)), content_type=content_type) + body
