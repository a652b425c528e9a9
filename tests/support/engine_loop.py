"""An engine's loop in this process, and gateways that talk to it over their sockets."""

from __future__ import annotations

import socket

import msgspec

from tests.support.local_totals import LocalTotals
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Call
from tilewire.service.engine.loop.loop import EngineLoop
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.host_mappings import HostMappings
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.engine.tensors.transfers import TransferThread
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import FrameDecoder, Hello, ToGateway, encode_frame
from tilewire.service.supervisor.vault import VaultWriter

SEGMENT_BYTES = 2**16
WAIT_S = 10.0


class GatewayEnd:
    """The other end of a gateway's socket.

    Args:
        mailbox: Of the engine that it connects to.
        index: Number of the gateway.
        nbytes: Size of its segment.

    Attributes:
        segment: Its end of the segment.
    """

    def __init__(self, mailbox: Mailbox, index: int = 0, nbytes: int = SEGMENT_BYTES) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        theirs.setblocking(False)
        self._decoder: FrameDecoder[ToGateway] = FrameDecoder(ToGateway)
        self._read: list[ToGateway] = []
        self.segment = Segment.create("tests", nbytes)
        mailbox.connect(theirs, Hello(index, nbytes), self.segment)

    def send(self, *messages: msgspec.Struct) -> None:
        """Sends messages in one frame."""
        self.sock.sendall(encode_frame(messages))

    def receive(self) -> ToGateway:
        """The next message."""
        while not self._read:
            self._read += self._decoder.feed(self.sock.recv(2**16))
        return self._read.pop(0)

    def close(self) -> None:
        """Ends the link."""
        self.sock.close()


def engine_of(mailbox: Mailbox, backend: CpuBackend | None = None) -> tuple[EngineLoop, TensorStore]:
    """An engine that has not begun, and its tensors."""
    backend = CpuBackend("cpu") if backend is None else backend
    vault = VaultWriter(-1)
    metrics = EngineMetrics(LocalTotals(), backend.identity, version="0", restarts=0)
    mappings = HostMappings(lambda call: mailbox.post(Call(call)))
    regions = Regions(backend, vault, mappings, max_bytes=2**20, max_copied_bytes=2**20)
    transfers = TransferThread(backend, lambda call: mailbox.post(Call(call)))
    store = TensorStore(backend, Residents(backend, 2**20, vault), regions, metrics, transfers)
    return EngineLoop(0, mailbox, backend, store, mappings, metrics), store
