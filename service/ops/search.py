"""Exact nearest-neighbour search: the k best items of each query by dot product, cosine or squared distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from tilewire.service.errors import BeyondLimit, InvalidRequest
from tilewire.service.ops.matmul import MAX_INT8_K
from tilewire.service.ops.op import (
    FLOATS16_32,
    Batching,
    Chunking,
    JoinStrategy,
    Op,
    OpOptions,
    Selection,
    Sharding,
    TensorType,
    Types,
    WarmupCase,
    check_counts,
    check_k,
    check_same_dtype,
    check_vector,
)

# Largest number of items that are chosen.
MAX_K = 1024

Metric = Literal["dot", "cosine", "l2"]
Precision = Literal["tf32", "tf32x3", "ieee"]


class SearchOptions(OpOptions, frozen=True, tag="search"):
    """Options of `search`."""

    k: Annotated[int, msgspec.Meta(description="How many, 1 to 1024 and no more than there are items.")] = 10
    metric: Annotated[Metric, msgspec.Meta(description="`l2` is the squared distance, smallest first.")] = "dot"
    precision: Annotated[Precision, msgspec.Meta(description="How float32 inputs are multiplied.")] = "ieee"


class Search(Op[SearchOptions]):
    """values, indices = the k best items of b for each query of a."""

    name = "search"
    summary = "values, indices = scores and numbers of the k items of b that are best for each query of a."
    required = ("a", "b")
    optional = ("bias",)
    outputs = ("values", "indices")
    dtypes = (*FLOATS16_32, "int8")
    options = SearchOptions
    ranks = {"a": 2, "b": 2, "values": 2, "indices": 2}
    output_datatypes = {"indices": "INT64"}
    # Items enough for the default of `k`.
    example = {"a": [[1, 0]], "b": [[x, 9 - x] for x in range(10)], "dtype": "float32"}
    example_options = {"k": 2}
    warmup = WarmupCase(
        {"k": 2}, {"a": [[1, 2], [-1, 0]], "b": [[1, 0], [0, 1], [1, 1]]}, [[[3, 2], [0, -1]], [[2, 1], [1, 0]]]
    )

    def infer(self, types: Types, options: SearchOptions) -> tuple[tuple[TensorType, ...], int]:
        dtype = check_same_dtype(types)
        a, b = types["a"], types["b"]
        if len(a.shape) < 2:
            raise InvalidRequest(f"a: rank {len(a.shape)}; search needs at least 2 dimensions")
        if len(b.shape) != 2:
            raise InvalidRequest(f"b: rank {len(b.shape)}; expected 2 dimensions, an item a row")
        (n, width), rows = b.shape, math.prod(a.shape[:-1])
        if a.shape[-1] != width:
            raise InvalidRequest(f"b: its items have {width} elements, but the queries of a have {a.shape[-1]}")
        if dtype == "int8" and width > MAX_INT8_K:
            raise BeyondLimit(f"a: K = {width} overflows the int32 accumulator of int8; the limit is {MAX_INT8_K}")
        if options.precision != "ieee" and dtype != "float32":
            raise InvalidRequest(f"precision: {options.precision} is for float32 inputs; a is {dtype}")
        if rows:
            check_counts("a", queries=rows, elements=width)
            check_counts("b", items=n)
        check_vector("bias", types, n)
        shape = (*a.shape[:-1], check_k(options.k, "b", n, MAX_K))
        return (TensorType("float32", shape), TensorType("int64", shape)), 2 * rows * n * width

    def batching(
        self, types: Types, residents: frozenset[str], options: SearchOptions, outputs: Sequence[TensorType]
    ) -> Batching[SearchOptions] | None:
        """Queries against the same resident items."""
        a = types["a"]
        if residents != types.keys() - {"a"} or not a.num_elements:
            return None
        return Batching(JoinStrategy.ROWS, (options, a.dtype, a.shape[-1]), options)

    def chunking(self, types: Types, options: SearchOptions, outputs: Sequence[TensorType]) -> Chunking | None:
        """Queries, with all items."""
        return Chunking(("a",)) if len(types["a"].shape) == 2 else None

    def sharding(self, types: Types, options: SearchOptions) -> Sharding:
        """Items, with their bias; the best of all parts are the best."""
        axes = {"b": -2, "bias": -1} if "bias" in types else {"b": -2}
        return Sharding("b", axes, Selection(options.k, options.metric != "l2", is_nan_large=False))
