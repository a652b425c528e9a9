"""Connections of several gateways on one page: who has its share, who is ready, and that a new process begins at 0."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tilewire.service.ipc.connection_counts import ConnectionCounts, create_counts


@pytest.fixture
def page() -> Iterator[int]:
    fd = create_counts(3)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0, 0), (False, False, False)),
        ((1, 0, 0), (False, False, False)),
        ((2, 0, 1), (True, False, False)),
        ((50, 40, 47), (True, False, True)),
        ((46, 40, 45), (False, False, False)),
    ],
)
def test_the_share_is_little_more_than_the_least(
    page: int, counts: tuple[int, ...], expected: tuple[bool, ...]
) -> None:
    views = [ConnectionCounts(page, index) for index in range(3)]
    for view, count in zip(views, counts, strict=True):
        view.add(count)
    assert tuple(view.has_share for view in views) == expected


def test_a_successor_begins_at_none(page: int) -> None:
    ConnectionCounts(page, 1).add(7)
    other = ConnectionCounts(page, 0)
    other.add(2)
    successor = ConnectionCounts(page, 1)
    successor.clear()
    assert successor.own == 0
    assert other.has_share


def test_a_gateway_is_behind_while_others_are_ready_and_it_is_not(page: int) -> None:
    views = [ConnectionCounts(page, index) for index in range(3)]
    assert not any(view.is_behind for view in views)
    views[1].set_ready(is_ready=True)
    assert [view.is_behind for view in views] == [True, False, True]
    views[2].set_ready(is_ready=True)
    assert [view.is_behind for view in views] == [True, False, False]
    for view in views[1:]:
        view.set_ready(is_ready=False)
    assert not any(view.is_behind for view in views)


def test_a_gateway_that_died_ready_is_cleared(page: int) -> None:
    ConnectionCounts(page, 1).set_ready(is_ready=True)
    other = ConnectionCounts(page, 0)
    assert other.is_behind
    ConnectionCounts(page, 1).clear()
    assert not other.is_behind


def test_the_share_is_counted_among_those_that_are_ready(page: int) -> None:
    views = [ConnectionCounts(page, index) for index in range(3)]
    for view, count in zip(views, (9, 8, 0), strict=True):
        view.add(count)
    assert views[0].has_share
    for view in views[:2]:
        view.set_ready(is_ready=True)
    assert not views[0].has_share


def test_a_gateway_that_is_alone_takes_every_connection() -> None:
    counts = ConnectionCounts()
    counts.add(1000)
    assert not counts.has_share
    assert not counts.is_behind
