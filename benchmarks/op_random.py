"""Random cases of search, topk, reduce, normalize and pointwise beside PyTorch, for which nothing was tuned."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.op_cases import DEVICE
from benchmarks.op_cases import random as normal
from tilewire.kernels.autotune.measuring import sets_beyond_l2
from tilewire.kernels.normalize.op import KINDS as NORMALIZATIONS
from tilewire.kernels.normalize.op import normalize, prepare_normalize
from tilewire.kernels.op import log_uniform
from tilewire.kernels.pointwise.op import BINARY, UNARY, pointwise, prepare_pointwise
from tilewire.kernels.reduce.configs import KINDS as REDUCTIONS
from tilewire.kernels.reduce.op import prepare_reduce, reduce
from tilewire.kernels.search.op import item_norms, prepare_search, search
from tilewire.kernels.topk.op import prepare_topk, topk

MAX_ELEMENTS = 1 << 26
_MAX_SETS = 16
Call = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """One random case, not on the device yet.

    Attributes:
        op: Name of the op.
        name: The case in words.
        make: Contestants by name (`chosen` and `torch`), the number of their operand sets, and whether the public
            function gives what PyTorch gives.
    """

    op: str
    name: str
    make: Callable[[], tuple[Mapping[str, Call], int, Callable[[], bool]]]


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields `count` random cases of each op, in turns."""
    generator = random.Random(seed)
    for _ in range(count):
        for draw in (_topk, _reduce, _normalize, _search, _pointwise):
            yield draw(generator)


def _dtype(generator: random.Random) -> str:
    return generator.choice(["float32", "bfloat16"])


def _length(generator: random.Random, least: int, most: int) -> int:
    """A length; most are whole words."""
    length = log_uniform(generator, least, most)
    return length if generator.random() < 0.4 else max(least, length // 8 * 8)


def _topk(generator: random.Random) -> Case:
    n, dtype, largest = _length(generator, 8, 2_000_000), _dtype(generator), generator.random() < 0.7
    rows, k = log_uniform(generator, 1, max(1, MAX_ELEMENTS // n // 2)), log_uniform(generator, 1, min(n, 1024))
    return Case("topk", f"{rows} x {n} k={k} {dtype}", functools.partial(_make_topk, rows, n, k, dtype, largest))


def _sets(shape: tuple[int, ...], dtype: str) -> list[torch.Tensor]:
    item = 4 if dtype == "float32" else 2
    return [normal(shape, dtype, seed) for seed in range(sets_beyond_l2(math.prod(shape) * item, _MAX_SETS))]


def _make_topk(rows: int, n: int, k: int, dtype: str, largest: bool) -> Any:
    xs = _sets((rows, n), dtype)
    values, indices = (
        torch.empty_like(xs[0][:, :k].contiguous()),
        torch.empty((rows, k), dtype=torch.int64, device=DEVICE),
    )
    prepared = prepare_topk(xs[0], values, indices, largest=largest)

    def is_right() -> bool:
        ours, order = topk(xs[0], k, largest=largest)
        theirs = torch.topk(xs[0], k, largest=largest).values
        return torch.equal(ours, theirs) and torch.equal(xs[0].gather(1, order), theirs)

    found = {
        "chosen": lambda index: prepared(xs[index], values, indices),
        "torch": lambda index: torch.topk(xs[index], k, largest=largest),
    }
    return found, len(xs), is_right


def _reduce(generator: random.Random) -> Case:
    dtype, kind, lengths, room = _dtype(generator), generator.choice(list(REDUCTIONS)), [], MAX_ELEMENTS
    for _ in range(generator.randint(1, 3)):
        lengths.append(_length(generator, 1, min(room, 1 << 21)))
        room //= lengths[-1]
    generator.shuffle(lengths)
    axis = generator.choice([None, *range(len(lengths))])
    make = functools.partial(_make_reduce, tuple(lengths), axis, kind, dtype)
    return Case("reduce", f"{kind} {tuple(lengths)} axis {axis} {dtype}", make)


def torch_reduce(kind: str, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """PyTorch's reduction of a kind along one axis, or all."""
    dims = tuple(range(x.dim())) if axis is None else (axis,)
    if kind in ("argmax", "argmin"):
        found: torch.Tensor = getattr(torch, kind)(x, axis)
    elif kind == "norm":
        found = torch.linalg.vector_norm(x, 2, dims)
    else:
        found = {"max": torch.amax, "min": torch.amin}.get(kind, getattr(torch, kind))(x, dims)
    return found


def _make_reduce(shape: tuple[int, ...], axis: int | None, kind: str, dtype: str) -> Any:
    xs = _sets(shape, dtype)
    out = torch.empty_like(torch_reduce(kind, xs[0], axis))
    prepared = prepare_reduce(xs[0], out, kind=kind, axis=axis)

    def is_right() -> bool:
        ours, theirs = reduce(xs[0], kind, axis=axis), torch_reduce(kind, xs[0].double(), axis)
        if REDUCTIONS[kind].is_index:
            # Equal elements may have several places.
            flat = xs[0].view(-1) if axis is None else xs[0].movedim(axis, -1)
            return torch.equal(flat.gather(-1, ours.unsqueeze(-1)), flat.gather(-1, theirs.unsqueeze(-1)))
        rtol, atol = (1e-2, 1e-1) if dtype == "bfloat16" else (1e-4, 1e-2)
        return torch.allclose(ours.double(), theirs, rtol=rtol, atol=atol)

    calls = {
        "chosen": lambda index: prepared(xs[index], out),
        "torch": lambda index: torch_reduce(kind, xs[index], axis),
    }
    return calls, len(xs), is_right


def _normalize(generator: random.Random) -> Case:
    n, dtype, kind = _length(generator, 16, 1 << 16), _dtype(generator), generator.choice(list(NORMALIZATIONS))
    rows = log_uniform(generator, 1, max(1, MAX_ELEMENTS // n))
    return Case("normalize", f"{kind} {rows} x {n} {dtype}", functools.partial(_make_normalize, rows, n, kind, dtype))


def _make_normalize(rows: int, n: int, kind: str, dtype: str) -> Any:
    xs, weight = _sets((rows, n), dtype), None if kind == "l2" else normal((n,), dtype, 2)
    bias = normal((n,), dtype, 3) if kind == "layer" else None
    out = torch.empty_like(xs[0])
    prepared = prepare_normalize(xs[0], out, kind=kind, weight=weight, bias=bias, eps=1e-5)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return torch_normalize(kind, x, 1e-5, *(None if one is None else one.to(x.dtype) for one in (weight, bias)))

    def is_right() -> bool:
        ours = normalize(xs[0], kind, weight=weight, bias=bias, eps=1e-5)
        tolerance = 3e-2 if dtype == "bfloat16" else 1e-4
        return torch.allclose(ours.double(), theirs(xs[0].double()), rtol=tolerance, atol=tolerance)

    found = {"chosen": lambda index: prepared(xs[index], weight, bias, out), "torch": lambda index: theirs(xs[index])}
    return found, len(xs), is_right


def torch_normalize(
    kind: str, x: torch.Tensor, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """PyTorch's normalisation of a kind along the last axis."""
    if kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if kind == "rms":
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)


def _search(generator: random.Random) -> Case:
    k, m, best = _length(generator, 16, 1536), log_uniform(generator, 1, 256), log_uniform(generator, 1, 128)
    n = log_uniform(generator, 1000, min(2_000_000, (1 << 30) // k))
    dtype, metric = _dtype(generator), generator.choice(["dot", "cosine", "l2"])
    make = functools.partial(_make_search, m, n, k, min(best, n), dtype, metric)
    return Case("search", f"{metric} {m} x {n} x {k} k={min(best, n)} {dtype}", make)


def _make_search(m: int, n: int, k: int, best: int, dtype: str, metric: str) -> Any:
    sets = sets_beyond_l2(n * k * 2, 4)
    # Rows start at multiples of 16 bytes, as those of uploads do.
    stride = -(-k // 8) * 8
    a, bs = normal((m, stride), dtype)[:, :k], [normal((n, stride), dtype, seed)[:, :k] for seed in range(sets)]
    values, indices = torch.empty((m, best), device=DEVICE), torch.empty((m, best), dtype=torch.int64, device=DEVICE)
    prepared = prepare_search(a, bs[0], values, indices, metric=metric)
    norms = [None if metric == "dot" else item_norms(b, metric) for b in bs]
    squares = [(b.float() ** 2).sum(1) for b in bs]
    inverse = [square.rsqrt() for square in squares]

    def scores(b: torch.Tensor, index: int) -> torch.Tensor:
        product = torch.mm(a, b.mT)
        if metric == "cosine":
            return product * inverse[index]
        return product if metric == "dot" else product * 2 - squares[index]

    def is_right() -> bool:
        ours, order = search(a, bs[0], best, metric=metric)
        found = bs[0].double()[order]
        query = a.double()[:, None, :]
        exact = (found - query).square().sum(-1) if metric == "l2" else (found * query).sum(-1)
        if metric == "cosine":
            exact /= found.norm(dim=-1) * query.norm(dim=-1)
        theirs = torch.topk(scores(bs[0].float(), 0) if dtype == "float32" else scores(bs[0], 0).float(), best).indices
        overlap = (order[:, :, None] == theirs[:, None, :]).any(-1).float().mean().item()
        return torch.allclose(ours.double(), exact, rtol=1e-4, atol=1e-3 * k**0.5) and overlap > 0.7

    found = {
        "chosen": lambda index: prepared(a, bs[index], norms[index], None, values, indices),
        "torch": lambda index: torch.topk(scores(bs[index], index), best),
    }
    return found, sets, is_right


def _pointwise(generator: random.Random) -> Case:
    fn, dtype = generator.choice([*UNARY, *BINARY]), _dtype(generator)
    rows, n = log_uniform(generator, 1, 4096), _length(generator, 1, 8192)
    is_row = fn in BINARY and generator.random() < 0.5
    name = f"{fn} {(rows, n)}{' by a row' if is_row else ''} {dtype}"
    return Case("pointwise", name, functools.partial(_make_pointwise, fn, rows, n, is_row, dtype))


_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def torch_pointwise(fn: str) -> Callable[..., torch.Tensor]:
    """PyTorch's function of a name of `pointwise`."""
    found: Callable[..., torch.Tensor] = _TORCH.get(fn) or getattr(torch, fn)
    return found


def _make_pointwise(fn: str, rows: int, n: int, is_row: bool, dtype: str) -> Any:
    xs = [x.abs() + 0.5 if fn in ("log", "sqrt", "rsqrt") else x for x in _sets((rows, n), dtype)]
    y = None
    if fn in BINARY:
        y = normal((n,) if is_row else (rows, n), dtype, 99).abs() + 0.5
    out, theirs = torch.empty_like(xs[0]), torch_pointwise(fn)
    operands = () if y is None else (y,)
    prepared = prepare_pointwise(xs[0], out, fn=fn, y=y)

    def is_right() -> bool:
        expected = theirs(xs[0].double(), *(other.double() for other in operands))
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-4
        return torch.allclose(pointwise(xs[0], fn, y=y).double(), expected, rtol=tolerance, atol=tolerance)

    found = {"chosen": lambda index: prepared(xs[index], y, out), "torch": lambda index: theirs(xs[index], *operands)}
    return found, len(xs), is_right
