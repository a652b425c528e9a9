"""Builds `/openapi.json` from the routes.

A route's `openapi_extra` is its whole operation but for the id, which is the route's name, and for tags and summary. The
document is not FastAPI's: that names statuses which are never sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from tilewire.service.gateway.api.openapi.parts import HEADERS, Described
from tilewire.service.gateway.api.openapi.schemas import SCHEMAS

OPENAPI = "3.1.0"


def add_route(
    routes: APIRouter,
    method: str,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    summary: str = "",
    described: Described | None = None,
    name: str = "",
) -> None:
    """Adds a route, under the name of its endpoint unless it has another; one without a description is in no document."""
    routes.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=name or endpoint.__name__,
        summary=summary,
        include_in_schema=described is not None,
        openapi_extra=described,
    )


def add_routes(
    routes: APIRouter,
    described: Mapping[str, Described],
    *rows: tuple[str, str, Callable[..., Awaitable[Response]], str],
) -> None:
    """Adds routes, each a method, a path, an endpoint and a summary; `described` has their descriptions by endpoint."""
    for method, path, endpoint, summary in rows:
        add_route(routes, method, path, endpoint, summary, described[endpoint.__name__])


def make_document(routes: Iterable[BaseRoute], *, version: str, description: str, needs_keys: bool) -> dict[str, Any]:
    """Builds the document of routes, of which those without `openapi_extra` are left out."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, APIRoute) and route.include_in_schema and route.openapi_extra is not None:
            for method in sorted(route.methods or ()):
                paths.setdefault(route.path_format, {})[method.lower()] = _operation(route)
    document: dict[str, Any] = {
        "openapi": OPENAPI,
        "info": {"title": "Tilewire", "version": version, "description": description},
        # Relative to the document: a proxy may have put a prefix before every path.
        "servers": [{"url": "."}],
        "paths": paths,
        "components": {"schemas": SCHEMAS, "headers": HEADERS},
    }
    if needs_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: APIRoute) -> dict[str, Any]:
    assert route.openapi_extra is not None, "This is a bug."
    named = {"tags": list(route.tags), "summary": route.summary, "operationId": route.name}
    return named | route.openapi_extra
