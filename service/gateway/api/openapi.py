"""Describes the binary routes for `/openapi.json` and `/docs`, from the table of ops."""

from __future__ import annotations

from typing import Any

import msgspec

from tilewire.service.gateway.codecs.negotiation import CODECS
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.registry import OPS
from tilewire.service.placement import AUTO, PLACEMENTS

_PROBLEM = {
    "description": "What is wrong, as RFC 9457 problem details; `detail` names the field.",
    "content": {"application/problem+json": {"schema": {"type": "object"}}},
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def describe_op(op: AnyOp) -> dict[str, Any]:
    """The OpenAPI operation of `POST /v1/{op}`."""
    # The first one is what `/docs` offers to try.
    body: dict[str, Any] = {"application/json": {"schema": {"type": "object"}, "example": dict(op.example)}}
    body |= {codec.content_type: dict(_BINARY) for codec in CODECS if not codec.is_text}
    return {
        "parameters": [*_options(op), *_residents(op), *_COMMON],
        "requestBody": {"content": body, "description": f"Inputs: {', '.join(op.inputs)}."},
        "responses": {
            "200": {
                "description": f"Tensors: {', '.join(op.outputs)}; in the format of the body or of `Accept`.",
                "content": _answers(),
            },
            "201": {"description": "`store=`: what is resident now.", "content": {"application/json": {}}},
            "410": {**_PROBLEM, "description": "A resident that it names was lost with its engine."},
            "4XX": _PROBLEM,
            "5XX": _PROBLEM,
        },
    }


def describe_model_call(*, is_versioned: bool, is_infer: bool) -> dict[str, Any]:
    """The OpenAPI operation of a call under `/v2/models/{model}`."""
    parameters = [_MODEL, _VERSION] if is_versioned else [_MODEL]
    error = {"description": "What is wrong.", "content": {"application/json": {"schema": _ERROR}}}
    if not is_infer:
        return {"parameters": parameters, "responses": {"4XX": error, "5XX": error}}
    answer = {"application/json": {"schema": {"type": "object"}}, "application/octet-stream": dict(_BINARY)}
    body = {**answer, "application/json": {"schema": {"type": "object"}, "example": _INFER}}
    return {
        "parameters": [*parameters, _HEADER_LENGTH],
        "requestBody": {"content": body, "required": True},
        "responses": {
            "200": {"description": "The output `out`, in JSON or behind it.", "content": answer},
            "4XX": error,
            "5XX": error,
        },
    }


def describe_put() -> dict[str, Any]:
    """The OpenAPI operation of `PUT /v1/tensors/{name}`."""
    content = {codec.content_type: dict(_BINARY) for codec in CODECS if not codec.is_text}
    return {
        "parameters": [_PLACEMENT],
        "requestBody": {"content": content, "description": "One tensor.", "required": True},
        "responses": _errors(),
    }


def describe_get() -> dict[str, Any]:
    """The OpenAPI operation of `GET /v1/tensors/{name}`."""
    lost = {**_PROBLEM, "description": "It was lost with its engine: write it again."}
    return {"responses": {"200": {"description": "The tensor.", "content": _answers()}, "410": lost, **_errors()}}


def _answers() -> dict[str, Any]:
    return {codec.content_type: dict(_BINARY) if not codec.is_text else {} for codec in CODECS}


def _errors() -> dict[str, Any]:
    return {"4XX": _PROBLEM, "5XX": _PROBLEM}


def _options(op: AnyOp) -> list[dict[str, Any]]:
    schemas = msgspec.json.schema(op.options)["$defs"][op.options.__name__]["properties"]
    return [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in schemas.items()
        if name != "type"
    ]


def _residents(op: AnyOp) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": f"`@` and the name of a resident tensor that stands for `{name}`.",
            "schema": {"type": "string", "pattern": "^@"},
        }
        for name in op.inputs
    ]


_INFER = {
    "inputs": [
        {"name": "a", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]},
        {"name": "b", "datatype": "FP32", "shape": [2, 2], "data": [5, 6, 7, 8]},
    ],
    "parameters": {"activation": "relu"},
}

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(OPS)}}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "enum": ["1"]}}
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}

_HEADER_LENGTH: dict[str, Any] = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Length of the JSON when binary data follows it; 0 for a body that is one raw tensor.",
    "schema": {"type": "integer", "minimum": 0},
}

_PLACEMENT: dict[str, Any] = {
    "name": "placement",
    "in": "query",
    "required": False,
    "description": "Engines that hold it: all, or one; `auto` chooses by its size.",
    "schema": {"type": "string", "enum": [AUTO, *PLACEMENTS], "default": AUTO},
}

_COMMON: list[dict[str, Any]] = [
    {
        "name": "store",
        "in": "query",
        "required": False,
        "description": "`@` and a name: keep the result as a resident tensor; answers 201 with its metadata.",
        "schema": {"type": "string", "pattern": "^@"},
    },
    {
        "name": "durable",
        "in": "query",
        "required": False,
        "description": "With `store`: answer once a copy outside of the engine exists, so that its death loses nothing.",
        "schema": {"type": "boolean", "default": False},
    },
    {
        "name": "timeout_ms",
        "in": "query",
        "required": False,
        "description": "A request that cannot start by then is answered 504; also the header `X-Timeout-Ms`.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
]
