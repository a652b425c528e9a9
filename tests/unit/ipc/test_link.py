"""Which messages leave together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tilewire.service.ipc.link import MAX_GATHERED, Link
from tilewire.service.ipc.messages import Cancel, FrameDecoder, ToEngine


class Writes(asyncio.Transport):
    """Keeps the numbers of the cancellations in each write."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[list[int]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        decoder: FrameDecoder[Cancel] = FrameDecoder(ToEngine)
        self.numbers.append([message.id for message in decoder.feed(bytes(data))])

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


async def sent_in_writes(
    messages: Sequence[tuple[int, int]], turns_between: int, turns_after: int = 100
) -> list[list[int]]:
    """Sends cancellations, and returns the numbers that each write brought.

    Args:
        messages: Number of each, and the turns that it may wait.
        turns_between: Turns of the loop between two.
        turns_after: Turns of the loop until the link is closed.
    """
    link: Link[object] = Link(ToEngine, lambda _message: None, lambda: None)
    writes = Writes()
    link.connection_made(writes)
    for number, turns in messages:
        link.send(Cancel(number), turns)
        for _ in range(turns_between):
            await asyncio.sleep(0)
    for _ in range(turns_after):
        await asyncio.sleep(0)
    link.close()
    return writes.numbers


@pytest.mark.parametrize(
    ("messages", "turns_between", "writes"),
    [
        ([(1, 0), (2, 0)], 0, [[1, 2]]),
        ([(1, 0), (2, 0)], 2, [[1], [2]]),
        ([(1, 8), (2, 8), (3, 8)], 2, [[1, 2, 3]]),
        ([(1, 2), (2, 2)], 8, [[1], [2]]),
        # One that may not wait takes those with it that may.
        ([(1, 50), (2, 0), (3, 0)], 4, [[1, 2], [3]]),
        ([(number, 50) for number in range(MAX_GATHERED + 1)], 0, [[*range(MAX_GATHERED + 1)]]),
    ],
)
def test_messages_wait_for_others_as_long_as_they_may(
    messages: list[tuple[int, int]], turns_between: int, writes: list[list[int]]
) -> None:
    assert asyncio.run(sent_in_writes(messages, turns_between)) == writes


def test_many_messages_wait_no_longer() -> None:
    writes = asyncio.run(sent_in_writes([(number, 90) for number in range(MAX_GATHERED + 4)], 1))
    assert len(writes) == 2
    assert len(writes[0]) in (MAX_GATHERED, MAX_GATHERED + 1)


def test_what_waits_leaves_when_the_link_is_closed() -> None:
    assert asyncio.run(sent_in_writes([(1, 1000)], 0, turns_after=0)) == [[1]]
