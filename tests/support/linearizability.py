"""Decides whether a history of one register is linearizable: whether one order that respects real time explains every answer.

Source: Wing and Gong, Testing and Verifying Concurrent Objects (1993), with Lowe's memory of configurations (2017). A register
holds a value or nothing. Operations without an answer may take effect at any time after they began, or never.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_STEPS = 2_000_000
# Operations done as bits, the register behind them, and how many of the first ones are done.
Step = tuple[int, int | None, int]
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


def is_linearizable(history: Sequence[Operation]) -> bool:
    """Whether some order of the operations explains all answers, from an empty register on.

    Raises:
        Undecided: More than `MAX_STEPS` configurations were tried.
    """
    # Certain ones first among those that began together: one without an answer is taken only where it is needed.
    known = [one for one in history if one.is_certain or one.kind != READ]
    known.sort(key=lambda one: (one.began_s, one.ended_s))
    all_certain = sum(1 << index for index, one in enumerate(known) if one.is_certain)
    seen: set[tuple[int, int | None]] = set()
    stack: list[Step] = [(0, None, 0)]
    while stack:
        done, state, first = stack.pop()
        if done & all_certain == all_certain:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if len(seen) > MAX_STEPS:
            raise Undecided(f"{len(history)} operations")
        while first < len(known) and done >> first & 1:
            first += 1
        stack += _steps(known, done, state, first)
    return False


def _steps(known: Sequence[Operation], done: int, state: int | None, first: int) -> list[Step]:
    """What may come next: operations that began before every pending one's answer. The last is tried first."""
    certain: list[tuple[Operation, Step]] = []
    others: list[tuple[Operation, Step]] = []
    earliest_end_s = math.inf
    for index in range(first, len(known)):
        one = known[index]
        if one.began_s > earliest_end_s:
            break
        if done >> index & 1:
            continue
        earliest_end_s = min(earliest_end_s, one.ended_s)
        can, after = one.apply(state)
        if can:
            (certain if one.is_certain else others).append((one, (done | 1 << index, after, first)))
    allowed = [step for one, step in others if one.began_s <= earliest_end_s]
    # A read changes nothing: what may be read now may as well be read first.
    for one, step in certain:
        if one.kind == READ and one.began_s <= earliest_end_s:
            return [step]
    return allowed + [step for one, step in reversed(certain) if one.began_s <= earliest_end_s]


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
