"""Admits requests: the drain, the number of requests under way, and the memory that one request may hold.

Owns the counts and the leases of each request. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tilewire.service.errors import BodyTooLarge, TooBusy, Unavailable
from tilewire.service.gateway.request.room import Room
from tilewire.service.ipc.arena import Lease


class Admission:
    """The door of one gateway.

    Args:
        room: Memory for bodies and results.
        max_in_flight: Most requests under way at once.
        budget_bytes: Most that one request may hold for tensors that its body inflates to.
    """

    def __init__(self, room: Room, max_in_flight: int, budget_bytes: int) -> None:
        self._room = room
        self._max_in_flight = max_in_flight
        self._budget_bytes = budget_bytes
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.is_draining = False

    def admit(self) -> Leases:
        """Counts a request in, until its leases are released.

        Raises:
            Unavailable: The gateway drains.
            TooBusy: Too many are under way.
        """
        if self.is_draining:
            raise Unavailable("the server is draining; another replica can serve this")
        if self.in_flight >= self._max_in_flight:
            raise TooBusy(f"the queue is full: {self.in_flight} requests are under way")
        if not self.in_flight:
            self._idle.clear()
        self.in_flight += 1
        return Leases(self._room, self._budget_bytes, self)

    def leave(self) -> None:
        """Counts a request out; `Leases.release` calls it."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def drain(self) -> None:
        """Admits nobody any more; returns when the last one has left."""
        self.is_draining = True
        await self._idle.wait()


class Leases:
    """Every slot that one request holds, and its place among those under way; all end together, when its answer has left.

    Made by `Admission.admit`.
    """

    def __init__(self, room: Room, budget_bytes: int, admission: Admission) -> None:
        self._room = room
        self._budget_bytes = budget_bytes
        self._admission: Admission | None = admission
        self._leases: list[Lease] = []
        self._answered: asyncio.Future[Any] | None = None

    def lease(self, nbytes: int) -> Lease:
        """Takes a slot at once, for a body or a result.

        Raises:
            BodyTooLarge: The arena could never hold it beside what the request holds already.
            TooBusy: There is no room right now.
        """
        self._check(nbytes)
        lease = self._room.take(nbytes, is_new=not self._leases)
        self._leases.append(lease)
        return lease

    def take_now(self, nbytes: int, spare_bytes: int = 0) -> Lease | None:
        """As `wait`, without a coroutine, and with room for `spare_bytes` behind it; None when the request must wait."""
        lease = self._room.take_now(nbytes, spare_bytes, is_new=not self._leases)
        if lease is not None:
            self._leases.append(lease)
        return lease

    async def wait(self, nbytes: int) -> Lease:
        """Takes a slot, for a body or a result, when there is room.

        Raises:
            BodyTooLarge: The arena could never hold it beside what the request holds already.
            TooBusy: There was no room within the time-out.
        """
        self._check(nbytes)
        lease = await self._room.wait(nbytes, is_new=not self._leases)
        self._leases.append(lease)
        return lease

    def _check(self, nbytes: int) -> None:
        held_bytes = sum(lease.nbytes for lease in self._leases)
        capacity = self._room.arena.capacity
        if held_bytes + nbytes > capacity:
            raise BodyTooLarge(
                f"{nbytes} bytes beside the {held_bytes} that the request holds; a gateway's arena has {capacity}"
            )

    @property
    def first(self) -> Lease:
        """The slot that was taken first."""
        return self._leases[0]

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """Room for a tensor that a codec inflates or parses; counts against the budget.

        Raises:
            BodyTooLarge: More than the request may hold.
            TooBusy: There is no room right now.
        """
        if nbytes > self._budget_bytes:
            raise BodyTooLarge(f"the body's tensors exceed the limit by {nbytes - self._budget_bytes} bytes")
        self._budget_bytes -= nbytes
        lease = self.lease(nbytes)
        return lease.offset, lease.view

    def give_back(self, lease: Lease) -> None:
        """Gives one slot back early."""
        self._leases.remove(lease)
        lease.release()

    def hold_until(self, answered: asyncio.Future[Any]) -> None:
        """Keeps the slots when they are released, until an engine has answered: it may still write there."""
        self._answered = answered

    def release(self) -> None:
        """Gives every slot back and leaves, now or when the engine has answered; a second call does nothing."""
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered.add_done_callback(self._on_answered)
            return
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        if self._admission is not None:
            self._admission.leave()
            self._admission = None

    def _on_answered(self, answered: asyncio.Future[Any]) -> None:
        # Read, because nobody else does; what it was does not matter any more.
        answered.exception()
        self.release()
