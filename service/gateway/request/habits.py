"""Caches what a connection has asked for: `request.lane` answers requests that repeat it but for their tensors.

Owns the rules of what is remembered. A client that repeats itself sends the same head each time (`request.heads`), and the same
header in front of its tensors; what follows from those bytes alone is worked out once. What may change meanwhile (keys,
residents' types, the drain) is not taken for granted: the lane looks again. Knows no connection and no engine. Runs in
the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from tilewire.service.gateway.auth.authenticator import Access
from tilewire.service.gateway.engines.templates import BoundTemplate
from tilewire.service.gateway.request.context import Exchange
from tilewire.service.gateway.request.heads import Form, form_of
from tilewire.service.ipc.arena import SLOT_ALIGN
from tilewire.service.ipc.messages import InputSpec, Template
from tilewire.service.ops.op import TensorType

# Of different requests that a connection remembers: a client that calls one layer after the other has a few in turn.
MAX_HABITS = 16

# Connections are many, and idle ones hold what they remember: a head, and the header at the front of a body.
MAX_LEAD_BYTES = 2**13

# Longer bodies and answers take the ordinary path: what they cost beside their bytes does not count.
MAX_BODY_BYTES = 2**18

MAX_ANSWER_BYTES = 2**18

# Native formats whose payload is the tensor as it is, behind a header that tells where.
FORMATS = ("npy", "safetensors")

# Such a header changes how the body or the answer travels.
_ON_THE_WAY = frozenset({"content-encoding", "expect", "transfer-encoding"})
# What `Connection` may say: the last two come with an offer of HTTP/2, which is declined.
_STAYING = frozenset({"keep-alive", "upgrade", "http2-settings"})


@dataclass(frozen=True, slots=True)
class Habit:
    """A request that was answered, without its payload.

    Attributes:
        form: Of its request line and headers, with the empty line.
        lead: The header at the front of its body.
        nbytes: Of the whole request.
        body_at: Where the body begins in its slot.
        body_bytes: Of the body, as `Content-Length` says.
        scope: ASGI's, without what belongs to one request.
        path: In it.
        headers: By lower-case name; those that are each request's own say what that one's did.
        op: Name of the op.
        access: Who asked; may run the op and read the residents.
        timeout_ns: It must have started by then, or 0.
        template: Template of its job.
        priority: Of its job.
        resident_types: Dtype and shape of each resident that it was planned with, by name.
        placed: Offsets of the operands in the body from the slot's start, in the template's order.
        out_at: Where the result goes, from the slot's start.
        out_bytes: Of the result.
        slot_bytes: For body and result together.
        answer_lead: The header at the front of the answer's body.
        answer_head: Headers of the answer that are the same each time, in front of those that are not.
        more_headers: Those behind.
    """

    form: Form
    lead: bytes
    nbytes: int
    body_at: int
    body_bytes: int
    scope: Scope
    path: str
    headers: Mapping[str, str]
    op: str
    access: Access
    timeout_ns: int
    template: Template
    priority: int
    resident_types: tuple[tuple[str, TensorType], ...]
    placed: tuple[int, ...]
    out_at: int
    out_bytes: int
    slot_bytes: int
    answer_lead: bytes
    answer_head: bytes
    more_headers: str

    @property
    def charged_bytes(self) -> int:
        """Bytes of body and answer, which count against the key's quota."""
        return self.body_bytes + len(self.answer_lead) + self.out_bytes


@dataclass(frozen=True, slots=True)
class Served:
    """What the ordinary path made of a request that may come again.

    Attributes:
        bound: Template and offsets of its job.
        body: All of its body.
        begin: Where the body begins in the segment.
        body_at: How far behind the start of its slot that is.
        timeout_ns: It must have started by then, or 0.
        content_type: Of its answer.
        answer_lead: The header at the front of the answer's body.
        more_headers: Lines of the answer's head behind those that differ each time.
        priority: Of its job.
    """

    bound: BoundTemplate
    body: memoryview
    begin: int
    body_at: int
    timeout_ns: int
    content_type: str
    answer_lead: bytes
    more_headers: str = ""
    priority: int = 0


def is_repeatable(exchange: Exchange, answer_nbytes: int) -> bool:
    """Whether a request that was computed may be remembered, so far as its head and its sizes tell.

    Args:
        exchange: The request.
        answer_nbytes: Of its answer's body.
    """
    headers = exchange.headers
    return (
        (exchange.content_length or 0) <= MAX_BODY_BYTES
        and answer_nbytes <= MAX_ANSWER_BYTES
        and _ON_THE_WAY.isdisjoint(headers)
        and all(word.strip() in _STAYING for word in headers.get("connection", "keep-alive").lower().split(","))
    )


def habit_of(head: bytes, scope: Scope, exchange: Exchange, served: Served) -> Habit | None:
    """Works out what can be remembered of a request.

    Args:
        head: Its request line and headers.
        scope: ASGI's.
        exchange: The request; `is_repeatable` holds for it.
        served: What was made of it.

    Returns:
        None when its tensors do not stand in the body as they are, or behind too long a header.
    """
    form = form_of(head)
    (template, offsets), body, begin = served.bound, served.body, served.begin
    (out,) = template.outputs
    in_body = [spec for spec in template.inputs if spec.resident is None]
    if form is None or not in_body or out.region is not None:
        return None
    if not all(_is_within(spec, at, begin, body.nbytes) for spec, at in zip(in_body, offsets, strict=False)):
        return None
    placed = offsets[: len(in_body)]
    lead = bytes(body[: min(placed) - begin])
    # A big-endian payload is swapped where it lies, and the lane touches none.
    is_swapped = exchange.body_format == "npy" and b">" in lead
    if is_swapped or len(head) + len(lead) > MAX_LEAD_BYTES:
        return None
    slot_at = begin - served.body_at
    out_at = -(-(served.body_at + body.nbytes) // SLOT_ALIGN) * SLOT_ALIGN
    return Habit(
        form=form,
        lead=lead,
        nbytes=len(head) + body.nbytes,
        body_at=served.body_at,
        body_bytes=body.nbytes,
        scope={name: value for name, value in scope.items() if name not in ("state", "extensions")},
        path=scope["path"],
        headers=exchange.headers,
        op=template.op,
        access=exchange.granted,
        timeout_ns=served.timeout_ns,
        template=template,
        priority=served.priority,
        resident_types=tuple((spec.resident, spec.type) for spec in template.inputs if spec.resident is not None),
        placed=tuple(at - slot_at for at in placed),
        out_at=out_at,
        out_bytes=out.type.nbytes,
        slot_bytes=out_at + out.type.nbytes,
        answer_lead=served.answer_lead,
        answer_head=b"content-type: %b\r\ncontent-length: %d\r\nserver-timing: "
        % (served.content_type.encode("ascii"), len(served.answer_lead) + out.type.nbytes),
        more_headers=served.more_headers,
    )


def _is_within(spec: InputSpec, at: int, begin: int, nbytes: int) -> bool:
    """Whether its bytes lie in the body, and neither in a region nor where numbers of a text were put."""
    return spec.region is None and begin <= at <= begin + nbytes - spec.type.nbytes
