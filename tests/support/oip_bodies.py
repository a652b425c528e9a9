"""Infer requests and answers of the Open Inference Protocol, written for the tests alone: no code of ours, no client's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.float64_oracle import random_array
from tests.support.tensor_bodies import NUMPY, Array

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


def bad_products() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Requests for matmul that cannot be right: bodies and headers, by what is wrong. Each is 400."""
    a, b = random_array("float32", (4, 3), 1), random_array("float32", (3, 5), 2)
    good = {"a": a, "b": b}
    body, headers = to_binary(good)
    length = int(headers[LENGTH])
    text = to_text(good)
    return {
        "empty": (b"", {}),
        "a byte short": (body[:-1], headers),
        "a byte long": (body + b"x", headers),
        "no header length": (body, {}),
        "header length of zero": (body, {LENGTH: "0"}),
        "header length splits the JSON": (body, {LENGTH: str(length - 7)}),
        "header length takes of the blobs": (body, {LENGTH: str(length + 1)}),
        "header length beyond the body": (body, {LENGTH: str(len(body) + 1)}),
        "header length of 2^62": (body, {LENGTH: str(2**62)}),
        "header length of 2^64": (body, {LENGTH: str(2**64)}),
        "header length negative": (body, {LENGTH: "-1"}),
        "header length signed": (body, {LENGTH: f"+{length}"}),
        "header length in hex": (body, {LENGTH: hex(length)}),
        "header length empty": (body, {LENGTH: ""}),
        "header length a list": (body, {LENGTH: f"{length}, {length}"}),
        "inner dimensions differ": (to_text({"a": a, "b": a}), {}),
        "unknown input": (to_text({**good, "c": b}), {}),
        "input missing": (to_text({"a": a}), {}),
        "duplicate key": (text.replace(b'{"inputs"', b'{"inputs": [], "inputs"', 1), {}),
        "NUL in a name": (text.replace(b'"name": "a"', b'"name": "a\\u0000"'), {}),
        "lone surrogate in a name": (text.replace(b'"name": "a"', b'"name": "\\ud800"'), {}),
        "lone surrogate in a key": (text.replace(b'"datatype"', b'"\\ud800"', 1), {}),
        "BOM": (b"\xef\xbb\xbf" + text, {}),
        "a number past float64": (text.replace(b'"data": [', b'"data": [1e999, ', 1), {}),
        "a number of 5,000 digits": (text.replace(b'"shape": [4', b'"shape": [' + b"4" * 5000, 1), {}),
        "nested 100,000 deep": (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
        "data nested deep": (text.replace(b'"data": [', b'"data": ' + b"[" * 50_000, 1), {}),
        "dimensions that wrap": (text.replace(b'"shape": [4, 3]', b'"shape": [4, 1152921504606846978]'), {}),
        "negative dimension": (text.replace(b'"shape": [4, 3]', b'"shape": [-4, -3]'), {}),
        "100,000 outputs": (to_text(good, outputs=[{"name": "out"}] * 100_000), {}),
        "outputs twice the same": (to_text(good, outputs=[{"name": "out"}] * 2), {}),
        "unknown output": (to_text(good, outputs=[{"name": "c"}]), {}),
        "outputs no list": (to_text(good, outputs={}), {}),
        "no object": (b"[]", {}),
        "unknown option": (to_text(good, parameters={"activaton": "gelu"}), {}),
        "reserved parameter": (to_text(good, parameters={"sequence_id": 1}), {}),
        "shared memory while it is off": (
            to_text({}, parameters={}).replace(
                b"[]",
                b'[{"name": "a", "datatype": "FP32", "shape": [1], "parameters": '
                b'{"shared_memory_region": "r", "shared_memory_byte_size": 4}}]',
            ),
            {},
        ),
        "safetensors": (bytes([10, 0, 0, 0, 0, 0, 0, 0]) + b'{"a": 1   }', {}),
    }
