"""The public search: checks its arguments, computes norms, and launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilewire.kernels.matmul.configs import MAX_INT8_K
from tilewire.kernels.matmul.plan import Epilogue
from tilewire.kernels.matmul.plan import prepare as prepare_product
from tilewire.kernels.runtime.kinds import FLOATS, name_of
from tilewire.kernels.runtime.launch import Descriptor, Launch, LaunchCache, are_aligned, device_number
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step
from tilewire.kernels.runtime.rows import check_counts, check_dtype, check_pair, row_stride
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.search.configs import (
    DTYPES,
    MAX_ORDERS,
    MAX_QUERY_BLOCKS,
    METRICS,
    PRECISIONS,
    Config,
    Problem,
    choose,
    finish_for,
    invariant,
)
from tilewire.kernels.search.variants import (
    CENTRE_K,
    DISTANCES,
    NORM_ROWS,
    centre_variant,
    distances_variant,
    finish_variant,
    norms_variant,
    product_variant,
    score_variant,
    tile_variant,
)
from tilewire.kernels.topk.configs import MAX_K, num_kept, select_blocks
from tilewire.kernels.topk.op import select_steps

_TENSORS = ("a", "b", "norms", "bias", "values", "indices")
# Results of `search_norms_kernel`, by their number.
_NORMS = {"l2": 0, "cosine": 1, "norm": 2, "centred": 3}


def search(
    a: torch.Tensor,
    b: torch.Tensor,
    k: int = 10,
    *,
    metric: str = "dot",
    bias: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
    precision: str = "ieee",
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the `k` items with the best scores for each query, best first.

    Equal scores rank by the smaller index; NaN comes after every number.

    Args:
        a: (…, M, K) queries; float16, bfloat16, float32 or int8.
        b: (N, K) items; the dtype of `a`.
        k: Number of items, 1 to 1024 and at most N.
        metric: `dot` and `cosine`, of which the largest is best, or `l2`, the squared distance, of which the smallest is.
        bias: (N,) added to the scores; float16, bfloat16 or float32.
        norms: Result of `item_norms(b, metric)`, where it is known already.
        precision: `tf32`, or `ieee` and `tf32x3`, which are one here: products of float32 that select the items. Scores
            are float32 sums.
        batch_invariant: Whether a query's result must not depend on the number of queries.

    Returns:
        (…, M, k) float32 scores and (…, M, k) int64 indices of items.

    Raises:
        ValueError: Shapes, dtypes or options do not fit.
    """
    _check(a, b, k, metric, bias, precision)
    shape = (*a.shape[:-1], k)
    values = torch.empty(shape, dtype=torch.float32, device=a.device)
    indices = torch.empty(shape, dtype=torch.int64, device=a.device)
    if values.numel() > 0:
        if norms is None and metric != "dot":
            norms = item_norms(b, metric)
        prepared = prepare_search(
            a, b, values, indices, metric=metric, bias=bias, precision=precision, batch_invariant=batch_invariant
        )
        prepared(a, b, norms, bias, values, indices)
    return values, indices


def item_norms(b: torch.Tensor, metric: str) -> torch.Tensor:
    """Computes what `search` needs of each item besides its products: computed once for a resident tensor.

    Args:
        b: (N, K) items.
        metric: `l2` for squared norms, `cosine` for inverse norms (0 of a zero row).

    Returns:
        (N,) float32. For `l2` of float32 (N + K,): squared distances from a centre, and the centre, which is the item
        nearest the mean.

    Raises:
        ValueError: `metric` is neither, or `b` is not a matrix.
    """
    if metric not in ("l2", "cosine") or b.dim() != 2:
        raise ValueError(f"metric: expected l2 or cosine of a matrix, got {metric} of rank {b.dim()}")
    (n, k), is_centred = b.shape, _is_centred(b, metric)
    out = torch.empty(n + k * is_centred, dtype=torch.float32, device=b.device)
    if n == 0:
        return out
    rows = _rows(b)
    if not is_centred:
        norms_launch(rows, metric)(rows, out)
        return out
    launch = norms_launch(rows, "centred")
    # An item keeps whole numbers whole, and so their ties.
    out[n:] = rows.mean(0).nan_to_num(0, 0, 0)
    launch(rows, out)
    out[n:] = rows[out[:n].nan_to_num(torch.inf).argmin()]
    launch(rows, out)
    return out


def _is_centred(b: torch.Tensor, metric: str) -> bool:
    """Whether queries and items count from a centre. Items of fewer digits are far apart beside float32's sums."""
    return metric == "l2" and b.dtype == torch.float32


def norms_launch(rows: torch.Tensor, kind: str) -> Launch:
    """Prepares norms of `rows`, (M, K) with neighbours in a row; called with them and (M,) float32."""
    key = (rows.shape, rows.stride(), rows.dtype, kind, rows.device)

    def make() -> Launch:
        m, k = rows.shape
        sizes = {"rows": m, "k": k, "stride_row": rows.stride(0), "kind": _NORMS[kind]}
        variant = norms_variant(name_of(rows.dtype), current(rows.get_device()))
        return Launch(variant, (-(-m // NORM_ROWS),), sizes, rows.device)

    return _norms.get(key, make)


def prepare_search(
    a: torch.Tensor,
    b: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    *,
    metric: str = "dot",
    bias: torch.Tensor | None = None,
    precision: str = "ieee",
    batch_invariant: bool = False,
) -> Prepared:
    """Prepares searches for tensors of these shapes, strides, dtypes and alignment.

    Args:
        a: As in `search`.
        b: As in `search`.
        values: (…, M, k) float32, contiguous, not empty.
        indices: Shape of `values`; int64, contiguous.
        metric: As in `search`.
        bias: As in `search`; a launch takes another tensor like it.
        precision: As in `search`.
        batch_invariant: As in `search`.

    Returns:
        A launcher, called with `(a, b, norms, bias, values, indices)`; `norms` is None for `dot`. It belongs to the
        calling thread.

    Raises:
        ValueError: As in `search`, or an output does not fit.
    """
    k = values.shape[-1] if values.dim() else 0
    _check(a, b, k, metric, bias, precision)
    shape = (*a.shape[:-1], k)
    for name, out, dtype in (("values", values, torch.float32), ("indices", indices, torch.int64)):
        if tuple(out.shape) != shape or out.dtype != dtype or out.numel() == 0 or not out.is_contiguous():
            raise ValueError(f"{name}: expected {shape} of {dtype}, contiguous, not empty, got {tuple(out.shape)}")
    return prepare(a, b, k, metric=metric, bias=bias, precision=precision, batch_invariant=batch_invariant)


def _check(a: torch.Tensor, b: torch.Tensor, k: int, metric: str, bias: torch.Tensor | None, precision: str) -> None:
    check_dtype("a", a.dtype, DTYPES)
    check_pair("a and b", a, b)
    if a.dim() < 2 or b.dim() != 2:
        raise ValueError(f"a, b: expected (…, M, K) and (N, K), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[-1] != b.shape[1]:
        raise ValueError(f"a, b: K differs, {a.shape[-1]} and {b.shape[1]}")
    if a.dtype == torch.int8 and a.shape[-1] > MAX_INT8_K:
        raise ValueError(f"a: int32 sums of int8 hold K up to {MAX_INT8_K}, got {a.shape[-1]}")
    if queries := math.prod(a.shape[:-1]):
        check_counts("a", queries=queries, elements=a.shape[-1])
        check_counts("b", items=b.shape[0])
    if not 1 <= k <= min(MAX_K, b.shape[0]):
        raise ValueError(f"k: expected 1 to {min(MAX_K, b.shape[0])}, got {k}")
    if metric not in METRICS:
        raise ValueError(f"metric: expected one of {', '.join(METRICS)}, got {metric}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision}")
    if bias is not None and (tuple(bias.shape) != (b.shape[0],) or name_of(bias.dtype) not in FLOATS):
        raise ValueError(f"bias: expected ({b.shape[0]},) of {', '.join(FLOATS)}, got {tuple(bias.shape)} {bias.dtype}")


_norms: LaunchCache[Launch] = LaunchCache()
_launches: LaunchCache[Detour] = LaunchCache()


def prepare(
    a: torch.Tensor,
    b: torch.Tensor,
    best: int,
    *,
    metric: str,
    bias: torch.Tensor | None,
    precision: str = "ieee",
    batch_invariant: bool = False,
    config: Config | None = None,
    max_orders: int = MAX_ORDERS,
) -> Detour:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning.

    So many queries at a time that their groups, and the scores computed again, leave at most `max_orders` orders each in
    scratch memory.
    """
    shapes = (a.shape, a.stride(), b.shape, b.stride(), best)
    options = (metric, bias is not None, precision, batch_invariant, config, max_orders)
    key = (shapes, a.dtype, are_aligned((a, b)), options, a.device)

    def make() -> Detour:
        target = current(a.get_device())
        queries, items = _rows(a), _rows(b)
        m, k, n = queries.shape[0], a.shape[-1], items.shape[0]
        is_aligned = _is_aligned(queries) and _is_aligned(items)
        is_plain = metric == "dot" and bias is None
        problem = Problem(m, n, k, best, name_of(a.dtype), precision, is_aligned, is_plain, metric == "l2")
        chosen = config or choose(invariant(problem) if batch_invariant else problem, target)
        rows_of = functools.partial(_rows, is_padded=chosen.kernel == "tma")
        if chosen.kernel == "tma":
            # Products that read rows at any distance take several times as long.
            queries, items = rows_of(a), rows_of(b)
            problem = replace(problem, is_aligned=True)
        groups = -(-n // chosen.group)
        a_query = max(groups, _num_kept(chosen, best, groups) * chosen.group)
        most_blocks = min(MAX_QUERY_BLOCKS, max_orders // a_query // chosen.block_m)
        most = chosen.block_m * max(1, most_blocks)
        pipelines: dict[tuple[int, int], Prepared] = {}
        for first in range(0, m, most):
            rows = slice(first, min(m, first + most))
            given = (queries[rows], items, problem, metric)
            pipelines[first, rows.stop] = (
                _through_product(*given, has_bias=bias is not None, is_invariant=batch_invariant)
                if chosen.kernel == "product"
                else _pipeline(*given, chosen, bias is not None)
            )
        return Detour(functools.partial(_launch, pipelines, rows_of), *pipelines.values())

    return _launches.get(key, make)


def _launch(
    pipelines: Mapping[tuple[int, int], Prepared],
    rows_of: Callable[[torch.Tensor], torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    norms: torch.Tensor | None,
    bias: torch.Tensor | None,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Launches each cut (first query, end) of the queries."""
    a, b = rows_of(a), rows_of(b)
    bias = bias if bias is None else bias.float().contiguous()
    if len(pipelines) == 1:
        next(iter(pipelines.values()))(a, b, norms, bias, values, indices)
        return
    values, indices = (out.view(-1, out.shape[-1]) for out in (values, indices))
    for (first, end), pipeline in pipelines.items():
        rows = slice(first, end)
        pipeline(a[rows], b, norms, bias, values[rows], indices[rows])


def _pipeline(
    a: torch.Tensor, b: torch.Tensor, problem: Problem, metric: str, config: Config, has_bias: bool
) -> Pipeline:
    target = current(a.get_device())
    m, n, k, best = a.shape[0], problem.n, problem.k, problem.best
    unit = problem.unit
    sizes = {
        "m": m,
        "n": n,
        "groups": -(-n // config.group),
        "metric": METRICS.index(metric),
        "has_bias": int(has_bias),
        "stride_a": a.stride(0) // unit,
        "stride_b": b.stride(0) // unit,
    }
    steps: list[Step] = []
    parts: dict[str, Part] = {}
    selected = "scored"
    kept = _num_kept(config, best, sizes["groups"])
    if not config.is_whole_scored:
        steps, parts = _selection(a, b, problem, metric, config, sizes, target)
        selected = steps[-1].operands[-1]
    num_keys = kept * config.group
    parts |= {"scored": Part(torch.int64, (m, num_keys)), "kept": Part(torch.int64, (m, 2, num_kept(best)))}
    if config.kernel == "tile":
        tiles = -(-m // config.block_m) * -(-num_keys // config.block_n)
        of_tiles = sizes | {"k": k, "num_keys": num_keys, "stride_a": a.stride(0), "stride_b": b.stride(0)}
        launch = Launch(tile_variant(problem, config, target), (tiles,), of_tiles, a.device)
        steps.append(Step(launch, ("a", "b", "bias", "scored")))
    else:
        of_groups = sizes | {"k": k, "kept": kept, "is_selected": int(config.kernel != "none")}
        programs = m * -(-kept // config.score.groups)
        launch = Launch(score_variant(problem, config, target), (programs,), of_groups, a.device)
        steps.append(Step(launch, ("a", "b", "norms", "bias", selected, "scored")))
    last = _finish(sizes | {"num_keys": num_keys, "pitch": 0}, best, a.device, is_scores=False)
    steps.append(Step(last, ("scored", "norms", "norms", "bias", "kept", "values", "indices")))
    return Pipeline(_TENSORS, steps, a.device, parts)


def _finish(sizes: dict[str, int], best: int, device: torch.device, *, is_scores: bool) -> Launch:
    """The launch that finds the `best` of keys or scores."""
    block = finish_for(sizes["num_keys"], best, is_scores=is_scores)
    variant = finish_variant(block, is_scores, current(device_number(device)))
    return Launch(variant, (-(-sizes["m"] // block.block_rows),), sizes | {"k": best, "most": num_kept(best)}, device)


def _through_product(
    a: torch.Tensor, b: torch.Tensor, problem: Problem, metric: str, *, has_bias: bool, is_invariant: bool
) -> Detour:
    """Computes the scores of all items by a product, and finds the best of them."""
    (m, n), device = (a.shape[0], b.shape[0]), a.device
    pitch = -(-n // 4)

    def empty() -> torch.Tensor:
        return torch.empty((m, 4 * pitch), device=device)[:, :n]

    product = prepare_product(a, b.mT, empty(), Epilogue(), "ieee", "invariant" if is_invariant else None)
    norms_of_queries = norms_launch(a, "cosine") if metric == "cosine" else None
    sizes = {"m": m, "num_keys": n, "pitch": pitch, "metric": METRICS.index(metric), "has_bias": int(has_bias)}
    last = _finish(sizes, problem.best, device, is_scores=True)
    names = ("scored", "norms", "factors", "bias", "values", "indices")
    kept = {"kept": Part(torch.int64, (m, 2, num_kept(problem.best)))}
    finish = Pipeline(names, [Step(last, (*names[:4], "kept", *names[4:]))], device, kept)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        norms: torch.Tensor | None,
        bias: torch.Tensor | None,
        values: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        factors, scores = None, empty()
        if norms_of_queries is not None:
            factors = torch.empty(m, device=device)
            norms_of_queries(a, factors)
        product(a, b.mT, scores)
        finish(scores, norms, factors, bias, values, indices)

    return Detour(run, *([] if norms_of_queries is None else [norms_of_queries]), product, finish)


def _num_kept(config: Config, best: int, groups: int) -> int:
    """Number of groups of a query whose scores are computed again."""
    return groups if config.is_whole_scored else best


def _selection(
    a: torch.Tensor,
    b: torch.Tensor,
    problem: Problem,
    metric: str,
    config: Config,
    sizes: dict[str, int],
    target: Target,
) -> tuple[list[Step], dict[str, Part]]:
    """The launches that select the best groups of each query, which the last one leaves in its last operand."""
    m, n, k = a.shape[0], problem.n, problem.k
    steps: list[Step] = []
    parts: dict[str, Part] = {}
    queries, factors, stride = "a", "norms", a.stride(0)
    if metric == "cosine" and sizes["has_bias"]:
        factors = "factors0"
        parts[factors] = Part(torch.float32, (m,))
        steps.append(Step(norms_launch(a, "norm"), ("a", factors)))
    if k > 0 and _is_centred(b, metric):
        queries, stride = "centred", -(-k // 4) * 4
        parts[queries] = Part(torch.float32, (m, stride))
        centre = {"n": n, "k": k, "stride_a": a.stride(0), "stride_out": stride}
        launch = Launch(centre_variant(target), (m * max(1, -(-k // CENTRE_K)),), centre, a.device)
        steps.append(Step(launch, ("a", "norms", queries)))
    product = _product(m, stride, b, problem, config, sizes | {"stride_a": stride // problem.unit}, target)
    steps.append(Step(product, (queries, "b", "norms", factors, "bias", "orders")))
    if metric == "l2":
        # Of many queries a program walks all blocks: more programs only read the query again.
        programs = max(1, min(-(-sizes["groups"] // DISTANCES), 16 * target.num_sms // m))
        of_distances = sizes | {"k": k, "programs": programs, "stride_centred": stride}
        launch = Launch(distances_variant(problem, config, target), (m * programs,), of_distances, a.device)
        steps.append(Step(launch, ("a", "b", queries, "bias", "orders")))
    blocks = select_blocks(problem.best, target)
    selecting, select_parts = select_steps(m, sizes["groups"], problem.best, blocks, a.device)
    return steps + selecting, parts | select_parts


def _product(
    m: int,
    stride: int,
    b: torch.Tensor,
    problem: Problem,
    config: Config,
    sizes: dict[str, int],
    target: Target,
) -> Launch:
    n, k = problem.n, problem.k
    variant = product_variant(problem, config, target)
    blocks = (-(-n // config.block_n), -(-m // config.block_m))
    values: dict[str, Any] = sizes | {"k": k}
    if config.kernel == "tma":
        width = max(1, k)
        values["a_desc"] = Descriptor((m, width), (stride, 1), (config.block_m, config.block_k))
        values["b_desc"] = Descriptor((n, width), (b.stride(0), 1), (config.block_n, config.block_k))
        programs = max(1, target.num_sms * config.programs_per_sm // blocks[1])
        blocks = (min(blocks[0], programs), blocks[1])
    return Launch(variant, blocks, values, b.device)


def _rows(x: torch.Tensor, *, is_padded: bool = False) -> torch.Tensor:
    """`x` (…, K) as (rows, K), rows of neighbours at one distance; `is_padded`: at multiples of 16 bytes, K > 0."""
    rows, k = math.prod(x.shape[:-1]), x.shape[-1]
    stride = row_stride(x)
    if x.dim() == 2 and x.stride(1) == 1:
        found = x
    elif stride is None or x.numel() == 0:
        found = x.reshape(rows, k).contiguous()
    else:
        found = x.as_strided((rows, k), (stride, 1))
    if not is_padded or (0 < k <= found.stride(0) and _is_aligned(found)):
        return found
    unit = 16 // x.element_size()
    # Without elements a row has zeros, which count for nothing.
    return torch.nn.functional.pad(found, (0, unit if k == 0 else -k % unit))[:, : k or unit]


def _is_aligned(rows: torch.Tensor) -> bool:
    """Whether each of `rows` begins at a multiple of 16 bytes."""
    return are_aligned((rows,)) and rows.stride(0) % (16 // rows.element_size()) == 0
