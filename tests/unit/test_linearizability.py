"""The checker itself: known good histories, and known bad ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.support.linearizability import DELETE, READ, WRITE, Operation, first_violation, is_linearizable, relaxed

NEVER = math.inf


def history(*operations: tuple[str, int | bool | None, float, float]) -> list[Operation]:
    return [Operation(*one) for one in operations]


GOOD = {
    "nothing": [],
    "empty": history((READ, None, 0, 1)),
    "one after the other": history((WRITE, 1, 0, 1), (READ, 1, 2, 3), (WRITE, 2, 4, 5), (READ, 2, 6, 7)),
    "a read beside a write sees either": history(
        (WRITE, 1, 0, 1), (WRITE, 2, 2, 9), (READ, 1, 3, 4), (READ, 2, 5, 6), (READ, 2, 7, 8)
    ),
    "writes at once, in either order": history((WRITE, 1, 0, 5), (WRITE, 2, 0, 5), (READ, 1, 6, 7), (READ, 1, 8, 9)),
    "unanswered and done": history((WRITE, 1, 0, 1), (WRITE, 2, 2, NEVER), (READ, 2, 3, 4)),
    "unanswered and never done": history((WRITE, 1, 0, 1), (WRITE, 2, 2, NEVER), (READ, 1, 3, 4), (READ, 1, 8, 9)),
    "unanswered and done late": history((WRITE, 1, 0, 1), (WRITE, 2, 2, NEVER), (READ, 1, 3, 4), (READ, 2, 8, 9)),
    "deleted": history((WRITE, 1, 0, 1), (DELETE, True, 2, 3), (READ, None, 4, 5), (DELETE, False, 6, 7)),
    "an unanswered delete": history((WRITE, 1, 0, 1), (DELETE, None, 2, NEVER), (READ, 1, 3, 4), (READ, None, 5, 6)),
}
BAD = {
    "from nowhere": history((READ, 7, 0, 1)),
    "stale": history((WRITE, 1, 0, 1), (WRITE, 2, 2, 3), (READ, 1, 4, 5)),
    "lost": history((WRITE, 1, 0, 1), (READ, None, 2, 3)),
    "back and forth": history((WRITE, 1, 0, 5), (WRITE, 2, 0, 5), (READ, 1, 6, 7), (READ, 2, 8, 9), (READ, 1, 10, 11)),
    "two truths": history((WRITE, 1, 0, 5), (WRITE, 2, 0, 5), (READ, 1, 6, 7), (READ, 2, 8, 9)),
    "new, then old, beside a write": history((WRITE, 1, 0, 1), (WRITE, 2, 2, 20), (READ, 2, 3, 4), (READ, 1, 5, 6)),
    "risen again": history((WRITE, 1, 0, 1), (DELETE, True, 2, 3), (READ, 1, 4, 5)),
    "deleted twice": history((WRITE, 1, 0, 1), (DELETE, True, 2, 3), (DELETE, True, 4, 5)),
    "before it began": history((READ, 1, 0, 1), (WRITE, 1, 2, 3)),
    "unanswered, done and undone": history((WRITE, 1, 0, 1), (WRITE, 2, 2, NEVER), (READ, 2, 3, 4), (READ, 1, 5, 6)),
}


@pytest.mark.parametrize("name", GOOD)
def test_good(name: str) -> None:
    assert is_linearizable(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str) -> None:
    assert not is_linearizable(BAD[name])


def by_every_order(operations: list[Operation]) -> bool:
    """The definition itself: some subset and order, answered ones all in it."""
    for size in range(len(operations) + 1):
        for order in itertools.permutations(operations, size):
            if any(one.is_certain and one not in order for one in operations):
                continue
            if any(later.ended_s < earlier.began_s for earlier, later in itertools.combinations(order, 2)):
                continue
            state, is_right = None, True
            for one in order:
                can, state = one.apply(state)
                is_right &= can
            if is_right:
                return True
    return False


def test_as_the_definition_says() -> None:
    random_ = random.Random(5)
    verdicts = []
    for _ in range(600):
        operations = []
        for value in range(random_.randint(1, 5)):
            kind = random_.choice((WRITE, WRITE, READ, READ, DELETE))
            began_s = random_.uniform(0, 10)
            seen = {WRITE: value, READ: random_.choice((None, *range(value + 1))), DELETE: random_.random() < 0.5}[kind]
            is_lost = kind != READ and random_.random() < 0.2
            operations.append(Operation(kind, seen, began_s, NEVER if is_lost else began_s + random_.uniform(0.1, 6)))
        verdicts.append(is_linearizable(operations))
        assert verdicts[-1] == by_every_order(operations), operations
    assert 100 < sum(verdicts) < 500


def test_the_first_violation_is_shown() -> None:
    bad = history((WRITE, 1, 0, 1), (WRITE, 2, 2, 3), (READ, 1, 4, 5), (READ, 2, 6, 7), (WRITE, 3, 8, 9))
    assert first_violation(bad, 2) == bad[1:3]
    assert first_violation(GOOD["deleted"]) == []


def test_many_unanswered_writes_are_no_burden() -> None:
    lost = [(WRITE, 1000 + number, 2 + number / 1000, NEVER) for number in range(200)]
    good = history((WRITE, 1, 0, 1), *lost, (READ, 1, 5, 6), (READ, 1100, 7, 8), (READ, 1007, 9, 10))
    assert is_linearizable(good)
    assert not is_linearizable([*good, Operation(READ, 1100, 11, 12)])


def test_reads_may_be_as_old_as_they_are_allowed() -> None:
    history = [Operation(WRITE, 1, 0, 1), Operation(WRITE, 2, 2, 3), Operation(READ, 1, 3.5, 4)]
    assert not is_linearizable(history)
    assert not is_linearizable(relaxed(history, 0.4))
    assert is_linearizable(relaxed(history, 0.6))
    # Changes are exact all the same.
    late = [Operation(WRITE, 1, 0, 1), Operation(DELETE, False, 2, 3)]
    assert not is_linearizable(relaxed(late, 10))
