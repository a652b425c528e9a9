"""Infer requests and answers of the Open Inference Protocol, written for the tests alone: no code of ours, no client's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.tensor_bodies import NUMPY, Array

DATATYPES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "float8_e4m3fn": "FP8_E4M3",
    "float8_e5m2": "FP8_E5M2",
}
LENGTH = "Inference-Header-Content-Length"


def binary_input(name: str, array: Array) -> dict[str, Any]:
    """An input whose bytes follow the JSON."""
    datatype = DATATYPES[array.dtype.name]
    return {
        "name": name,
        "datatype": datatype,
        "shape": list(array.shape),
        "parameters": {"binary_data_size": array.nbytes},
    }


def text_input(name: str, array: Array, *, is_nested: bool = False) -> dict[str, Any]:
    """An input whose numbers stand in the JSON."""
    wide = array.astype(np.float32) if array.dtype.kind not in "iuf" or array.dtype.itemsize == 2 else array
    data = (wide if is_nested else wide.reshape(-1)).tolist()
    return {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape), "data": data}


def to_binary(arrays: Mapping[str, Array], **members: Any) -> tuple[bytes, dict[str, str]]:
    """A body with binary inputs, and its headers; further members of the JSON by name."""
    header = json.dumps({"inputs": [binary_input(name, array) for name, array in arrays.items()], **members}).encode()
    return header + b"".join(array.tobytes() for array in arrays.values()), {LENGTH: str(len(header))}


def to_text(arrays: Mapping[str, Array], **members: Any) -> bytes:
    """A body that is JSON alone."""
    return json.dumps({"inputs": [text_input(name, array) for name, array in arrays.items()], **members}).encode()


def from_answer(body: bytes, header_bytes: str | None) -> tuple[dict[str, Any], Array]:
    """The JSON of an answer, and its only output as an array."""
    length = len(body) if header_bytes is None else int(header_bytes)
    answer: dict[str, Any] = json.loads(body[:length])
    (output,) = answer["outputs"]
    names = {datatype: name for name, datatype in DATATYPES.items()}
    dtype = NUMPY[names[output["datatype"]]]
    if "data" in output:
        assert length == len(body)
        return answer, np.array(output["data"], dtype=dtype).reshape(output["shape"])
    assert output["parameters"] == {"binary_data_size": len(body) - length}
    return answer, np.frombuffer(body[length:], dtype).reshape(output["shape"])
