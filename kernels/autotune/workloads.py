"""Shapes worth measuring: what each op is asked to do, as a line of JSON and as the choice of a kernel sees it.

Pure: no torch, no Triton, no device. Knows how operands lie (which strides), not where.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from tilewire.kernels.add.configs import DTYPES as ADD_DTYPES
from tilewire.kernels.add.configs import ITEM_BYTES as ADD_ITEM_BYTES
from tilewire.kernels.add.configs import Config as AddConfig
from tilewire.kernels.add.configs import Problem as AddProblem
from tilewire.kernels.matmul.configs import ACTIVATIONS, ITEM_BYTES, OUT_DTYPES, PRECISIONS, Problem
from tilewire.kernels.matmul.configs import Config as MatmulConfig
from tilewire.kernels.matmul.view import Dtypes, Extent, problem_of, view_of
from tilewire.kernels.runtime.layouts import row_step
from tilewire.kernels.softmax.configs import DTYPES as SOFTMAX_DTYPES
from tilewire.kernels.softmax.configs import ITEM_BYTES as SOFTMAX_ITEM_BYTES
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem

Config: TypeAlias = MatmulConfig | SoftmaxConfig | AddConfig


class WorkloadError(ValueError):
    """A line that describes no workload; the message names the line and the field."""


@dataclass(frozen=True)
class Product:
    """One matmul: (batch, m, k) times (batch, k, n).

    Attributes:
        m: rows of `a`.
        n: columns of `b`.
        k: the summed dimension.
        batch: independent products.
        dtype: of the inputs.
        out_dtype: of the output; empty for the default.
        precision: of float32 inputs.
        a_major: the contiguous dimension of `a`, `k` or `m`.
        b_major: the contiguous dimension of `b`, `n` or `k`.
        is_padded: rows start at multiples of 16 bytes, as staging lays them; else they follow one another.
        activation: with a bias, unless it is `none`: then nothing follows the product.
    """

    op: ClassVar[str] = "matmul"
    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    out_dtype: str = ""
    precision: str = "ieee"
    a_major: str = "k"
    b_major: str = "n"
    is_padded: bool = True
    activation: str = "none"

    @property
    def stored_dtype(self) -> str:
        """The dtype of the output."""
        return self.out_dtype or OUT_DTYPES[self.dtype][0]

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the product."""
        return self.activation == "none"

    @property
    def extents(self) -> tuple[Extent, Extent, Extent]:
        """Shapes and strides of `a`, `b` and the output."""
        a = self._extent(self.m, self.k, self.dtype, is_turned=self.a_major == "m")
        b = self._extent(self.k, self.n, self.dtype, is_turned=self.b_major == "k")
        return a, b, self._extent(self.m, self.n, self.stored_dtype, is_turned=False)

    def _extent(self, rows: int, columns: int, dtype: str, *, is_turned: bool) -> Extent:
        count, length = (columns, rows) if is_turned else (rows, columns)
        step = row_step(length, ITEM_BYTES[dtype]) if self.is_padded else length
        strides = (1, step) if is_turned else (step, 1)
        if self.batch == 1:
            return Extent((rows, columns), strides)
        return Extent((self.batch, rows, columns), (count * step, *strides))

    @property
    def problem(self) -> Problem:
        """What the choice of a kernel depends on, at addresses that divide by 16."""
        view = view_of(*self.extents, is_row_scaled=False)
        assert view is not None, "This is a bug."
        dtypes = Dtypes(self.dtype, self.stored_dtype, self.precision)
        return problem_of(view, dtypes, is_in_aligned=True, is_out_aligned=True)

    @property
    def num_bytes(self) -> int:
        """Each operand read once and the output written once."""
        return self.problem.min_bytes


@dataclass(frozen=True)
class Rows:
    """One softmax over `rows` rows of `n` elements; they lie across memory unless `is_contiguous`."""

    op: ClassVar[str] = "softmax"
    rows: int
    n: int
    dtype: str = "float32"
    out_dtype: str = ""
    is_contiguous: bool = True

    @property
    def stored_dtype(self) -> str:
        """The dtype of the output."""
        return self.out_dtype or self.dtype

    @property
    def extent(self) -> Extent:
        """Shape and strides of input and output."""
        return Extent((self.rows, self.n), (self.n, 1) if self.is_contiguous else (1, self.rows))

    @property
    def problem(self) -> SoftmaxProblem:
        """What the choice of a kernel depends on, at addresses that divide by 16."""
        is_contiguous = self.is_contiguous or self.rows == 1 or self.n == 1
        is_aligned = is_contiguous and self.n % (16 // SOFTMAX_ITEM_BYTES[self.dtype]) == 0
        return SoftmaxProblem(self.rows, self.n, self.dtype, self.stored_dtype, is_contiguous, is_aligned)

    @property
    def num_bytes(self) -> int:
        """Read once and written once."""
        return self.rows * self.n * (SOFTMAX_ITEM_BYTES[self.dtype] + SOFTMAX_ITEM_BYTES[self.stored_dtype])


@dataclass(frozen=True)
class Sum:
    """One addition of (rows, n) and, as `b_shape` says, `full` (rows, n) or a `row` (n,)."""

    op: ClassVar[str] = "add"
    rows: int
    n: int
    dtype: str = "float32"
    b_shape: str = "full"

    @property
    def problem(self) -> AddProblem:
        """What the choice of blocks depends on, at addresses that divide by 16."""
        if self.b_shape == "full" or self.rows == 1:
            return AddProblem(1, self.rows * self.n, self.dtype, self.dtype)
        is_aligned = self.n % (16 // ADD_ITEM_BYTES[self.dtype]) == 0
        return AddProblem(self.rows, self.n, self.dtype, self.dtype, is_aligned, outer_rank=1)

    @property
    def num_bytes(self) -> int:
        """Each operand read once and the output written once."""
        num_read = self.n if self.b_shape == "row" else self.rows * self.n
        return (2 * self.rows * self.n + num_read) * ADD_ITEM_BYTES[self.dtype]


Workload: TypeAlias = Product | Rows | Sum
_KINDS: dict[str, type[Product | Rows | Sum]] = {kind.op: kind for kind in (Product, Rows, Sum)}
_CHOICES: dict[str, dict[str, Sequence[str]]] = {
    "matmul": {
        "dtype": tuple(OUT_DTYPES),
        "precision": PRECISIONS,
        "a_major": ("k", "m"),
        "b_major": ("n", "k"),
        "activation": ACTIVATIONS,
    },
    "softmax": {"dtype": SOFTMAX_DTYPES, "out_dtype": ("", *SOFTMAX_DTYPES)},
    "add": {"dtype": ADD_DTYPES, "b_shape": ("full", "row")},
}


def parse(text: str, source: str) -> list[Workload]:
    """Reads workloads: one JSON object a line, empty lines and lines that begin with `#` left out.

    Args:
        text: the lines. `{"op": "matmul", "m": 64, "n": 4096, "k": 4096, "dtype": "float16"}`; the other keys are the
            attributes of `Product`, `Rows` (softmax) and `Sum` (add).
        source: what messages call the text.

    Raises:
        WorkloadError: a line is none.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                found.append(parse_line(line))
            except ValueError as error:
                raise WorkloadError(f"{source}:{number}: {error}") from None
    return found


def parse_line(line: str) -> Workload:
    """Reads one workload.

    Raises:
        WorkloadError: it is none; the message names the field.
    """
    try:
        given = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise WorkloadError("expected a JSON object")
    op = given.pop("op", None)
    if op not in _KINDS:
        raise WorkloadError(f"op: expected one of {', '.join(_KINDS)}, got {op!r}")
    fields = {field.name: field for field in dataclasses.fields(_KINDS[op])}
    for name in given:
        if name not in fields:
            raise WorkloadError(f"{name}: {op} has no such field; there are {', '.join(fields)}")
    for name, field in fields.items():
        if name in given:
            _check(op, field, given[name])
        elif field.default is dataclasses.MISSING:
            raise WorkloadError(f"{name}: is missing")
    return _checked(_KINDS[op](**given))


def _check(op: str, field: dataclasses.Field[Any], value: object) -> None:
    choices = _CHOICES[op].get(field.name)
    if choices is not None and value not in choices:
        raise WorkloadError(f"{field.name}: expected one of {', '.join(filter(None, choices))}, got {value!r}")
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if field.type == "int" and not (is_whole and value >= 1):  # type: ignore[operator]
        raise WorkloadError(f"{field.name}: expected a whole number from 1, got {value!r}")
    if field.type == "bool" and not isinstance(value, bool):
        raise WorkloadError(f"{field.name}: expected true or false, got {value!r}")


def _checked(workload: Workload) -> Workload:
    if not isinstance(workload, Product):
        return workload
    allowed = OUT_DTYPES[workload.dtype]
    if workload.stored_dtype not in allowed:
        raise WorkloadError(f"out_dtype: expected one of {', '.join(allowed)}, got {workload.out_dtype!r}")
    if workload.precision != "ieee" and workload.dtype != "float32":
        raise WorkloadError("precision: only float32 has a choice")
    if workload.stored_dtype == "int32" and workload.activation not in ("none", "relu"):
        raise WorkloadError(f"activation: {workload.activation} needs a floating-point output, not int32")
    return workload


def as_line(workload: Workload) -> str:
    """The workload as `parse_line` reads it, defaults left out."""
    shown = {
        field.name: getattr(workload, field.name)
        for field in dataclasses.fields(workload)
        if getattr(workload, field.name) != field.default
    }
    return json.dumps({"op": workload.op, **shown})


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers; 1 of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0
