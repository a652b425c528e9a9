"""The lock between pytest's workers: many hold it together or one alone, and who waits is not overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.turns import Turns

SOON_S = 0.2
LONG_S = 30.0


@pytest.fixture
def visit(tmp_path: Path) -> Callable[[bool], Visit]:
    (tmp_path / "room").touch()
    return lambda alone: Visit(Turns(tmp_path, tmp_path / "room"), alone)


class Visit:
    """Takes a turn in a thread, with a lock of its own as a process has, until `leave`."""

    def __init__(self, turns: Turns, alone: bool) -> None:
        self.inside, self._leaves = threading.Event(), threading.Event()
        threading.Thread(target=self._stay, args=(turns, alone), daemon=True).start()

    def _stay(self, turns: Turns, alone: bool) -> None:
        turns.take(alone=alone)
        self.inside.set()
        self._leaves.wait(LONG_S)
        turns.end()

    def leave(self) -> None:
        self._leaves.set()


def test_many_hold_it_together(visit: Callable[[bool], Visit]) -> None:
    one, other = visit(False), visit(False)
    assert one.inside.wait(LONG_S)
    assert other.inside.wait(LONG_S)
    one.leave()
    other.leave()


def test_one_holds_it_alone(visit: Callable[[bool], Visit]) -> None:
    one = visit(True)
    assert one.inside.wait(LONG_S)
    others = [visit(True), visit(False)]
    assert not any(other.inside.wait(SOON_S) for other in others)
    one.leave()
    for other in others:
        other.leave()
    # One after the other, in whichever order they came.
    assert all(other.inside.wait(LONG_S) for other in others)


def test_who_waits_to_be_alone_is_not_overtaken(visit: Callable[[bool], Visit]) -> None:
    one = visit(False)
    assert one.inside.wait(LONG_S)
    alone = visit(True)
    assert not alone.inside.wait(SOON_S)
    late = visit(False)
    assert not late.inside.wait(SOON_S)
    one.leave()
    assert alone.inside.wait(LONG_S)
    assert not late.inside.is_set()
    alone.leave()
    assert late.inside.wait(LONG_S)
    late.leave()


def test_a_turn_alone_lasts_until_it_ends(tmp_path: Path, visit: Callable[[bool], Visit]) -> None:
    turns = Turns(tmp_path, tmp_path / "room")
    turns.take(alone=True)
    late = visit(False)
    turns.take(alone=True)
    assert not late.inside.wait(SOON_S)
    turns.end()
    assert late.inside.wait(LONG_S)
    late.leave()
