"""Admits requests: the drain, the number of requests under way and each flow's share, and the memory that one may hold.

Owns the counts and the leases of each request. Runs in the gateway's event loop.

A flow that has its share is refused while only the reserve is left. So a flood of one flow gets its own refusals, and others
find a place at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from tilewire.service.errors import BodyTooLarge, TooBusy, Unavailable
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.request.room import Room, Share
from tilewire.service.ipc.arena import Lease

# An eighth of the places is left to flows that have less than their share of the rest.
RESERVE = 8

# Flows without requests that are remembered, so that a lone client's next request makes nothing new.
MAX_IDLE_FLOWS = 64


class Admission:
    """The door of one gateway.

    Args:
        room: Memory for bodies and results.
        max_in_flight: Most requests under way at once. From 8 up, an eighth is the reserve.
        budget_bytes: Most that one request may hold for tensors that its body inflates to.

    Attributes:
        in_flight: Requests under way.
        is_draining: Nobody is admitted any more.
    """

    def __init__(self, room: Room, max_in_flight: int, budget_bytes: int) -> None:
        self._room = room
        self._max_in_flight = max_in_flight
        self._budget_bytes = budget_bytes
        # Places that flows share by their weights.
        self._shared = max_in_flight - max_in_flight // RESERVE
        # Flows with requests under way and a few others, and the sum of the former's weights.
        self._shares: dict[int, Share] = {}
        self._weights = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.is_draining = False

    @property
    def num_flows(self) -> int:
        """Flows that are remembered."""
        return len(self._shares)

    def admit(self, flow: Flow) -> Leases:
        """Counts a request in, until its leases are released.

        Raises:
            Unavailable: The gateway drains.
            TooBusy: Too many are under way, in all or of this flow.
        """
        if self.is_draining:
            raise Unavailable("the server is draining; another replica can serve this")
        share = self._shares.get(flow.id) or Share(flow)
        if share.num_requests:
            # Its weight may be another since.
            self._weights += flow.weight - share.flow.weight
        share.flow = flow
        if self.in_flight >= self._shared:
            self._check(share)
        if not share.num_requests:
            self._shares[flow.id] = share
            self._weights += flow.weight
        share.num_requests += 1
        if not self.in_flight:
            self._idle.clear()
        self.in_flight += 1
        return Leases(self._room, self._budget_bytes, self, share)

    def _check(self, share: Share) -> None:
        weight, num_own = share.flow.weight, share.num_requests
        if self.in_flight >= self._max_in_flight:
            raise TooBusy(f"the queue is full: {self.in_flight} requests are under way")
        others = self._weights - (weight if num_own else 0)
        if num_own * (others + weight) >= self._shared * weight:
            raise TooBusy(
                f"the queue is full: {self.in_flight} requests are under way, {num_own} of them of this client"
            )

    def leave(self, share: Share) -> None:
        """Counts a request out; `Leases.release` calls it."""
        share.num_requests -= 1
        if not share.num_requests:
            self._weights -= share.flow.weight
            if len(self._shares) > MAX_IDLE_FLOWS:
                del self._shares[share.flow.id]
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

    Attributes:
        deadline_ns: When it gives up waiting for a slot, on the monotonic clock; 0 for no deadline.
    """

    deadline_ns = 0

    def __init__(self, room: Room, budget_bytes: int, admission: Admission, share: Share) -> None:
        self._room = room
        self._share = share
        self._held_bytes = 0
        self._budget_bytes = budget_bytes
        self._admission: Admission | None = admission
        self._leases: list[Lease] = []
        self._answered: asyncio.Future[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()

    def take_now(self, nbytes: int, spare_bytes: int = 0, *, is_result: bool = False) -> Lease | None:
        """As `wait`, without a coroutine, and with room for `spare_bytes` behind it; None when the request must wait."""
        lease = self._room.take_now(nbytes, self._share, spare_bytes, is_new=not self._leases, is_result=is_result)
        return None if lease is None else self._held(lease)

    async def wait(self, nbytes: int, *, is_result: bool = False) -> Lease:
        """Takes a slot, for a body or a result, when there is room.

        Raises:
            BodyTooLarge: The arena could never hold it beside what the request holds already.
            TooBusy: There was no room within the time-out.
            DeadlinePassed: There was none by the deadline.
        """
        self._check(nbytes)
        is_new = not self._leases
        lease = await self._room.wait(
            nbytes, self._share, is_new=is_new, is_result=is_result, deadline_ns=self.deadline_ns
        )
        return self._held(lease)

    def _held(self, lease: Lease) -> Lease:
        """Notes a slot. The room has counted what of it is for results among those of the flow."""
        nbytes = lease.nbytes + lease.spare_bytes
        self._leases.append(lease)
        self._held_bytes += nbytes
        self._share.held_bytes += nbytes
        return lease

    def _check(self, nbytes: int) -> None:
        capacity = self._room.arena.capacity
        if self._held_bytes + nbytes > capacity:
            beside = f" beside the {self._held_bytes} that the request holds" if self._held_bytes else ""
            raise BodyTooLarge(
                f"{nbytes} bytes{beside}; a gateway's part of --arena-bytes has {capacity} bytes for all of a request"
            )

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """Room for a tensor that a codec inflates or parses; counts against the budget.

        Raises:
            BodyTooLarge: More than the request may hold, or than the arena could ever hold beside what it holds already.
            TooBusy: There is no room right now.
        """
        if nbytes > self._budget_bytes:
            more = nbytes - self._budget_bytes
            raise BodyTooLarge(f"body: its tensors exceed the limit, --max-body-bytes, by {more} bytes")
        self._budget_bytes -= nbytes
        self._check(nbytes)
        lease = self._held(self._room.take(nbytes, self._share, is_new=not self._leases))
        return lease.offset, lease.view

    def give_back(self, lease: Lease) -> None:
        """Gives one slot back early."""
        self._leases.remove(lease)
        self._held_bytes -= lease.nbytes
        self._share.held_bytes -= lease.nbytes
        self._share.let_go(lease)
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
        # First, so that what is free now goes to whoever holds least.
        self._share.held_bytes -= self._held_bytes
        self._held_bytes = 0
        for lease in self._leases:
            self._share.let_go(lease)
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        if self._admission is not None:
            self._admission.leave(self._share)
            self._admission = None

    def _on_answered(self, answered: asyncio.Future[Any]) -> None:
        # Read, because nobody else does; what it was does not matter any more.
        answered.exception()
        self.release()
