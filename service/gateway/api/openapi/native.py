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
    body,
    json_content,
    list_content,
    not_modified,
    operation,
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
    inputs = json_content(ref(inputs_schema(op)), dict(op.example)) | binary_content()
    outputs = json_content(ref(outputs_schema(op))) | binary_content()
    text = f"{', '.join(op.outputs)}, in the format of the body or of `Accept`."
    answers = {"200": answer(f"Tensors: {text}", outputs, is_computed=True)}
    parameters = _options(op)
    parameters += [
        query_parameter(name, f"`@` and the name of a resident tensor that stands for `{name}`.", RESIDENT)
        for name in op.inputs
    ]
    if len(op.outputs) == 1:
        stored = json_content(ref("Tensor"))
        answers["201"] = answer("`store=`: the resident tensor.", stored, is_computed=True)
        parameters += [_STORE, _DURABLE]
    text = f"Inputs: {', '.join(op.inputs)}; without those that residents stand for."
    return operation(answers, STORED, [*parameters, TIMEOUT, IF_MATCH], body(inputs, text, is_required=False))


def _kept(content: Described) -> Described:
    """Describes the answers to what replaces or makes something."""
    return {
        "200": answer("Replaced.", content, has_version=True),
        "201": answer("Created.", content, has_version=True),
    }


def describe_tensors() -> dict[str, Described]:
    """Describes the calls of resident tensors, by the name of the route."""
    changed, read = [_TENSOR, IF_MATCH], [_TENSOR, IF_MATCH, IF_NONE_MATCH]
    fetched = answer("The tensor.", binary_content() | json_content(ref("ProgramAnswer")), has_version=True)
    # Without schemas: what a body would be, and there is none.
    formats: Described = {content_type: {} for content_type in fetched["content"]}
    described = answer("The description, in headers; `Content-Type` is that of `GET`.", formats, has_version=True)
    return {
        "list_tensors": operation({"200": answer("The tensors.", list_content("Tensor"))}, KEYS),
        "put_tensor": operation(
            _kept(json_content(ref("Tensor"))),
            (*BODY, PreconditionFailed, ResidentQuota, StoreFull),
            [_TENSOR, _PLACEMENT, _AXIS, IF_MATCH],
            body(binary_content(), "One tensor."),
        ),
        "get_tensor": operation(
            {"200": fetched} | not_modified(),
            (*ADMITTED, Lost, PreconditionFailed, UnknownFormat, BeyondLimit, ResidentQuota),
            read,
        ),
        "head_tensor": operation(
            {"200": described} | not_modified(),
            (*KEYS, UnknownName, Lost, PreconditionFailed, ResidentQuota),
            read,
        ),
        "delete_tensor": operation(
            {"204": answer("It is gone.")}, (*KEYS, UnknownName, Lost, PreconditionFailed, StoreFull), changed
        ),
    }


def describe_programs() -> dict[str, Described]:
    """Describes the calls of programs, by the name of the route."""
    outputs = json_content(ref("ProgramAnswer")) | binary_content()
    computed = {"200": answer("Outputs by name.", outputs, is_computed=True)}
    fetched = {"200": answer("The program.", json_content(ref("Program")), has_version=True)}
    run = json_content(ref("RunBody"), {"program": _EXAMPLE, "x": [[1, 2, 3]]}) | binary_content()
    return {
        "list_programs": operation({"200": answer("The programs.", list_content("KeptProgram"))}, ADMITTED),
        "put_program": operation(
            _kept(json_content(ref("KeptProgram"))),
            (*BODY, PreconditionFailed, ResidentQuota, StoreFull),
            [_PROGRAM, IF_MATCH],
            body(json_content(ref("Program"), _EXAMPLE)),
        ),
        "get_program": operation(
            fetched | not_modified(), (*ADMITTED, PreconditionFailed), [_PROGRAM, IF_MATCH, IF_NONE_MATCH]
        ),
        "delete_program": operation(
            {"204": answer("It is gone.")}, (*KEYS, UnknownName, PreconditionFailed, StoreFull), [_PROGRAM, IF_MATCH]
        ),
        "run_program": operation(
            computed,
            COMPUTED,
            [_PROGRAM, TIMEOUT, IF_MATCH],
            body(
                json_content(ref("ProgramBody")) | binary_content(),
                "Inputs by name; `name=@resident` in the query stands for one.",
                is_required=False,
            ),
        ),
        "run": operation(
            computed,
            COMPUTED,
            [TIMEOUT, IF_MATCH],
            body(
                run,
                "Inputs by name, and the program: the key `program` of JSON, or the string `program` of a "
                "safetensors header's `__metadata__`.",
            ),
        ),
    }


def describe_metrics() -> Described:
    """Describes `GET /metrics`."""
    text = {"schema": {"type": "string"}}
    content = {"text/plain": text, "application/openmetrics-text": text}
    return operation({"200": answer("The exposition; OpenMetrics when `Accept` says so.", content)}, KEYS)


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


_EXAMPLE: Described = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 3]}},
    "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}],
    "outputs": ["p"],
}
