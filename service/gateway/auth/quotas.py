"""Counts what each API key uses over all gateways, and refuses what is over its quota.

Owns the usage page and the buckets, which hold no secrets. Runs in the gateway's event loop.

Connections are not spread evenly over gateways, so a share of the quota for each would refuse a client that has one
connection. Instead the supervisor makes one page of shared memory. Each gateway has a part of it that it alone writes,
so there is no lock. The part has, for each key, the number of requests and bytes that went through since the service
started. A gateway that admits adds up the parts of all, and fills and drains its own token bucket by the growth since
its last look. So the sum over all gateways keeps to the quota. Two gateways that admit in the same instant may both
take the last token, which the next look sees.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import time
from collections.abc import Callable, Iterable

from tilewire.service.errors import OverQuota
from tilewire.service.keys import MAX_KEYS, Key

logger = logging.getLogger(__name__)

# A bucket holds what a second brings: a client that was idle may send that at once.
BURST_S = 1.0
# Longest wait that a refusal names.
MAX_WAIT_S = 86_400.0

# Keys come and go while the service runs; records stay. Of later keys each gateway counts its own requests alone.
RECORDS = 4 * MAX_KEYS
WORDS = 3  # tag, requests, bytes: unsigned, 8 bytes each, so that each is written and read whole
STRETCH_BYTES = RECORDS * WORDS * 8


def page_bytes(num_gateways: int) -> int:
    """Size of the page that the supervisor makes."""
    return num_gateways * STRETCH_BYTES


class UsagePage:
    """The counts of all gateways; writes those of one. Counts of a predecessor with the same index continue."""

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._words = memoryview(memory).cast("Q")
        self._index = index
        num_gateways = self._words.nbytes // STRETCH_BYTES
        self._records: list[dict[int, int]] = [{} for _ in range(num_gateways)]
        # Requests and bytes of keys that came when all records were taken: no other gateway sees them.
        self._unseen: dict[int, list[int]] = {}

    def used(self, tag: int) -> tuple[int, int]:
        """Requests and bytes of a key, over all gateways."""
        requests, nbytes = self._unseen.get(tag, (0, 0))
        for gateway in range(len(self._records)):
            record = self._find(gateway, tag)
            if record is not None:
                requests += self._words[record + 1]
                nbytes += self._words[record + 2]
        return requests, nbytes

    def add(self, tag: int, requests: int, nbytes: int) -> None:
        """Counts what a key used here."""
        record = self._find(self._index, tag)
        if record is None:
            record = self._new(tag)
        if record is None:
            unseen = self._unseen.setdefault(tag, [0, 0])
            unseen[0] += requests
            unseen[1] += nbytes
            return
        self._words[record + 1] += requests
        self._words[record + 2] += nbytes

    def _find(self, gateway: int, tag: int) -> int | None:
        known = self._records[gateway]
        if tag not in known:
            # Records are only ever appended: what is new stands behind what is known.
            while len(known) < RECORDS and (found := self._words[self._at(gateway, len(known))]):
                known[found] = self._at(gateway, len(known))
        return known.get(tag)

    def _new(self, tag: int) -> int | None:
        known = self._records[self._index]
        if len(known) >= RECORDS:
            if not self._unseen:
                logger.warning(
                    "more keys with quotas came and went than are counted over all gateways: each counts new ones alone; "
                    "restart the service"
                )
            return None
        record = known[tag] = self._at(self._index, len(known))
        self._words[record] = tag
        return record

    @staticmethod
    def _at(gateway: int, number: int) -> int:
        return (gateway * RECORDS + number) * WORDS


class Bucket:
    """A token bucket that is drained by a running total, whoever caused it.

    Args:
        per_s: Tokens gained in a second.
        total: Tokens used so far.
        now_s: On a monotonic clock.

    Attributes:
        most: Tokens of a full bucket.
    """

    def __init__(self, per_s: float, total: int, now_s: float) -> None:
        self._per_s = per_s
        self.most = self._level = max(1.0, per_s * BURST_S)
        self._total = total
        self._now_s = now_s

    def look(self, total: int, now_s: float) -> None:
        """Brings the level up to date."""
        gained = (now_s - self._now_s) * self._per_s - (total - self._total)
        self._level = min(self.most, self._level + gained)
        self._total, self._now_s = total, now_s

    def wait_s(self, credit: float = 0.0) -> float:
        """Seconds until one more may come; what it costs may then exceed the level, and is waited for afterwards.

        `credit` tokens count as if they were there.
        """
        return max(0.0, (1.0 - self._level - credit) / self._per_s)


class _Meter:
    def __init__(self, key: Key, used: tuple[int, int], now_s: float) -> None:
        self.key = key
        quota_bytes = key.quota_bytes_per_s
        self._requests = Bucket(key.requests_per_s, used[0], now_s) if key.requests_per_s is not None else None
        self._bytes = Bucket(quota_bytes, used[1], now_s) if quota_bytes is not None else None

    def wait_s(self, used: tuple[int, int], now_s: float) -> tuple[float, str]:
        """Seconds until it may use more, and what it waits for."""
        waits = [(0.0, "")]
        for bucket, total, what in ((self._requests, used[0], "requests"), (self._bytes, used[1], "bytes")):
            if bucket is not None:
                bucket.look(total, now_s)
                waits.append((bucket.wait_s(), what))
        return max(waits)

    def answer_wait_s(self, used: tuple[int, int], now_s: float, own_bytes: int) -> float:
        """Seconds until an answer may be made; 0 while others have left a debt of less than a bucket."""
        bucket = self._bytes
        if bucket is None:
            return 0.0
        bucket.look(used[1], now_s)
        return bucket.wait_s(own_bytes) if bucket.wait_s(own_bytes + bucket.most) > 0 else 0.0


class Quotas:
    """The quotas of all keys that have one."""

    def __init__(self, page: UsagePage, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._clock_s = clock_s
        self._meters: dict[str, _Meter] = {}

    def follow(self, keys: Iterable[Key]) -> None:
        """From now on, watches what these keys use, wherever they use it."""
        current = {key.name: key for key in keys if key.has_quota}
        self._meters = {name: meter for name, meter in self._meters.items() if current.get(name) == meter.key}
        for key in current.values():
            self._look(key, _tag(key.name))

    def admit(self, key: Key, nbytes: int) -> None:
        """Counts a request with a body of `nbytes` in.

        Raises:
            OverQuota: The key has used up what it may; nothing was counted.
        """
        if not key.has_quota:
            return
        tag = _tag(key.name)
        wait_s, what = self._look(key, tag)
        if wait_s > 0:
            raise OverQuota(
                f"key: {key.name} is over its quota of {what} per second",
                retry_after_s=_told(wait_s),
            )
        self._page.add(tag, 1, nbytes)

    def reserve(self, key: Key, nbytes: int, own_bytes: int) -> None:
        """Counts the bytes of an answer before it is made: answers that are made at once do not each find the bucket full.

        Requests that were admitted together may leave a debt of one bucket, and of one answer beyond it.

        Args:
            key: Key of the request.
            nbytes: Bytes of the answer.
            own_bytes: Bytes of the same request that are counted; they do not refuse it.

        Raises:
            OverQuota: Other requests have left such a debt; nothing was counted.
        """
        if key.bytes_per_s is None:
            return
        tag = _tag(key.name)
        meter, used, now_s = self._meter(key, tag)
        wait_s = meter.answer_wait_s(used, now_s, own_bytes)
        if wait_s > 0:
            raise OverQuota(
                f"key: {key.name} is over its quota of bytes per second",
                retry_after_s=_told(wait_s),
            )
        self._page.add(tag, 0, nbytes)

    def charge(self, key: Key, nbytes: int) -> None:
        """Counts bytes that were not known when the request came in; below 0, those that were declared and never came."""
        if nbytes and key.bytes_per_s is not None:
            self._page.add(_tag(key.name), 0, nbytes)

    def refresh(self) -> None:
        """Brings all buckets up to date: the oftener, the less is a gateway misled that a key has not used for a while."""
        for name, meter in self._meters.items():
            self._look(meter.key, _tag(name))

    def _look(self, key: Key, tag: int) -> tuple[float, str]:
        meter, used, now_s = self._meter(key, tag)
        return meter.wait_s(used, now_s)

    def _meter(self, key: Key, tag: int) -> tuple[_Meter, tuple[int, int], float]:
        used, now_s = self._page.used(tag), self._clock_s()
        # Requests under way since before the entry changed draw on the same bucket: each would fill it otherwise.
        meter = self._meters.get(key.name)
        if meter is None:
            meter = self._meters[key.name] = _Meter(key, used, now_s)
        return meter, used, now_s


def _tag(name: str) -> int:
    """A number that stands for a key's name in the page; never 0, which marks the end."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


def _told(wait_s: float) -> int:
    return math.ceil(min(wait_s, MAX_WAIT_S))
