"""Slots of a gateway's arena for requests that wait their turn. Owns the queue. Runs in the gateway's event loop.

A request that holds nothing takes a slot only while a multiple of it is free (`HEADROOM`), and leaves at most half of the
arena: slow bodies of one size leave room for all much smaller requests. A request that holds a slot takes what there is, and
is served first: when it ends, its slots come back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tilewire.service.errors import TooBusy
from tilewire.service.ipc.arena import Arena, Lease

# Requests of an eighth of a size or less have room whatever requests of that size do, and do not wait behind them.
HEADROOM = 8


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue."""

    nbytes: int
    is_new: bool
    granted: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Room:
    """Grants slots of one arena, in order of arrival among requests of like size.

    Args:
        arena: The memory.
        timeout_s: Longest wait.
    """

    def __init__(self, arena: Arena, timeout_s: float) -> None:
        self.arena = arena
        self._timeout_s = timeout_s
        # Requests that hold slots first, then those that hold none, each in order of arrival.
        self._waiting: list[_Waiter] = []

    def take(self, nbytes: int, *, is_new: bool) -> Lease:
        """Takes a slot at once.

        Args:
            nbytes: Size of the slot.
            is_new: The request holds no slot yet.

        Raises:
            TooBusy: There is no room, or others wait for it.
        """
        if self._waiting and not self._may_overtake(nbytes, is_new=is_new):
            raise TooBusy(f"no room for {nbytes} bytes: {self}")
        return self._lease(nbytes, is_new=is_new)

    def take_now(self, nbytes: int, spare_bytes: int = 0, *, is_new: bool) -> Lease | None:
        """As `take`, with spare room behind the slot, but returns None when there is no room, or others wait for it."""
        arena, whole_bytes = self.arena, nbytes + spare_bytes
        if self._waiting or arena.free_bytes < (HEADROOM * whole_bytes if is_new else whole_bytes):
            return None
        try:
            return arena.lease(nbytes, spare_bytes)
        except TooBusy:
            return None

    async def wait(self, nbytes: int, *, is_new: bool) -> Lease:
        """Takes a slot, when there is room for it.

        Args:
            nbytes: Size of the slot.
            is_new: The request holds no slot yet.

        Raises:
            TooBusy: There was none within the time-out.
        """
        try:
            return self.take(nbytes, is_new=is_new)
        except TooBusy:
            if not self._timeout_s:
                raise
        waiter = _Waiter(nbytes, is_new)
        num_ahead = len(self._waiting) if is_new else sum(not other.is_new for other in self._waiting)
        self._waiting.insert(num_ahead, waiter)
        self.arena.on_freed = self._grant
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, waiter)
        try:
            return await waiter.granted
        except BaseException:
            self._leave(waiter)
            raise
        finally:
            timer.cancel()

    def __str__(self) -> str:
        """Free memory and waiting requests, for error texts."""
        return f"{self.arena}; {len(self._waiting)} requests wait"

    def _lease(self, nbytes: int, *, is_new: bool) -> Lease:
        arena = self.arena
        if is_new and arena.free_bytes < min(HEADROOM * nbytes, nbytes + arena.capacity // 2, arena.capacity):
            raise TooBusy(f"no room for {nbytes} bytes and as much as must stay free beside them: {self}")
        return arena.lease(nbytes)

    def _may_overtake(self, nbytes: int, *, is_new: bool) -> bool:
        return all(HEADROOM * nbytes <= other.nbytes for other in self._waiting if is_new or not other.is_new)

    def _grant(self) -> None:
        """Serves whoever can be served now."""
        smallest = self.arena.capacity * HEADROOM
        for waiter in self._waiting[:]:
            if waiter.granted.done():
                # Cancelled; it leaves as soon as its task runs.
                continue
            if HEADROOM * waiter.nbytes <= smallest:
                try:
                    lease = self._lease(waiter.nbytes, is_new=waiter.is_new)
                except TooBusy:
                    pass
                else:
                    self._waiting.remove(waiter)
                    waiter.granted.set_result(lease)
                    continue
            smallest = min(smallest, waiter.nbytes)
        if not self._waiting:
            self.arena.on_freed = None

    def _give_up(self, waiter: _Waiter) -> None:
        if not waiter.granted.done():
            detail = f"no room for {waiter.nbytes} bytes within {self._timeout_s:g} s: {self}"
            waiter.granted.set_exception(TooBusy(detail))

    def _leave(self, waiter: _Waiter) -> None:
        """Takes a request out that does not wait any more; those behind it may have room."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        else:
            waiter.granted.result().release()
        self._grant()
