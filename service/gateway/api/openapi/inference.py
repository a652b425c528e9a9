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
    body,
    describe_ready,
    json_content,
    list_content,
    operation,
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
    answers = {"200": answer("Every model, and whether it is ready.", list_content("ModelIndexEntry"))}
    asked = body(json_content(ref("ModelIndexRequest")), is_required=False)
    return operation(answers, (*ADMITTED, BodyTooLarge, UnknownFormat), request_body=asked, is_oip=True)


def describe_model_call(schema: str, description: str, is_versioned: bool) -> Described:
    """Describes a GET under `/v2/models/{model}`."""
    answers = {"200": answer(description, json_content(ref(schema)))}
    return operation(answers, ADMITTED, _parameters(is_versioned), is_oip=True)


def describe_model_ready(is_versioned: bool) -> Described:
    """Describes `GET /v2/models/{model}/ready`."""
    return describe_ready("ModelReady", _parameters(is_versioned))


def describe_infer(is_versioned: bool) -> Described:
    """Describes `POST /v2/models/{model}/infer`."""
    inputs = json_content(ref("InferRequest"), _EXAMPLE) | {OCTETS: dict(BINARY)}
    outputs = json_content(ref("InferResponse")) | {OCTETS: dict(BINARY)}
    answers = {"200": answer("The outputs, in JSON or behind it.", outputs, is_computed=True)}
    return operation(answers, COMPUTED, [*_parameters(is_versioned), _HEADER_LENGTH], body(inputs), is_oip=True)


def describe_region_call(*, is_one: bool = True, is_status: bool = False) -> Described:
    """Describes a call that forgets regions, or answers their status; the path names one, or it is about all."""
    answers = {"200": answer("Done.", list_content("SharedMemoryRegion") if is_status else None)}
    causes, parameters = ((*KEYS, UnknownName), [_REGION]) if is_one else (KEYS, [])
    return operation(answers, causes, parameters, is_oip=True)


def describe_registration() -> Described:
    """Describes the registration of a region."""
    causes = (*ADMITTED, LengthRequired, BodyTooLarge, BeyondLimit)
    asked = body(json_content(ref("SharedMemoryRegistration")))
    return operation({"200": answer("Done.")}, causes, [_REGION], asked, is_oip=True)


def _parameters(is_versioned: bool) -> list[Described]:
    return [_MODEL, _VERSION] if is_versioned else [_MODEL]
