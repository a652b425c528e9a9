"""Receives the loop thread's events: from the gateways' sockets, and from other threads.

Owns the sockets of gateways that have said hello. Receives and sends for all of them in the one thread that has the
device, so no job waits for a thread to wake. Messages that are sent between two `flush` calls leave in one write for
each gateway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque

import msgspec

from tilewire.service.engine.loop.jobs import Attached, Call, Changed, Client, Event, Lost, Received, Stop
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import FrameDecoder, Hello, ToEngine, encode_frame
from tilewire.service.supervisor.vault import VaultFollower

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 2**18
# For what is unsent when the engine ends.
CLOSE_TIMEOUT_S = 5.0
# `select` takes no larger descriptor.
FD_SETSIZE = 1024


class Peer:
    """One gateway's non-blocking socket; `changed` gets this peer when it has something to send and had not."""

    def __init__(self, sock: socket.socket, hello: Hello, segment: Segment, changed: list[Peer]) -> None:
        self.sock = sock
        self.decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
        self.client = Client(f"gateway-{hello.gateway}", segment, self.send)
        self.is_open = True
        # Bytes that the socket's buffer had no room for; the gateway reads slowly.
        self.unsent = b""
        self.is_full = False
        self._outgoing: list[msgspec.Struct] = []
        self._changed = changed

    def send(self, message: msgspec.Struct) -> None:
        """Sends at the next flush; dropped when the gateway is gone."""
        if not self._outgoing:
            self._changed.append(self)
        self._outgoing.append(message)

    def write(self) -> bool:
        """Writes what there is. Returns whether it all left.

        Raises:
            OSError: The gateway is gone.
        """
        if self._outgoing:
            self.unsent += encode_frame(self._outgoing)
            self._outgoing.clear()
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        return not self.unsent


class Mailbox:
    """The loop thread's inbox and outbox.

    `post`, `connect` and `ring` may be called by any thread, all else by the loop thread.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        # Other threads' events, and the bell for them, which is rung no more once the loop has ended.
        self._posting = threading.Lock()
        self._is_closed = False
        self._posted: deque[Peer | Stop | Call] = deque()
        self._peers: dict[int, Peer] = {}
        self._changed: list[Peer] = []
        self._follower: VaultFollower | None = None

    def follow(self, follower: VaultFollower) -> None:
        """Says from now on when the vault has changes."""
        if follower.is_open:
            self._follower = follower
            self._epoll.register(follower.fileno(), select.EPOLLIN)

    def connect(self, sock: socket.socket, hello: Hello, segment: Segment) -> None:
        """Takes over the socket of a gateway that has said hello."""
        if not self.post(Peer(sock, hello, segment, self._changed)):
            sock.close()
            segment.close()

    def post(self, event: Peer | Stop | Call) -> bool:
        """Hands the loop an event. Returns False, and drops it, when the loop has ended."""
        # Both or neither: the loop may take the event, and end, before the bell is rung for it.
        with self._posting:
            if not self._is_closed:
                self._posted.append(event)
                os.eventfd_write(self._bell, 1)
            return not self._is_closed

    def ring(self) -> None:
        """Has `take` return, with no event of its own."""
        with self._posting:
            if not self._is_closed:
                os.eventfd_write(self._bell, 1)

    def take(self, timeout_s: float | None) -> list[Event]:
        """Everything that has come; waits for an event up to the time-out, for ever without one."""
        events: list[Event] = []
        ready = self._wait(timeout_s)
        # Before what came over sockets: a change of the store is known to the jobs behind it.
        self._take_posted(events)
        for fd, happened in ready:
            if fd == self._bell:
                # It may have been rung again since: what is posted by now has no other bell.
                os.eventfd_read(self._bell)
                self._take_posted(events)
                continue
            peer = self._peers.get(fd)
            if peer is None:
                self._look_at_vault(events)
                continue
            if happened & select.EPOLLOUT:
                self._changed.append(peer)
            if happened & ~select.EPOLLOUT:
                self._receive(peer, events)
        return events

    def flush(self) -> None:
        """Sends what was said since the last flush."""
        if not self._changed:
            return
        changed = self._changed[:]
        # The list itself stays: every peer has it.
        self._changed.clear()
        for peer in changed:
            if not peer.is_open:
                continue
            try:
                is_all = peer.write()
            except OSError:
                # Reading says so too, with the events that are still to come before the end.
                peer.unsent = b""
                continue
            if peer.is_full is is_all:
                peer.is_full = not is_all
                self._epoll.modify(peer.sock, select.EPOLLIN if is_all else select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Sends what is still to be sent and closes every socket."""
        for peer in self._peers.values():
            peer.sock.settimeout(CLOSE_TIMEOUT_S)
            with contextlib.suppress(OSError):
                peer.write()
            peer.sock.close()
        if self._follower is not None:
            self._follower.close()
        self._epoll.close()
        with self._posting:
            self._is_closed = True
            os.close(self._bell)

    def _wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if timeout_s is None:
            return self._epoll.poll()
        if timeout_s > 0 and self._epoll.fileno() < FD_SETSIZE:
            # To the microsecond; epoll's own time-out counts milliseconds.
            select.select([self._epoll], [], [], timeout_s)
            timeout_s = 0
        return self._epoll.poll(timeout_s)

    def _take_posted(self, events: list[Event]) -> None:
        while self._posted:
            posted = self._posted.popleft()
            if not isinstance(posted, Peer):
                events.append(posted)
                continue
            self._peers[posted.sock.fileno()] = posted
            self._epoll.register(posted.sock, select.EPOLLIN)
            events.append(Attached(posted.client))

    def _look_at_vault(self, events: list[Event]) -> None:
        if self._follower is None:
            return
        if not self._follower.is_open:
            self._epoll.unregister(self._follower.fileno())
            self._follower = None
            return
        events.append(Changed())

    def _receive(self, peer: Peer, events: list[Event]) -> None:
        try:
            data = peer.sock.recv(RECEIVE_BYTES)
            messages = peer.decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            logger.warning("%s is cut off: %s", peer.client.name, error)
            data, messages = b"", []
        client = peer.client
        if messages:
            events.append(Received(client, messages))
        if not data:
            self._forget(peer)
            events.append(Lost(client))

    def _forget(self, peer: Peer) -> None:
        peer.is_open = False
        del self._peers[peer.sock.fileno()]
        self._epoll.unregister(peer.sock)
        peer.sock.close()
