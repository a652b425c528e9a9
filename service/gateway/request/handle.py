"""Handles every POST of an op, of any API, first and repeated: receive, resolve, submit, respond.

The file reads in the order of a request. One whose template is cached skips parsing, decoding and
planning, and nothing else. Every refusal comes before the step that costs. Runs in the gateway's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from tilewire.service.errors import InvalidRequest, Lost, TilewireError, Unavailable, UnknownName
from tilewire.service.gateway.auth.authenticator import Access, authorise
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.templates import Outputs
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.adapter import Api, Call, Region, Task
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import receive_body
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, offload
from tilewire.service.gateway.request.response import (
    describe_tensor,
    json_answer,
    respond,
    respond_error,
    timing_lines,
)
from tilewire.service.gateway.request.template import MAX_LEAD_BYTES, CachedHead, RequestTemplate
from tilewire.service.ipc.arena import Lease, slot_bytes
from tilewire.service.ipc.messages import Done, InputSpec, OutputSpec, Stale, TensorInfo
from tilewire.service.match import Match, parse_match
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.planning import plan
from tilewire.service.telemetry import log

# Attempts to plan a request whose residents or program change meanwhile. Under load, a program that is replaced every 30 ms
# needs more than 4 in 0.2 % of its runs.
MAX_PLANS = 16

# A look-up in the enumeration costs more than a small function.
OK, CREATED = int(HTTPStatus.OK), int(HTTPStatus.CREATED)


def handle(gateway: Gateway, context: RequestContext, api: Api, op: AnyOp) -> Coroutine[Any, Any, None] | None:
    """Admits one request, or refuses it at once: under overload most requests end here, without a coroutine.

    Returns:
        Coroutine that ends the request, to be run at once; None when it has ended.
    """
    context.op = op.name
    context.route = context.head.path
    try:
        access = admit(gateway, context)
        leases = gateway.admission.admit(context.flow)
    except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
        written = respond_error(gateway, context, error)
        if written is not None:
            return _end_refusal(gateway, context, written)
        report(gateway, context)
        return None
    return _answer(gateway, context, (api, op), access, leases)


async def _end_refusal(gateway: Gateway, context: RequestContext, written: Awaitable[None]) -> None:
    """Waits until a refusal has left."""
    try:
        await written
    finally:
        report(gateway, context)


async def _answer(
    gateway: Gateway, context: RequestContext, target: tuple[Api, AnyOp], access: Access, leases: Leases
) -> None:
    """Answers an admitted request, on success and on error; its leases are released on success, error or disconnect."""
    log.request_id.set(context.request_id)
    try:
        call = read_call(gateway, context, *target)
        leases.deadline_ns = deadline_of(call.timeout_ns, context)
        gateway.engines.check_ready()
        allow(context.cached, access, call)
        if call.program is not None or not gateway.engines.have_types(call.residents):
            for name, resident in call.residents.items():
                await gateway.engines.type_of(resident, field=name)
            await call.find_program(leases)
            context.model = call.program or ""
        head, cached, body = context.head, context.cached, None
        if call.needs_body or head.is_chunked or head.content_length:
            spare_bytes = 0 if cached is None else cached.spare_bytes
            body = await receive_body(
                gateway, context, leases, gateway.settings.max_body_bytes, call.pad_bytes, spare_bytes
            )
            if not call.needs_body and not context.received_bytes:
                # In chunks, of which there were none.
                body = None
        template, places, done = await compute(gateway, context, call, body, leases)
        encoder = template.encoder
        lines = timing_lines(context.receive_s, done.timings, done.batch_size) if context.has_lines else ""
        if encoder is None:
            assert done.stored is not None, "This is a bug."
            await respond(gateway, context, CREATED, json_answer(describe_tensor(done.stored.info), lines))
        else:
            view = gateway.arena.segment.view
            payloads = [view[at : at + size] for at, size in zip(places, template.payload_bytes, strict=True)]
            answer = (
                encoder.encode(payloads)
                if encoder.work_bytes <= OFFLOAD_BYTES
                else await offload(encoder.work_bytes, encoder.encode, payloads)
            )
            answer.lines = lines + answer.lines
            await respond(gateway, context, OK, answer)
    except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
        written = respond_error(gateway, context, error)
        if written is not None:
            await written
    finally:
        leases.release()
        report(gateway, context)


def admit(gateway: Gateway, context: RequestContext) -> Access:
    """Checks the API key and its quota; every path but those of health passes here, in any spelling.

    Raises:
        TilewireError: The key is missing or unknown, or has used up its quota.
    """
    head, cached, authenticator = context.head, context.cached, gateway.authenticator
    if cached is not None and cached.keys_version == authenticator.keys_version:
        access = cached.access
    else:
        head.check()
        access = authenticator.identify(head.path, head.headers)
        if cached is not None:
            cached.access, cached.keys_version = access, authenticator.keys_version
    context.access = access
    context.flow = access.flow or context.stream.client_flow
    declared = head.content_length or 0
    if access.quotas is not None:
        access.quotas.admit(access.holder, declared)
    context.charged_bytes = declared
    return access


def read_call(gateway: Gateway, context: RequestContext, api: Api, op: AnyOp) -> Call:
    """Parses the head, or finds it in the cache."""
    if context.cached is not None:
        return context.cached.call
    call = api.read_call(op, context.head)
    if context.key is not None:
        context.cached = gateway.templates.add(context.key, context.head, (api, op), call)
    return call


def allow(cached: CachedHead | None, access: Access, call: Call) -> None:
    """Refuses what the head alone shows to be forbidden or impossible, before the body is read.

    Raises:
        Forbidden: The key may not do that.
    """
    if cached is not None and cached.allowed is access:
        return
    authorise(access, op=call.op.name, read=call.residents.values(), write=call.writes)
    if cached is not None:
        cached.allowed = access


async def compute(
    gateway: Gateway, context: RequestContext, call: Call, body: Lease | None, leases: Leases
) -> tuple[RequestTemplate, list[int], Done]:
    """Has the request computed; plans it anew when a resident changes its type meanwhile.

    Returns:
        Result, offsets of its outputs in the segment, and the engine's report.
    """
    engines, cached, task, begin, end = gateway.engines, context.cached, None, 0, 0
    if body is not None:
        begin, end = body.offset + call.pad_bytes, body.offset + body.nbytes
    template = None if cached is None else cached.find(gateway.arena.segment.view, begin, end)
    is_renewed = False
    for _attempt in range(MAX_PLANS):
        if template is None or not engines.are_current(template.resident_types):
            task = task or await call.decode(body, leases)
            template = await _plan(gateway, context, task, body)
        if context.access is not template.allowed:
            authorise(context.granted, read=template.reads, write=template.writes, shared_memory=template.uses_regions)
            template.allowed = context.access
        leases.deadline_ns = deadline_of(template.timeout_ns, context)
        if context.granted.quotas is not None and template.encoder is not None:
            reserve_answer(context, sum(template.payload_bytes))
        slot, result_bytes = None, template.result_bytes
        if body is not None and body.spare_bytes >= result_bytes:
            base = body.spare_offset
        else:
            slot = leases.take_now(result_bytes, is_result=True) or await leases.wait(result_bytes, is_result=True)
            base = slot.offset
        offsets = [begin + at if is_in_body else at for at, is_in_body in template.inputs]
        places = [base + at if is_in_slot else at for at, is_in_slot in template.outputs]
        caller = Caller(context.stream, leases, leases.deadline_ns, template.priority, context.flow)
        try:
            reply: Done | Stale | None = await engines.compute(template.job, (*offsets, *places), caller)
        except (UnknownName, Lost):
            # A kept program may have been replaced, and what the one before read deleted: the newest is planned, once.
            if not template.is_pinned or is_renewed:
                raise
            is_renewed, reply = True, None
        if isinstance(reply, Done):
            context.timings, context.batch_size = reply.timings, reply.batch_size
            return template, places, reply
        if slot is not None:
            leases.give_back(slot)
        if template.is_pinned:
            template, task = None, None if task is None else await task.renew(leases)
    raise Unavailable("residents: a tensor or the program that it reads keeps changing while it waits")


async def _plan(gateway: Gateway, context: RequestContext, task: Task, body: Lease | None) -> RequestTemplate:
    """Plans a task that its sender may have computed.

    Raises:
        TilewireError: It may not, or cannot be.
    """
    # Before residents are looked up: who may not read one does not hear whether it is there.
    written = () if task.store is None else (task.store,)
    uses_regions = bool(task.regions or task.out_regions)
    authorise(context.granted, read=task.residents.values(), write=written, shared_memory=uses_regions)
    template = await make_template(gateway, context, task, body)
    template.allowed = context.access
    if context.receive_began_s:
        context.receive_s = time.perf_counter() - context.receive_began_s
    return template


def reserve_answer(context: RequestContext, nbytes: int) -> None:
    """Counts an answer of `nbytes` against its key's quota before it is made; what was sent is settled at the end.

    The body of the request is in. What was reserved before is replaced.

    Raises:
        OverQuota: Other requests of the key have used up what it may.
    """
    access, charged_bytes = context.granted, context.charged_bytes or 0
    if access.quotas is None:
        return
    whole_bytes = max(context.head.content_length or 0, context.received_bytes) + nbytes
    access.quotas.reserve(access.holder, whole_bytes - charged_bytes, charged_bytes)
    context.charged_bytes = whole_bytes


async def make_template(gateway: Gateway, context: RequestContext, task: Task, body: Lease | None) -> RequestTemplate:
    """Plans a task, and caches the result for requests with the same bytes in front of their tensors."""
    match = match_of(context.head) if task.store is None else change_of(context.head)
    if match is not None:
        infos = await current_infos(gateway, task, match)
        types = {field: info.type for field, info in infos.items()}
        versions = {field: info.tag for field, info in infos.items()}
        template = plan_task(gateway, task, types, body, versions)
    else:
        template = await _plan_unpinned(gateway, task, body)
    if context.cached is not None:
        gateway.templates.keep(context.cached, template)
    return template


async def _plan_unpinned(gateway: Gateway, task: Task, body: Lease | None) -> RequestTemplate:
    """Plans a task with residents of any version."""
    types = await resident_types(gateway, task)
    try:
        return plan_task(gateway, task, types, body)
    except TilewireError:
        # It may be our memory of a resident that is wrong: another gateway may have replaced it.
        current = {field: info.type for field, info in (await current_infos(gateway, task, None)).items()}
        if current == types:
            raise
        return plan_task(gateway, task, current, body)


def match_of(head: Head) -> Match | None:
    """Returns the condition of a request on the versions of the residents that it reads or changes.

    Raises:
        InvalidRequest: `If-Match` cannot be read.
    """
    if "if-match" in head.repeated:
        raise InvalidRequest("if-match: given more than once")
    return parse_match(head.headers.get("if-match"))


def change_of(head: Head) -> Match | None:
    """Returns the condition of a request on the version that it replaces or deletes.

    Raises:
        InvalidRequest: `If-Match` cannot be read, or the condition is `If-None-Match`, which would be lost.
    """
    if "if-none-match" in head.headers:
        raise InvalidRequest("if-none-match: changes take if-match only")
    return match_of(head)


async def resident_types(gateway: Gateway, task: Task) -> dict[str, TensorType]:
    """Types of the residents by input; perhaps out of date, which the engine notices."""
    place_of, residents = task.op.place_of, task.residents
    return {field: await gateway.engines.type_of(name, field=place_of(field)) for field, name in residents.items()}


async def current_infos(gateway: Gateway, task: Task, match: Match | None) -> dict[str, TensorInfo]:
    """Descriptions of the residents by input, each fetched from an engine.

    Raises:
        PreconditionFailed: One of them does not meet `match`.
    """
    place_of = task.op.place_of
    return {
        field: await gateway.engines.describe(name, field=place_of(field), match=match)
        for field, name in task.residents.items()
    }


def plan_task(
    gateway: Gateway,
    task: Task,
    types: Mapping[str, TensorType],
    body: Lease | None,
    versions: Mapping[str, int] | None = None,
) -> RequestTemplate:
    """Works out what a task computes and how it is answered, with residents of these versions, or of any.

    Raises:
        TilewireError: Operands, limits or the format of the answer do not allow it.
    """
    op, pad_bytes, residents = task.op, task.call.pad_bytes, task.residents
    begin = 0 if body is None else body.offset + pad_bytes
    inputs = bind(task, types, begin, versions or {})
    specs, options = tuple(spec for spec, _ in inputs), task.options
    regions = [task.out_regions.get(name) for name in op.outputs]
    region_names = [None if region is None else region.name for region in regions]

    def plan_outputs() -> Outputs:
        planned = plan(op, {spec.name: spec.type for spec in specs}, options, gateway.settings.limits)
        outs = tuple(
            OutputSpec(kind, region, task.store, task.durable)
            for kind, region in zip(planned.outputs, region_names, strict=True)
        )
        return Outputs(outs, planned.flops, planned.moved_bytes)

    destination = (*region_names, task.store, task.durable)
    job = gateway.engines.templates.find(op.name, specs, options, destination, plan_outputs)
    outputs = {name: spec.type for name, spec in zip(op.outputs, job.outputs, strict=True)}
    check_regions(outputs, task.out_regions)
    encoder = task.encoder(op, outputs)
    lead = None
    if task.lead_bytes is not None and task.lead_bytes <= MAX_LEAD_BYTES:
        lead = b"" if body is None else bytes(body.view[pad_bytes:][: task.lead_bytes])
    outputs_at, result_bytes = list[tuple[int, bool]](), 0
    for kind, region in zip(outputs.values(), regions, strict=True) if task.store is None else ():
        outputs_at.append((result_bytes, True) if region is None else (region.offset, False))
        result_bytes += slot_bytes(kind.nbytes) if region is None else 0
    located = [(spec, offset) for spec, offset in inputs if offset is not None]
    return RequestTemplate(
        lead=lead,
        job=job,
        reads=tuple(residents.values()),
        resident_types=tuple((name, types[field]) for field, name in residents.items()),
        uses_regions=bool(task.regions or task.out_regions),
        is_pinned=bool(task.pinned) or versions is not None,
        inputs=tuple((offset, spec.region is None) for spec, offset in located),
        outputs=tuple(outputs_at),
        timeout_ns=task.timeout_ns,
        priority=task.priority,
        payload_bytes=tuple(
            0 if spec.region is not None else spec.type.nbytes for spec in job.outputs if not spec.resident
        ),
        result_bytes=result_bytes,
        encoder=encoder,
        store=task.store,
    )


def check_regions(outputs: Mapping[str, TensorType], regions: Mapping[str, Region]) -> None:
    """Refuses outputs that do not fit their regions, or would be written to the same bytes of one.

    Raises:
        InvalidRequest: One is too large, or two overlap.
    """
    for name, region in regions.items():
        kind = outputs[name]
        if region.byte_size < kind.nbytes:
            raise InvalidRequest(
                f"{name}: shared_memory_byte_size is {region.byte_size}; {kind} takes {kind.nbytes} bytes"
            )
    ends: dict[str, tuple[str, int]] = {}
    full = [(name, region) for name, region in regions.items() if outputs[name].nbytes]
    for name, region in sorted(full, key=lambda item: item[1].offset):
        before, end = ends.get(region.name, ("", 0))
        if region.offset < end:
            raise InvalidRequest(f"outputs: {before!r} and {name!r} overlap in region {region.name[:64]!r}")
        ends[region.name] = (name, region.offset + outputs[name].nbytes)


def bind(
    task: Task, types: Mapping[str, TensorType], begin: int, versions: Mapping[str, int]
) -> list[tuple[InputSpec, int | None]]:
    """Joins residents, tensors in regions and those of the body; an unnamed one is the first required input that is left.

    Returns:
        Inputs and where their bytes begin: None for residents, an offset in the region, or one from `begin`.
    """
    task.op.check_given(name for name in task.placed if name)
    inputs: dict[str, tuple[InputSpec, int | None]] = {
        field: (InputSpec(field, types[field], name, version=versions.get(field)), None)
        for field, name in task.residents.items()
    }
    for field, declared in task.declared.items():
        if declared != types[field]:
            raise InvalidRequest(f"{field}: {task.residents[field]!r} is {types[field]}; the request says {declared}")
    for field, info in task.pinned.items():
        inputs[field] = (InputSpec(field, info.type, info.name, version=info.tag), None)
    for field, (kind, region) in task.regions.items():
        inputs[field] = (InputSpec(field, kind, region=region.name), region.offset)
    for name, tensor in task.placed.items():
        field = name or next((one for one in task.op.required if one not in inputs), task.op.required[0])
        if field in inputs:
            other = "as a resident tensor and" if inputs[field][0].resident else "twice"
            raise InvalidRequest(f"{field}: given {other} in the body")
        inputs[field] = (InputSpec(field, tensor.type, fortran=tensor.fortran), tensor.offset - begin)
    return list(inputs.values())


def deadline_of(timeout_ns: int, context: RequestContext) -> int:
    """Nanoseconds on the monotonic clock by which the job must have started; 0 for no deadline. Notes if the request set it."""
    deadline_ns = int(context.began_s * 1e9) + timeout_ns if timeout_ns else 0
    given_up_ns = int(context.deadline_s * 1e9)
    if given_up_ns and not 0 < deadline_ns < given_up_ns:
        return given_up_ns
    context.is_timed = deadline_ns > 0
    return deadline_ns
