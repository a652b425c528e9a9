"""Cases of the benchmark of ops: checks against float64 on hostile input, and contestants to be timed. Measures nothing."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tilewire.kernels.normalize import op as normalize_op
from tilewire.kernels.normalize.op import normalize_reference
from tilewire.kernels.normalize.op import variant as normalize_variant
from tilewire.kernels.pointwise import op as pointwise_op
from tilewire.kernels.pointwise.op import build as build_pointwise
from tilewire.kernels.pointwise.op import pointwise_reference
from tilewire.kernels.reduce import configs as reduce_configs
from tilewire.kernels.reduce import op as reduce_op
from tilewire.kernels.reduce.op import build as build_reduce
from tilewire.kernels.reduce.op import reduce_reference
from tilewire.kernels.registry import kernel_op
from tilewire.kernels.runtime.elementwise import Config
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.pipeline import Pipeline
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.search import configs as search_configs
from tilewire.kernels.search import op as search_op
from tilewire.kernels.search.reference import search_reference
from tilewire.kernels.search.variants import product_variant, score_variant
from tilewire.kernels.topk import configs as topk_configs
from tilewire.kernels.topk import op as topk_op
from tilewire.kernels.topk.op import built, select_variant, topk_reference

Row = dict[str, Any]
Check = tuple[str, str, Callable[[], Row]]
Timing = tuple[str, str, Callable[[], tuple[dict[str, Any], float]]]
DEVICE = "cuda"
_DTYPES = ("float32", "bfloat16")
INF, NAN = float("inf"), float("nan")
Tma = functools.partial(search_configs.Config, "tma")

# Blocks that the choice could have: by items' length, then by queries.
SEARCH = {
    (768, 1): (
        Tma(16, 128, 128, 4, 4, is_swapped=True),
        Tma(16, 128, 64, 4, 8, is_swapped=True),
        Tma(16, 128, 128, 4, 3, is_swapped=True, programs_per_sm=2),
        Tma(16, 64, 256, 4, 4, is_swapped=True),
        Tma(16, 256, 128, 8, 3, is_swapped=True),
    ),
    (768, 64): (
        Tma(64, 128, 64, 4, 4, programs_per_sm=2),
        Tma(64, 256, 64, 8, 4),
        Tma(64, 128, 128, 8, 4),
        Tma(64, 64, 128, 4, 3, programs_per_sm=2),
    ),
    (768, 256): (
        Tma(128, 128, 64, 4, 3, programs_per_sm=2),
        Tma(128, 256, 64, 8, 4),
        Tma(128, 128, 64, 8, 3, programs_per_sm=2),
        Tma(128, 128, 128, 8, 3),
        Tma(256, 128, 64, 8, 3),
        Tma(256, 64, 64, 8, 5),
    ),
    (128, 1): (
        Tma(16, 128, 128, 4, 5, is_swapped=True, is_whole=True),
        Tma(16, 256, 128, 8, 3, is_swapped=True, is_whole=True),
        Tma(16, 256, 128, 8, 3, is_swapped=True, is_whole=True),
    ),
    (128, 64): (
        Tma(64, 256, 128, 8, 3, is_whole=True),
        Tma(64, 128, 128, 4, 4, is_whole=True),
        Tma(64, 128, 128, 8, 3, is_whole=True, programs_per_sm=2),
    ),
    (128, 256): (
        Tma(128, 256, 128, 8, 2, is_whole=True),
        Tma(128, 128, 128, 8, 3, is_whole=True),
        Tma(256, 128, 128, 8, 3, is_whole=True),
        Tma(128, 128, 128, 4, 2, is_whole=True, programs_per_sm=2),
        Tma(64, 128, 128, 4, 3, is_whole=True, programs_per_sm=2),
    ),
}
_TOPK_BLOCKS = tuple(
    (topk_configs.Block(block_n, warps), group)
    for block_n, group, warps in (
        (1024, 128, 2),
        (1024, 128, 4),
        (2048, 128, 2),
        (2048, 128, 4),
        (2048, 128, 8),
        (4096, 128, 4),
        (4096, 128, 8),
        (8192, 128, 8),
        (2048, 256, 4),
        (4096, 256, 4),
    )
)
_TOPK_SELECT = (topk_configs.Block(8192, 8), topk_configs.Block(8192, 4), topk_configs.Block(8192, 16))
_REDUCE = tuple(
    reduce_configs.Config(1, block_n, warps, parts)
    for block_n, warps, parts in (
        (2048, 8, 16),
        (4096, 4, 31),
        (4096, 8, 8),
        (4096, 8, 62),
        (8192, 8, 16),
        (8192, 16, 8),
    )
)
_COLUMNS = tuple(reduce_configs.Config(rows, n, warps) for rows, n, warps in ((64, 64, 8), (256, 16, 8), (64, 32, 4)))
_NORMALIZE = tuple(normalize_op.Config(rows, 4096, warps) for rows, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16)))
_POINTWISE = tuple(Config(1, n, warps) for n, warps in ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)))


def wanted_variants(target: Target, only: tuple[str, ...]) -> list[Variant]:
    """Every binary that the cases of the ops `only`, or of all, launch; the candidates first."""
    makers = {
        "search": _search_wanted,
        "topk": _topk_wanted,
        "reduce": _reduce_wanted,
        "normalize": _normalize_wanted,
        "pointwise": _pointwise_wanted,
    }
    found: list[Variant] = []
    for op, make in makers.items():
        if not only or op in only:
            found += make(target)
    return list(dict.fromkeys(found))


def _usual(op: str, target: Target) -> list[Variant]:
    """The binaries of an op, but for float16, which no case has."""
    listed = kernel_op(op).variants(target)
    return [variant for variant in listed if not any("fp16" in kind for _, kind in variant.signature)]


def _search_wanted(target: Target) -> list[Variant]:
    found = []
    for (k, _), configs in SEARCH.items():
        problem = search_configs.Problem(1, 1, k, 10, "bfloat16")
        for config in configs:
            grouped = replace(config, group=search_configs.group_for(replace(problem, n=1 << 20), config))
            found += [product_variant(problem, grouped, target)]
            found += [score_variant(problem, grouped, target)]
    listed = _usual("search", target)
    tf32 = [variant for variant in listed if dict(variant.constants).get("PRECISION") in ("tf32", "tf32x3")]
    return [*found, *(variant for variant in listed if variant not in tf32)]


def _topk_wanted(target: Target) -> list[Variant]:
    found: list[Variant] = []
    for config in _topk_candidates(target):
        found += built("float32", config, target).values()
        found += [select_variant(block, False, target) for block in config.select]
    return [*found, *_usual("topk", target)]


def _topk_candidates(target: Target) -> list[topk_configs.Config]:
    chosen = topk_configs.choose(topk_configs.Problem(64, 1_000_000, 10, "float32"), target)
    wide = topk_configs.Block(4096, 4)
    found = [
        replace(chosen, groups=block, group=group, finish=wide if group > chosen.group else chosen.finish)
        for block, group in _TOPK_BLOCKS
    ]
    return found + [replace(chosen, select=(block,)) for block in _TOPK_SELECT]


def _reduce_wanted(target: Target) -> list[Variant]:
    found = []
    for config, state in itertools.product(_REDUCE, reduce_configs.STATES):
        problem = reduce_configs.Problem(64, 64, 1_000_000, "float32", state)
        found.append(build_reduce(problem, config, target))
    for config in _COLUMNS:
        problem = reduce_configs.Problem(64, 64, 64, "float32", 0, is_row=False)
        found.append(build_reduce(problem, config, target))
    return [*found, *_usual("reduce", target)]


def _normalize_wanted(target: Target) -> list[Variant]:
    problem = normalize_op.Problem(8192, 4096, "bfloat16", "bfloat16", "bfloat16")
    found = [normalize_variant(problem, config, target) for config in _NORMALIZE]
    return [*found, *_usual("normalize", target)]


def _pointwise_wanted(target: Target) -> list[Variant]:
    found = []
    for config, dtype, is_binary in itertools.product(_POINTWISE, _DTYPES, (True, False)):
        problem = pointwise_op.Problem(1, 1 << 26, dtype, dtype, is_binary=is_binary)
        found.append(build_pointwise(problem.specialization, config, target))
    return [*found, *_usual("pointwise", target)]


def random(shape: tuple[int, ...], dtype: str = "float32", seed: int = 1) -> torch.Tensor:
    """Normal values on the device; for int8 spread over its range."""
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    values = torch.randn(shape, generator=generator, device=DEVICE)
    return (values * 40).clamp(-128, 127).to(torch.int8) if dtype == "int8" else values.to(getattr(torch, dtype))


def whole(shape: tuple[int, ...], dtype: str = "float32", most: int = 4) -> torch.Tensor:
    """Small whole numbers on the device, whose sums are exact and which tie often."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randint(-most, most + 1, shape, generator=generator, device=DEVICE).to(getattr(torch, dtype))


def nasty(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros of both signs, infinities and NaN here and there, and rows full of them."""
    flat = x.view(-1)
    for step, value in ((101, 0.0), (103, -0.0), (997, INF), (1009, -INF)):
        flat[::step] = value
    if x.shape[0] > 3:
        x[1, x.shape[1] // 2] = NAN
        x[2] = -INF
        x[3] = NAN
    return x


def verdict(got: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> Row:
    """Whether `got` is near `expected`, with the largest error."""
    got, expected = got.double(), expected.double()
    is_near = torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    gap = (got - expected).abs().nan_to_num(0, 0, 0).max().item() if got.numel() else 0.0
    return {"is_right": bool(is_near.all()), "detail": f"max error {gap:.3g}, off {int((~is_near).sum())}"}


def check_topk(rows: int, n: int, k: int, dtype: str, *, largest: bool, is_nasty: bool) -> Row:
    """Top-k against a stable sort, bit for bit."""
    x = random((rows, n), dtype)
    x = nasty(x) if is_nasty else x
    values, indices = topk_op.topk(x, k, largest=largest)
    expected, order = topk_reference(x, k, largest=largest)
    is_right = torch.equal(indices, order) and bool(
        torch.isclose(values, expected, equal_nan=True, rtol=0, atol=0).all()
    )
    return {"is_right": is_right, "detail": f"{int((indices != order).sum())} of {order.numel()} indices differ"}


def check_search(m: int, n: int, k: int, best: int, dtype: str, metric: str, *, has_bias: bool, exact: bool) -> Row:
    """Search against float64: bit for bit on whole numbers, else by what the items found are worth."""
    a, b = (whole((size, k), dtype) if exact else random((size, k), dtype) for size in (m, n))
    b[n // 3] = 0
    b[n // 2 : n // 2 + 7] = b[5]
    if exact and dtype != "int8" and k > 0:
        b[11, 0] = NAN
    bias = None
    if has_bias:
        bias = whole((n,), "float32", 9)
        bias[::3] = INF if metric == "l2" else -INF
    values, indices = search_op.search(a, b, best, metric=metric, bias=bias)
    is_int = dtype == "int8" and metric == "dot"
    row: Row = {}
    off = 0
    gap = 0.0
    for first in range(0, m, 16):
        part = slice(first, first + 16)
        expected, order = search_reference(a[part], b, best, metric=metric, bias=bias)
        gap = max(gap, (values[part].double() - expected).abs().nan_to_num(0, 0, 0).max().item())
        if exact and (metric != "cosine" or is_int):
            off += int((indices[part] != order).sum())
    tolerance = 2e-6 * (k if metric != "cosine" else 1) * (4 if metric == "l2" else 1)
    tolerance *= 128**2 if dtype == "int8" and metric != "cosine" else 1
    row["is_right"] = off == 0 and gap <= (0 if exact and metric != "cosine" else tolerance)
    row["detail"] = f"{off} of {m * best} indices differ, scores by {gap:.3g}"
    return row


def check_reduce(shape: tuple[int, ...], axis: int | None, kind: str, dtype: str) -> Row:
    """Reductions of random and of hostile input against float64."""
    x = random(shape, dtype)
    found = []
    for tensor in (x, nasty(x.clone())):
        out_dtype = None if reduce_configs.KINDS[kind].is_index else torch.float32
        got = reduce_op.reduce(tensor, kind, axis=axis, out_dtype=out_dtype)
        found.append(verdict(got, reduce_reference(tensor, kind, axis=axis), 1e-5, 1e-3))
    return {"is_right": all(each["is_right"] for each in found), "detail": "; ".join(each["detail"] for each in found)}


def check_normalize(rows: int, n: int, kind: str, dtype: str) -> Row:
    """A normalisation with weight and bias against float64."""
    x, weight, bias = random((rows, n), dtype) + 1, random((n,), dtype, 2), random((n,), dtype, 3)
    got = normalize_op.normalize(x, kind, weight=weight, bias=bias, out_dtype=torch.float32)
    eps = normalize_op.KINDS[kind]
    return verdict(got, normalize_reference(x, kind, eps, weight=weight, bias=bias), 2e-5, 2e-5)


def check_pointwise(fn: str, dtype: str) -> Row:
    """A function of random and of hostile input against float64."""
    x = nasty(random((1000, 1003), dtype) * 8)
    y = None if fn in pointwise_op.UNARY else nasty(random((1000, 1003), dtype).flip(0).contiguous())
    got = pointwise_op.pointwise(x, fn, y=y, scale=2.0, shift=-0.5, out_dtype=torch.float32)
    expected = pointwise_reference(x, fn, y=y, scale=2.0, shift=-0.5)
    return verdict(got, expected.float(), 3e-6, 3e-6)


def _search_checks() -> Iterator[tuple[int, int, int, int, str, str, bool, bool]]:
    """Queries, items, elements, k, dtype, metric, whether there is a bias, whether the numbers are whole."""
    flags = (True, False)
    for m in (1, 16, 17, 64, 200, 300):
        yield m, 100_000, 768, 10, "bfloat16", "dot", False, True
    for m in (1, 16, 64, 256):
        yield m, 200_003, 128, 10, "bfloat16", "dot", False, True
    for metric, has_bias in itertools.product(("dot", "cosine", "l2"), flags):
        yield 20, 50_000, 128, 10, "bfloat16", metric, has_bias, True
    for best in (64, 100, 1000):
        yield 70, 50_000, 768, best, "bfloat16", "dot", True, True
    yield 3, 12, 16, 10, "bfloat16", "dot", False, True
    yield 3, 5000, 0, 4, "float32", "dot", True, True
    for m in (3, 70):
        yield m, 50_000, 100, 10, "bfloat16", "dot", False, True
        for metric in ("dot", "l2"):
            yield m, 50_000, 131, 10, "bfloat16", metric, True, True
        for metric, exact in itertools.product(("dot", "l2"), flags):
            yield m, 50_000, 256, 10, "float32", metric, False, exact
        for metric, exact in itertools.product(("dot", "cosine"), flags):
            yield m, 50_000, 256, 10, "int8", metric, False, exact
        for metric in ("dot", "cosine", "l2"):
            yield m, 50_000, 768, 10, "bfloat16", metric, False, False


def _checks() -> Iterator[Check]:
    for rows, n, k, dtype in (
        (64, 1_000_000, 10, "float32"),
        (5, 1_000_003, 16, "float32"),
        (7, 100_003, 64, "bfloat16"),
        (300, 4096, 10, "float32"),
        (33, 50_257, 1, "bfloat16"),
        (5, 300_000, 1000, "float32"),
        (4, 5_000_000, 256, "float32"),
        (1000, 33, 7, "bfloat16"),
        (50, 900, 200, "float32"),
        (9, 4000, 1024, "float32"),
    ):
        for largest, is_nasty in ((True, False), (True, True), (False, True)):
            name = f"{rows}x{n} k={k} {dtype} {'largest' if largest else 'smallest'}{' nasty' if is_nasty else ''}"
            yield "topk", name, functools.partial(check_topk, rows, n, k, dtype, largest=largest, is_nasty=is_nasty)
    for m, n, k, best, dtype, metric, has_bias, exact in _search_checks():
        name = f"{m}x{n}x{k} k={best} {dtype} {metric}{' bias' if has_bias else ''}{' exact' if exact else ''}"
        call = functools.partial(check_search, m, n, k, best, dtype, metric, has_bias=has_bias, exact=exact)
        yield "search", name, call
    for kind in reduce_configs.KINDS:
        for shape, axis, dtype in (
            ((64, 1_000_000), 1, "float32"),
            ((5, 1003), 1, "bfloat16"),
            ((3000, 40), 1, "float32"),
            ((4096, 4096), 0, "float32"),
            ((300, 77, 100), 1, "bfloat16"),
            ((100_001, 33), 0, "float32"),
            ((1000, 999), None, "float32"),
        ):
            yield (
                "reduce",
                f"{kind} {shape} axis {axis} {dtype}",
                functools.partial(check_reduce, shape, axis, kind, dtype),
            )
    for kind, (rows, n), dtype in itertools.product(
        normalize_op.KINDS, ((8192, 4096), (100, 33), (7, 5003), (3, 40_000), (50, 16_384)), _DTYPES
    ):
        yield "normalize", f"{kind} {rows}x{n} {dtype}", functools.partial(check_normalize, rows, n, kind, dtype)
    for fn, dtype in itertools.product((*pointwise_op.UNARY, *pointwise_op.BINARY), _DTYPES):
        yield "pointwise", f"{fn} {dtype}", functools.partial(check_pointwise, fn, dtype)


def _ignore(call: Callable[[], None], _index: int) -> None:
    """`call` for every operand set alike."""
    call()


def _contestant(make: Callable[[], Callable[[int], object]]) -> Any:
    """What `make` returns, or its error as text."""
    try:
        call = make()
        call(0)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a candidate that fails must not end the case
        return f"{type(error).__name__}: {error}"
    return call


def time_search(m: int, n: int, k: int) -> tuple[dict[str, Any], float]:
    """One search: chosen blocks, each of its launches, candidates, a plain read, and PyTorch's product with its topk."""
    a, b = random((m, k), "bfloat16"), torch.empty((n, k), dtype=torch.bfloat16, device=DEVICE)
    for first in range(0, n, 1 << 20):
        b[first : first + (1 << 20)].normal_()
    values, indices = torch.empty((m, 10), device=DEVICE), torch.empty((m, 10), dtype=torch.int64, device=DEVICE)
    tensors = (a, b, None, None, values, indices)

    def launch(config: search_configs.Config | None) -> Callable[[int], object]:
        prepared = search_op.prepare(a, b, 10, metric="dot", bias=None, config=config)
        return lambda _: prepared(*tensors)

    found = {"chosen": _contestant(lambda: launch(None))}
    (pipeline,) = search_op.prepare(a, b, 10, metric="dot", bias=None).inner
    for number, step in enumerate(pipeline.single_steps(*tensors) if isinstance(pipeline, Pipeline) else ()):
        found[f"chosen, launch {number}"] = functools.partial(_ignore, step)
    key = (768 if k > 256 else 128, 1 if m <= 16 else 64 if m <= 64 else 256)
    problem = search_configs.Problem(m, n, k, 10, "bfloat16")
    for config in SEARCH[key]:
        grouped = replace(config, group=search_configs.group_for(problem, config))
        found[f"{grouped}"[7:-1]] = _contestant(functools.partial(launch, grouped))
    scores = torch.empty((m, n), dtype=torch.bfloat16, device=DEVICE)

    def theirs(_: int) -> None:
        torch.mm(a, b.mT, out=scores)
        torch.topk(scores, 10)

    found["torch.mm + topk"] = _contestant(lambda: theirs)
    found["torch.mm"] = _contestant(lambda: lambda _: torch.mm(a, b.mT, out=scores))
    return found, float(n * k * 2)


def time_topk(rows: int, n: int, k: int, dtype: str) -> tuple[dict[str, Any], float]:
    """One top-k: chosen blocks, each of its launches, PyTorch, and for the headline shape candidates."""
    x = random((rows, n), dtype)
    values = torch.empty((rows, k), dtype=x.dtype, device=DEVICE)
    indices = torch.empty((rows, k), dtype=torch.int64, device=DEVICE)

    def launch(config: topk_configs.Config | None) -> Callable[[int], object]:
        prepared = topk_op.prepare(x, values, indices, axis=1, largest=True, config=config)
        return lambda _: prepared(x, values, indices)

    found = {"chosen": _contestant(lambda: launch(None)), "torch": lambda _: torch.topk(x, k)}
    prepared = topk_op.prepare(x, values, indices, axis=1, largest=True)
    steps = prepared.single_steps(x, values, indices) if isinstance(prepared, Pipeline) else ()
    for number, step in enumerate(steps):
        found[f"chosen, launch {number}"] = functools.partial(_ignore, step)
    if (rows, n, k) == (64, 1_000_000, 10):
        from tilewire.kernels.runtime.targets import current  # noqa: PLC0415 - needs the device

        for config in _topk_candidates(current(0)):
            name = f"groups {config.groups} of {config.group} select {config.select[-1]}"
            found[name] = _contestant(functools.partial(launch, config))
    return found, float(x.numel() * x.element_size())


def time_reduce(shape: tuple[int, ...], axis: int, kind: str, dtype: str) -> tuple[dict[str, Any], float]:
    """One reduction: chosen blocks, candidates for the headline shapes, PyTorch."""
    x = random(shape, dtype)
    rows = math.prod(shape) // shape[axis]
    out = torch.empty(rows, dtype=torch.int64 if "arg" in kind else x.dtype, device=DEVICE)

    def launch(config: reduce_configs.Config | None) -> Callable[[int], object]:
        prepared = reduce_op.prepare(x, out, kind=kind, axis=axis, config=config)
        return lambda _: prepared(x, out)

    theirs = {
        "sum": lambda _: torch.sum(x, axis),
        "mean": lambda _: torch.mean(x, axis),
        "max": lambda _: torch.amax(x, axis),
        "argmax": lambda _: torch.argmax(x, axis),
        "logsumexp": lambda _: torch.logsumexp(x, axis),
        "norm": lambda _: torch.linalg.vector_norm(x, 2, axis),
    }
    found: dict[str, Any] = {"chosen": _contestant(lambda: launch(None)), "torch": theirs[kind]}
    candidates: list[reduce_configs.Config] = []
    if shape == (64, 1_000_000):
        candidates = list(_REDUCE)
    elif shape == (4096, 4096) and axis == 0 and kind == "sum":
        problem = reduce_configs.Problem(4096, 4096, 4096, dtype, 0, is_row=False)
        candidates = [reduce_configs.share(problem, config, _target()) for config in _COLUMNS]
    for config in candidates:
        found[f"{config}"[7:-1]] = _contestant(functools.partial(launch, config))
    return found, float(x.numel() * x.element_size())


def _target() -> Target:
    from tilewire.kernels.runtime.targets import current  # noqa: PLC0415 - needs the device

    return current(0)


def time_normalize(rows: int, n: int, kind: str, dtype: str) -> tuple[dict[str, Any], float]:
    """One normalisation over operands beyond L2: chosen blocks, candidates, PyTorch."""
    sets = max(1, math.ceil(200e6 / (rows * n * 4)))
    xs = [random((rows, n), dtype, seed) for seed in range(sets)]
    outs = [torch.empty_like(x) for x in xs]
    weight, bias = random((n,), dtype, 2), random((n,), dtype, 3)
    shift = bias if kind == "layer" else None

    def launch(config: normalize_op.Config | None) -> Callable[[int], object]:
        prepared = normalize_op.prepare(xs[0], outs[0], kind, 1e-5, weight, shift, 1, config)

        def call(_: int) -> None:
            for x, out in zip(xs, outs, strict=True):
                prepared(x, weight, shift, out)

        return call

    def theirs(_: int) -> None:
        for x in xs:
            if kind == "layer":
                torch.nn.functional.layer_norm(x, (n,), weight, bias, 1e-5)
            elif kind == "rms":
                torch.nn.functional.rms_norm(x, (n,), weight, 1e-5)
            else:
                torch.nn.functional.normalize(x, dim=1)

    found: dict[str, Any] = {"chosen": _contestant(lambda: launch(None)), "torch": theirs}
    if n == 4096 and dtype == "bfloat16":
        for config in _NORMALIZE:
            found[f"{config}"[7:-1]] = _contestant(functools.partial(launch, config))
    return found, 2.0 * sets * rows * n * xs[0].element_size()


def time_pointwise(fn: str, size: int, dtype: str) -> tuple[dict[str, Any], float]:
    """One function of large tensors: chosen blocks, candidates, PyTorch."""
    x, y, out = (random((size,), dtype, seed) for seed in range(3))
    other = y if fn in pointwise_op.BINARY else None

    def launch(config: Config | None) -> Callable[[int], object]:
        prepared = pointwise_op.prepare(x, other, out, fn, 1.0, 0.0, config)
        return lambda _: prepared(x, other, out)

    theirs = {
        "mul": lambda _: torch.mul(x, y, out=out),
        "exp": lambda _: torch.exp(x, out=out),
        "gelu": lambda _: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    found: dict[str, Any] = {"chosen": _contestant(lambda: launch(None)), "torch": theirs[fn]}
    for config in _POINTWISE:
        found[f"{config}"[7:-1]] = _contestant(functools.partial(launch, config))
    return found, float((3 if other is not None else 2) * size * x.element_size())


def _timings() -> Iterator[Timing]:
    for m in (1, 16, 64, 256):
        yield "search", f"{m} x 1,000,000 x 768", functools.partial(time_search, m, 1_000_000, 768)
    yield "topk", "64 x 1,000,000 k=10 float32", functools.partial(time_topk, 64, 1_000_000, 10, "float32")
    for kind in ("sum", "argmax", "logsumexp"):
        call = functools.partial(time_reduce, (64, 1_000_000), 1, kind, "float32")
        yield "reduce", f"{kind} 64 x 1,000,000 float32", call
    for kind in ("layer", "rms"):
        yield (
            "normalize",
            f"{kind} 8192 x 4096 bfloat16",
            functools.partial(time_normalize, 8192, 4096, kind, "bfloat16"),
        )
    for m in (1, 16, 64, 256):
        yield "search", f"{m} x 10,000,000 x 128", functools.partial(time_search, m, 10_000_000, 128)
    for rows, n, k, dtype in (
        (4096, 1000, 5, "float32"),
        (8192, 4096, 8, "bfloat16"),
        (1024, 50_257, 50, "bfloat16"),
        (16, 131_072, 100, "float32"),
        (1, 10_000_000, 10, "float32"),
        (100_000, 40, 3, "float32"),
        (256, 20_000, 1000, "float32"),
    ):
        yield "topk", f"{rows} x {n} k={k} {dtype}", functools.partial(time_topk, rows, n, k, dtype)
    for shape, axis, kind, dtype in (
        ((4096, 4096), 0, "sum", "float32"),
        ((4096, 4096), 0, "argmax", "float32"),
        ((256, 1000, 500), 1, "max", "bfloat16"),
        ((100_000, 100), 1, "mean", "float32"),
        ((8192, 4096), 1, "norm", "bfloat16"),
        ((1, 50_000_000), 1, "sum", "bfloat16"),
        ((500_000, 64), 0, "sum", "float32"),
        ((20_000, 3000), 1, "logsumexp", "bfloat16"),
    ):
        yield "reduce", f"{kind} {shape} axis {axis} {dtype}", functools.partial(time_reduce, shape, axis, kind, dtype)
    for kind, rows, n, dtype in (
        ("layer", 8192, 1024, "bfloat16"),
        ("rms", 2048, 8192, "bfloat16"),
        ("l2", 100_000, 768, "float32"),
        ("layer", 50_000, 128, "float32"),
        ("layer", 256, 50_000, "bfloat16"),
    ):
        yield "normalize", f"{kind} {rows} x {n} {dtype}", functools.partial(time_normalize, rows, n, kind, dtype)
    for fn, dtype in (("mul", "bfloat16"), ("mul", "float32"), ("gelu", "bfloat16"), ("exp", "float32")):
        yield "pointwise", f"{fn} 2^26 {dtype}", functools.partial(time_pointwise, fn, 1 << 26, dtype)


CHECKS = tuple(_checks())
TIMINGS = tuple(_timings())
