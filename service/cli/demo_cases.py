"""Defines the demonstration's requests: bodies in each format, and NumPy's answers.

References are computed in float64 from the inputs as they are after rounding to their dtype, so that a tolerance covers the
server's arithmetic alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilewire._arrays.host import CONTENT_TYPE, Array, HostArray, from_safetensors, to_safetensors

M, K, N = 16, 256, 192
WEIGHT_DTYPES = ("bfloat16", "float32")

# Relative to |reference| + its root mean square. One unit in the last place of the result's dtype; for float32 the sum over
# K adds its own rounding. Integers are exact.
_TOLERANCES = {
    "float64": 2.0**-48,
    "float32": 2.0**-17,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "int32": 0.0,
    "int64": 0.0,
}


@dataclass(frozen=True)
class Case:
    """One request, to be sent any number of times.

    Attributes:
        expected: The result in float64.
        query: Options and resident inputs.
    """

    format: str
    op: str
    dtype: str
    inputs: Mapping[str, Array]
    out_dtype: str
    expected: npt.NDArray[np.float64]
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_type(self) -> str:
        """Of body and answer."""
        return _FORMATS[self.format].content_type

    def body(self) -> bytes:
        """The inputs in the case's format."""
        return _FORMATS[self.format].write(self.inputs)

    def error_of(self, body: bytes) -> float:
        """Returns the error of an answer.

        Returns:
            The largest error over what the dtype allows: up to 1 is right, infinity is another shape, dtype or a NaN.

        Raises:
            ValueError: The body is not in the case's format.
        """
        got, dtype = _FORMATS[self.format].read(body)
        if got.shape != self.expected.shape or dtype != self.out_dtype:
            return float("inf")
        return worst_error(got.astype(np.float64), self.expected, dtype)


def worst_error(got: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], dtype: str) -> float:
    """The largest error as a multiple of what a result of `dtype` may have; infinity for NaN."""
    allowed = _TOLERANCES[dtype] * (np.abs(expected) + np.sqrt(np.mean(np.square(expected))))
    ratio = np.abs(got - expected) / np.maximum(allowed, np.finfo(np.float64).tiny)
    return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf).max(initial=0.0))


def make_cases(weights: Mapping[str, Array], names: Mapping[str, str]) -> list[Case]:
    """All cases of the demonstration; the resident (K, N) weights, and their names on the server, are by dtype."""
    random = np.random.default_rng(7)
    maker = _Maker(random)
    resident = [
        maker.resident_product(kind, dtype, weights, names)
        for kind, dtype in (
            ("safetensors", "bfloat16"),
            ("safetensors", "float32"),
            ("npy", "float32"),
            ("npz", "float32"),
            ("json", "float32"),
            ("json", "bfloat16"),
        )
    ]
    inline = [
        maker.product(kind, dtype)
        for kind, dtype in (
            ("safetensors", "float16"),
            ("safetensors", "int8"),
            ("safetensors", "float8_e4m3fn"),
            ("npz", "float16"),
        )
    ]
    softmaxes = [maker.softmax(kind, "float32") for kind in _FORMATS]
    softmaxes.append(maker.softmax("safetensors", "bfloat16"))
    sums = [
        maker.addition(kind, dtype)
        for kind, dtype in (("safetensors", "float64"), ("npz", "int32"), ("json", "float32"), ("safetensors", "int64"))
    ]
    return [*resident, *inline, *softmaxes, *sums]


def random_array(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Numbers of order one; whole ones for integers."""
    if dtype.startswith("int"):
        return random.integers(-100, 100, shape).astype(dtype)
    return random.standard_normal(shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


class _Maker:
    """Draws inputs and works out what the server should answer."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def resident_product(self, kind: str, dtype: str, weights: Mapping[str, Array], names: Mapping[str, str]) -> Case:
        a = random_array(self._random, (M, K), dtype)
        expected = np.maximum(_double(a) @ _double(weights[dtype]), 0)
        query = {"b": f"@{names[dtype]}", "activation": "relu"}
        return Case(kind, "matmul", dtype, {"a": a}, dtype, expected, query)

    def product(self, kind: str, dtype: str) -> Case:
        a, b = (random_array(self._random, shape, dtype) for shape in ((M, K), (K, N)))
        out = {"int8": "int32", "float8_e4m3fn": "bfloat16"}.get(dtype, dtype)
        return Case(kind, "matmul", dtype, {"a": a, "b": b}, out, _double(a) @ _double(b))

    def softmax(self, kind: str, dtype: str) -> Case:
        x = random_array(self._random, (M, K), dtype)
        powers = np.exp(_double(x))
        return Case(kind, "softmax", dtype, {"x": x}, dtype, powers / powers.sum(axis=-1, keepdims=True))

    def addition(self, kind: str, dtype: str) -> Case:
        a, b = (random_array(self._random, shape, dtype) for shape in ((M, K), (K,)))
        return Case(kind, "add", dtype, {"a": a, "b": b}, dtype, _double(a) + 2 * _double(b), {"alpha": "2"})


def _double(array: Array) -> npt.NDArray[np.float64]:
    return array.astype(np.float64)


def _write_safetensors(inputs: Mapping[str, Array]) -> bytes:
    return b"".join(to_safetensors({name: HostArray.of(array) for name, array in inputs.items()}))


def _write_npy(inputs: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    (array,) = inputs.values()
    np.save(file, array)
    return file.getvalue()


def _write_npz(inputs: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **inputs)  # type: ignore[arg-type]  # the stubs take the first name for a flag
    return file.getvalue()


def _write_json(inputs: Mapping[str, Array]) -> bytes:
    (dtype,) = {array.dtype.name for array in inputs.values()}
    return json.dumps({**{name: _double(array).tolist() for name, array in inputs.items()}, "dtype": dtype}).encode()


def _read_safetensors(body: bytes) -> tuple[Array, str]:
    out = from_safetensors(bytearray(body))["out"].numpy()
    return out, out.dtype.name


def _read_numpy(body: bytes) -> tuple[Array, str]:
    found = np.load(io.BytesIO(body))
    out: Array = found if isinstance(found, np.ndarray) else found["out"]
    return out, out.dtype.name


def _read_json(body: bytes) -> tuple[Array, str]:
    document = json.loads(body)
    return np.array(document["out"], dtype=np.float64).reshape(document["shape"]), document["dtype"]


class _Format(NamedTuple):
    content_type: str
    write: Callable[[Mapping[str, Array]], bytes]
    read: Callable[[bytes], tuple[Array, str]]


_FORMATS = {
    "safetensors": _Format(CONTENT_TYPE, _write_safetensors, _read_safetensors),
    "npy": _Format("application/x-npy", _write_npy, _read_numpy),
    "npz": _Format("application/x-npz", _write_npz, _read_numpy),
    "json": _Format("application/json", _write_json, _read_json),
}
