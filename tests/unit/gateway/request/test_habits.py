"""What is remembered of a request: when it may be remembered at all, and where its tensors lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from starlette.types import Message

from tests.support.raw_http import head
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.gateway.auth.authenticator import Access
from tilewire.service.gateway.codecs.negotiation import codec_for_body
from tilewire.service.gateway.codecs.protocol import Codec
from tilewire.service.gateway.engines.templates import BoundTemplate
from tilewire.service.gateway.request.context import Exchange, Incoming
from tilewire.service.gateway.request.habits import (
    MAX_ANSWER_BYTES,
    MAX_BODY_BYTES,
    MAX_LEAD_BYTES,
    Habit,
    Served,
    habit_of,
    is_repeatable,
)
from tilewire.service.gateway.request.heads import form_of
from tilewire.service.ipc.messages import InputSpec, OutputSpec, Template
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType

HEAD = head("POST", "/v1/add?b=@w", content_length="10")
NPY = codec_for_body("application/x-npy", b"")
BEGIN = 4096
A = TensorType("float32", (3, 4))
RESIDENT = InputSpec("b", A, resident="w")


async def _receive() -> Message:
    raise AssertionError


def exchange_with(headers: dict[str, str], *, form: str = "npy", nbytes: int = 100) -> Exchange:
    exchange = Exchange("id", Incoming(_receive), {"content-length": str(nbytes), **headers})
    exchange.body_format, exchange.body_offset, exchange.access = form, BEGIN, Access()
    return exchange


def repeatable(headers: dict[str, str] | None = None, nbytes: int = 100, answer_nbytes: int = 100) -> bool:
    return is_repeatable(exchange_with(headers or {}, nbytes=nbytes), answer_nbytes)


def test_plain_requests_may_be_remembered() -> None:
    assert repeatable()
    assert repeatable({"connection": "Keep-Alive", "authorization": "Bearer tw_1", "accept": "*/*"})
    assert repeatable({"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "x-request-id": "1"})


@pytest.mark.parametrize("name", ["expect", "transfer-encoding", "content-encoding"])
def test_headers_that_change_the_way(name: str) -> None:
    assert not repeatable({name: "1"})


@pytest.mark.parametrize(
    "changed",
    [
        {"nbytes": MAX_BODY_BYTES + 1},
        {"answer_nbytes": MAX_ANSWER_BYTES + 1},
        {"headers": {"connection": "close"}},
        {"headers": {"connection": "keep-alive, close"}},
        {"headers": {"content-encoding": "identity"}},
    ],
)
def test_requests_that_are_not_remembered(changed: dict[str, Any]) -> None:
    assert not repeatable(**changed)


def habit_for(form: str, body: bytes, codec: Codec = NPY, **changed: Any) -> Habit | None:
    placed = codec_for_body(None, body[:64]).decode(memoryview(bytearray(body)), BEGIN, _NoRoom())
    inputs = [(InputSpec(name or "a", one.type), one.offset) for name, one in placed.items()]
    inputs += changed.get("operands", [])
    specs = (RESIDENT, *(spec for spec, _ in inputs))
    template = Template(7, "add", specs, AddOptions(), (OutputSpec(A),), 12, 96)
    job = BoundTemplate(template, (*(offset for _, offset in inputs), 0))
    scope = {"path": "/v1/add", "method": "POST", "state": {"exchange": None}, "extensions": {}}
    exchange = exchange_with({}, form=form, nbytes=len(body))
    body_at = changed.get("body_at", 0)
    served = Served(job, memoryview(body), BEGIN, body_at, 5_000_000, codec.content_type, b"lead", "more: 1\r\n")
    return habit_of(HEAD, scope, exchange, served)


class _NoRoom:
    def take(self, nbytes: int) -> tuple[int, memoryview]:
        raise AssertionError(nbytes)


def test_a_habit_ends_where_the_first_tensor_begins() -> None:
    body = to_npy(np.arange(12, dtype=np.float32).reshape(3, 4))
    habit = habit_for("npy", body)
    assert habit is not None
    assert habit.form == form_of(HEAD)
    assert habit.lead == body[:128]
    assert (habit.body_bytes, habit.nbytes) == (len(body), len(HEAD) + len(body))
    assert habit.placed == (128,)
    assert habit.resident_types == (("w", A),)
    assert habit.out_at >= len(body)
    assert habit.slot_bytes == habit.out_at + 48 == habit.out_at + habit.out_bytes
    assert habit.timeout_ns == 5_000_000
    assert b"content-length: 52\r\n" in habit.answer_head
    assert habit.more_headers == "more: 1\r\n"
    assert habit.scope == {"path": "/v1/add", "method": "POST"}


def test_places_count_from_the_start_of_the_slot() -> None:
    body = to_npy(np.arange(12, dtype=np.float32).reshape(3, 4))
    habit = habit_for("npy", body, body_at=40)
    assert habit is not None
    assert habit.body_at == 40
    assert habit.placed == (168,)
    assert habit.out_at >= 40 + len(body)


@pytest.mark.parametrize(
    "elsewhere",
    [
        (InputSpec("bias", A), BEGIN - 48),
        (InputSpec("bias", A), BEGIN + 10**6),
        (InputSpec("bias", A), BEGIN + 140),
        (InputSpec("bias", A, region="r"), BEGIN + 128),
    ],
)
def test_a_tensor_that_is_not_in_the_body_makes_no_habit(elsewhere: tuple[InputSpec, int]) -> None:
    body = to_npy(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert habit_for("npy", body, operands=[elsewhere]) is None


def test_tensors_by_name_lie_where_their_header_says() -> None:
    body = to_safetensors({"bias": np.ones(4, np.float32), "a": np.ones((3, 4), np.float32)})
    habit = habit_for("safetensors", body)
    assert habit is not None
    header_bytes = len(body) - 4 * (4 + 12)
    assert habit.lead == body[:header_bytes]
    names = [one.name for one in habit.template.inputs if one.resident is None]
    assert dict(zip(names, habit.placed, strict=True)) == {"bias": header_bytes, "a": header_bytes + 16}


def test_a_header_that_is_too_long_to_be_kept_makes_no_habit() -> None:
    body = to_safetensors({"a": np.ones((3, 4), np.float32)})
    begin = 8 + int.from_bytes(body[:8], "little")
    header = body[8:begin] + b" " * MAX_LEAD_BYTES
    assert habit_for("safetensors", len(header).to_bytes(8, "little") + header + body[begin:]) is None


def test_a_body_that_is_swapped_where_it_lies_or_that_has_no_tensor_makes_no_habit() -> None:
    assert habit_for("npy", to_npy(np.ones((3, 4), ">f4"))) is None
    assert habit_for("safetensors", to_safetensors({})) is None
