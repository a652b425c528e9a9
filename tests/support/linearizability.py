"""Decides whether a history of one register is linearizable: whether one order that respects real time explains every answer.

Source: Wing and Gong, Testing and Verifying Concurrent Objects (1993), with Lowe's memory of configurations (2017). A register
holds a value or nothing. Operations without an answer may take effect at any time after they began, or never.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_STEPS = 500_000
WRITE, DELETE, READ = "write", "delete", "read"


class Undecided(Exception):
    """The search grew past its bound."""


@dataclass(frozen=True)
class Operation:
    """One operation of a client.

    Attributes:
        kind: `write`, `delete` or `read`.
        value: Value written, or value read (None for nothing). Of a delete with an answer: whether there was something.
        began_s: When it was sent.
        ended_s: When its answer was in; infinity without an answer.
    """

    kind: str
    value: int | bool | None
    began_s: float
    ended_s: float = math.inf

    @property
    def is_certain(self) -> bool:
        """Whether it was answered."""
        return self.ended_s < math.inf

    def apply(self, state: int | None) -> tuple[bool, int | None]:
        """Whether it can happen in this state, and the state behind it."""
        if self.kind == READ:
            return state == self.value, state
        if self.kind == WRITE:
            assert self.value is not None
            return True, int(self.value)
        return not self.is_certain or (state is not None) == self.value, None


@dataclass(frozen=True)
class Configuration:
    """How far an order has come.

    Attributes:
        first: Number of answered operations, from the first on, that are all in the order.
        later: Bits of those behind them that are in it, too.
        used: Bits of unanswered operations in the order.
        state: The register.
    """

    first: int = 0
    later: int = 0
    used: int = 0
    state: int | None = None


class _Search:
    """Looks for an order of one history.

    An unanswered operation is only taken right before an answered one that needs it. This loses no order: between a write and
    the first read of its value nothing changes the register, and what nobody saw may as well never have happened.
    """

    def __init__(self, history: Sequence[Operation]) -> None:
        self._certain = sorted((one for one in history if one.is_certain), key=lambda one: one.began_s)
        self._unknown = [one for one in history if not one.is_certain and one.kind != READ]
        seen = {one.value for one in self._certain if one.kind == READ}
        self._writes = {one.value: index for index, one in enumerate(self._unknown) if one.kind == WRITE}
        self._unseen = [index for value, index in self._writes.items() if value not in seen]
        self._deletes = [index for index, one in enumerate(self._unknown) if one.kind == DELETE]

    def run(self) -> bool:
        """Whether there is an order."""
        seen: set[Configuration] = set()
        stack = [Configuration()]
        while stack:
            now = stack.pop()
            if now.first == len(self._certain):
                return True
            if now in seen:
                continue
            seen.add(now)
            if len(seen) > MAX_STEPS:
                raise Undecided(f"{len(self._certain)} operations")
            stack += self._steps(now)
        return False

    def _steps(self, now: Configuration) -> list[Configuration]:
        """What may come next; the last is tried first."""
        pending, earliest_end_s = [], math.inf
        for index in range(now.first, len(self._certain)):
            one = self._certain[index]
            if one.began_s > earliest_end_s:
                break
            if not now.later >> (index - now.first) & 1:
                pending.append(index)
                earliest_end_s = min(earliest_end_s, one.ended_s)
        steps, helped = [], []
        for index in reversed(pending):
            one = self._certain[index]
            if one.began_s > earliest_end_s:
                continue
            can, after = one.apply(now.state)
            if can:
                step = self._behind(now, index, now.used, after)
                if one.kind == READ:
                    # A read changes nothing: what may be read now may as well be read first.
                    return [step]
                steps.append(step)
            elif (help_ := self._help(now, one, earliest_end_s)) is not None:
                helped.append(
                    self._behind(now, index, now.used | 1 << help_, one.apply(self._unknown[help_].apply(None)[1])[1])
                )
        return helped + steps

    def _help(self, now: Configuration, one: Operation, earliest_end_s: float) -> int | None:
        """An unanswered operation that makes this one possible."""
        if one.kind == READ and one.value is not None:
            able = [self._writes[one.value]] if one.value in self._writes else []
        else:
            able = self._unseen if one.kind == DELETE and one.value else self._deletes
        free = (i for i in able if not now.used >> i & 1 and self._unknown[i].began_s <= earliest_end_s)
        return next(free, None)

    def _behind(self, now: Configuration, index: int, used: int, state: int | None) -> Configuration:
        first, later = now.first, now.later | 1 << (index - now.first)
        while later & 1:
            first, later = first + 1, later >> 1
        return Configuration(first, later, used, state)


def relaxed(history: Sequence[Operation], staleness_s: float) -> list[Operation]:
    """The same history, in which reads may take effect before they began: what they found was true at most so long ago."""
    return [replace(one, began_s=one.began_s - staleness_s) if one.kind == READ else one for one in history]


def is_linearizable(history: Sequence[Operation]) -> bool:
    """Whether some order of the operations explains all answers, from an empty register on. Values are written once.

    Raises:
        Undecided: More than `MAX_STEPS` configurations were tried.
    """
    return _Search(history).run()


def first_violation(history: Sequence[Operation], num_shown: int = 12) -> list[Operation]:
    """The operations at the first moment that no order explains, the last of them answered there; none for a good history."""
    ends = sorted(one.ended_s for one in history if one.is_certain)
    low, high = 0, len(ends)
    # What a history shows up to a moment is a history: if it is bad, so is every longer one.
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_linearizable(_until(history, ends[middle])) else (low, middle)
    if low == len(ends):
        return []
    shown = [one for one in _until(history, ends[low]) if one.is_certain]
    return sorted(shown, key=lambda one: one.ended_s)[-num_shown:]


def _until(history: Sequence[Operation], end_s: float) -> list[Operation]:
    begun = [one for one in history if one.began_s <= end_s]
    return [
        one if one.ended_s <= end_s else Operation(one.kind, one.value if one.kind == WRITE else None, one.began_s)
        for one in begun
    ]
