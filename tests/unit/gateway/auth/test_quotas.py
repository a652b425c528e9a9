"""Quotas: one client's use through several gateways is one use, no lock and no share."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.errors import OverQuota
from tilewire.service.gateway.auth.quotas import RECORDS, Quotas, UsagePage, page_bytes
from tilewire.service.keys import Key

DIGEST = "0" * 64


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def gateways(count: int, clock: Callable[[], float]) -> list[Quotas]:
    memory = mmap.mmap(-1, page_bytes(count))
    return [Quotas(UsagePage(memory, index), clock) for index in range(count)]


def admitted(quotas: Quotas, key: Key, nbytes: int = 0) -> bool:
    try:
        quotas.admit(key, nbytes)
    except OverQuota:
        return False
    return True


def test_a_key_without_quota_is_never_counted() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    assert all(admitted(quotas, Key("free", DIGEST), 10**12) for _ in range(1000))


def test_one_connection_gets_all_of_the_quota_on_one_gateway() -> None:
    clock = Clock()
    one, _other = gateways(2, clock)
    key = Key("k", DIGEST, requests_per_s=10)
    assert [admitted(one, key) for _ in range(11)] == [True] * 10 + [False]


def test_what_went_through_another_gateway_counts_here() -> None:
    clock = Clock()
    one, other = gateways(2, clock)
    key = Key("k", DIGEST, requests_per_s=10)
    one.follow([key])
    other.follow([key])
    assert admitted(one, key)
    assert all(admitted(other, key) for _ in range(9))
    assert not admitted(one, key)
    assert not admitted(other, key)
    clock.now_s += 0.15
    assert admitted(one, key)
    assert not admitted(other, key)


def test_a_refusal_for_ever_says_a_day() -> None:
    (quotas,) = gateways(1, Clock())
    never = Key("never", DIGEST, requests_per_s=1e-309)
    assert admitted(quotas, never)
    with pytest.raises(OverQuota) as refused:
        quotas.admit(never, 0)
    assert refused.value.retry_after_s == 86_400


def test_a_refusal_says_when_to_come_again() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    slow = Key("slow", DIGEST, requests_per_s=0.1)
    assert admitted(quotas, slow)
    with pytest.raises(OverQuota, match="requests per second") as refused:
        quotas.admit(slow, 0)
    assert refused.value.retry_after_s == 10
    clock.now_s += refused.value.retry_after_s
    assert admitted(quotas, slow)


def test_a_body_larger_than_the_bucket_is_admitted_once_and_waited_for_afterwards() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    key = Key("k", DIGEST, bytes_per_s=1000)
    assert admitted(quotas, key, 5000)
    with pytest.raises(OverQuota, match="bytes per second") as refused:
        quotas.admit(key, 1)
    assert refused.value.retry_after_s == 5
    clock.now_s += 4.1
    assert admitted(quotas, key, 1)


def test_bytes_that_were_not_declared_count_and_those_that_never_came_do_not() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    key = Key("k", DIGEST, bytes_per_s=1000)
    assert admitted(quotas, key)
    quotas.charge(key, 3000)
    assert not admitted(quotas, key)
    quotas.charge(key, -3000)
    assert admitted(quotas, key)


def test_a_gateway_that_starts_again_goes_on_with_its_counts() -> None:
    clock = Clock()
    memory = mmap.mmap(-1, page_bytes(2))
    key = Key("k", DIGEST, requests_per_s=10)
    other = Quotas(UsagePage(memory, 1), clock)
    before = Quotas(UsagePage(memory, 0), clock)
    assert all(admitted(before, key) for _ in range(5))
    after = Quotas(UsagePage(memory, 0), clock)
    assert admitted(after, key)
    assert admitted(other, Key("another", DIGEST, requests_per_s=1))
    assert UsagePage(memory, 1).used(0) == (0, 0)
    assert sum(memory[position] for position in range(8, 16)) == 6


def test_a_changed_quota_holds_from_now_on() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    assert admitted(quotas, Key("k", DIGEST, requests_per_s=1))
    assert not admitted(quotas, Key("k", DIGEST, requests_per_s=1))
    quotas.follow([Key("k", DIGEST, requests_per_s=5)])
    assert all(admitted(quotas, Key("k", DIGEST, requests_per_s=5)) for _ in range(5))
    assert not admitted(quotas, Key("k", DIGEST, requests_per_s=5))


def test_requests_from_before_a_change_draw_on_the_bucket_of_those_after_it() -> None:
    (quotas,) = gateways(1, Clock())
    before, after = (Key("k", DIGEST, weight=weight, bytes_per_s=100) for weight in (1, 2))
    quotas.follow([before])
    quotas.follow([after])
    assert admitted(quotas, after, 60)
    quotas.reserve(before, 60, 0)
    assert not admitted(quotas, after, 60)
    quotas.reserve(before, 200, 0)
    with pytest.raises(OverQuota):
        quotas.reserve(before, 200, 0)


def test_there_is_room_for_keys_that_come_and_go() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    for number in range(RECORDS):
        assert admitted(quotas, Key(f"k{number}", DIGEST, requests_per_s=1))
    assert not admitted(quotas, Key("k7", DIGEST, requests_per_s=1))


def test_keys_that_come_behind_all_records_have_their_quota_from_each_gateway(caplog: pytest.LogCaptureFixture) -> None:
    one, other = gateways(2, Clock())
    for number in range(RECORDS):
        assert admitted(one, Key(f"k{number}", DIGEST, requests_per_s=1))
    for name in ("late", "later"):
        key = Key(name, DIGEST, requests_per_s=2, bytes_per_s=1000)
        assert [admitted(one, key) for _ in range(3)] == [True, True, False]
        assert [admitted(other, key) for _ in range(3)] == [True, True, False]
    last = Key("last", DIGEST, bytes_per_s=1000)
    assert admitted(one, last)
    one.charge(last, 5000)
    assert not admitted(one, last)
    assert caplog.text.count("restart the service") == 1


# Steps of at most the time between two looks of `Authenticator.keep_current`: gateway, and seconds that pass before.
STEPS = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 0.25)), min_size=1, max_size=300)


@given(STEPS, st.integers(1, 20))
def test_over_any_time_all_gateways_together_keep_to_the_quota(steps: list[tuple[int, float]], per_s: int) -> None:
    clock = Clock()
    three = gateways(3, clock)
    key = Key("k", DIGEST, requests_per_s=per_s)
    for quotas in three:
        quotas.follow([key])
    count, began_s = 0, clock.now_s
    for gateway, pause_s in steps:
        clock.now_s += pause_s
        for quotas in three:
            quotas.refresh()
        count += admitted(three[gateway], key)
    assert count <= per_s + (clock.now_s - began_s) * per_s + 1e-6


def test_answers_that_are_reserved_at_once_overshoot_by_one_of_them() -> None:
    clock = Clock()
    one, other = gateways(2, clock)
    key = Key("k", DIGEST, bytes_per_s=1000)
    for quotas in (one, other):
        quotas.follow([key])
    assert all(admitted(quotas, key, 10) for quotas in (one, other))
    one.reserve(key, 16_000, 10)
    with pytest.raises(OverQuota, match="bytes per second") as refused:
        other.reserve(key, 16_000, 10)
    # Fifteen seconds' worth, and until then nothing else comes in either.
    assert refused.value.retry_after_s == 16
    assert not admitted(one, key)
    one.charge(key, -16_000)
    other.reserve(key, 16_000, 10)


def test_answers_of_requests_that_were_admitted_together_may_leave_a_debt_of_one_bucket() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    key = Key("k", DIGEST, bytes_per_s=1000)
    assert all(admitted(quotas, key, 100) for _ in range(10))
    assert not admitted(quotas, key, 100)
    for _ in range(10):
        quotas.reserve(key, 100, 100)
    with pytest.raises(OverQuota):
        quotas.reserve(key, 1, 0)


def test_a_large_body_does_not_stand_in_the_way_of_its_own_answer() -> None:
    clock = Clock()
    (quotas,) = gateways(1, clock)
    key = Key("k", DIGEST, bytes_per_s=1000)
    assert admitted(quotas, key, 50_000)
    quotas.reserve(key, 50_000, 50_000)
    assert not admitted(quotas, key)


def test_answers_of_a_key_without_a_quota_of_bytes_are_not_counted() -> None:
    (quotas,) = gateways(1, Clock())
    key = Key("k", DIGEST, requests_per_s=10)
    for _ in range(100):
        quotas.reserve(key, 10**12, 0)
    assert admitted(quotas, key)
