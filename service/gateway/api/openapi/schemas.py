"""Describes the JSON of bodies and answers, as the components of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BY_CODE
from tilewire.service.gateway.api.openapi.parts import Described as Schema
from tilewire.service.gateway.api.openapi.parts import ref
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.registry import OPS
from tilewire.service.placement import AXES, PLACEMENTS

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_BOOLEAN: Schema = {"type": "boolean"}
_TIME: Schema = {"type": "string", "format": "date-time"}
_SIZES: Schema = {"type": "array", "items": {"type": "integer"}}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _map(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


def _object(properties: Mapping[str, Schema], optional: Sequence[str] = (), **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    described: Schema = {"type": "object", "properties": dict(properties)}
    return described | ({"required": required} if required else {}) | more


def inputs_schema(op: AnyOp) -> str:
    """Returns the name of the schema of an op's JSON body."""
    return f"{op.name.title()}Inputs"


def outputs_schema(op: AnyOp) -> str:
    """Returns the name of the schema of an op's JSON answer."""
    return f"{op.name.title()}Outputs"


def _inputs_of(op: AnyOp) -> Schema:
    properties = {name: ref("JsonTensor") for name in op.inputs} | {"dtype": ref("DType")}
    return _object(properties, optional=list(properties), additionalProperties=False)


def _outputs_of(op: AnyOp) -> Schema:
    dtype, shape = ref("DType"), _SIZES
    if len(op.outputs) > 1:
        dtype, shape = (_object(dict.fromkeys(op.outputs, one)) for one in (dtype, shape))
    return _object({**{name: ref("Numbers") for name in op.outputs}, "dtype": dtype, "shape": shape})


_NATIVE: dict[str, Schema] = {
    "Problem": _object(
        {
            "type": {"type": "string", "enum": [f"urn:tilewire:error:{code}" for code in BY_CODE]},
            "title": _STRING,
            "status": {"type": "integer"},
            "detail": {"type": "string", "description": "What is wrong; it names the field."},
            "request_id": _STRING,
        }
    ),
    "DType": {"type": "string", "enum": list(DTYPES)},
    "Numbers": {
        "description": "Nested lists of numbers in C order, or a number for rank 0. NaN and infinities are bare.",
        "anyOf": [_list({}), {"type": "number"}],
    },
    "JsonTensor": {"anyOf": [_list({}), {"type": "number"}, ref("TypedTensor")]},
    "TypedTensor": _object({"data": ref("Numbers"), "dtype": ref("DType"), "shape": _SIZES}, ("dtype", "shape")),
    "Tensor": _object(
        {
            "name": _STRING,
            "shape": _SIZES,
            "dtype": ref("DType"),
            "bytes": _COUNT,
            "created": {"anyOf": [_TIME, {"type": "null"}]},
            "last_used": {"anyOf": [_TIME, {"type": "null"}]},
            "hits": _COUNT,
            "version": _COUNT,
            "placement": {"type": "string", "enum": list(PLACEMENTS)},
            "engines": _list(_COUNT),
            "axis": {"anyOf": [{"type": "integer", "enum": list(AXES)}, {"type": "null"}]},
            "parts": _list(ref("TensorPart")),
        }
    ),
    "TensorPart": _object({"engine": _COUNT, "begin": _COUNT, "end": _COUNT, "bytes": _COUNT}),
    "ProgramInput": _object({"dtype": ref("DType"), "shape": _SIZES}),
    "ProgramStep": _object(
        {
            "op": {"type": "string", "enum": list(OPS)},
            "inputs": _map(_STRING),
            "options": {"type": "object"},
            "as": {"anyOf": [_STRING, _list(_STRING)]},
        },
        ("options",),
    ),
    "Program": _object(
        {
            "inputs": _map(ref("ProgramInput")),
            "steps": {**_list(ref("ProgramStep")), "minItems": 1, "maxItems": 32},
            "outputs": _list(_STRING),
        }
    ),
    "KeptProgram": _object(
        {
            "name": _STRING,
            "inputs": _map(ref("ProgramInput")),
            "outputs": _list(_STRING),
            "steps": _COUNT,
            "residents": _list(_STRING),
            "version": _COUNT,
        }
    ),
    "ProgramBody": _object({"dtype": ref("DType")}, ("dtype",), additionalProperties=ref("JsonTensor")),
    "RunBody": _object(
        {"program": ref("Program"), "dtype": ref("DType")}, ("dtype",), additionalProperties=ref("JsonTensor")
    ),
    "ProgramAnswer": _object(
        {
            "dtype": {"anyOf": [ref("DType"), _map(ref("DType"))]},
            "shape": {"anyOf": [_SIZES, _map(_SIZES)]},
        },
        additionalProperties=ref("Numbers"),
    ),
    "Interval": _object(
        {
            "end": {"type": "number", "description": "Unix time, in seconds."},
            "seconds": {"type": "number"},
            "requests": _map(_COUNT),
            "statuses": _map(_COUNT),
            "refused": _map(_COUNT),
            "latency": _map({"type": "number"}),
            "kernel_seconds": {"type": "number"},
        },
        ("requests", "statuses", "refused", "latency", "kernel_seconds"),
    ),
    "Failure": _object(
        {
            "time": {"type": "number", "description": "Unix time, in seconds."},
            "method": _STRING,
            "route": _STRING,
            "op": {"anyOf": [_STRING, {"type": "null"}]},
            "status": {"type": "integer"},
            "reason": {"type": "string", "enum": list(BY_CODE)},
            "request_id": _STRING,
            "key": {"anyOf": [_STRING, {"type": "null"}]},
        }
    ),
    "History": _object(
        {
            "period_s": {"type": "number"},
            "intervals": _list(ref("Interval")),
            "failures": _list(ref("Failure")),
        }
    ),
    "Devices": _object({"devices": _list({"type": "object"})}),
    "Live": _object({"live": _BOOLEAN}),
    "Ready": _object({"ready": _BOOLEAN, "error": _STRING, "engines": _list({"type": "object"})}, ("error", "engines")),
}

_PARAMETERS: Schema = {"type": "object", "description": "Options by name; see the documentation."}
_DATATYPE: Schema = {"type": "string", "enum": [dtype.oip for dtype in DTYPES.values()]}
_DURATION: Schema = _object({"count": _COUNT, "ns": _COUNT})
_LAUNCH: dict[str, Schema] = dict.fromkeys(("compute_input", "compute_infer", "compute_output"), ref("Duration"))

# Names and members as the Open Inference Protocol and Triton's extensions publish them.
_OIP: dict[str, Schema] = {
    "InferError": _object({"error": _STRING}),
    "ServerMetadata": _object(
        {"name": _STRING, "version": _STRING, "extensions": _list(_STRING), "engines": _list({"type": "object"})}
    ),
    "ModelTensor": _object({"name": _STRING, "datatype": _DATATYPE, "shape": _SIZES}),
    "ModelMetadata": _object(
        {
            "name": _STRING,
            "versions": _list(_STRING),
            "platform": _STRING,
            "inputs": _list(ref("ModelTensor")),
            "outputs": _list(ref("ModelTensor")),
            "parameters": _map(_STRING),
        }
    ),
    "ConfiguredTensor": _object({"name": _STRING, "data_type": _STRING, "dims": _SIZES}),
    "ModelConfiguration": _object(
        {
            "name": _STRING,
            "platform": _STRING,
            "backend": _STRING,
            "version_policy": {"type": "object"},
            "max_batch_size": _COUNT,
            "input": _list(ref("ConfiguredTensor")),
            "output": _list(ref("ConfiguredTensor")),
        }
    ),
    "ModelReady": _object({"name": _STRING, "ready": _BOOLEAN, "error": _STRING}, ("error",)),
    "Duration": _DURATION,
    "InferenceStatistics": _object(
        dict.fromkeys(("success", "fail", "queue"), ref("Duration"))
        | _LAUNCH
        | dict.fromkeys(("cache_hit", "cache_miss"), ref("Duration"))
    ),
    "BatchStatistics": _object({"batch_size": _COUNT, **_LAUNCH}),
    "ModelStatistics": _object(
        {
            "name": _STRING,
            "version": _STRING,
            "last_inference": _COUNT,
            "inference_count": _COUNT,
            "execution_count": _COUNT,
            "inference_stats": ref("InferenceStatistics"),
            "batch_stats": _list(ref("BatchStatistics")),
        }
    ),
    "Statistics": _object({"model_stats": _list(ref("ModelStatistics"))}),
    "ModelIndexRequest": _object({"ready": _BOOLEAN}, ("ready",)),
    "ModelIndexEntry": _object({"name": _STRING, "version": _STRING, "state": _STRING, "reason": _STRING}),
    "InferInput": _object(
        {
            "name": _STRING,
            "datatype": _DATATYPE,
            "shape": _SIZES,
            "parameters": _PARAMETERS,
            "data": {"description": "Numbers, flat or nested.", **_list({})},
        },
        ("datatype", "shape", "parameters", "data"),
    ),
    "InferOutputRequest": _object({"name": _STRING, "parameters": _PARAMETERS}, ("parameters",)),
    "InferRequest": _object(
        {
            "id": _STRING,
            "inputs": _list(ref("InferInput")),
            "outputs": _list(ref("InferOutputRequest")),
            "parameters": _PARAMETERS,
        },
        ("id", "outputs", "parameters"),
    ),
    "InferOutput": _object(
        {
            "name": _STRING,
            "datatype": _DATATYPE,
            "shape": _SIZES,
            "parameters": _PARAMETERS,
            "data": _list({"type": "number"}),
        },
        ("parameters", "data"),
    ),
    "InferResponse": _object(
        {"id": _STRING, "model_name": _STRING, "model_version": _STRING, "outputs": _list(ref("InferOutput"))},
        ("id",),
    ),
    "SharedMemoryRegion": _object({"name": _STRING, "key": _STRING, "offset": _COUNT, "byte_size": _COUNT}),
    "SharedMemoryRegistration": _object({"key": _STRING, "offset": _COUNT, "byte_size": _COUNT}, ("offset",)),
}

SCHEMAS: dict[str, Schema] = {
    **_NATIVE,
    **{inputs_schema(op): _inputs_of(op) for op in OPS.values()},
    **{outputs_schema(op): _outputs_of(op) for op in OPS.values()},
    **_OIP,
}
