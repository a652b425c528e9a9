"""`/v1/programs` and `/v1/run`: programs are kept, listed, deleted and run.

Runs go through `request.handle` like any op. Implements `request.adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.openapi.native import describe_programs
from tilewire.service.gateway.api.v1.calls import CodecEncoder, check_text, encoder_for, read_tensors
from tilewire.service.gateway.api.v1.query import RunQuery, parse_run_query
from tilewire.service.gateway.auth.authenticator import authorise
from tilewire.service.gateway.codecs.json_text import PROGRAM_KEY
from tilewire.service.gateway.codecs.negotiation import codec_for_accept
from tilewire.service.gateway.codecs.protocol import Codec, Placed
from tilewire.service.gateway.request.adapter import Region
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import receive_body, refuse_encodings
from tilewire.service.gateway.request.context import Gateway, RequestContext, context_of
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.programs import KeptProgram, Programs
from tilewire.service.gateway.request.response import json_response
from tilewire.service.ipc.arena import Lease
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.program.definition import MAX_TEXT_BYTES, RESIDENT, parse_program
from tilewire.service.ops.program.op import PROGRAM, NoOptions, ProgramOp, ProgramOptions
from tilewire.service.ops.registry import OPS

PATH, RUN = "/v1/programs/", "/v1/run"


class ProgramApi:
    """`POST /v1/programs/{name}` and `POST /v1/run`.

    Args:
        programs: Kept programs.
        max_json_bytes: Largest body of JSON, and largest result that JSON carries.
    """

    def __init__(self, programs: Programs, max_json_bytes: int) -> None:
        self._programs = programs
        self._max_json_bytes = max_json_bytes

    def read_call(self, op: AnyOp, head: Head) -> ProgramCall:
        """Reads the head of a request."""
        refuse_encodings(head)
        headers = head.headers
        return ProgramCall(
            op,
            self._programs,
            None if head.path == RUN else head.path.removeprefix(PATH),
            parse_run_query(head.query, headers.get("x-timeout-ms")),
            headers.get("content-type"),
            headers.get("accept"),
            self._max_json_bytes,
        )


class ProgramCall(msgspec.Struct, frozen=True):
    """Parsed head of a program's run; see `Call`.

    Attributes:
        op: The op `program`, not bound to any.
        programs: Kept programs.
        program: Name of a kept program; None when the body carries one.
        query: Residents and the deadline.
        content_type: Value of the header, or None.
        accept: Value of the header, or None.
        max_json_bytes: As in `ProgramApi`.
    """

    op: AnyOp
    programs: Programs
    program: str | None
    query: RunQuery
    content_type: str | None
    accept: str | None
    max_json_bytes: int

    lead_bytes: int = 0
    needs_body: bool = False
    writes: tuple[str, ...] = ()
    program_field: str = "program"

    @property
    def residents(self) -> Mapping[str, str]:
        return self.query.residents

    async def decode(self, body: Lease | None, leases: Leases) -> ProgramTask:
        """Reads the body of a request."""
        codec, placed, lead_bytes, text = None, dict[str, Placed](), 0 if body is None else None, None
        if body is not None:
            codec, placed = await read_tensors(self.content_type, body, leases, self.max_json_bytes)
            lead_bytes = codec.lead_bytes(body.view)
            text = codec.metadata(body.view).get(PROGRAM_KEY) if self.program is None else None
        if self.program is not None:
            kept = await self.programs.find(self.program, leases)
            return ProgramTask(self, codec, placed, lead_bytes, leases, kept.op, kept)
        if text is None:
            raise InvalidRequest(
                "program: the body carries none; send it as the string `program` of a safetensors header's __metadata__, "
                "or as the key `program` of a JSON body"
            )
        op = self.programs.bind(parse_program(text, OPS))
        return ProgramTask(self, codec, placed, lead_bytes, leases, op, None)


class ProgramTask(msgspec.Struct, frozen=True):
    """A run whose program and operands are known; see `Task`.

    Attributes:
        call: Parsed head.
        codec: Format of the body; None without one.
        placed: Tensors of the body by name.
        lead_bytes: As in `Task`.
        leases: Source of room for a program's text.
        op: The op that runs the program.
        kept: The kept program; None for one that the body carries.
    """

    call: ProgramCall
    codec: Codec | None
    placed: Mapping[str, Placed]
    lead_bytes: int | None
    leases: Leases
    op: ProgramOp
    kept: KeptProgram | None

    declared: Mapping[str, TensorType] = {}
    regions: Mapping[str, tuple[TensorType, Region]] = {}
    out_regions: Mapping[str, Region] = {}
    store: str | None = None
    durable: bool = False
    priority: int = 0

    @property
    def options(self) -> ProgramOptions:
        return self.op.complete(NoOptions())

    @property
    def residents(self) -> Mapping[str, str]:
        return residents_of(self.op, self.call.query.residents)

    @property
    def pinned(self) -> Mapping[str, TensorInfo]:
        return {} if self.kept is None else {PROGRAM: self.kept.info}

    @property
    def timeout_ns(self) -> int:
        return int((self.call.query.timeout_ms or 0) * 1e6)

    async def renew(self) -> ProgramTask:
        if self.kept is None:
            return self
        kept = await self.call.programs.fetch(self.kept.name, self.leases)
        return msgspec.structs.replace(self, op=kept.op, kept=kept)

    def encoder(self, outputs: Mapping[str, TensorType]) -> CodecEncoder:
        check_names(self.op, self.placed)
        codec = codec_for_accept(self.call.accept, self.codec, [kind.dtype for kind in outputs.values()])
        check_text(codec, outputs, self.call.max_json_bytes)
        return encoder_for(codec, outputs)


def residents_of(op: ProgramOp, given: Mapping[str, str]) -> dict[str, str]:
    """Names of residents by input: those of the steps, and those that stand for inputs of the program.

    Raises:
        InvalidRequest: A name that is no input of the program.
    """
    check_names(op, given)
    return {**given, **{RESIDENT + name: name for name in op.program.residents}}


def check_names(op: ProgramOp, names: Mapping[str, object]) -> None:
    """Refuses what is no input of the program.

    Raises:
        InvalidRequest: A name that is no input of the program.
    """
    for name in names:
        if name and name not in op.program.inputs:
            raise InvalidRequest(f"{name[:64]}: the program has no such input; it has {', '.join(op.program.inputs)}")


def program_api(gateway: Gateway) -> ProgramApi:
    """The API of every run."""
    return ProgramApi(gateway.programs, gateway.settings.max_json_bytes)


def router(gateway: Gateway) -> APIRouter:
    """Makes the routes of kept programs; runs are answered before the router."""
    routes = APIRouter(tags=["programs"], default_response_class=Response)
    described = describe_programs()

    @routes.get("/v1/programs", summary="List the programs.", openapi_extra=described["list_programs"])
    async def list_programs(request: Request) -> Response:
        return json_response(await _list(gateway, context_of(request.scope)))

    @routes.put("/v1/programs/{name}", summary="Keep a program, or replace it.", openapi_extra=described["put_program"])
    async def put_program(name: str, request: Request) -> Response:
        kept, was_there = await _put(gateway, context_of(request.scope), name)
        return json_response(_describe(kept), HTTPStatus.OK if was_there else HTTPStatus.CREATED)

    @routes.get("/v1/programs/{name}", summary="Fetch a program.", openapi_extra=described["get_program"])
    async def get_program(name: str, request: Request) -> Response:
        kept = await _fetch(gateway, context_of(request.scope), name)
        return Response(kept.op.program.text, media_type="application/json")

    @routes.delete(
        "/v1/programs/{name}",
        summary="Forget a program.",
        status_code=204,
        openapi_extra=described["delete_program"],
    )
    async def delete_program(name: str, request: Request) -> Response:
        authorise(context_of(request.scope).granted, op=PROGRAM, write=[f"programs/{name}"])
        await gateway.programs.delete(name)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    _add_runs(routes, described)
    return routes


async def _list(gateway: Gateway, context: RequestContext) -> list[dict[str, object]]:
    authorise(context.granted, op=PROGRAM)
    with gateway.admission.admit(context.flow) as leases:
        return [_describe(await gateway.programs.find(name, leases)) for name in await gateway.programs.names()]


async def _put(gateway: Gateway, context: RequestContext, name: str) -> tuple[KeptProgram, bool]:
    authorise(context.granted, op=PROGRAM, write=[f"programs/{name}"])
    with gateway.admission.admit(context.flow) as leases:
        gateway.engines.check_ready()
        refuse_encodings(context.head)
        body = await receive_body(gateway, context, leases, _max_text_bytes(gateway))
        return await gateway.programs.put(name, bytes(body.view), leases)


async def _fetch(gateway: Gateway, context: RequestContext, name: str) -> KeptProgram:
    authorise(context.granted, op=PROGRAM)
    with gateway.admission.admit(context.flow) as leases:
        return await gateway.programs.fetch(name, leases)


def _add_runs(routes: APIRouter, described: Mapping[str, dict[str, Any]]) -> None:
    """Adds the runs, for the OpenAPI document and for the router's 405."""

    async def answered_before() -> Response:
        raise AssertionError("This is a bug: runs are answered before the router.")

    for name, path, summary in (
        ("run_program", "/v1/programs/{name}", "Run a kept program."),
        ("run", RUN, "Run the program that the body carries."),
    ):
        routes.add_api_route(
            path,
            answered_before,
            methods=["POST"],
            name=name,
            summary=summary,
            openapi_extra=described[name],
        )


def _max_text_bytes(gateway: Gateway) -> int:
    """Largest text that is read: written with spaces and line breaks, it may be longer than what is kept."""
    return min(16 * MAX_TEXT_BYTES, gateway.settings.max_body_bytes)


def _describe(kept: KeptProgram) -> dict[str, object]:
    program = kept.op.program
    return {
        "name": kept.name,
        "inputs": program.inputs,
        "outputs": program.outputs,
        "steps": len(program.steps),
        "residents": program.residents,
        "version": kept.info.version,
    }
