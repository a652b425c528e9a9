"""Tensors to bodies and back in every format, written for the tests alone: a mistake of ours cannot hide in our own codec."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in (
        "float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip
CODES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
TYPES = {
    "safetensors": "application/x-safetensors",
    "npz": "application/x-npz",
    "npy": "application/x-npy",
    "json": "application/json",
}
IN_NUMPY = ("float16", "float32", "float64", "int8", "int32", "int64")
CARRIES: dict[str, tuple[str, ...]] = {
    "safetensors": tuple(CODES),
    "npz": IN_NUMPY,
    "npy": IN_NUMPY,
    "json": tuple(CODES),
}


@contextlib.contextmanager
def sparse_npy(nbytes: int, marks: Mapping[int, bytes]) -> Iterator[tuple[int, int]]:
    """A descriptor of an npy file of int8, sparse and zero but for the bytes at some offsets, and its length."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|i1", "fortran_order": False, "shape": (nbytes,)})
    begin = len(header.getvalue())
    fd = os.memfd_create("large")
    os.truncate(fd, begin + nbytes)
    os.pwrite(fd, header.getvalue(), 0)
    for offset, mark in marks.items():
        os.pwrite(fd, mark, begin + offset)
    try:
        yield fd, begin + nbytes
    finally:
        os.close(fd)


def to_safetensors(arrays: Mapping[str, Array]) -> bytes:
    entries: dict[str, object] = {}
    payload = b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [len(payload), len(payload) + len(data)]
        entries[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        payload += data
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + payload


def to_npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def to_npz(arrays: Mapping[str, Array], *, is_deflated: bool = False) -> bytes:
    file = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    (np.savez_compressed if is_deflated else np.savez)(file, **named)
    return file.getvalue()


def to_json(arrays: Mapping[str, Array]) -> bytes:
    def entry(array: Array) -> object:
        numbers = array.astype(np.float32 if array.dtype.itemsize < 4 and array.dtype.name != "int8" else array.dtype)
        return {"data": numbers.reshape(-1).tolist(), "shape": list(array.shape), "dtype": array.dtype.name}

    return json.dumps({name: entry(array) for name, array in arrays.items()}).encode()


def encode(form: str, arrays: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
    """A body and its headers; npy carries the first array only."""
    if form == "npy":
        body = to_npy(next(iter(arrays.values())))
    else:
        body = {"safetensors": to_safetensors, "npz": to_npz, "json": to_json}[form](arrays)
    return body, {"content-type": TYPES[form]}


def from_safetensors(body: bytes) -> dict[str, Array]:
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    header.pop("__metadata__", None)
    payload = body[8 + length :]
    names = {code: name for name, code in CODES.items()}
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(payload[begin:end], NUMPY[names[entry["dtype"]]]).reshape(entry["shape"])
    return arrays


# NumPy reads headers by `ast`, whose count of recursion CPython 3.11 shares between threads.
_READING_HEADER = threading.Lock()


def _load(body: bytes) -> Any:
    with _READING_HEADER:
        loaded = np.load(io.BytesIO(body))
        return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded


def decode(content_type: str, body: bytes) -> Array:
    """The tensor `out` of an answer; npy has no names."""
    if content_type == TYPES["safetensors"]:
        return from_safetensors(body)["out"]
    if content_type == TYPES["npz"]:
        out: Array = _load(body)["out"]
        return out
    if content_type == TYPES["npy"]:
        array: Array = _load(body)
        return array
    assert content_type == TYPES["json"], content_type
    answer = json.loads(body)
    return np.array(answer["out"], dtype=np.float64).astype(NUMPY[answer["dtype"]]).reshape(answer["shape"])
