"""Describes `/v2`: the Open Inference Protocol and Triton's extensions of it."""

from __future__ import annotations

from tilewire.service.errors import BeyondLimit, BodyTooLarge, LengthRequired, UnknownFormat, UnknownName
from tilewire.service.gateway.api.openapi.parts import (
    ADMITTED,
    BINARY,
    COMPUTED,
    KEYS,
    OCTETS,
    Described,
    answer,
    describe_ready,
    errors,
    json_content,
    path_parameter,
    ref,
)

_MODEL = path_parameter("model", "An op, or the name of a kept program.")
_VERSION = path_parameter("version", "The only version.", {"type": "string", "enum": ["1"]})
_REGION = path_parameter("region", "Name of the region.")

_HEADER_LENGTH: Described = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Length of the JSON when binary data follows it; 0 for a body that is one raw tensor.",
    "schema": {"type": "integer", "minimum": 0},
}

_EXAMPLE = {
    "inputs": [
        {"name": "a", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]},
        {"name": "b", "datatype": "FP32", "shape": [2, 2], "data": [5, 6, 7, 8]},
    ],
    "parameters": {"activation": "relu"},
}


def describe_index() -> Described:
    """Describes `POST /v2/repository/index`."""
    models = json_content({"type": "array", "items": ref("ModelIndexEntry")})
    causes = (*ADMITTED, BodyTooLarge, UnknownFormat)
    return {
        "requestBody": {"content": json_content(ref("ModelIndexRequest")), "required": False},
        "responses": {"200": answer("Every model, and whether it is ready.", models)} | errors(causes, is_oip=True),
    }


def describe_model_call(schema: str, description: str, is_versioned: bool) -> Described:
    """Describes a GET under `/v2/models/{model}`."""
    responses = {"200": answer(description, json_content(ref(schema)))} | errors(ADMITTED, is_oip=True)
    return {"parameters": _parameters(is_versioned), "responses": responses}


def describe_model_ready(is_versioned: bool) -> Described:
    """Describes `GET /v2/models/{model}/ready`."""
    return describe_ready("ModelReady", _parameters(is_versioned))


def describe_infer(is_versioned: bool) -> Described:
    """Describes `POST /v2/models/{model}/infer`."""
    body = json_content(ref("InferRequest"), _EXAMPLE) | {OCTETS: dict(BINARY)}
    outputs = json_content(ref("InferResponse")) | {OCTETS: dict(BINARY)}
    return {
        "parameters": [*_parameters(is_versioned), _HEADER_LENGTH],
        "requestBody": {"content": body, "required": True},
        "responses": {"200": answer("The outputs, in JSON or behind it.", outputs, is_computed=True)}
        | errors(COMPUTED, is_oip=True),
    }


def describe_region_call(*, is_registration: bool = False, is_one: bool = True, is_status: bool = False) -> Described:
    """Describes a call of shared memory.

    Args:
        is_registration: It registers, and has a body.
        is_one: The path names a region.
        is_status: It answers regions.
    """
    described: Described = {"parameters": [_REGION]} if is_one else {}
    causes = KEYS
    if is_registration:
        described["requestBody"] = {"content": json_content(ref("SharedMemoryRegistration")), "required": True}
        causes = (*ADMITTED, LengthRequired, BodyTooLarge, BeyondLimit)
    regions = json_content({"type": "array", "items": ref("SharedMemoryRegion")}) if is_status else None
    causes = (*causes, UnknownName) if is_one else causes
    return described | {"responses": {"200": answer("Done.", regions)} | errors(causes, is_oip=True)}


def _parameters(is_versioned: bool) -> list[Described]:
    return [_MODEL, _VERSION] if is_versioned else [_MODEL]
