"""Describes the JSON of bodies and answers, as the components of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_OBJECT: Schema = {"type": "object"}
_BOOLEAN: Schema = {"type": "boolean"}
_TIME: Schema = {"type": "string", "format": "date-time"}
_SIZES: Schema = {"type": "array", "items": {"type": "integer"}}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _nullable(value: Schema) -> Schema:
    return {"anyOf": [value, {"type": "null"}]}


def _enum(names: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list(names)}


def _map(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


def _object(*, optional: Sequence[str] = (), additional: Schema | bool | None = None, **properties: Schema) -> Schema:
    """An object of these properties; `additional` describes further ones, where they are not simply ignored."""
    required = [name for name in properties if name not in optional]
    described: Schema = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return described if additional is None else described | {"additionalProperties": additional}


def _each(names: Iterable[str], schema: Schema) -> dict[str, Any]:
    return dict.fromkeys(names, schema)


def inputs_schema(op: AnyOp) -> str:
    """Returns the name of the schema of an op's JSON body."""
    return f"{op.name.title()}Inputs"


def outputs_schema(op: AnyOp) -> str:
    """Returns the name of the schema of an op's JSON answer."""
    return f"{op.name.title()}Outputs"


def _inputs_of(op: AnyOp) -> Schema:
    properties: dict[str, Any] = _each(op.inputs, ref("JsonTensor")) | {"dtype": ref("DType")}
    return _object(optional=list(properties), additional=False, **properties)


def _outputs_of(op: AnyOp) -> Schema:
    dtype, shape = ref("DType"), _SIZES
    if len(op.outputs) > 1:
        dtype, shape = (_object(**_each(op.outputs, one)) for one in (dtype, shape))
    return _object(**_each(op.outputs, ref("Numbers")), dtype=dtype, shape=shape)


_NATIVE: dict[str, Schema] = {
    "Problem": _object(
        type=_enum(f"urn:tilewire:error:{code}" for code in BY_CODE),
        title=_STRING,
        status=_INTEGER,
        detail={"type": "string", "description": "What is wrong; it names the field."},
        request_id=_STRING,
    ),
    "DType": _enum(DTYPES),
    "Numbers": {
        "description": "Nested lists of numbers in C order, or a number for rank 0. NaN and infinities are bare.",
        "anyOf": [_list({}), {"type": "number"}],
    },
    "JsonTensor": {"anyOf": [_list({}), {"type": "number"}, ref("TypedTensor")]},
    "TypedTensor": _object(optional=("dtype", "shape"), data=ref("Numbers"), dtype=ref("DType"), shape=_SIZES),
    "Tensor": _object(
        name=_STRING,
        shape=_SIZES,
        dtype=ref("DType"),
        bytes=_COUNT,
        created=_nullable(_TIME),
        last_used=_nullable(_TIME),
        hits=_COUNT,
        version=_COUNT,
        placement=_enum(PLACEMENTS),
        engines=_list(_COUNT),
        axis=_nullable({"type": "integer", "enum": list(AXES)}),
        parts=_list(ref("TensorPart")),
    ),
    "TensorPart": _object(engine=_COUNT, begin=_COUNT, end=_COUNT, bytes=_COUNT),
    "ProgramInput": _object(dtype=ref("DType"), shape=_SIZES),
    "ProgramStep": _object(
        optional=("options",),
        op=_enum(OPS),
        inputs=_map(_STRING),
        options=_OBJECT,
        **{"as": {"anyOf": [_STRING, _list(_STRING)]}},
    ),
    "Program": _object(
        inputs=_map(ref("ProgramInput")),
        steps={**_list(ref("ProgramStep")), "minItems": 1, "maxItems": 32},
        outputs=_list(_STRING),
    ),
    "KeptProgram": _object(
        name=_STRING,
        inputs=_map(ref("ProgramInput")),
        outputs=_list(_STRING),
        steps=_COUNT,
        residents=_list(_STRING),
        version=_COUNT,
    ),
    "ProgramBody": _object(optional=("dtype",), additional=ref("JsonTensor"), dtype=ref("DType")),
    "RunBody": _object(optional=("dtype",), additional=ref("JsonTensor"), program=ref("Program"), dtype=ref("DType")),
    "ProgramAnswer": _object(
        additional=ref("Numbers"),
        dtype={"anyOf": [ref("DType"), _map(ref("DType"))]},
        shape={"anyOf": [_SIZES, _map(_SIZES)]},
    ),
    "Interval": _object(
        optional=("requests", "statuses", "refused", "latency", "kernel_seconds"),
        end={"type": "number", "description": "Unix time, in seconds."},
        seconds=_NUMBER,
        requests=_map(_COUNT),
        statuses=_map(_COUNT),
        refused=_map(_COUNT),
        latency=_map(_NUMBER),
        kernel_seconds=_NUMBER,
    ),
    "Failure": _object(
        time={"type": "number", "description": "Unix time, in seconds."},
        method=_STRING,
        route=_STRING,
        op=_nullable(_STRING),
        status=_INTEGER,
        reason=_enum(BY_CODE),
        request_id=_STRING,
        key=_nullable(_STRING),
    ),
    "History": _object(period_s=_NUMBER, intervals=_list(ref("Interval")), failures=_list(ref("Failure"))),
    "Devices": _object(devices=_list(_OBJECT)),
    "Live": _object(live=_BOOLEAN),
    "Ready": _object(optional=("error", "engines"), ready=_BOOLEAN, error=_STRING, engines=_list(_OBJECT)),
}

_PARAMETERS: Schema = {"type": "object", "description": "Options by name; see the documentation."}
_DATATYPE: Schema = _enum(dtype.oip for dtype in DTYPES.values())
_LAUNCH = _each(("compute_input", "compute_infer", "compute_output"), ref("Duration"))

# Names and members as the Open Inference Protocol and Triton's extensions publish them.
_OIP: dict[str, Schema] = {
    "InferError": _object(error=_STRING),
    "ServerMetadata": _object(name=_STRING, version=_STRING, extensions=_list(_STRING), engines=_list(_OBJECT)),
    "ModelTensor": _object(name=_STRING, datatype=_DATATYPE, shape=_SIZES),
    "ModelMetadata": _object(
        name=_STRING,
        versions=_list(_STRING),
        platform=_STRING,
        inputs=_list(ref("ModelTensor")),
        outputs=_list(ref("ModelTensor")),
        parameters=_map(_STRING),
    ),
    "ConfiguredTensor": _object(name=_STRING, data_type=_STRING, dims=_SIZES),
    "ModelConfiguration": _object(
        name=_STRING,
        platform=_STRING,
        backend=_STRING,
        version_policy=_OBJECT,
        max_batch_size=_COUNT,
        input=_list(ref("ConfiguredTensor")),
        output=_list(ref("ConfiguredTensor")),
    ),
    "ModelReady": _object(optional=("error",), name=_STRING, ready=_BOOLEAN, error=_STRING),
    "Duration": _object(count=_COUNT, ns=_COUNT),
    "InferenceStatistics": _object(
        **_each(("success", "fail", "queue", *_LAUNCH, "cache_hit", "cache_miss"), ref("Duration"))
    ),
    "BatchStatistics": _object(batch_size=_COUNT, **_LAUNCH),
    "ModelStatistics": _object(
        name=_STRING,
        version=_STRING,
        last_inference=_COUNT,
        inference_count=_COUNT,
        execution_count=_COUNT,
        inference_stats=ref("InferenceStatistics"),
        batch_stats=_list(ref("BatchStatistics")),
    ),
    "Statistics": _object(model_stats=_list(ref("ModelStatistics"))),
    "ModelIndexRequest": _object(optional=("ready",), ready=_BOOLEAN),
    "ModelIndexEntry": _object(name=_STRING, version=_STRING, state=_STRING, reason=_STRING),
    "InferInput": _object(
        optional=("datatype", "shape", "parameters", "data"),
        name=_STRING,
        datatype=_DATATYPE,
        shape=_SIZES,
        parameters=_PARAMETERS,
        data={"description": "Numbers, flat or nested.", **_list({})},
    ),
    "InferOutputRequest": _object(optional=("parameters",), name=_STRING, parameters=_PARAMETERS),
    "InferRequest": _object(
        optional=("id", "outputs", "parameters"),
        id=_STRING,
        inputs=_list(ref("InferInput")),
        outputs=_list(ref("InferOutputRequest")),
        parameters=_PARAMETERS,
    ),
    "InferOutput": _object(
        optional=("parameters", "data"),
        name=_STRING,
        datatype=_DATATYPE,
        shape=_SIZES,
        parameters=_PARAMETERS,
        data=_list(_NUMBER),
    ),
    "InferResponse": _object(
        optional=("id",), id=_STRING, model_name=_STRING, model_version=_STRING, outputs=_list(ref("InferOutput"))
    ),
    "SharedMemoryRegion": _object(name=_STRING, key=_STRING, offset=_COUNT, byte_size=_COUNT),
    "SharedMemoryRegistration": _object(optional=("offset",), key=_STRING, offset=_COUNT, byte_size=_COUNT),
}

SCHEMAS: dict[str, Schema] = {
    **_NATIVE,
    **{inputs_schema(op): _inputs_of(op) for op in OPS.values()},
    **{outputs_schema(op): _outputs_of(op) for op in OPS.values()},
    **_OIP,
}
