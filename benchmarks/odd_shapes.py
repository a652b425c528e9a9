"""Random cases of odd shapes and strides, beside PyTorch: short axes, tiny batched products, vectors, views.

Shapes, strides and options come from Python's generator alone: a seed draws the same cases on every machine, and those of
an op are the same whichever other ops are drawn.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.op_random import torch_normalize, torch_pointwise, torch_reduce
from tilewire import kernels
from tilewire.kernels.normalize.op import KINDS as NORMALIZATIONS
from tilewire.kernels.op import log_uniform
from tilewire.kernels.pointwise.op import BINARY, UNARY
from tilewire.kernels.reduce.configs import KINDS as REDUCTIONS
from tilewire.kernels.reduce.op import reduce_reference

MAX_ELEMENTS = 1 << 25
FORMS = ("permuted", "shifted", "narrowed", "stepped", "expanded")
Call = Callable[..., torch.Tensor]
Shape = tuple[int, ...]
# Both relative and absolute; for sums of k products times √k.
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
_TF32_TOLERANCE = 1e-2
# Of rows of equal elements, `layer` scales what rounding leaves by 1/√eps.
_NORMALIZE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Operand:
    """A normal random tensor, not on the device yet.

    Attributes:
        shape: As the op sees it.
        dtype: Of the elements.
        form: How it lies in memory: `plain`, or one of `FORMS`.
        axes: For `permuted` the axes in the order of memory, for `expanded` the one of stride 0.
    """

    shape: Shape
    dtype: torch.dtype
    form: str = "plain"
    axes: Shape = ()

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """Returns the tensor, on the generator's device."""
        first, last = self.shape[0], self.shape[-1]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=generator.device).to(self.dtype)

        if self.form == "permuted":
            x = normal(*(self.shape[axis] for axis in self.axes))
            return x.permute([self.axes.index(axis) for axis in range(len(self.shape))])
        if self.form == "shifted":
            return normal(first + 1, *self.shape[1:])[1:]
        if self.form == "narrowed":
            return normal(*self.shape[:-1], last + 3)[..., 1:-2]
        if self.form == "stepped":
            return normal(*self.shape[:-1], last * 2)[..., ::2]
        stored = (1 if axis in self.axes else length for axis, length in enumerate(self.shape))
        return normal(*stored).expand(self.shape)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return shape if self.form == "plain" else f"{shape} {self.form}{','.join(map(str, self.axes))}"


@dataclass(frozen=True)
class Case:
    """One random case, not on the device yet.

    Attributes:
        op: Name of the op.
        name: The case in words.
        operands: What both sides are called with.
        ours: Tilewire's function of the operands.
        theirs: PyTorch's.
        tolerance: Largest difference from the expected result, relative and absolute.
        expected: The function of float64 operands that gives the expected result; `theirs` by default.
    """

    op: str
    name: str
    operands: tuple[Operand, ...]
    ours: Call
    theirs: Call
    tolerance: float
    expected: Call | None = None

    def tensors(self, device: str) -> tuple[torch.Tensor, ...]:
        """Returns the operands on `device`, the same ones at each call."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()))
        return tuple(operand.tensor(generator) for operand in self.operands)

    def is_right(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether our result is that of PyTorch in float64, rounded to our dtype."""
        ours = self.ours(*tensors)
        expected = (self.expected or self.theirs)(*(tensor.double() for tensor in tensors)).to(ours.dtype)
        if ours.shape != expected.shape:
            return False
        return torch.allclose(ours.double(), expected.double(), self.tolerance, self.tolerance, equal_nan=True)


def cases(seed: int, ops: Sequence[str], most: int = MAX_ELEMENTS) -> Iterator[Case]:
    """Yields cases without end, of each op in turns.

    Args:
        seed: Of the cases.
        ops: Names of ops, keys of `DRAWS`.
        most: About how many elements an operand or a result has at most, 1024 or more; of `search` the items have four
            times, the scores eight times as many.
    """
    generators = {op: random.Random(f"{seed} {op}") for op in ops}
    while True:
        for op, generator in generators.items():
            yield DRAWS[op](generator, most)


def _dtype(generator: random.Random) -> torch.dtype:
    return generator.choice(list(_TOLERANCE))


def _size(generator: random.Random, least: int, most: int) -> int:
    """A log-uniform size; many are powers of two or multiples of 16."""
    size = log_uniform(generator, least, most)
    if generator.random() < 0.4 and size > 8:
        size = 1 << round(math.log2(size))
    elif generator.random() < 0.3 and size > 32:
        size = size // 16 * 16
    return max(least, min(most, size))


def _shape(generator: random.Random, most: int) -> Shape:
    """One to four axes, most of them of very unlike lengths."""
    least = most // 64 if generator.random() < 0.7 else 16
    total = math.log(_size(generator, least, most))
    weights = [generator.random() ** 2 for _ in range(generator.randint(1, 4))]
    lengths = [max(1, round(math.exp(total * weight / sum(weights)))) for weight in weights]
    lengths = [n // 16 * 16 if n > 64 and generator.random() < 0.5 else n for n in lengths]
    generator.shuffle(lengths)
    return tuple(lengths)


def _operand(generator: random.Random, shape: Shape, dtype: torch.dtype) -> Operand:
    """An operand of any form, half of them plain."""
    axes, form = list(range(len(shape))), "plain"
    if generator.random() < 0.5:
        form = generator.choice(FORMS)
    if form in ("permuted", "expanded") and len(shape) == 1:
        form = "plain"
    if form == "permuted":
        generator.shuffle(axes)
        return Operand(shape, dtype, form, tuple(axes))
    return Operand(shape, dtype, form, (generator.randrange(len(shape) - 1),) if form == "expanded" else ())


def _case(op: str, words: str, operands: tuple[Operand, ...], ours: Call, theirs: Call, tolerance: float) -> Case:
    """The case whose name has `words`, the operands and their dtype."""
    dtype = str(operands[0].dtype).removeprefix("torch.")
    return Case(op, " ".join([words, *map(str, operands), dtype]).strip(), operands, ours, theirs, tolerance)


def _product(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    """PyTorch's product; float32 in `precision`."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return torch.matmul(a, b)


def _product_sizes(generator: random.Random, kind: str) -> Shape:
    """Batch, M, N and K of a kind of product."""
    size = functools.partial(_size, generator)
    if kind == "tiny":
        found = (size(2, 1 << 18), size(1, 300), size(1, 300), size(1, 300))
    elif kind == "vector":
        batch = generator.choice([1, 1, size(2, 512)])
        found = (batch, generator.choice([1, size(1, 8)]), size(64, 1 << 20), size(16, 1 << 15))
    elif kind == "outer":
        found = (1, size(256, 1 << 14), size(256, 1 << 14), size(1, 12))
    elif kind == "thin":
        found = (1, size(1 << 12, 1 << 21), size(1, 64), size(1, 512))
    elif kind == "strided":
        found = (generator.choice([1, size(2, 16)]), size(16, 4096), size(16, 4096), size(16, 4096))
    else:
        found = (size(2, 4096), size(1, 512), size(1, 512), size(1, 512))
    batch, m, n, k = found
    is_swapped = kind in ("vector", "thin") and generator.random() < 0.5
    return (batch, n, m, k) if is_swapped else (batch, m, n, k)


def _matrix(generator: random.Random, shape: Shape, dtype: torch.dtype, form: str) -> Operand:
    """An operand of a product: of any form, narrowed, plain, or often with its last two axes swapped in memory."""
    if form == "any":
        return _operand(generator, shape, dtype)
    if form != "transposed":
        return Operand(shape, dtype, form)
    axes = tuple(range(len(shape)))
    is_swapped = generator.random() < 0.6
    return Operand(shape, dtype, "permuted", (*axes[:-2], axes[-1], axes[-2])) if is_swapped else Operand(shape, dtype)


def _matmul(generator: random.Random, most: int) -> Case:
    dtype = _dtype(generator)
    while True:
        kind = generator.choice(["tiny", "tiny", "vector", "outer", "thin", "strided", "shared"])
        batch, m, n, k = _product_sizes(generator, kind)
        # At most 2^38 multiplications at the default size.
        if batch * max(m * n, m * k, n * k) < most and batch * m * n * k < most << 13:
            break
    shapes: list[Shape] = [(batch, m, k), (batch, k, n)] if batch > 1 else [(m, k), (k, n)]
    if kind == "shared":
        side = generator.randrange(2)
        shapes[side] = shapes[side][-2:]
    form = "any" if kind == "strided" else generator.choice(["plain", "plain", "transposed", "narrowed"])
    a, b = (_matrix(generator, shape, dtype, form) for shape in shapes)
    precision = "tf32" if dtype == torch.float32 and generator.random() < 0.5 else "ieee"
    tolerance = _TF32_TOLERANCE if precision == "tf32" else _TOLERANCE[dtype]
    ours = functools.partial(kernels.matmul, precision=precision)
    theirs = functools.partial(_product, precision=precision)
    return _case("matmul", f"{kind} {precision}", (a, b), ours, theirs, tolerance * math.sqrt(k))


def _pair(generator: random.Random, most: int) -> tuple[Operand, Operand]:
    """Two operands, the second of which often repeats along axes of the first, or lacks its first ones."""
    shape, dtype = _shape(generator, most), _dtype(generator)
    other = tuple(1 if generator.random() < 0.3 else length for length in shape)
    lacked = generator.randrange(len(shape)) if generator.random() < 0.2 else 0
    return _operand(generator, shape, dtype), _operand(generator, other[lacked:], dtype)


def _add(generator: random.Random, most: int) -> Case:
    operands = _pair(generator, most)
    return _case("add", "", operands, kernels.add, torch.add, _TOLERANCE[operands[0].dtype])


def _pointwise(generator: random.Random, most: int) -> Case:
    x, y = _pair(generator, most)
    operands: tuple[Operand, ...]
    ours: Call
    if generator.random() < 0.5:
        fn = generator.choice(list(BINARY))
        operands, ours = (x, y), lambda x, y: kernels.pointwise(x, fn, y=y)
    else:
        fn = generator.choice(list(UNARY))
        operands, ours = (x,), lambda x: kernels.pointwise(x, fn)
    return _case("pointwise", fn, operands, ours, torch_pointwise(fn), _TOLERANCE[x.dtype])


def _rows(generator: random.Random, most: int) -> tuple[Operand, int]:
    """An operand and one of its axes."""
    shape, dtype = _shape(generator, most), _dtype(generator)
    return _operand(generator, shape, dtype), generator.randrange(len(shape))


def _softmax(generator: random.Random, most: int) -> Case:
    x, axis = _rows(generator, most)
    ours, theirs = functools.partial(kernels.softmax, axis=axis), functools.partial(torch.softmax, dim=axis)
    return _case("softmax", f"axis {axis} of", (x,), ours, theirs, _TOLERANCE[x.dtype])


def _reduce(generator: random.Random, most: int) -> Case:
    x, drawn = _rows(generator, most)
    kind, axis = generator.choice(list(REDUCTIONS)), None if generator.random() < 0.2 else drawn
    length = math.prod(x.shape) if axis is None else x.shape[axis]
    ours = functools.partial(kernels.reduce, kind=kind, axis=axis)
    theirs = functools.partial(torch_reduce, kind, axis=axis)
    tolerance = 0 if REDUCTIONS[kind].is_index else _TOLERANCE[x.dtype]
    if kind == "sum":
        tolerance += 1e-5 * math.sqrt(length)
    # The first of equal elements gives our index, which PyTorch does not promise.
    expected = functools.partial(reduce_reference, kind=kind, axis=axis)
    return replace(_case("reduce", f"{kind} axis {axis} of", (x,), ours, theirs, tolerance), expected=expected)


def _normalize(generator: random.Random, most: int) -> Case:
    x, axis = _rows(generator, most)
    kind = generator.choice(list(NORMALIZATIONS))

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return torch_normalize(kind, x.movedim(axis, -1), NORMALIZATIONS[kind]).movedim(-1, axis)

    ours = functools.partial(kernels.normalize, kind=kind, axis=axis)
    tolerance = max(_TOLERANCE[x.dtype], _NORMALIZE_TOLERANCE)
    return _case("normalize", f"{kind} axis {axis} of", (x,), ours, theirs, tolerance)


def _topk(generator: random.Random, most: int) -> Case:
    x, axis = _rows(generator, most)
    k = min(x.shape[axis], generator.choice([1, 1, 5, 10, _size(generator, 1, 128), _size(generator, 1, 1024)]))
    return _case(
        "topk",
        f"k={k} axis {axis} of",
        (x,),
        lambda x: kernels.topk(x, k, axis=axis)[0],
        lambda x: torch.topk(x, k, dim=axis).values,
        0.0,
    )


def _search(generator: random.Random, most: int) -> Case:
    dtype = _dtype(generator)
    while True:
        m, n, k = _size(generator, 1, 1 << 20), _size(generator, 1, 1 << 21), _size(generator, 1, 1024)
        if m * n < most * 8 and m * k < most and n * k < most * 4:
            break
    best = min(n, generator.choice([1, 10, 10, _size(generator, 1, 1024)]))
    return _case(
        "search",
        f"k={best}",
        (Operand((m, k), dtype), Operand((n, k), dtype)),
        lambda a, b: kernels.search(a, b, best)[0],
        lambda a, b: torch.topk(_product(a, b.mT, "ieee"), best).values,
        _TOLERANCE[dtype] * math.sqrt(k),
    )


DRAWS: dict[str, Callable[[random.Random, int], Case]] = {
    "matmul": _matmul,
    "add": _add,
    "softmax": _softmax,
    "reduce": _reduce,
    "normalize": _normalize,
    "topk": _topk,
    "search": _search,
    "pointwise": _pointwise,
}
