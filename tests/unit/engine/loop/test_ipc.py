"""The engine's mailbox on real sockets: nothing lost or reordered, one write for many, slow, broken and vanished gateways."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Attached, Client, Lost, Received, Stop
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Cancel, Done, FrameDecoder, Hello, Timings, ToGateway, encode_frame

SEGMENT_BYTES = 4096


class Gateway:
    """The other end of a connection to a mailbox."""

    def __init__(self, mailbox: Mailbox, number: int = 0) -> None:
        self.sock, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.segment = Segment.create("test", SEGMENT_BYTES)
        mailbox.connect(theirs, Hello(number, SEGMENT_BYTES), self.segment)
        (event,) = mailbox.take(None)
        assert isinstance(event, Attached)
        self.client: Client = event.client

    def receive(self, count: int) -> list[ToGateway]:
        decoder: FrameDecoder[ToGateway] = FrameDecoder(ToGateway)
        messages: list[ToGateway] = []
        while len(messages) < count:
            messages += decoder.feed(self.sock.recv(2**16))
        return messages


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def ids(events: list) -> list[int]:
    messages = [message for event in events if isinstance(event, Received) for message in event.messages]
    return [message.id for message in messages if isinstance(message, Cancel)]


def test_messages_come_in_order_with_their_gateway(mailbox: Mailbox) -> None:
    one, two = Gateway(mailbox, 1), Gateway(mailbox, 2)
    one.sock.sendall(encode_frame([Cancel(1), Cancel(2)]) + encode_frame([Cancel(3)]))
    two.sock.sendall(encode_frame([Cancel(7)]))
    events = mailbox.take(None)
    while len(ids(events)) < 4:
        events += mailbox.take(None)
    assert ids([event for event in events if isinstance(event, Received) and event.client is one.client]) == [1, 2, 3]
    assert ids([event for event in events if isinstance(event, Received) and event.client is two.client]) == [7]
    one.sock.close()
    two.sock.close()


def test_what_is_sent_leaves_at_the_flush_in_one_write(mailbox: Mailbox) -> None:
    gateway = Gateway(mailbox)
    gateway.client.send(Done(1, Timings()))
    gateway.client.send(Done(2, Timings()))
    gateway.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        gateway.sock.recv(1)
    mailbox.flush()
    frame = encode_frame([Done(1, Timings()), Done(2, Timings())])
    assert gateway.sock.recv(2**16) == frame
    gateway.sock.close()


def test_a_gateway_that_reads_slowly_gets_everything(mailbox: Mailbox) -> None:
    gateway = Gateway(mailbox)
    count = 50_000
    for number in range(count):
        gateway.client.send(Done(number, Timings()))
    mailbox.flush()
    received: list[ToGateway] = []
    reader = threading.Thread(target=lambda: received.extend(gateway.receive(count)))
    reader.start()
    while reader.is_alive():
        mailbox.take(0.01)
        mailbox.flush()
    assert [message.id for message in received if isinstance(message, Done)] == list(range(count))
    gateway.sock.close()


@pytest.mark.parametrize("last", [b"", b"\xff\xff\xff\xff", encode_frame([Cancel(1)])[:-1] + b"\xc1"])
def test_a_gateway_that_leaves_or_talks_nonsense_is_lost_once(mailbox: Mailbox, last: bytes) -> None:
    gateway = Gateway(mailbox)
    gateway.sock.sendall(last)
    if not last:
        gateway.sock.close()
    (event,) = mailbox.take(None)
    assert isinstance(event, Lost)
    assert event.client is gateway.client
    # Answers to it are dropped.
    gateway.client.send(Done(1, Timings()))
    mailbox.flush()
    assert mailbox.take(0) == []
    gateway.sock.close()


def test_the_last_words_of_a_gateway_come_before_its_end(mailbox: Mailbox) -> None:
    gateway = Gateway(mailbox)
    gateway.sock.sendall(encode_frame([Cancel(5)]))
    gateway.sock.close()
    events = mailbox.take(None)
    while not isinstance(events[-1], Lost):
        events += mailbox.take(None)
    assert ids(events) == [5]


def test_another_thread_wakes_it(mailbox: Mailbox) -> None:
    timer = threading.Timer(0.05, lambda: mailbox.post(Stop()))
    timer.start()
    (event,) = mailbox.take(None)
    assert isinstance(event, Stop)
    timer.join()


def test_what_another_thread_has_posted_comes_before_what_gateways_sent(mailbox: Mailbox) -> None:
    """A change of the store, before the jobs of clients that know of it."""
    gateway = Gateway(mailbox)
    assert mailbox.take(0) == []
    gateway.sock.sendall(encode_frame([Cancel(1)]))
    mailbox.post(Stop())
    events = mailbox.take(None)
    assert isinstance(events[0], Stop)
    assert ids(events) == [1]
    gateway.sock.close()


def test_what_comes_after_the_end_is_dropped() -> None:
    mailbox = Mailbox()
    mailbox.close()
    mailbox.post(Stop())
    ours, theirs = socket.socketpair()
    with ours:
        mailbox.connect(theirs, Hello(0, 4096), Segment.create("tests", 4096))
        assert ours.recv(1) == b""


def test_a_loop_may_end_while_another_thread_tells_it_to() -> None:
    for _ in range(200):
        mailbox = Mailbox()
        stopping = threading.Thread(target=mailbox.post, args=(Stop(),))
        stopping.start()
        while not any(isinstance(event, Stop) for event in mailbox.take(0)):
            pass
        mailbox.close()
        stopping.join()
