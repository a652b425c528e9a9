"""Slots of a gateway's arena for requests that wait their turn. Owns the queues. Runs in the gateway's event loop.

A request that holds nothing takes a slot only while a multiple of it is free (`HEADROOM`), and leaves at most half of the
arena: slow bodies of one size leave room for all much smaller requests. A request that holds a slot takes what there is, and
is served first: when it ends, its slots come back. Of the others, the flow that holds least is served first.

Results are held until their clients have read them. So those of one flow take at most half of the arena, or little more than
one of that size or larger: a flow that reads slowly waits for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tilewire.service.errors import DeadlinePassed, TooBusy
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.ipc.arena import Arena, Lease

# Requests of an eighth of a size or less have room whatever requests of that size do, and do not wait behind them.
HEADROOM = 8

# Beside a result of about half of the arena or more, the others of its flow have this part of it.
BESIDE_LARGE = 64

# Part of the time-out: while the first of a flow has waited longer, further ones of it are refused at once. Those that do wait
# are then served in time, unless the rate falls to less than half.
MAX_WAIT_SHARE = 0.5


@dataclass(slots=True, eq=False)
class Share:
    """Share of one flow in a gateway.

    Attributes:
        flow: The flow.
        num_requests: Number of its requests under way.
        held_bytes: Bytes of the slots that they hold.
        result_bytes: Those of them that are for results.
        large_bytes: Size of the one result that takes about half of the arena, or more; 0 for none.
        waiting: Those of its requests that hold nothing and wait, in order of arrival.
    """

    flow: Flow
    num_requests: int = 0
    held_bytes: int = 0
    result_bytes: int = 0
    large_bytes: int = 0
    waiting: list[_Waiter] = field(default_factory=list)

    def __str__(self) -> str:
        """Results under way, for error texts."""
        return f"this client has {self.result_bytes} bytes of results under way, which stay until it has read them"

    def let_go(self, lease: Lease) -> None:
        """Counts a slot that is given back no more among those for results."""
        self.result_bytes -= lease.result_bytes
        if lease.result_bytes == self.large_bytes:
            self.large_bytes = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue."""

    nbytes: int
    share: Share
    is_new: bool
    is_result: bool
    since_s: float = field(default_factory=time.monotonic)
    granted: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Room:
    """Grants slots of one arena, by turns of the flows, and in order of arrival among a flow's requests of like size."""

    def __init__(self, arena: Arena, timeout_s: float) -> None:
        self.arena = arena
        self._timeout_s = timeout_s
        # Requests that hold slots, in order of arrival.
        self._holders: list[_Waiter] = []
        # Flows with requests that hold none.
        self._shares: list[Share] = []

    def take(self, nbytes: int, share: Share, *, is_new: bool, is_result: bool = False) -> Lease:
        """Takes a slot at once, for a request that holds none yet where `is_new`.

        Raises:
            TooBusy: There is no room, or others wait for it.
        """
        if (self._holders or self._shares) and not self._may_overtake(nbytes, share, is_new=is_new):
            raise TooBusy(f"no room for {nbytes} bytes: {self}")
        return self._lease(nbytes, share, is_new=is_new, is_result=is_result)

    def take_now(
        self, nbytes: int, share: Share, spare_bytes: int = 0, *, is_new: bool, is_result: bool = False
    ) -> Lease | None:
        """As `take`, with spare room behind the slot, but returns None when there is no room, or others wait for it."""
        arena, whole_bytes = self.arena, nbytes + spare_bytes
        if self._holders or self._shares or arena.free_bytes < (HEADROOM * whole_bytes if is_new else whole_bytes):
            return None
        result_bytes = nbytes if is_result else spare_bytes
        if result_bytes and self._has_its_part(result_bytes, share):
            return None
        try:
            lease = arena.lease(nbytes, spare_bytes)
        except TooBusy:
            return None
        self._count(lease, share, result_bytes)
        return lease

    async def wait(
        self, nbytes: int, share: Share, *, is_new: bool, is_result: bool = False, deadline_ns: int = 0
    ) -> Lease:
        """Takes a slot, when there is room for it.

        Raises:
            TooBusy: There was none within the time-out, or there will hardly be.
            DeadlinePassed: There was none by the deadline, on the monotonic clock; 0 for none.
        """
        try:
            return self.take(nbytes, share, is_new=is_new, is_result=is_result)
        except TooBusy:
            if not self._timeout_s:
                raise
        if is_new and share.waiting:
            self._check_wait(nbytes, share.waiting[0])
        waiter = _Waiter(nbytes, share, is_new, is_result)
        self._join(waiter)
        self.arena.on_freed = self._grant
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else math.inf
        timeout_s = min(left_s, self._timeout_s)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, waiter, left_s < self._timeout_s)
        try:
            return await waiter.granted
        except BaseException:
            self._leave(waiter)
            raise
        finally:
            timer.cancel()

    def __str__(self) -> str:
        """Free memory and waiting requests, for error texts."""
        return f"{self.arena}; {sum(1 for _ in self._waiting())} requests wait"

    def _check_wait(self, nbytes: int, first: _Waiter) -> None:
        waited_s = time.monotonic() - first.since_s
        if waited_s > MAX_WAIT_SHARE * self._timeout_s:
            raise TooBusy(
                f"no room for {nbytes} bytes: an earlier request of this client has waited for {waited_s:.2g} s"
            )

    def _lease(self, nbytes: int, share: Share, *, is_new: bool, is_result: bool) -> Lease:
        arena = self.arena
        if is_result and self._has_its_part(nbytes, share):
            raise TooBusy(f"no room for {nbytes} bytes: {share}")
        if is_new and arena.free_bytes < min(HEADROOM * nbytes, nbytes + arena.capacity // 2, arena.capacity):
            raise TooBusy(f"no room for {nbytes} bytes and as much as must stay free beside them: {self}")
        lease = arena.lease(nbytes)
        self._count(lease, share, nbytes if is_result else 0)
        return lease

    def _count(self, lease: Lease, share: Share, result_bytes: int) -> None:
        """Counts what of a slot is for results, until `Share.let_go`."""
        lease.result_bytes = result_bytes
        share.result_bytes += result_bytes
        capacity = self.arena.capacity
        if result_bytes > capacity // 2 - capacity // BESIDE_LARGE:
            share.large_bytes = result_bytes

    def _has_its_part(self, nbytes: int, share: Share) -> bool:
        """Whether results of a flow must be read before it has room for one more."""
        capacity = self.arena.capacity
        most_bytes = max(capacity // 2, share.large_bytes + capacity // BESIDE_LARGE if share.large_bytes else 0)
        return share.result_bytes > 0 and share.result_bytes + nbytes > most_bytes

    def _waiting(self) -> Iterator[_Waiter]:
        """All that wait, in the order in which they are served."""
        yield from self._holders
        for share in self._shares:
            yield from share.waiting

    def _may_overtake(self, nbytes: int, share: Share, *, is_new: bool) -> bool:
        """Whether nobody waits whose turn is before that of such a request."""
        if any(HEADROOM * nbytes > other.nbytes and not self._waits_for_itself(other) for other in self._holders):
            return False
        if not is_new:
            return True
        used = share.held_bytes / share.flow.weight
        return all(
            HEADROOM * nbytes <= waiter.nbytes
            for other in self._shares
            if other is share or other.held_bytes / other.flow.weight <= used
            for waiter in other.waiting
        )

    def _waits_for_itself(self, waiter: _Waiter) -> bool:
        return waiter.is_result and self._has_its_part(waiter.nbytes, waiter.share)

    def _join(self, waiter: _Waiter) -> None:
        share = waiter.share
        if not waiter.is_new:
            self._holders.append(waiter)
            return
        share.waiting.append(waiter)
        if len(share.waiting) == 1:
            self._shares.append(share)

    def _grant(self) -> None:
        """Serves whoever can be served now."""
        if len(self._shares) > 1:
            self._shares.sort(key=lambda share: share.held_bytes / share.flow.weight)
        smallest = self.arena.capacity * HEADROOM
        for waiter in list(self._waiting()):
            if waiter.granted.done():
                # Cancelled; it leaves as soon as its task runs.
                continue
            if self._waits_for_itself(waiter):
                continue
            if HEADROOM * waiter.nbytes <= smallest:
                try:
                    lease = self._lease(waiter.nbytes, waiter.share, is_new=waiter.is_new, is_result=waiter.is_result)
                except TooBusy:
                    pass
                else:
                    self._take_out(waiter)
                    waiter.granted.set_result(lease)
                    continue
            smallest = min(smallest, waiter.nbytes)
        if not self._holders and not self._shares:
            self.arena.on_freed = None

    def _give_up(self, waiter: _Waiter, is_late: bool) -> None:
        if waiter.granted.done():
            return
        if is_late:
            waiter.granted.set_exception(DeadlinePassed(f"deadline: it passed while {waiter.nbytes} bytes had no room"))
        else:
            cause = waiter.share if self._waits_for_itself(waiter) else self
            detail = f"no room for {waiter.nbytes} bytes within {self._timeout_s:g} s: {cause}"
            waiter.granted.set_exception(TooBusy(detail))

    def _take_out(self, waiter: _Waiter) -> bool:
        """Takes a request out of its queue. Returns whether it was there."""
        queue = waiter.share.waiting if waiter.is_new else self._holders
        if waiter not in queue:
            return False
        queue.remove(waiter)
        if waiter.is_new and not queue:
            self._shares.remove(waiter.share)
        return True

    def _leave(self, waiter: _Waiter) -> None:
        """Takes a request out that does not wait any more; those behind it may have room."""
        if not self._take_out(waiter):
            lease = waiter.granted.result()
            waiter.share.let_go(lease)
            lease.release()
        self._grant()
