"""Exact search: torch on the CPU, Tilewire's kernels on the GPU. Norms of a resident are computed once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewire.service.engine.ops import narrow
from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results, Summed
from tilewire.service.engine.ops.ranking import best
from tilewire.service.ops.search import SearchOptions

# Items beyond the k best that are scored again on the CPU: so many, and a quarter of k. Scores of 16 bits need more.
SPARE_CANDIDATES, SPARE_HALF_CANDIDATES = 8, 32
# With fewer items for each candidate, float32 and 16 bits choose none: scoring them again would take as long as it saves.
MIN_ITEMS_PER_CANDIDATE, MIN_ITEMS_PER_HALF_CANDIDATE = 256, 512
# Most elements of items that are gathered at once to be scored again: 4 MiB in float32.
MAX_GATHERED = 2**20
# Most bytes of items, as they are multiplied, and of what comes of them that are held at once: a core's cache has room for it.
MAX_BLOCK_BYTES = 2**21
# Most scores that are held at once on the CPU: 16 MiB. Twice as many took longer.
MAX_SCORES = 2**22
# Queries that are scored together, where there are as many: for fewer, items are converted as long as they are multiplied.
MIN_QUERIES = 64
# Float32 can add up products below that, and divide by a norm above its inverse.
_MAX_FLOAT32 = 2.0**126
# Computes (M, n) scores of M queries and (n, K) items, which are this part of all.
_Score: TypeAlias = Callable[[torch.Tensor, slice], torch.Tensor]
# Says, as (M,) booleans, for which of (M, K) queries no item but its candidates can be a result. Takes the (M,) scores of their
# last candidates and their worst results, too.
_Check: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EngineSearch(EngineOp[SearchOptions]):
    """Exact search on the CPU and on the GPU."""

    takes_steps = True

    def __init__(self) -> None:
        # By metric: what `kernels.item_norms` gives of the items, for as long as their tensor lives. `centre` and `squares` are
        # the CPU's for `l2`, `largest` is for `dot`.
        self._norms: dict[str, WeakTensorKeyDictionary] = {
            kind: WeakTensorKeyDictionary() for kind in ("cosine", "l2", "centre", "squares", "largest")
        }

    def cpu(self, inputs: Operands, options: SearchOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        a, b = inputs["a"], inputs["b"]
        rows, width = math.prod(a.shape[:-1]), a.shape[-1]
        queries = a.reshape(rows, width)
        if not width:
            # Queries without elements are equal.
            queries = queries[:1]
        search = _Search(self._metric_of(inputs, options), b, inputs.get("bias"), options.k)
        parts = torch.split(queries, max(MIN_QUERIES, MAX_SCORES // len(b)))
        values, indices = (torch.cat(one).expand(rows, -1) for one in zip(*map(search.best, parts), strict=True))
        shape = (*a.shape[:-1], options.k)
        return values.reshape(shape), indices.reshape(shape)

    def _metric_of(self, inputs: Operands, options: SearchOptions) -> _Metric:
        """Returns how items are scored on the CPU; it has their norms."""
        b, bias = inputs["b"], inputs.get("bias")
        # Only candidates need it: few items have none.
        largest = functools.cache(lambda: self._norms_of(inputs, "largest", lambda: _largest_norm(b)))
        if options.metric == "l2":
            centre = self._norms_of(inputs, "centre", lambda: _centre(b))
            squares = self._norms_of(inputs, "squares", lambda: _squares(b, centre))
            return _distance(b, _ItemNorms(centre, squares, largest), bias)
        if options.metric == "cosine":
            return _cosine(b, self._norms_of(inputs, "cosine", lambda: _inverse_norms(b)), bias is not None)
        return _dot(b, largest, bias is not None)

    def prepare(self, call: KernelCall[SearchOptions]) -> Compute:
        kernels, inputs, options, (values, indices), batch_invariant = call
        search = kernels.prepare_search(
            inputs["a"],
            inputs["b"],
            values,
            indices,
            metric=options.metric,
            bias=inputs.get("bias"),
            precision=options.precision,
            batch_invariant=batch_invariant,
        )

        def compute(given: Operands) -> None:
            b = given["b"]
            norms = None
            if options.metric != "dot":
                norms = self._norms_of(given, options.metric, lambda: kernels.item_norms(b, options.metric))
            search(given["a"], b, norms, given.get("bias"), values, indices)

        return compute

    def summed(self, name: str, options: SearchOptions) -> Summed | None:
        return Summed(-1, options.precision) if name in ("a", "b") else None

    def _norms_of(self, inputs: Operands, kind: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the norms of the items; those of resident ones are computed at their first use."""
        b, norms_of = inputs["b"], self._norms[kind]
        if "b" not in inputs.resident:
            return make()
        if b not in norms_of:
            norms_of[b] = make()
            if b.is_cuda:
                # Other streams read them, too.
                torch.cuda.current_stream(b.device).synchronize()
        norms: torch.Tensor = norms_of[b]
        return norms


def _blocks(rows: torch.Tensor, num_beside: int = 1, itemsize: int = 8) -> Sequence[torch.Tensor]:
    """Splits (N, K) rows.

    Args:
        rows: Rows.
        num_beside: How many float64 come of each row and are held for a block, too.
        itemsize: Bytes of an element once it is converted, float64 by default; 0 where none is.
    """
    return torch.split(rows, max(1, MAX_BLOCK_BYTES // max(itemsize * rows.shape[1], 8 * num_beside)))


class _Converted:
    """Converts blocks of items, each into the memory of the one before: new memory takes as long as converting.

    Args:
        dtype: What they are computed in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._room = torch.empty((0, 0), dtype=dtype)

    def __call__(self, items: torch.Tensor) -> torch.Tensor:
        """Returns `items`, (n, K), until the next call."""
        if items.dtype == self._dtype:
            return items
        if len(self._room) < len(items):
            self._room = torch.empty(items.shape, dtype=self._dtype)
        return self._room[: len(items)].copy_(items)


class _Way(NamedTuple):
    """A way to score all items.

    Attributes:
        scoring: Makes the score of (M, K) queries. How a product is rounded depends on where its item lies. In float64 equal
            items have equal float32 scores all the same.
        itemsize: Bytes of an element of an item once it is converted; 0 where none is.
        check: Where the best by these scores are candidates, which are scored again: says for which queries they are enough.
            None where these scores are results.
        items_each: Fewest items for each candidate.
        spare: Candidates beyond the k best and a quarter of k.
    """

    scoring: Callable[[torch.Tensor], _Score]
    itemsize: int
    check: _Check | None = None
    items_each: int = 0
    spare: int = SPARE_CANDIDATES


class _Metric(NamedTuple):
    """How items are scored.

    Attributes:
        ways: Fast ones first; the last one gives results.
        results: Computes (M, c) scores as a result has them, of (M, K) queries, (M, c, K) items, and their (M, c) indices.
        largest: Whether larger scores are better.
    """

    ways: tuple[_Way, ...]
    results: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    largest: bool = True


class _Search(NamedTuple):
    """A search among items.

    Attributes:
        metric: How they are scored.
        b: (N, K) items.
        bias: (N,) added to the scores, or None.
        k: Number of results.
    """

    metric: _Metric
    b: torch.Tensor
    bias: torch.Tensor | None
    k: int

    def best(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses k items of each query. Queries for which a way may have missed one go the next way.

        Args:
            a: (M, K) queries.

        Returns:
            (M, k) float32 scores, best first, and (M, k) int64 indices; among equals those of the smaller index.
        """
        values, indices = torch.empty((len(a), self.k)), torch.empty((len(a), self.k), dtype=torch.int64)
        left = torch.arange(len(a))
        for way in self.metric.ways:
            count = min(self.k + self.k // 4 + way.spare, len(self.b))
            if way.check is None:
                values[left], indices[left] = self._ranked(a[left], way, self.k)
                break
            if len(self.b) < way.items_each * count:
                continue
            queries = a[left]
            scores, candidates = self._ranked(queries, way, count)
            values[left], indices[left] = self._among(queries, candidates.sort(dim=-1).values)
            if count == len(self.b):
                break
            left = left[~way.check(queries, scores[:, -1].double(), values[left, -1].double())]
            if not len(left):
                break
        return values, indices

    def _among(self, a: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses k of (M, c) candidates, whose indices ascend, by their results."""
        scores = torch.empty(candidates.shape)
        at_once = max(1, MAX_GATHERED // max(candidates.shape[1] * self.b.shape[1], 1))
        for queries, chosen, into in zip(*(torch.split(one, at_once) for one in (a, candidates, scores)), strict=True):
            into.copy_(self.metric.results(queries, self.b[chosen], chosen))
        if self.bias is not None:
            scores += self.bias.float()[candidates]
        values, places = best(scores, self.k, largest=self.metric.largest, is_nan_large=False)
        return values, candidates.gather(-1, places)

    def _ranked(self, a: torch.Tensor, way: _Way, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses `count` of all items by the scores of `way`."""
        score, largest = way.scoring(a), self.metric.largest
        values, indices, begin = [], [], 0
        for items in torch.split(self.b, max(count, MAX_SCORES // max(len(a), 1))):
            scores, at = torch.empty((len(a), len(items))), begin
            for block in _blocks(items, len(a), way.itemsize):
                end = at + len(block)
                scores[:, at - begin : end - begin] = score(block, slice(at, end))
                at = end
            if self.bias is not None:
                scores += self.bias[begin:at].float()
            found = best(scores, min(count, len(items)), largest=largest, is_nan_large=False)
            values.append(found[0])
            indices.append(found[1] + begin)
            begin = at
        if len(values) == 1:
            return values[0], indices[0]
        # Candidates lie in the order of their items where they are equal.
        chosen, places = best(torch.cat(values, -1), count, largest=largest, is_nan_large=False)
        return chosen, torch.cat(indices, -1).gather(-1, places)


def _squares(rows: torch.Tensor, centre: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Sums of squares of the rows less a centre, in float64."""
    converted = _Converted(torch.float64)
    blocks = _blocks(rows.flatten(0, -2))
    return torch.cat([converted(block).sub_(centre).square_().sum(-1) for block in blocks]).view(rows.shape[:-1])


class _ItemNorms(NamedTuple):
    """Norms of items, for distances.

    Attributes:
        centre: (K,) float64 point that items are counted from; 0 for int8.
        squares: (N,) squared distances of the items from it, in float64.
        largest: Returns the largest norm of an item, counted from 0.
    """

    centre: torch.Tensor
    squares: torch.Tensor
    largest: Callable[[], torch.Tensor]


def _inverse_norms(rows: torch.Tensor) -> torch.Tensor:
    norms = _squares(rows).sqrt()
    return torch.where(norms == 0, 0.0, 1 / norms)


def _largest_norm(rows: torch.Tensor) -> torch.Tensor:
    """The largest norm of the rows, in float64, rounded up; not finite where one is not, or float32 has no number for it."""
    converted = _Converted(torch.float32)
    norms = [torch.linalg.vector_norm(converted(block), dim=-1) for block in _blocks(rows, itemsize=4)]
    return torch.cat(norms).max().double() * (1 + 2.0**-10)


def _centre(items: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the items, in float64; 0 where it is no number, and of integers, whose distances are exact so."""
    if not items.is_floating_point():
        return torch.zeros(items.shape[1], dtype=torch.float64)
    converted = _Converted(torch.float64)
    sums = torch.stack([converted(block).sum(0) for block in _blocks(items)]).sum(0)
    return (sums / max(len(items), 1)).nan_to_num(0.0, 0.0, 0.0)


def _products(dtype: torch.dtype) -> Callable[[torch.Tensor], _Score]:
    """Makes scores by products that are added up in `dtype`, in float32 where it has 16 bits; exactly, as float64, of int8."""

    def scoring(a: torch.Tensor) -> _Score:
        if dtype == torch.int8:
            return lambda items, _at: narrow.multiply_int8(a, items.mT).double()
        if dtype in narrow.HALF_FLAGS:
            return lambda items, _at: torch.matmul(a, items.mT).float()
        queries, converted = a.to(dtype), _Converted(dtype)
        return lambda items, _at: torch.matmul(queries, converted(items).mT)

    return scoring


def _product_ways(
    b: torch.Tensor,
    scoring_in: Callable[[torch.dtype], Callable[[torch.Tensor], _Score]],
    check_in: Callable[[torch.dtype], _Check],
) -> tuple[_Way, ...]:
    """The ways of scores that are made of products: in 16 bits and float32, with checks, then in float64; of int8 exactly."""
    if b.dtype == torch.int8:
        return (_Way(scoring_in(torch.int8), 0 if narrow.has_int8_dot(b) else 8),)
    ways = (_coarse_way(b, scoring_in(torch.float32), check_in(torch.float32)), _Way(scoring_in(torch.float64), 8))
    if not narrow.adds_in_float32(b.dtype):
        return ways
    half = _Way(scoring_in(b.dtype), 0, check_in(b.dtype), MIN_ITEMS_PER_HALF_CANDIDATE, SPARE_HALF_CANDIDATES)
    return (half, *ways)


def _coarse_way(b: torch.Tensor, scoring: Callable[[torch.Tensor], _Score], check: _Check) -> _Way:
    """The way of items `b` by float32 sums."""
    return _Way(scoring, 0 if b.dtype == torch.float32 else 4, check, MIN_ITEMS_PER_CANDIDATE)


def _gathered_products(a: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Returns (M, c) float64 products of (M, K) queries and (M, c, K) items."""
    return torch.bmm(items.double(), a.double().unsqueeze(-1)).squeeze(-1)


def _dot(b: torch.Tensor, largest: Callable[[], torch.Tensor], has_bias: bool) -> _Metric:
    """Scores by products; `largest` returns the largest norm of the items."""

    def check_in(dtype: torch.dtype) -> _Check:
        def check(a: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor) -> torch.Tensor:
            own = _squares(a).sqrt()
            size = own * largest()
            error = _error_of_sums(dtype, a.shape[1], size, 1 + own + largest(), size if has_bias else bounds.abs())
            return _is_beyond(worst, bounds, error) & (size < _MAX_FLOAT32)

        return check

    ways = _product_ways(b, _products, check_in)
    return _Metric(ways, lambda a, items, _indices: _gathered_products(a, items))


def _cosine(b: torch.Tensor, norms: torch.Tensor, has_bias: bool) -> _Metric:
    """Scores by cosine; `norms` are those of the items, inverse, in float64."""

    def scoring_in(dtype: torch.dtype) -> Callable[[torch.Tensor], _Score]:
        factors = norms if dtype in (torch.int8, torch.float64) else norms.float()

        def scoring(a: torch.Tensor) -> _Score:
            product, own = _products(dtype)(a), _inverse_norms(a).unsqueeze(-1).to(factors.dtype)
            # Behind the product, which float64 rounds little: the cosine of orthogonal integers is 0 wherever the item lies.
            return lambda items, at: product(items, at).mul_(own).mul_(factors[at])

        return scoring

    def check_in(dtype: torch.dtype) -> _Check:
        def check(a: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor) -> torch.Tensor:
            own, inverse = _inverse_norms(a), norms.max()
            largest = 1 / norms.where(norms != 0, torch.inf).min()
            is_able = (largest < own * _MAX_FLOAT32) & (own < _MAX_FLOAT32) & (inverse < _MAX_FLOAT32)
            shown = torch.ones_like(bounds) if has_bias else bounds.abs()
            error = _error_of_sums(dtype, a.shape[1], torch.ones_like(bounds), (1 + own) * (1 + inverse), shown)
            return _is_beyond(worst, bounds, error) & is_able

        return check

    def results(a: torch.Tensor, items: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return _gathered_products(a, items).mul_(_inverse_norms(a).unsqueeze(-1)).mul_(norms[indices])

    return _Metric(_product_ways(b, scoring_in, check_in), results)


def _error_of_sums(
    dtype: torch.dtype, width: int, size: torch.Tensor, inverse: torch.Tensor, shown: torch.Tensor
) -> torch.Tensor:
    """By how much (M,) scores by products may be off: a bound.

    A float32 sum of products is off by a rounding of the sum of their magnitudes for each of them, and by the smallest number
    of float32 where it has none for one. Source: Higham, Accuracy and Stability of Numerical Algorithms, 3.1. Where `dtype` has
    16 bits, sums are rounded to it, and so are numbers below the smallest.

    Args:
        dtype: What products are rounded to.
        width: Number of products, K.
        size: (M,) products of the norms of query and item at the most, as scores have them.
        inverse: (M,) numbers that the smallest number of float32 is multiplied by in a score.
        shown: (M,) magnitudes that sums are rounded at.
    """
    error = (width + 16) * (2.0**-24 * size + 2.0**-126 * inverse)
    if dtype == torch.float32:
        return error
    kind = torch.finfo(dtype)
    return error + kind.eps * (shown + kind.tiny * inverse)


def _is_beyond(worst: torch.Tensor, bounds: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Returns, as (M,) booleans, for which queries the worst result is better than any item that is no candidate.

    Args:
        worst: (M,) worst results.
        bounds: (M,) scores of the last candidates.
        error: (M,) bounds of their error, before they are float32.
    """
    return worst > bounds + error + 2.0**-22 * bounds.abs()


def _distance(b: torch.Tensor, norms: _ItemNorms, bias: torch.Tensor | None) -> _Metric:
    """Scores by squared distance, made of norms and products.

    Norms and products agree in many digits where points are far from 0 beside their distances, and those digits are lost:
    points lie around their centre instead. Results are sums of squared differences, as those of the GPU's kernels, and lose
    none. Those of int8 are exact in any way.

    Args:
        b: (N, K) items.
        norms: Norms of the items.
        bias: (N,) added to the distances, or None.
    """
    if b.dtype == torch.int8:

        def exactly(a: torch.Tensor) -> _Score:
            own, product = _squares(a).unsqueeze(-1), _products(torch.int8)(a)
            return lambda items, at: (own + norms.squares[at]).sub_(product(items, at), alpha=2)

        return _Metric((_Way(exactly, 0 if narrow.has_int8_dot(b) else 8),), _gathered_distances, largest=False)
    below = 0.0 if bias is None else float(bias.double().neg().nan_to_num(0.0, 0.0, 0.0).clamp(min=0).max())

    def check(a: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor) -> torch.Tensor:
        return _is_apart(a, bounds, worst, norms, below)

    def check_coarse(a: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor) -> torch.Tensor:
        return _is_apart_in_float32(a, bounds, worst, norms, below)

    ways = (
        _coarse_way(b, lambda a: _made_in_float32(a, norms), check_coarse),
        _Way(lambda a: _made_of_norms(a, norms), 8, check),
        _Way(_differences, 8),
    )
    return _Metric(ways, _gathered_distances, largest=False)


def _gathered_distances(a: torch.Tensor, items: torch.Tensor, _indices: torch.Tensor) -> torch.Tensor:
    """Returns (M, c) float32 squared distances of (M, K) queries and (M, c, K) items."""
    return (items.float() - a.float().unsqueeze(-2)).square_().sum(-1)


def _differences(a: torch.Tensor) -> _Score:
    """Makes the score of (M, K) queries by squared distance as a sum of squared differences, which loses no digits.

    The bits are those of `_gathered_distances`: parts of sharded items may be scored either way.
    """
    return lambda items, _at: torch.stack([(items.float() - query).square_().sum(-1) for query in a.float()])


def _made_in_float32(a: torch.Tensor, norms: _ItemNorms) -> _Score:
    """As `_made_of_norms`, but by float32 products with the items as they are: converting them takes as long as multiplying."""
    queries = a.double() - norms.centre
    own = queries.square().sum(-1, keepdim=True) + 2 * torch.mv(queries, norms.centre).unsqueeze(-1)
    own, of_items, queries = own.float(), norms.squares.float(), queries.float()
    converted = _Converted(torch.float32)
    return lambda items, at: torch.addmm(own + of_items[at], queries, converted(items).mT, alpha=-2)


def _is_apart_in_float32(
    a: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor, norms: _ItemNorms, below: float
) -> torch.Tensor:
    """As `_is_apart`, for scores of `_made_in_float32`: their products are as large as the norms of the items themselves."""
    own = (a.double() - norms.centre).square().sum(-1)
    size = own + norms.centre.square().sum() + norms.largest().square() + bounds.abs() + below
    error = (a.shape[1] + 16) * (2.0**-22 * size + 2.0**-126)
    return (worst + error < bounds - error) & (size < _MAX_FLOAT32)


def _made_of_norms(a: torch.Tensor, norms: _ItemNorms) -> _Score:
    """Makes the score of (M, K) queries by squared distance, in float64."""
    centre, of_items = norms.centre, norms.squares
    queries = a.double() - centre
    own = queries.square().sum(-1, keepdim=True)
    has_infinite = bool(own.isinf().any() or of_items.isinf().any())

    def score(items: torch.Tensor, at: slice) -> torch.Tensor:
        sums = own + of_items[at]
        distances = torch.addmm(sums, queries, (items - centre).mT, alpha=-2).clamp_(min=0)
        if has_infinite:
            # The difference of infinities would be NaN, and an infinite distance is none; of the same infinity in both it is.
            distances = torch.where(sums.isinf(), sums, distances)
            for end in (torch.inf, -torch.inf):
                distances[torch.matmul((a == end).double(), (items == end).double().mT) > 0] = torch.nan
        return distances

    return score


def _is_apart(
    a: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor, norms: _ItemNorms, below: float
) -> torch.Tensor:
    """Returns, as (M,) booleans, for which queries no item that is no candidate may be among the nearest.

    An item whose distance is D lies within 2 · (norm² of the query + D) of the centre, so its distance made of norms and
    products is off by that many roundings of float64 for each element. That does no harm where it is less than float32
    shows, nor where candidates behind the worst result are farther away than that.

    Args:
        a: (M, K) queries.
        bounds: (M,) scores of the last candidates, made of norms and products.
        worst: (M,) scores of the last results, made of differences.
        norms: Norms of the items.
        below: How far a bias is below 0, at the most.
    """
    # Past the range of float32 an error is infinite, too.
    limit = torch.finfo(torch.float32).max
    bounds = bounds.clamp(-limit, limit)
    size, own = bounds.abs() + below, (a.double() - norms.centre).square().sum(-1)
    error = (a.shape[1] + 8) * 2.0**-51 * (2 * own + size)
    is_apart = worst + 2.0**-22 * size + error < bounds - error
    return is_apart | (error <= 2.0**-26 * size) | ~own.isfinite()
