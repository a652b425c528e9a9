"""Exact search: torch on the CPU, Tilewire's kernels on the GPU. Norms of a resident are computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewire.service.engine.ops import int8
from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results, Summed
from tilewire.service.engine.ops.ranking import best
from tilewire.service.ops.search import SearchOptions

# Items beyond twice k whose distances are computed again on the CPU: those that rounding may have put behind the k best.
SPARE_CANDIDATES = 32
# Most elements of items that are gathered at once for that: 4 MiB in float32.
MAX_GATHERED = 2**20
# Most bytes of items, as they are multiplied, and of what comes of them that are held at once: a core's cache has room for it.
MAX_BLOCK_BYTES = 2**21
# Most scores that are held at once on the CPU: 16 MiB. Twice as many took longer.
MAX_SCORES = 2**22
# Queries that are scored together, where there are as many: for fewer, items are converted as long as they are multiplied.
MIN_QUERIES = 64
# Computes (M, n) float64 scores of M queries and (n, K) items, which are this part of all.
_Score: TypeAlias = Callable[[torch.Tensor, slice], torch.Tensor]


class EngineSearch(EngineOp[SearchOptions]):
    """Exact search on the CPU and on the GPU."""

    takes_steps = True

    def __init__(self) -> None:
        # By metric: what `kernels.item_norms` gives of the items, for as long as their tensor lives. `centre` and `squares` are
        # the CPU's for `l2`, in float64.
        self._norms: dict[str, WeakTensorKeyDictionary] = {
            kind: WeakTensorKeyDictionary() for kind in ("cosine", "l2", "centre", "squares")
        }

    def cpu(self, inputs: Operands, options: SearchOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        a, b, bias = inputs["a"], inputs["b"], inputs.get("bias")
        rows, width = math.prod(a.shape[:-1]), a.shape[-1]
        queries = a.reshape(rows, width)
        if not width:
            # Queries without elements are equal.
            queries = queries[:1]
        centre = self._norms_of(inputs, "centre", lambda: _centre(b)) if options.metric == "l2" else None
        score_of = self._scoring(inputs, options, centre)
        found = []
        for part in torch.split(queries, max(MIN_QUERIES, MAX_SCORES // len(b))):
            given = part if part.dtype == torch.int8 else part.double()
            scored = _Scored(score_of(given), len(part), b, bias, options.metric != "l2")
            if centre is not None and a.is_floating_point():
                found.append(_nearest(part, scored, options.k, centre))
            else:
                found.append(scored.best(options.k))
        values, indices = (torch.cat(one).expand(rows, -1) for one in zip(*found, strict=True))
        shape = (*a.shape[:-1], options.k)
        return values.reshape(shape), indices.reshape(shape)

    def _scoring(
        self, inputs: Operands, options: SearchOptions, centre: torch.Tensor | None
    ) -> Callable[[torch.Tensor], _Score]:
        """Returns what makes the score of (M, K) int8 or float64 queries on the CPU; it has the norms of the items."""
        b = inputs["b"]
        if options.metric == "cosine":
            norms = self._norms_of(inputs, "cosine", lambda: _inverse_norms(b))
            return lambda a: _cosine(a, norms)
        if centre is not None:
            squares = self._norms_of(inputs, "squares", lambda: _squares(b, centre))
            return lambda a: _distance(a, centre, squares)
        return lambda a: lambda items, _at: _products(a, items)

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
        itemsize: Bytes of an element while it is computed with: float64, unless it is taken as it is.
    """
    return torch.split(rows, max(1, MAX_BLOCK_BYTES // max(itemsize * rows.shape[1], 8 * num_beside)))


def _products(a: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Returns (M, n) float64 products of (M, K) queries and (n, K) items, int8 or float64 and any float; of int8 exactly."""
    if a.dtype == torch.int8:
        return int8.multiply(a, items.mT).double()
    return torch.matmul(a, items.double().mT)


class _Scored(NamedTuple):
    """Scores of some queries, which are computed some items at a time.

    How a product is rounded depends on where its item lies. In float64 equal items have equal float32 scores all the same.

    Attributes:
        score: Computes them.
        num_queries: Number of queries, M.
        b: (N, K) items.
        bias: (N,) added to the scores, or None.
        largest: Whether larger scores are better.
    """

    score: _Score
    num_queries: int
    b: torch.Tensor
    bias: torch.Tensor | None
    largest: bool

    def best(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (M, k) float32 scores, best first, and (M, k) int64 indices; among equals those of the smaller index."""
        values, indices, begin = [], [], 0
        for items in torch.split(self.b, max(k, MAX_SCORES // max(self.num_queries, 1))):
            found = best(self._of(items, begin), min(k, len(items)), largest=self.largest, is_nan_large=False)
            values.append(found[0])
            indices.append(found[1] + begin)
            begin += len(items)
        if len(values) == 1:
            return values[0], indices[0]
        # Candidates lie in the order of their items where they are equal.
        chosen, places = best(torch.cat(values, -1), k, largest=self.largest, is_nan_large=False)
        return chosen, torch.cat(indices, -1).gather(-1, places)

    def _of(self, items: torch.Tensor, begin: int) -> torch.Tensor:
        """Returns the (M, n) float32 scores of the items that begin there."""
        scores, at = torch.empty((self.num_queries, len(items))), 0
        for block in _blocks(items, self.num_queries, 1 if int8.has_dot(items) else 8):
            end = at + len(block)
            scores[:, at:end] = self.score(block, slice(begin + at, begin + end))
            at = end
        if self.bias is not None:
            scores += self.bias[begin : begin + len(items)].float()
        return scores


def _squares(rows: torch.Tensor, centre: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Sums of squares of the rows less a centre, in float64."""
    blocks = _blocks(rows.flatten(0, -2))
    return torch.cat([block.double().sub(centre).square_().sum(-1) for block in blocks]).view(rows.shape[:-1])


def _inverse_norms(rows: torch.Tensor) -> torch.Tensor:
    norms = _squares(rows).sqrt()
    return torch.where(norms == 0, 0.0, 1 / norms)


def _centre(items: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the items, in float64; 0 where it is no number, and of integers, whose distances are exact so."""
    if not items.is_floating_point():
        return torch.zeros(items.shape[1], dtype=torch.float64)
    sums = torch.stack([block.double().sum(0) for block in _blocks(items)]).sum(0)
    return (sums / max(len(items), 1)).nan_to_num(0.0, 0.0, 0.0)


def _cosine(a: torch.Tensor, norms: torch.Tensor) -> _Score:
    """Makes the score of (M, K) queries by cosine; `norms` are those of the items, inverse."""
    own = _inverse_norms(a).unsqueeze(-1)
    # Behind the product, which float64 rounds little: the cosine of orthogonal integers is 0 wherever the item lies.
    return lambda items, at: _products(a, items).mul_(own).mul_(norms[at])


def _distance(a: torch.Tensor, centre: torch.Tensor, squares: torch.Tensor) -> _Score:
    """Makes the score of (M, K) queries by squared distance, made of norms and products.

    Norms and products agree in many digits where points are far from 0 beside their distances, and those digits are lost:
    points lie around their centre instead.

    Args:
        a: (M, K) float64 or int8 queries.
        centre: (K,) float64 point that is subtracted from all; 0 for int8.
        squares: (N,) squared distances of the items from it.
    """
    queries = a - centre
    own = queries.square().sum(-1, keepdim=True)
    has_infinite = bool(own.isinf().any()) or bool(squares.isinf().any())

    def score(items: torch.Tensor, at: slice) -> torch.Tensor:
        sums = own + squares[at]
        if a.dtype == torch.int8:
            # Exact, so none is below 0.
            return sums.sub_(_products(a, items), alpha=2)
        distances = torch.addmm(sums, queries, (items - centre).mT, alpha=-2).clamp_(min=0)
        if has_infinite:
            # The difference of infinities would be NaN, and an infinite distance is none; of the same infinity in both it is.
            distances = torch.where(sums.isinf(), sums, distances)
            for end in (torch.inf, -torch.inf):
                distances[torch.matmul((a == end).double(), (items == end).double().mT) > 0] = torch.nan
        return distances

    return score


def _differences(a: torch.Tensor) -> _Score:
    """Makes the score of (M, K) float32 queries by squared distance as a sum of squared differences, which loses no digits.

    The bits are those of `_nearest`: parts of sharded items may be scored either way.
    """
    return lambda items, _at: torch.stack([(items.float() - query).square_().sum(-1) for query in a])


def _nearest(a: torch.Tensor, scored: _Scored, k: int, centre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses k items of each query by sums of squared differences, as the GPU's kernels do.

    Distances made of norms and products choose the candidates. Queries for which those may have missed an item are scored
    again, against all items.

    Args:
        a: (M, K) queries.
        scored: Their distances made of norms and products, which lose digits where norms are large beside them.
        k: Number of items.
        centre: (K,) point from which `scored` counts.

    Returns:
        (M, k) float32 distances, smallest first, and (M, k) int64 indices.
    """
    b, bias = scored.b, scored.bias
    count = min(2 * k + SPARE_CANDIDATES, b.shape[0])
    bounds, candidates = scored.best(count)
    candidates = candidates.sort(dim=-1).values
    distances = torch.empty(candidates.shape)
    at_once = max(1, MAX_GATHERED // (count * max(b.shape[1], 1)))
    for queries, chosen, into in zip(*(torch.split(one, at_once) for one in (a, candidates, distances)), strict=True):
        gaps = b[chosen].float() - queries.float().unsqueeze(-2)
        torch.sum(gaps.square_(), -1, out=into)
    if bias is not None:
        distances += bias.float()[candidates]
    values, places = best(distances, k, largest=False, is_nan_large=False)
    indices = candidates.gather(-1, places)
    if count < len(b) and (missed := _may_have_missed(a.double() - centre, bounds[:, -1], values[:, -1], bias)).any():
        exact = scored._replace(score=_differences(a[missed].float()), num_queries=int(missed.sum()))
        values[missed], indices[missed] = exact.best(k)
    return values, indices


def _may_have_missed(
    queries: torch.Tensor, bounds: torch.Tensor, worst: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns, as (M,) booleans, for which queries an item that is no candidate may be among the nearest.

    An item whose distance is D lies within 2 · (norm² of the query + D) of the centre, so its distance made of norms and
    products is off by that many roundings of float64 for each element. That does no harm where it is less than float32
    shows, nor where candidates behind the worst result are farther away than that.

    Args:
        queries: (M, K) float64 queries less the centre.
        bounds: (M,) scores of the last candidates, made of norms and products.
        worst: (M,) scores of the last results, made of differences.
        bias: (N,) added to the scores, or None.
    """
    below = 0.0 if bias is None else bias.double().neg().nan_to_num(0.0, 0.0, 0.0).clamp(min=0).max()
    # Past the range of float32 an error is infinite, too.
    limit = torch.finfo(torch.float32).max
    bounds = bounds.double().clamp(-limit, limit)
    size, norms = bounds.abs() + below, queries.square().sum(-1)
    error = (queries.shape[1] + 8) * 2.0**-51 * (2 * norms + size)
    is_apart = worst.double() + 2.0**-22 * size + error < bounds - error
    return norms.isfinite() & ~is_apart & (error > 2.0**-26 * size)
