"""`/v1/programs` and `/v1/run`: programs are kept, listed and deleted; runs go through `request.handle` like any op."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from fastapi import APIRouter, Request, Response

from tilewire.service.gateway.api.openapi.document import add_route, add_routes
from tilewire.service.gateway.api.openapi.native import describe_programs
from tilewire.service.gateway.api.v1.query import refuse_parameters
from tilewire.service.gateway.api.v1.routes import answered_before
from tilewire.service.gateway.auth.authenticator import authorise
from tilewire.service.gateway.request.body import receive_body, refuse_encodings
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.handle import change_of, match_of
from tilewire.service.gateway.request.offload import offload
from tilewire.service.gateway.request.programs import KeptProgram
from tilewire.service.gateway.request.response import json_response
from tilewire.service.match import entity_tag, is_known
from tilewire.service.ops.program.definition import MAX_TEXT_BYTES
from tilewire.service.ops.program.op import PROGRAM

PROGRAMS, PROGRAM_PATH = "/v1/programs", "/v1/programs/{name:path}"


def router(gateway: Gateway) -> APIRouter:
    """Makes the routes of kept programs; runs are answered before the router."""

    async def list_programs(request: Request) -> Response:
        context = context_of(request.scope)
        authorise(context.granted, op=PROGRAM)
        with gateway.admission.admit(context.flow) as leases:
            kept = await gateway.programs.find_all(leases)
            nbytes = sum(len(one.op.program.text) for one in kept)
            return json_response(await offload(nbytes, _describe_all, kept))

    async def put_program(name: str, request: Request) -> Response:
        context = context_of(request.scope)
        authorise(context.granted, op=PROGRAM, write=[f"programs/{name}"])
        refuse_parameters(context.head.query)
        with gateway.admission.admit(context.flow) as leases:
            gateway.engines.check_ready()
            refuse_encodings(context.head)
            # More than a program may have: `parse_program` refuses a text that is too long, and says so.
            max_bytes = min(16 * MAX_TEXT_BYTES, gateway.settings.max_body_bytes)
            body = await receive_body(gateway, context, leases, max_bytes)
            match, text = change_of(context.head), bytes(body.view)
            kept, was_there = await gateway.programs.put(name, text, leases, match, access=context.granted)
        return json_response(
            _describe(kept), HTTPStatus.OK if was_there else HTTPStatus.CREATED, {"etag": entity_tag(kept.info.tag)}
        )

    async def get_program(name: str, request: Request) -> Response:
        context = context_of(request.scope)
        authorise(context.granted, op=PROGRAM)
        refuse_parameters(context.head.query)
        with gateway.admission.admit(context.flow) as leases:
            kept = await gateway.programs.fetch(name, leases, match=match_of(context.head))
        tag = entity_tag(kept.info.tag)
        if is_known(context.head.headers.get("if-none-match"), tag):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"etag": tag})
        return Response(kept.op.program.text, media_type="application/json", headers={"etag": tag})

    async def delete_program(name: str, request: Request) -> Response:
        context = context_of(request.scope)
        authorise(context.granted, op=PROGRAM, write=[f"programs/{name}"])
        refuse_parameters(context.head.query)
        await gateway.programs.delete(name, change_of(context.head))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    routes, described = APIRouter(tags=["programs"], default_response_class=Response), describe_programs()
    add_routes(
        routes,
        described,
        ("GET", PROGRAMS, list_programs, "List the programs."),
        ("PUT", PROGRAM_PATH, put_program, "Keep a program, or replace it."),
        ("GET", PROGRAM_PATH, get_program, "Fetch a program."),
        ("DELETE", PROGRAM_PATH, delete_program, "Forget a program."),
    )
    for path, name, summary in (
        (PROGRAM_PATH, "run_program", "Run a kept program."),
        ("/v1/run", "run", "Run the program that the body carries."),
    ):
        add_route(routes, "POST", path, answered_before, summary, described[name], name)
    return routes


def _describe_all(kept: Sequence[KeptProgram]) -> msgspec.Raw:
    """Describes programs, as JSON."""
    return msgspec.Raw(msgspec.json.encode([_describe(one) for one in kept]))


def _describe(kept: KeptProgram) -> dict[str, object]:
    program = kept.op.program
    return {
        "name": kept.name,
        "inputs": program.inputs,
        "outputs": program.outputs,
        "steps": len(program.steps),
        "residents": program.residents,
        "version": kept.info.tag,
    }
