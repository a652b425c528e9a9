"""The path of one native request: query → body → operands → plan → engine → answer; `run` is the half that every door shares.

Everything that can be refused is refused before the step that costs: the query and the residents before the body is read, the
shapes before the result's slot is taken. Knows no device; runs in the gateway's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from tilewire.service.errors import BodyTooLarge, InvalidRequest, TilewireError, Unavailable
from tilewire.service.gateway.api.v1.query import Call
from tilewire.service.gateway.api.v2.request import Region
from tilewire.service.gateway.auth.authenticator import authorise
from tilewire.service.gateway.codecs.negotiation import SNIFF_BYTES, codec_for_accept, codec_for_body
from tilewire.service.gateway.codecs.protocol import Codec, Placed
from tilewire.service.gateway.engines.templates import BoundTemplate
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import receive_body, refuse_encodings
from tilewire.service.gateway.request.context import Exchange, Gateway
from tilewire.service.ipc.arena import Lease
from tilewire.service.ipc.messages import Done, InputSpec, OutputSpec
from tilewire.service.ops.op import AnyOp, Plan, TensorType
from tilewire.service.ops.planning import plan
from tilewire.service.ops.registry import Options

# How often a request is planned again because a resident changed its type under it.
MAX_PLANS = 4


class Task(msgspec.Struct, frozen=True):
    """A request whose operands are known.

    Attributes:
        op: The operation.
        options: Its options.
        placed: Tensors in the arena by input; "" for an unnamed one.
        residents: Names of resident tensors by input.
        declared: What the client says that residents are, by input; checked, where it says anything.
        regions: Tensors in registered regions by input.
        out_region: Where the result goes instead of the arena.
        is_sent: The result is sent to the client.
        deadline_ns: It must have started by then, on the monotonic clock; 0 for never.
        priority: 0 is the default, 1 the most urgent.
    """

    op: AnyOp
    options: Options
    placed: Mapping[str, Placed]
    residents: Mapping[str, str]
    declared: Mapping[str, TensorType] = {}
    regions: Mapping[str, tuple[TensorType, Region]] = {}
    out_region: Region | None = None
    is_sent: bool = True
    deadline_ns: int = 0
    priority: int = 0


class Computed(msgspec.Struct, frozen=True):
    """A result in its slot.

    Attributes:
        out: Its type.
        lease: Where it lies; empty when it went into a region.
        done: What the engine said.
        codec: The format of the answer, where one was chosen.
        bound: Template and offsets of the job.
    """

    out: TensorType
    lease: Lease
    done: Done
    codec: Codec | None
    bound: BoundTemplate


async def compute(gateway: Gateway, exchange: Exchange, call: Call, leases: Leases) -> Computed:
    """Runs a native request.

    Args:
        gateway: The parts.
        exchange: The request.
        call: Its query.
        leases: Holds every slot until the answer has left.

    Raises:
        TilewireError: Whatever is wrong, with the status of the contract.
    """
    written = () if call.store is None else (call.store,)
    authorise(exchange.granted, op=call.op.name, read=call.residents.values(), write=written)
    deadline_ns = time.monotonic_ns() + int(call.timeout_ms * 1e6) if call.timeout_ms else 0
    gateway.engines.check_ready()
    # A resident that is not there is refused before the body is read.
    await _resident_types(gateway, call.residents)
    body_codec, placed = await _read_operands(gateway, exchange, call, leases)

    def choose(out: TensorType) -> Codec | None:
        return _answer_codec(gateway, exchange, body_codec, out) if call.store is None else None

    task = Task(call.op, call.options, placed, call.residents, is_sent=call.store is None, deadline_ns=deadline_ns)
    return await run(gateway, exchange, task, leases, choose)


async def run(
    gateway: Gateway,
    exchange: Exchange,
    task: Task,
    leases: Leases,
    choose: Callable[[TensorType], Codec | None],
) -> Computed:
    """Plans a task and has it computed, again if a resident changes its type meanwhile.

    Args:
        gateway: The parts.
        exchange: The request.
        task: What to compute.
        leases: Where the result's slot comes from.
        choose: Picks the format of an answer of this type, and refuses what cannot be answered.

    Raises:
        TilewireError: Whatever is wrong, with the status of the contract.
    """
    # Whatever the door: `/v2` names its residents and its regions in the body.
    is_shared = bool(task.regions) or task.out_region is not None
    authorise(exchange.granted, op=task.op.name, read=task.residents.values(), shared_memory=is_shared)
    resident_types = await _resident_types(gateway, task.residents)
    for _attempt in range(MAX_PLANS):
        try:
            operands = _bind(task, resident_types)
            types = {spec.name: spec.type for spec, _ in operands}
            planned = plan(task.op, types, task.options, gateway.settings.limits)
            codec = choose(planned.outputs[0])
        except TilewireError:
            # It may be our memory of a resident that is wrong: another gateway may have replaced it.
            current = await _current_types(gateway, task.residents)
            if current == resident_types:
                raise
            resident_types = current
            continue
        (out,) = planned.outputs
        if task.is_sent:
            reserve_answer(gateway, exchange, out.nbytes)
        lease = await leases.wait(0 if task.out_region is not None else out.nbytes)
        bound = _bound(gateway, task, operands, planned, lease)
        reply = await gateway.engines.compute(
            bound, exchange.incoming, leases, deadline_ns=task.deadline_ns, priority=task.priority
        )
        if isinstance(reply, Done):
            exchange.timings, exchange.batch_size = reply.timings, reply.batch_size
            return Computed(out, lease, reply, codec, bound)
        leases.give_back(lease)
        resident_types = await _resident_types(gateway, task.residents)
    raise Unavailable("its resident tensors keep changing their shapes while it waits")


def reserve_answer(gateway: Gateway, exchange: Exchange, nbytes: int) -> None:
    """Counts an answer against its key's quota before it is made; what was sent is settled at the end.

    Args:
        gateway: The parts.
        exchange: The request; its body is in.
        nbytes: Of the tensor that it is answered with; instead of what was reserved before.

    Raises:
        OverQuota: Other requests of the key have used up what it may.
    """
    charged_bytes = exchange.charged_bytes or 0
    whole_bytes = max(exchange.content_length or 0, exchange.received_bytes) + nbytes
    gateway.doorman.reserve(exchange.granted, whole_bytes - charged_bytes, charged_bytes)
    exchange.charged_bytes = whole_bytes


async def receive_tensors(gateway: Gateway, exchange: Exchange, leases: Leases) -> tuple[Codec, Mapping[str, Placed]]:
    """Receives a body and reads the tensors' metadata out of it.

    Raises:
        TilewireError: See `receive_body` and `Codec.decode`.
    """
    settings = gateway.settings
    refuse_encodings(exchange)
    # Before, not after: a body that comes slowly holds its slot all the while.
    gateway.metrics.observe_load(gateway.admission.in_flight, gateway.arena)
    lease = await receive_body(exchange, leases, settings.max_body_bytes, settings.body_timeout_s)
    body = lease.view
    codec = codec_for_body(exchange.headers.get("content-type"), bytes(body[:SNIFF_BYTES]))
    if codec.name == "json" and lease.nbytes > settings.max_json_bytes:
        raise BodyTooLarge(
            f"body: {lease.nbytes} bytes of JSON; the limit is {settings.max_json_bytes}, use safetensors"
        )
    exchange.body_format, exchange.body_offset = codec.name, lease.offset
    return codec, codec.decode(body, lease.offset, leases)


async def _resident_types(gateway: Gateway, residents: Mapping[str, str]) -> dict[str, TensorType]:
    return {field: await gateway.engines.type_of(name, field=field) for field, name in residents.items()}


async def _current_types(gateway: Gateway, residents: Mapping[str, str]) -> dict[str, TensorType]:
    """As `_resident_types`, but asks an engine about each."""
    return {field: (await gateway.engines.describe(name, field=field)).type for field, name in residents.items()}


async def _read_operands(
    gateway: Gateway, exchange: Exchange, call: Call, leases: Leases
) -> tuple[Codec | None, Mapping[str, Placed]]:
    began_s = time.perf_counter()
    is_all_resident = all(name in call.residents for name in call.op.required)
    if is_all_resident and not exchange.is_chunked and not exchange.content_length:
        exchange.incoming.is_complete = True
        return None, {}
    exchange.receive_began_s = began_s
    codec, placed = await receive_tensors(gateway, exchange, leases)
    exchange.receive_s = time.perf_counter() - began_s
    gateway.metrics.observe_stage(call.op.name, "receive", exchange.receive_s)
    return codec, placed


# An input of a template, and where its bytes begin; residents have no bytes here.
Bound = tuple[InputSpec, int | None]


def _bind(task: Task, resident_types: Mapping[str, TensorType]) -> list[Bound]:
    """Joins the body's tensors, those in regions and the residents; an unnamed one is the first required input that is left."""
    operands: dict[str, Bound] = {
        field: (InputSpec(field, resident_types[field], name), None) for field, name in task.residents.items()
    }
    for field, declared in task.declared.items():
        if declared != resident_types[field]:
            raise InvalidRequest(
                f"{field}: {task.residents[field]!r} is {resident_types[field]}; the request says {declared}"
            )
    operands |= {
        field: (InputSpec(field, kind, region=region.name), region.offset)
        for field, (kind, region) in task.regions.items()
    }
    for name, tensor in task.placed.items():
        field = name or _first_missing(task.op, operands)
        if field in operands:
            raise InvalidRequest(f"{field}: given in the body and as a resident tensor")
        operands[field] = (InputSpec(field, tensor.type, fortran=tensor.fortran), tensor.offset)
    return list(operands.values())


def _first_missing(op: AnyOp, operands: Mapping[str, Bound]) -> str:
    return next((name for name in op.required if name not in operands), op.required[0])


def _answer_codec(gateway: Gateway, exchange: Exchange, body_codec: Codec | None, out: TensorType) -> Codec:
    codec = codec_for_accept(exchange.headers.get("accept"), body_codec, out.dtype)
    max_bytes = gateway.settings.max_json_bytes
    # A JSON number takes more room than its bytes: the bound is on what the loop must format.
    if codec.name == "json" and out.nbytes > max_bytes:
        raise BodyTooLarge(f"out: {out} is too large for JSON; the limit is {max_bytes} bytes, accept safetensors")
    return codec


def _bound(gateway: Gateway, task: Task, operands: list[Bound], planned: Plan, lease: Lease) -> BoundTemplate:
    region = task.out_region
    template = gateway.engines.templates.find(
        task.op.name,
        tuple(spec for spec, _ in operands),
        task.options,
        tuple(OutputSpec(out, None if region is None else region.name) for out in planned.outputs),
        (planned.flops, planned.moved_bytes),
    )
    offsets = tuple(offset for _, offset in operands if offset is not None)
    return BoundTemplate(template, (*offsets, lease.offset if region is None else region.offset))
