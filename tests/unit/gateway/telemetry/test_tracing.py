"""`traceparent` as the standard has it, sampling, and where stages stand on the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.gateway.telemetry.tracing import (
    Span,
    TraceParent,
    is_sampled,
    parse_traceparent,
    shifted,
    stages_of,
)
from tilewire.service.ipc.messages import Timings

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_caller_and_its_decision() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01", "a=1") == TraceParent(TRACE, SPAN, is_sampled=True, state="a=1")
    unsampled = parse_traceparent(f"00-{TRACE}-{SPAN}-02")
    assert unsampled is not None
    assert not unsampled.is_sampled


def test_a_later_version_may_have_more() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") is not None


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_what_is_none_counts_as_absent(value: str | None) -> None:
    assert parse_traceparent(value) is None


@given(st.text(max_size=80))
def test_any_text_is_read_or_ignored(value: str) -> None:
    parse_traceparent(value, value)


def test_the_caller_decides_and_else_the_ratio() -> None:
    for ratio in (0.0, 1.0):
        assert is_sampled(TraceParent(TRACE, SPAN, is_sampled=True), ratio)
        assert not is_sampled(TraceParent(TRACE, SPAN, is_sampled=False), ratio)
        assert is_sampled(None, ratio) == bool(ratio)
    assert 300 < sum(is_sampled(None, 0.5) for _ in range(1000)) < 700


def test_stages_stand_end_to_end_from_the_arrival() -> None:
    timings = Timings(queue_ns=5, h2d_ns=0, kernel_ns=7, d2h_ns=2, arrived_ns=100)
    assert stages_of((80, 95), timings, (120, 130)) == (
        Span("receive", 80, 95),
        Span("queue", 100, 105),
        Span("kernel", 105, 112),
        Span("d2h", 112, 114),
        Span("send", 120, 130),
    )
    assert stages_of((0, 0), None, (0, 0)) == ()
    assert shifted((Span("x", 1, 2),), 10) == (Span("x", 11, 12),)
