"""Caches what a connection has asked for: `request.lane` answers requests that repeat it but for their tensors.

Owns the rules of what is remembered. A client that repeats itself sends the same head each time (`request.heads`), and the same
header in front of its tensors; what follows from those bytes alone is worked out once. What may change meanwhile (keys,
residents' types, the drain) is not taken for granted: the lane looks again. Knows no connection and no engine. Runs in
the gateway's event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from starlette.types import Scope

from tilewire.service.gateway.auth.authenticator import Access
from tilewire.service.gateway.request.context import Exchange
from tilewire.service.gateway.request.heads import Form, form_of
from tilewire.service.ipc.arena import SLOT_ALIGN
from tilewire.service.ipc.messages import Job, Operand
from tilewire.service.ops.registry import TensorType

# Of different requests that a connection remembers: a client that calls one layer after the other has a few in turn.
MAX_HABITS = 16

# Connections are many, and idle ones hold what they remember: a head, and the header at the front of a body.
MAX_LEAD_BYTES = 2**13

# Longer bodies and answers take the ordinary path: what they cost beside their bytes does not count.
MAX_BODY_BYTES = 2**18

# Kinds of jobs that have a number; more get new ones.
MAX_NUMBERS = 4096
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
        job: What the engine was sent; the slots of the next one are elsewhere.
        kind: Its number, so that the engine knows the next one too.
        resident_types: Dtype and shape of each resident that it was planned with, by name.
        residents: Operands that are residents, by input.
        placed: Operands in the body, by input; offsets from the slot's start.
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
    job: Job
    kind: int
    resident_types: tuple[tuple[str, TensorType], ...]
    residents: dict[str, Operand]
    placed: tuple[tuple[str, Operand], ...]
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
        job: As the engine was sent it.
        body: All of its body.
        begin: Where the body begins in the segment.
        body_at: How far behind the start of its slot that is.
        timeout_ns: It must have started by then, or 0.
        content_type: Of its answer.
        answer_lead: The header at the front of the answer's body.
        more_headers: Lines of the answer's head behind those that differ each time.
    """

    job: Job
    body: memoryview
    begin: int
    body_at: int
    timeout_ns: int
    content_type: str
    answer_lead: bytes
    more_headers: str = ""


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
    job, body, begin = served.job, served.body, served.begin
    in_body = {name: one for name, one in job.operands.items() if one.resident is None}
    if form is None or not in_body or not all(_is_within(one, begin, body.nbytes) for one in in_body.values()):
        return None
    lead = bytes(body[: min(one.offset for one in in_body.values()) - begin])
    # A big-endian payload is swapped where it lies, and the lane touches none.
    is_swapped = exchange.body_format == "npy" and b">" in lead
    if is_swapped or len(head) + len(lead) > MAX_LEAD_BYTES:
        return None
    residents = {name: one for name, one in job.operands.items() if one.resident is not None}
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
        op=job.op,
        access=exchange.granted,
        timeout_ns=served.timeout_ns,
        job=job,
        kind=number_of(job),
        resident_types=tuple((str(one.resident), one.type) for one in residents.values()),
        residents=residents,
        placed=tuple(
            (name, Operand(one.type, one.offset - slot_at, fortran=one.fortran)) for name, one in in_body.items()
        ),
        out_at=out_at,
        out_bytes=job.out.nbytes,
        slot_bytes=out_at + job.out.nbytes,
        answer_lead=served.answer_lead,
        answer_head=b"content-type: %b\r\ncontent-length: %d\r\nserver-timing: "
        % (served.content_type.encode("ascii"), len(served.answer_lead) + job.out.nbytes),
        more_headers=served.more_headers,
    )


def _is_within(operand: Operand, begin: int, nbytes: int) -> bool:
    """Whether its bytes lie in the body, and neither in a region nor where numbers of a text were put."""
    return operand.region is None and begin <= operand.offset <= begin + nbytes - operand.type.nbytes


def number_of(job: Job) -> int:
    """The number of a job's kind, the same for all jobs of this gateway that differ only in where their bytes lie."""
    operands = tuple((name, one.type, one.resident, one.fortran) for name, one in job.operands.items())
    key = (job.op, job.options, operands, job.out)
    number = _numbers.get(key)
    if number is None:
        if len(_numbers) >= MAX_NUMBERS:
            _numbers.clear()
        number = _numbers[key] = next(_next_number)
    return number


_numbers: dict[Hashable, int] = {}
# Never given again: the engine may still remember what an old one meant.
_next_number = itertools.count(1)
