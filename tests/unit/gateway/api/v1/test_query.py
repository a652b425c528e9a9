"""The query of a native call."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.v1.query import Query, check_name, parse_query, parse_run_query
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.registry import OPS


def parse(query: str, header: str | None = None) -> Query:
    return parse_query(OPS["matmul"], query.encode(), header)


def test_everything_at_once() -> None:
    call = parse("activation=gelu&transpose_b=true&b=@w/1&bias=%40c&store=@out&timeout_ms=1.5")
    assert call.options == MatmulOptions(activation="gelu", transpose_b=True)
    assert call.residents == {"b": "w/1", "bias": "c"}
    assert (call.store, call.durable) == ("out", False)
    assert call.timeout_ms == 1.5


def test_durable_goes_with_store() -> None:
    assert parse("store=@out&durable=true").durable
    assert not parse("durable=false").durable
    for query in ("durable=true", "store=@out&durable=1", "store=@out&durable="):
        with pytest.raises(InvalidRequest, match=r"^durable: "):
            parse(query)


def test_durable_of_a_program_is_as_of_an_op() -> None:
    assert parse_run_query(b"durable=false", None) == parse_run_query(b"", None)
    for query in (b"durable=true", b"durable=1", b"durable="):
        with pytest.raises(InvalidRequest, match=r"^durable: "):
            parse_run_query(query, None)


def test_nothing_at_all() -> None:
    assert parse("") == Query(MatmulOptions(), {})


def test_the_query_wins_over_the_header() -> None:
    assert parse("timeout_ms=5", "9").timeout_ms == 5
    assert parse("", "9").timeout_ms == 9


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(query: bytes) -> None:
    call = None
    with contextlib.suppress(InvalidRequest):
        call = parse_query(OPS["matmul"], query, None)
    assert call is None or isinstance(call.options, MatmulOptions)


@given(st.text(max_size=300))
def test_any_name_is_taken_or_refused(name: str) -> None:
    try:
        assert check_name(name, field="name") == name
    except InvalidRequest:
        return
    assert 1 <= len(name) <= 255
    assert name.isascii()
    assert not {"", ".."} & set(name.split("/"))


@pytest.mark.parametrize(
    "query", ["b=w", "b=@", "b=@/w", "b=@w/", "b=@a/../b", "store=@", "x=@w", "relu=1", "b=@w&b=@w"]
)
def test_what_cannot_be_right_is_refused(query: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(query)
