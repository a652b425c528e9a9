"""`/v2`: the Open Inference Protocol. HTTP verbs only; `calls`, `models` and `service.telemetry.statistics` do the work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response

from tilewire.service.errors import Unavailable
from tilewire.service.gateway.api.health import why_not_ready
from tilewire.service.gateway.api.openapi.document import add_route
from tilewire.service.gateway.api.openapi.inference import (
    describe_index,
    describe_infer,
    describe_model_call,
    describe_model_ready,
)
from tilewire.service.gateway.api.openapi.parts import describe_json
from tilewire.service.gateway.api.v2 import models
from tilewire.service.gateway.request.body import receive_text
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.response import json_response

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


# Describes a call of a model for the OpenAPI document, with its version in the path or without.
Describe = Callable[[bool], dict[str, Any]]

MODEL = "/v2/models/{model}"
VERSIONED = "/v2/models/{model}/versions/{version}"


def router(gateway: Gateway) -> APIRouter:
    """Every route of the protocol, for the OpenAPI document and for paths that name no model of ours."""
    routes = APIRouter(tags=["open inference protocol"], default_response_class=Response)
    _add_server(routes, gateway)
    _add_models(routes, gateway)
    return routes


def _add_server(routes: APIRouter, gateway: Gateway) -> None:
    async def server_metadata(_request: Request) -> Response:
        return json_response(models.describe_server(gateway))

    async def repository_index(request: Request) -> Response:
        context = context_of(request.scope)
        asked = models.parse_index_request(await receive_text(gateway, context))
        return json_response(await models.index_models(gateway, context, only_ready=asked.ready))

    async def statistics(request: Request) -> Response:
        return json_response(await models.describe_statistics(gateway, context_of(request.scope)))

    described = describe_json("ServerMetadata", "The server.", is_oip=True)
    add_route(routes, "GET", "/v2", server_metadata, "What serves, and with what.", described)
    add_route(routes, "GET", "/v2/", server_metadata)
    add_route(routes, "POST", "/v2/repository/index", repository_index, "The models.", describe_index())
    # Before the routes of models: `stats` is no model.
    described = describe_json("Statistics", "Counts and times of every model.", is_oip=True)
    add_route(routes, "GET", "/v2/models/stats", statistics, "Statistics of every model.", described)


def _add_models(routes: APIRouter, gateway: Gateway) -> None:
    async def find(request: Request) -> models.Model:
        return await models.find_model(gateway, context_of(request.scope), **request.path_params)

    async def model_statistics(request: Request) -> Response:
        found = await models.describe_statistics(gateway, context_of(request.scope), **request.path_params)
        return json_response(found)

    async def model_metadata(request: Request) -> Response:
        return json_response(models.describe_model(await find(request)))

    async def model_configuration(request: Request) -> Response:
        return json_response(models.configure_model(await find(request)))

    async def model_ready(request: Request) -> Response:
        model = await find(request)
        reason = why_not_ready(gateway)
        if reason is None:
            return json_response({"name": model.name, "ready": True})
        body = {"name": model.name, "ready": False, "error": reason}
        return json_response(body, Unavailable.status, {"retry-after": "1"})

    async def infer(request: Request) -> Response:
        await find(request)
        raise AssertionError("This is a bug: models that there are, are answered before the router.")

    _add(routes, "GET", "/stats", "Statistics of a model.", model_statistics, _get("Statistics"))
    _add(routes, "GET", "", "Inputs and outputs of a model.", model_metadata, _get("ModelMetadata"))
    _add(routes, "GET", "/config", "Configuration of a model.", model_configuration, _get("ModelConfiguration"))
    _add(routes, "GET", "/ready", "Whether a model computes.", model_ready, describe_model_ready)
    _add(routes, "POST", "/infer", "Compute.", infer, describe_infer)


def _get(schema: str) -> Describe:
    return functools.partial(describe_model_call, schema, "About the model.")


def _add(routes: APIRouter, method: str, suffix: str, summary: str, endpoint: Endpoint, describe: Describe) -> None:
    """Adds a call of a model, with and without its version."""
    for path, name in ((MODEL, endpoint.__name__), (VERSIONED, f"{endpoint.__name__}_of_version")):
        add_route(routes, method, path + suffix, endpoint, summary, describe(path is VERSIONED), name)
