"""Describes `/v2`: the Open Inference Protocol and Triton's extensions of it."""

from __future__ import annotations

from tilewire.service.errors import BeyondLimit, BodyTooLarge, LengthRequired, UnknownFormat, UnknownName
from tilewire.service.gateway.api.openapi.parts import (
    ADMITTED,
    ANYWHERE,
    BINARY,
    COMPUTED,
    KEYS,
    OCTETS,
    Described,
    answer,
    json_content,
    oip_errors,
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


def describe_call(schema: str, description: str, *, is_open: bool = False) -> Described:
    """Describes a call without parameters that answers JSON.

    Args:
        schema: Name of the answer's schema.
        description: Description of the answer.
        is_open: No key is needed.
    """
    causes = ANYWHERE if is_open else KEYS
    return {"responses": {"200": answer(description, json_content(ref(schema)))} | oip_errors(causes)}


def describe_index() -> Described:
    """Describes `POST /v2/repository/index`."""
    models = json_content({"type": "array", "items": ref("ModelIndexEntry")})
    causes = (*ADMITTED, BodyTooLarge, UnknownFormat)
    return {
        "requestBody": {"content": json_content(ref("ModelIndexRequest")), "required": False},
        "responses": {"200": answer("Every model, and whether it is ready.", models)} | oip_errors(causes),
    }


def describe_model_call(schema: str, description: str, *, is_versioned: bool) -> Described:
    """Describes a GET under `/v2/models/{model}`."""
    responses = {"200": answer(description, json_content(ref(schema)))} | oip_errors(ADMITTED)
    return {"parameters": _parameters(is_versioned), "responses": responses}


def describe_ready(schema: str, *, is_versioned: bool | None = None) -> Described:
    """Describes a call that is answered 503 while nothing is computed, with the reason in the same schema.

    Args:
        schema: Name of the answer's schema.
        is_versioned: Whether the path has a version; None for one that names no model.
    """
    content = json_content(ref(schema))
    is_model = is_versioned is not None
    responses = oip_errors(ADMITTED if is_model else ANYWHERE) | {
        "200": answer("Requests are computed.", content),
        "503": answer("Not now, and why.", content),
    }
    return ({"parameters": _parameters(bool(is_versioned))} if is_model else {}) | {"responses": responses}


def describe_infer(*, is_versioned: bool) -> Described:
    """Describes `POST /v2/models/{model}/infer`."""
    body = json_content(ref("InferRequest"), _EXAMPLE) | {OCTETS: dict(BINARY)}
    outputs = json_content(ref("InferResponse")) | {OCTETS: dict(BINARY)}
    return {
        "parameters": [*_parameters(is_versioned), _HEADER_LENGTH],
        "requestBody": {"content": body, "required": True},
        "responses": {"200": answer("The outputs, in JSON or behind it.", outputs, is_computed=True)}
        | oip_errors(COMPUTED),
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
    return described | {"responses": {"200": answer("Done.", regions)} | oip_errors(causes)}


def _parameters(is_versioned: bool) -> list[Described]:
    return [_MODEL, _VERSION] if is_versioned else [_MODEL]
