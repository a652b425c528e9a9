"""The path of one infer request: body → header → operands, and then `compute.run`, as for a native one.

Owns what the protocol adds around it: the length of the inference header, codings, and answers. Knows no device; runs in the
gateway's event loop.
"""

from __future__ import annotations

import re
import time
from functools import partial

import msgspec
from starlette.types import Scope

from tilewire.service.errors import BeyondLimit, BodyTooLarge, InvalidRequest
from tilewire.service.gateway.api.v2.answer import encode_answer
from tilewire.service.gateway.api.v2.compression import coding_of_answer, coding_of_body, deflate, inflate
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.header import OUTPUT
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.api.v2.shared_memory import check_allowed
from tilewire.service.gateway.auth.authenticator import authorise
from tilewire.service.gateway.codecs.json_text import MAX_OUT_ELEMENTS
from tilewire.service.gateway.request.access_log import sent_by
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import receive_body
from tilewire.service.gateway.request.compute import Computed, Task, run
from tilewire.service.gateway.request.context import Exchange, Gateway, exchange_of
from tilewire.service.gateway.request.habits import Served, habit_of, is_repeatable
from tilewire.service.gateway.request.response import TensorResponse, timing_headers
from tilewire.service.ops.op import AnyOp, TensorType

# Of a body that came as it is.
FORMAT = "oip"
HEADER_LENGTH = "inference-header-content-length"
BINARY = "application/octet-stream"
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)
# Payloads begin on this: unaligned ones are copied to the device in smaller words, and with them their whole batch.
ALIGN_BYTES = 64


def header_length(scope: Scope) -> int | None:
    """Reads `Inference-Header-Content-Length`.

    Raises:
        InvalidRequest: Given twice, or not a length.
    """
    values = [value for name, value in scope["headers"] if name == HEADER_LENGTH.encode("ascii")]
    if not values:
        return None
    text = values[0].decode("latin-1")
    if len(values) > 1 or _LENGTH.fullmatch(text) is None:
        raise InvalidRequest(f"Inference-Header-Content-Length: expected one whole number; got {text[:64]!r}")
    return int(text)


class Inferred(msgspec.Struct, frozen=True):
    """A computed request.

    Attributes:
        request: As decoded.
        computed: Its result.
    """

    request: InferRequest
    computed: Computed


async def infer(gateway: Gateway, exchange: Exchange, op: AnyOp, header_bytes: int | None, leases: Leases) -> Inferred:
    """Runs an infer request.

    Args:
        gateway: The parts.
        exchange: The request.
        op: The model.
        header_bytes: Length of the JSON, as `header_length` read it.
        leases: Holds every slot until the answer has left.

    Raises:
        TilewireError: Whatever is wrong, with the status of the contract.
    """
    authorise(exchange.granted, op=op.name)
    began_ns = time.monotonic_ns()
    gateway.engines.check_ready()
    request = await _receive(gateway, exchange, op, header_bytes, leases)
    _check_regions(gateway, request)
    task = _task(op, request, began_ns)
    computed = await run(gateway, exchange, task, leases, partial(_check_answer, gateway, request))
    return Inferred(request, computed)


async def _receive(
    gateway: Gateway, exchange: Exchange, op: AnyOp, header_bytes: int | None, leases: Leases
) -> InferRequest:
    exchange.receive_began_s = began_s = time.perf_counter()
    settings = gateway.settings
    coding = coding_of_body(exchange.headers.get("content-encoding"))
    if coding is None:
        _check_lengths(gateway, header_bytes, exchange.content_length)
    lead_bytes = -(header_bytes or 0) % ALIGN_BYTES
    received_lead = 0 if coding is not None else lead_bytes
    gateway.metrics.observe_load(gateway.admission.in_flight, gateway.arena)
    lease = await receive_body(
        exchange, leases, settings.max_body_bytes, settings.body_timeout_s, lead_bytes=received_lead
    )
    if coding is not None:
        lease = await inflate(lease, leases, coding, settings.max_body_bytes, lead_bytes)
    gateway.metrics.observe_load(gateway.admission.in_flight, gateway.arena)
    body = lease.view[lead_bytes:]
    exchange.body_format, exchange.body_offset = FORMAT if coding is None else "", lease.offset + lead_bytes
    _check_lengths(gateway, header_bytes, body.nbytes)
    request = decode_request(op, body, lease.offset + lead_bytes, header_bytes, leases)
    exchange.receive_s = time.perf_counter() - began_s
    gateway.metrics.observe_stage(op.name, "receive", exchange.receive_s)
    return request


def _check_lengths(gateway: Gateway, header_bytes: int | None, body_bytes: int | None) -> None:
    """Refuses too much JSON, and a header beyond its body; before a byte is read when the body's length is declared."""
    if header_bytes is not None and body_bytes is not None and header_bytes > body_bytes:
        raise InvalidRequest(f"Inference-Header-Content-Length: {header_bytes}, but the body has {body_bytes} bytes")
    json_bytes = body_bytes if header_bytes is None else header_bytes
    max_bytes = gateway.settings.max_json_bytes
    if json_bytes is not None and json_bytes > max_bytes:
        raise BodyTooLarge(f"body: {json_bytes} bytes of JSON; the limit is {max_bytes}, send tensors as binary data")


def _task(op: AnyOp, request: InferRequest, began_ns: int) -> Task:
    return Task(
        op=op,
        options=request.options,
        placed={one.name: one.placed for one in request.inputs if one.placed is not None},
        residents={one.name: one.resident for one in request.inputs if one.resident is not None},
        declared={one.name: one.type for one in request.inputs if one.resident is not None and one.type is not None},
        regions={
            one.name: (one.type, one.region)
            for one in request.inputs
            if one.region is not None and one.type is not None
        },
        out_region=request.output.region,
        is_sent=request.output.region is None,
        deadline_ns=began_ns + 1000 * request.timeout_us if request.timeout_us else 0,
        priority=request.priority,
    )


def _check_regions(gateway: Gateway, request: InferRequest) -> None:
    """Refuses shared memory where it is off; which regions there are, the engines know."""
    if request.output.region is not None or any(one.region is not None for one in request.inputs):
        check_allowed(gateway.settings.allow_shared_memory)


def _check_answer(gateway: Gateway, request: InferRequest, out: TensorType) -> None:
    """Refuses a result that does not fit its region, or is too large for JSON, before it is computed."""
    region = request.output.region
    if region is not None and region.byte_size < out.nbytes:
        raise InvalidRequest(f"{OUTPUT}: shared_memory_byte_size is {region.byte_size}; {out} takes {out.nbytes} bytes")
    if request.output.is_binary or region is not None:
        return
    max_bytes = gateway.settings.max_json_bytes
    # A number takes more room as text than as bytes: the bound is on what the loop must format.
    if out.nbytes > max_bytes:
        raise BodyTooLarge(
            f"{OUTPUT}: {out} is too large for JSON; the limit is {max_bytes} bytes, ask for binary_data"
        )
    if out.num_elements > MAX_OUT_ELEMENTS:
        raise BeyondLimit(f"{OUTPUT}: {out} has more than the {MAX_OUT_ELEMENTS} elements that JSON carries")


async def answer(gateway: Gateway, exchange: Exchange, op: AnyOp, inferred: Inferred, leases: Leases) -> TensorResponse:
    """Makes the response; its slots go back when it has left."""
    computed = inferred.computed
    body = encode_answer(op, inferred.request, computed.out, computed.lease.view)
    headers = timing_headers(exchange, computed.done)
    if body.header_bytes is not None:
        headers[HEADER_LENGTH] = str(body.header_bytes)
    chunks, is_text = body.chunks, body.header_bytes is None
    nbytes = sum(len(chunk) for chunk in chunks)
    coding = coding_of_answer(exchange.headers.get("accept-encoding"), is_text=is_text, nbytes=nbytes)
    if coding is not None:
        chunks = [await deflate(chunks, coding)]
        headers |= {"content-encoding": coding, "vary": "accept-encoding"}
    return TensorResponse(
        chunks,
        "application/json" if is_text else BINARY,
        headers,
        leases,
        sent_by(gateway, exchange, op.name),
    )


def remember(gateway: Gateway, scope: Scope, inferred: Inferred, response: TensorResponse) -> None:
    """Lets the connection answer the next such request by itself; see `habits`."""
    exchange, chunks = exchange_of(scope), response.chunks
    connection = exchange.incoming.connection
    # One chunk is JSON, compressed, or went into a region.
    if connection is None or not connection.repeated_head or len(chunks) == 1 or exchange.body_format != FORMAT:
        return
    if not is_repeatable(exchange, response.nbytes):
        return
    begin, answer_lead = exchange.body_offset, bytes(chunks[0])
    served = Served(
        inferred.computed.bound,
        gateway.arena.segment.view[begin : begin + exchange.received_bytes],
        begin,
        -(header_length(scope) or 0) % ALIGN_BYTES,
        1000 * inferred.request.timeout_us,
        BINARY,
        answer_lead,
        f"{HEADER_LENGTH}: {len(answer_lead)}\r\n",
        inferred.request.priority,
    )
    habit = habit_of(connection.repeated_head, scope, exchange, served)
    if habit is not None:
        connection.remember(habit)
