"""Describes `/v1`: ops from their table, resident tensors, programs."""

from __future__ import annotations

from typing import Any

import msgspec

from tilewire.service.errors import (
    BeyondLimit,
    Lost,
    PreconditionFailed,
    ResidentQuota,
    StoreFull,
    UnknownFormat,
    UnknownName,
)
from tilewire.service.gateway.api.openapi.parts import (
    ADMITTED,
    BODY,
    COMPUTED,
    IF_MATCH,
    IF_NONE_MATCH,
    KEYS,
    NAME_PATTERN,
    RESIDENT,
    STORED,
    TIMEOUT,
    Described,
    answer,
    binary_content,
    errors,
    json_content,
    not_modified,
    path_parameter,
    query_parameter,
    ref,
)
from tilewire.service.gateway.api.openapi.schemas import inputs_schema, outputs_schema
from tilewire.service.ops.op import AnyOp
from tilewire.service.placement import AUTO, AXES, PLACEMENTS

_TENSOR = path_parameter(
    "name", "Name of the tensor; `/` makes folders.", {"type": "string", "pattern": NAME_PATTERN, "maxLength": 255}
)
_PROGRAM = path_parameter(
    "name", "Name of the program.", {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,255}$", "maxLength": 255}
)
_STORE = query_parameter(
    "store", "`@` and a name: keep the result as a resident tensor; answers 201 with its description.", RESIDENT
)

_DURABLE = query_parameter(
    "durable",
    "With `store`: answer once a copy outside of the engine exists, so that its death loses nothing.",
    {"type": "boolean", "default": False},
)
_PLACEMENT = query_parameter(
    "placement",
    "Devices that hold it: all, one, or all with a part each; `auto` chooses by its size.",
    {"type": "string", "enum": [AUTO, *PLACEMENTS], "default": AUTO},
)
_AXIS = query_parameter(
    "axis",
    "Axis along which a sharded tensor is cut: -1, its columns, or -2, its rows, as the items of a search.",
    {"type": "integer", "enum": list(AXES), "default": AXES[0]},
)


def describe_op(op: AnyOp) -> Described:
    """Describes `POST /v1/{op}`."""
    # JSON first: what `/docs` offers to try, and what generated clients speak.
    body = json_content(ref(inputs_schema(op)), dict(op.example)) | binary_content()
    outputs = json_content(ref(outputs_schema(op))) | binary_content()
    text = f"{', '.join(op.outputs)}, in the format of the body or of `Accept`."
    responses = {"200": answer(f"Tensors: {text}", outputs, is_computed=True)}
    if len(op.outputs) == 1:
        stored = json_content(ref("Tensor"))
        responses["201"] = answer("`store=`: the resident tensor.", stored, is_computed=True)
    return {
        "parameters": [
            *_options(op),
            *_residents(op),
            *([_STORE, _DURABLE] if len(op.outputs) == 1 else []),
            TIMEOUT,
            IF_MATCH,
        ],
        "requestBody": {
            "content": body,
            "required": False,
            "description": f"Inputs: {', '.join(op.inputs)}; without those that residents stand for.",
        },
        "responses": responses | errors(STORED),
    }


def describe_tensors() -> dict[str, Described]:
    """Describes the calls of resident tensors, by the name of the route."""
    tensor = json_content(ref("Tensor"))
    one: Described = {"parameters": [_TENSOR, IF_MATCH]}
    read: Described = {"parameters": [_TENSOR, IF_MATCH, IF_NONE_MATCH]}
    return {
        "list_tensors": {
            "responses": {"200": answer("The tensors.", json_content({"type": "array", "items": ref("Tensor")}))}
            | errors(KEYS)
        },
        "put_tensor": {
            "parameters": [_TENSOR, _PLACEMENT, _AXIS, IF_MATCH],
            "requestBody": {
                "content": binary_content(),
                "required": True,
                "description": "One tensor.",
            },
            "responses": {
                "200": answer("Replaced.", tensor, has_version=True),
                "201": answer("Created.", tensor, has_version=True),
            }
            | errors((*BODY, PreconditionFailed, ResidentQuota, StoreFull)),
        },
        "get_tensor": read
        | {
            "responses": {
                "200": answer("The tensor.", binary_content() | json_content(ref("ProgramAnswer")), has_version=True)
            }
            | not_modified()
            | errors((*ADMITTED, Lost, PreconditionFailed, UnknownFormat, BeyondLimit, ResidentQuota))
        },
        "head_tensor": read
        | {
            "responses": {"200": answer("The description, in headers.", has_version=True)}
            | not_modified()
            | errors((*KEYS, UnknownName, Lost, PreconditionFailed, ResidentQuota))
        },
        "delete_tensor": one
        | {
            "responses": {"204": answer("It is gone.")}
            | errors((*KEYS, UnknownName, Lost, PreconditionFailed, StoreFull))
        },
    }


def describe_programs() -> dict[str, Described]:
    """Describes the calls of programs, by the name of the route."""
    program, kept = json_content(ref("Program")), json_content(ref("KeptProgram"))
    one: Described = {"parameters": [_PROGRAM, IF_MATCH]}
    outputs = json_content(ref("ProgramAnswer")) | binary_content()
    computed = {"200": answer("Outputs by name.", outputs, is_computed=True)} | errors(COMPUTED)
    return {
        "list_programs": {
            "responses": {"200": answer("The programs.", json_content({"type": "array", "items": ref("KeptProgram")}))}
            | errors(ADMITTED)
        },
        "put_program": one
        | {
            "requestBody": {"content": json_content(ref("Program"), _EXAMPLE), "required": True},
            "responses": {
                "200": answer("Replaced.", kept, has_version=True),
                "201": answer("Created.", kept, has_version=True),
            }
            | errors((*BODY, PreconditionFailed, ResidentQuota, StoreFull)),
        },
        "get_program": {
            "parameters": [_PROGRAM, IF_MATCH, IF_NONE_MATCH],
            "responses": {"200": answer("The program.", program, has_version=True)}
            | not_modified()
            | errors((*ADMITTED, PreconditionFailed)),
        },
        "delete_program": one
        | {"responses": {"204": answer("It is gone.")} | errors((*KEYS, UnknownName, PreconditionFailed, StoreFull))},
        "run_program": {
            "parameters": [_PROGRAM, TIMEOUT, IF_MATCH],
            "requestBody": {
                "content": json_content(ref("ProgramBody")) | binary_content(),
                "required": False,
                "description": "Inputs by name; `name=@resident` in the query stands for one.",
            },
            "responses": computed,
        },
        "run": {
            "parameters": [TIMEOUT, IF_MATCH],
            "requestBody": {
                "content": json_content(ref("RunBody"), {"program": _EXAMPLE, "x": [[1, 2, 3]]}) | binary_content(),
                "required": True,
                "description": "Inputs by name, and the program: the key `program` of JSON, or the string `program` of a "
                "safetensors header's `__metadata__`.",
            },
            "responses": computed,
        },
    }


def describe_metrics() -> Described:
    """Describes `GET /metrics`."""
    text = {"schema": {"type": "string"}}
    content = {"text/plain": text, "application/openmetrics-text": text}
    return {"responses": {"200": answer("The exposition; OpenMetrics when `Accept` says so.", content)} | errors(KEYS)}


def _options(op: AnyOp) -> list[Described]:
    schemas = msgspec.json.schema(op.options)["$defs"][op.options.__name__]["properties"]
    described = [
        query_parameter(name, schema.pop("description", ""), _plain(schema), is_required=name in op.needs)
        for name, schema in schemas.items()
        if name != "type"
    ]
    for one in described:
        if one["name"] in op.example_options:
            one["example"] = op.example_options[one["name"]]
    return described


def _plain(schema: dict[str, Any]) -> Described:
    """Takes null out of a schema: in a query, what is not given is left out."""
    kinds = [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]
    if kinds == [{"type": "integer"}, {"type": "number"}]:
        kinds = kinds[1:]
    plain: Described = {"anyOf": kinds} if len(kinds) > 1 else dict(kinds[0])
    for one in (plain, *plain.get("anyOf", ())):
        if "enum" in one:
            one["type"] = "string"
    if schema.get("default") is not None:
        plain["default"] = schema["default"]
    return plain


def _residents(op: AnyOp) -> list[Described]:
    return [
        query_parameter(name, f"`@` and the name of a resident tensor that stands for `{name}`.", RESIDENT)
        for name in op.inputs
    ]


_EXAMPLE: Described = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 3]}},
    "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}],
    "outputs": ["p"],
}
