"""`POST /v1/{op}`: the native calls. HTTP verbs only; `compute` does the work."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tilewire.service.gateway.api.openapi import describe_op
from tilewire.service.gateway.api.v1.query import Call, parse_call
from tilewire.service.gateway.request.access_log import sent_by
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.compute import Computed, compute
from tilewire.service.gateway.request.context import Exchange, Gateway, exchange_of
from tilewire.service.gateway.request.habits import FORMATS, Served, habit_of, is_repeatable
from tilewire.service.gateway.request.middleware import ExchangeMiddleware
from tilewire.service.gateway.request.response import TensorResponse, describe_tensor, json_response, timing_headers
from tilewire.service.ipc.messages import Upload
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.registry import OPS


def hot_routes(gateway: Gateway) -> dict[str, ASGIApp]:
    """The native calls as plain ASGI, by path: FastAPI's way to an endpoint costs more than a small request."""
    return {f"/v1/{op.name}": ExchangeMiddleware(_plain(gateway, op), gateway) for op in OPS.values()}


def _plain(gateway: Gateway, op: AnyOp) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        response = await _call(gateway, op, scope)
        await response(scope, receive, send)

    return call


def router(gateway: Gateway) -> APIRouter:
    """The same calls as routes: one for each op, for the OpenAPI document and for the router's 405."""
    routes = APIRouter(tags=["ops"])
    for op in OPS.values():
        routes.add_api_route(
            f"/v1/{op.name}",
            _endpoint(gateway, op),
            methods=["POST"],
            name=op.name,
            summary=op.summary,
            response_class=Response,
            openapi_extra=describe_op(op),
        )
    return routes


def _endpoint(gateway: Gateway, op: AnyOp) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        return await _call(gateway, op, request.scope)

    return endpoint


async def _call(gateway: Gateway, op: AnyOp, scope: Scope) -> Response:
    exchange = exchange_of(scope)
    exchange.op = op.name
    leases = gateway.admission.admit()
    try:
        call = parse_call(op, scope["query_string"], exchange.headers.get("x-timeout-ms"))
        computed = await compute(gateway, exchange, call, leases)
        if call.store is None:
            response = _answer(gateway, exchange, computed, leases)
            _remember(gateway, scope, call, computed, response)
            return response
        info, _ = await gateway.engines.put(call.store, Upload(computed.out, computed.lease.offset))
        leases.release()
        return json_response(describe_tensor(info), 201, timing_headers(exchange, computed.done))
    except BaseException:
        leases.release()
        raise


def _remember(gateway: Gateway, scope: Scope, call: Call, computed: Computed, response: TensorResponse) -> None:
    """Lets the connection answer the next such request by itself; see `habits`."""
    exchange = exchange_of(scope)
    connection, codec = exchange.incoming.connection, computed.codec
    if connection is None or not connection.repeated_head or codec is None or codec.name not in FORMATS:
        return
    if exchange.body_format not in FORMATS or not is_repeatable(exchange, response.nbytes):
        return
    begin = exchange.body_offset
    served = Served(
        computed.bound,
        gateway.arena.segment.view[begin : begin + exchange.received_bytes],
        begin,
        0,
        int((call.timeout_ms or 0) * 1e6),
        codec.content_type,
        bytes(response.chunks[0]),
    )
    habit = habit_of(connection.repeated_head, scope, exchange, served)
    if habit is not None:
        connection.remember(habit)


def _answer(gateway: Gateway, exchange: Exchange, computed: Computed, leases: Leases) -> TensorResponse:
    assert exchange.op is not None, "This is a bug."
    assert computed.codec is not None, "This is a bug."
    return TensorResponse(
        computed.codec.encode("out", computed.out, computed.lease.view),
        computed.codec.content_type,
        timing_headers(exchange, computed.done),
        leases,
        sent_by(gateway, exchange, exchange.op),
    )
