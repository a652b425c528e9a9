"""Consistent hashing with bounded load as HAProxy computes it: which host gets a key, given the requests under way on each.

A proxy with `hash-type consistent crc32 avalanche` and `hash-balance-factor` gives the same answers for the same server ids,
so a figure of the simulation can be checked against a proxy that runs.

Source: https://github.com/haproxy/haproxy, `src/lb_chash.c` and `include/haproxy/tools.h`; the limit of load is that of
Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence

_MASK = 2**32 - 1
# Of HAProxy: the range of points that belong to one server id, and the points of one unit of weight.
_POINTS_PER_ID = 4096
POINTS_PER_WEIGHT = 16


def mix(value: int) -> int:
    """Spreads an integer over 32 bits: Bob Jenkins's mixing, times a prime near 3/4 of the range."""
    value = ((value + 0x7ED55D16) + (value << 12)) & _MASK
    value = (value ^ 0xC761C23C) ^ (value >> 19)
    value = ((value + 0x165667B1) + (value << 5)) & _MASK
    value = ((value + 0xD3A2646C) ^ (value << 9)) & _MASK
    value = ((value + 0xFD7046C5) + (value << 3)) & _MASK
    value = (value ^ 0xB55A4F09) ^ (value >> 16)
    return (value * 3221225473) & _MASK


def hash_of(key: str) -> int:
    """Place of a key on the ring."""
    return mix(zlib.crc32(key.encode()))


class Ring:
    """Places of the hosts on a circle of 2^32, and the limit of load of each.

    Args:
        ids: Server ids of the hosts that are up, 1 or larger. A host is named by its index among them.
        weight: Weight of every host; each unit is 16 points.
        balance_factor: Largest load of a host in percent of the mean; 0 for no limit.
    """

    def __init__(self, ids: Sequence[int], weight: int, balance_factor: int) -> None:
        assert ids, "This is a bug: a ring of no hosts."
        self._num_hosts = len(ids)
        self._weight = weight * POINTS_PER_WEIGHT
        self._balance_factor = balance_factor
        points = sorted(
            (mix(server_id * _POINTS_PER_ID + number), index)
            for index, server_id in enumerate(ids)
            for number in range(self._weight)
        )
        self._places = [place for place, _ in points]
        self._hosts = [index for _, index in points]

    def start(self, key_hash: int) -> int:
        """Number of the point that is nearest to a key, before or after it."""
        after = bisect_left(self._places, key_hash)
        if after == len(self._places):
            after = 0
        before = after - 1
        to_before = (key_hash - self._places[before]) & _MASK
        to_after = (self._places[after] - key_hash) & _MASK
        return before % len(self._places) if to_before <= to_after else after

    def owner(self, key_hash: int) -> int:
        """Host of a key while no host is at its limit."""
        return self._hosts[self.start(key_hash)]

    def choose(self, start: int, under_way: Sequence[int], total: int) -> int:
        """Host that gets the next request of a key: the first from its point on that is under its limit.

        Args:
            start: Point of the key.
            under_way: Requests under way on each host.
            total: Sum of `under_way`.
        """
        if not self._balance_factor:
            return self._hosts[start]
        hosts = self._hosts
        slots = -(-(total + 1) * self._balance_factor // 100)
        per_weight, rest = divmod(slots, self._num_hosts * self._weight)
        whole = per_weight * self._weight
        for point in range(start, start + len(hosts)):
            host = hosts[point % len(hosts)]
            if under_way[host] < max(1, whole + self._share(host, rest)):
                return host
        return hosts[start]

    def _share(self, host: int, rest: int) -> int:
        """Slots of a host among those that no unit of weight gets whole."""
        return (host + 1) * rest // self._num_hosts - host * rest // self._num_hosts
