"""Puts a gateway's application together: routers, the one middleware, the one table from the router's errors to ours.

`create_app` starts nothing and reads nothing but the console's packaged files; `gateway.__main__` runs what it makes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from tilewire.service.errors import InvalidRequest, MethodNotAllowed, UnknownName
from tilewire.service.gateway.api import health, pages
from tilewire.service.gateway.api.openapi.document import make_document
from tilewire.service.gateway.api.paths import target_finder
from tilewire.service.gateway.api.v1 import programs, reports, tensors
from tilewire.service.gateway.api.v1 import routes as native
from tilewire.service.gateway.api.v2 import routes as oip
from tilewire.service.gateway.api.v2 import shared_memory_routes as shared_memory
from tilewire.service.gateway.auth.authenticator import Authenticator
from tilewire.service.gateway.request.adapter import FindTarget
from tilewire.service.gateway.request.asgi import run_op
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.middleware import ContextMiddleware
from tilewire.service.ops.registry import OPS

DESCRIPTION = """GPU linear algebra over HTTP.

Send tensors as safetensors, npz, npy or, for trying things out here, JSON. Options and resident operands are query
parameters: `POST /v1/matmul?activation=gelu&b=@weights/w1`."""


class TilewireApp(FastAPI):
    """FastAPI, with the ops in front of its middleware and router.

    Attributes:
        gateway: Parts; None before they are known.
        find_target: Finds the API and the op of a POST.
        document: The OpenAPI document.
    """

    gateway: Gateway | None = None
    find_target: FindTarget = staticmethod(lambda _path: None)
    document: Mapping[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's call."""
        target = None
        if scope["type"] == "http" and scope["method"] == "POST":
            target = self.find_target(scope["path"].removeprefix(scope.get("root_path", "")))
        if target is not None and self.gateway is not None:
            await run_op(self.gateway, target, scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document, instead of FastAPI's."""
        return dict(self.document)


def create_app(gateway: Gateway) -> TilewireApp:
    """Makes the ASGI application of one gateway."""
    app = TilewireApp(title="Tilewire", version=gateway.version, description=DESCRIPTION, docs_url=None, redoc_url=None)
    routers = [
        tensors.router(gateway),
        native.router(),
        programs.router(gateway),
        reports.router(gateway),
        oip.router(gateway),
        shared_memory.router(gateway),
        health.router(gateway),
        pages.router(pages.console_assets()),
        pages.router(pages.docs_assets()),
    ]
    if gateway.settings.inherited.metrics_listener < 0:
        routers.append(health.metrics_router(gateway))
    _add(app, gateway, routers)
    app.document = make_document(
        [route for router in routers for route in router.routes],
        version=gateway.version,
        description=DESCRIPTION,
        needs_keys=gateway.authenticator.needs_keys,
    )
    app.find_target = target_finder(gateway)
    app.gateway = gateway
    return app


def create_metrics_app(gateway: Gateway) -> FastAPI:
    """Makes the application of `--metrics-port`: probes and scrapers, who need no key there."""
    app = FastAPI(title="Tilewire", version=gateway.version, docs_url=None, redoc_url=None, openapi_url=None)
    open_gateway = replace(gateway, authenticator=Authenticator())
    _add(app, open_gateway, [health.router(open_gateway), health.metrics_router(open_gateway)])
    return app


def _add(app: FastAPI, gateway: Gateway, routers: Sequence[APIRouter]) -> None:
    # A redirect would name the address that the request came to, which behind a proxy is another scheme, host or port.
    app.router.redirect_slashes = False
    routes: list[BaseRoute] = [*app.routes]
    for router in routers:
        router.routes += _head_routes(router)
        app.include_router(router)
        routes += router.routes
    raise_ours = _raise_ours_for(routes)
    app.add_exception_handler(HTTPException, raise_ours)
    app.add_exception_handler(RequestValidationError, raise_ours)
    app.add_middleware(ContextMiddleware, gateway=gateway)


def _head_routes(router: APIRouter) -> list[BaseRoute]:
    """Makes a HEAD route of each GET route of a router that has none of its own; the server leaves out the bodies."""
    routes = [(route, route.methods or set()) for route in router.routes if isinstance(route, APIRoute)]
    described = {route.path for route, methods in routes if "HEAD" in methods}
    return [
        APIRoute(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False, response_class=Response)
        for route, methods in routes
        if "GET" in methods and route.path not in described
    ]


def _raise_ours_for(routes: Sequence[BaseRoute]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Turns the router's own errors into the tree's; the middleware answers them as it answers all others."""

    async def raise_ours(request: Request, error: Exception) -> Response:
        path = request.scope["path"][:128]
        if path == "*" and request.method == "OPTIONS":
            # About the server as a whole (RFC 9110, section 9.3.7); no route can have this path.
            methods = {method for route in routes if isinstance(route, Route) for method in route.methods or ()}
            return Response(status_code=HTTPStatus.NO_CONTENT, headers={"allow": ", ".join(sorted(methods))})
        if isinstance(error, HTTPException) and error.status_code == UnknownName.status:
            is_op, name = path.startswith("/v1/"), path.removeprefix("/v1/")
            if is_op and "/" not in name:
                raise UnknownName(f"op: no op {name[:64]!r}; there are {', '.join(OPS)}")
            raise UnknownName(f"path: there is nothing at {path!r}")
        if isinstance(error, HTTPException) and error.status_code == MethodNotAllowed.status:
            context_of(request.scope).allow = _methods_at(request.scope, routes)
            raise MethodNotAllowed(f"method: {request.method[:16]} is not offered at {path!r}")
        raise InvalidRequest(str(error)[:256])

    return raise_ours


def _methods_at(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """Every method that the path offers: each is a route of its own, and the router names only the first one's."""
    methods: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))
