"""The cases of the kernel benchmark: what is multiplied, by whom, over how many operand sets. Measures nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.plain_read import read
from tilewire.kernels import prepare_add, prepare_matmul, prepare_softmax
from tilewire.kernels.autotune.measuring import Call, sets_beyond_l2
from tilewire.kernels.build.operands import random_operand
from tilewire.kernels.matmul.grouped.op import GroupedLaunch
from tilewire.kernels.runtime.layouts import lay_out, preferred_layout

OURS, THEIRS = "tilewire", "torch"
LARGE = ((2048,) * 3, (4096,) * 3, (8192,) * 3, (4864, 4096, 4096), (4864, 4096, 8192), (9728, 8192, 65536))
SMALL = ((320,) * 3, (512,) * 3, (1024,) * 3, (1024, 1024, 4096), (128, 128, 16384))
UNALIGNED = ((1823, 781, 1000), (127, 255, 511), (4096, 4096, 65), (1000, 1000, 1000))
ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@dataclass
class Case:
    """One row of the table.

    Attributes:
        group: the geomean that it counts in.
        shape: (m, n, k), or (rows, n).
        dtype: name of the inputs' dtype.
        layout: `nn`, `nt`, or how else operands lie.
        flops: of one call; 0 where bytes count.
        num_bytes: each operand read once, the output written once.
        contestants: by name; `OURS` and `THEIRS` at least.
        num_sets: operand sets.
    """

    group: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    flops: float
    num_bytes: float
    contestants: dict[str, Call]
    num_sets: int = 1


Make = Callable[[], Case]


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(20261121)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def product(group: str, shape: tuple[int, int, int], dtype: torch.dtype, layout: str, *, is_cold: bool = False) -> Case:
    """A plain 16-bit product; `is_cold` rotates operands past L2."""
    m, n, k = shape
    generator = _generator()
    num_bytes = (m * k + k * n + m * n) * dtype.itemsize
    num_sets = sets_beyond_l2(num_bytes, 16) if is_cold else 1
    a = [random_operand((m, k), dtype, generator) for _ in range(num_sets)]
    b = [random_operand((n, k) if layout == "nt" else (k, n), dtype, generator) for _ in range(num_sets)]
    b = [tensor.mT if layout == "nt" else tensor for tensor in b]
    out = [torch.empty((m, n), dtype=dtype, device="cuda") for _ in range(num_sets)]
    ours = prepare_matmul(a[0], b[0], out[0])
    contestants: dict[str, Call] = {
        OURS: lambda i: ours(a[i], b[i], out[i]),
        THEIRS: lambda i: torch.mm(a[i], b[i], out=out[i]),
    }
    if is_cold:
        contestants["read"] = lambda i: read(b[i].mT if layout == "nt" else b[i])
    return Case(group, shape, _name(dtype), layout, 2.0 * m * n * k, num_bytes, contestants, num_sets)


def unaligned(shape: tuple[int, int, int]) -> Case:
    """Odd sizes: the service pads rows to 16 bytes while staging, torch gets them as they come."""
    m, n, k = shape
    generator = _generator()
    odd = 1 if shape == (1000, 1000, 1000) else 0
    a = random_operand((m, k + odd), torch.bfloat16, generator)[:, :k]
    b = random_operand((k, n + odd), torch.bfloat16, generator)[:, :n]
    staged_a, staged_b = (lay_out(tensor, preferred_layout("matmul", "a", "bfloat16")) for tensor in (a, b))
    out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    staged_out = lay_out(out, preferred_layout("matmul", "out", "bfloat16"))
    ours = prepare_matmul(staged_a, staged_b, staged_out)
    contestants: dict[str, Call] = {
        OURS: lambda _: ours(staged_a, staged_b, staged_out),
        THEIRS: lambda _: torch.mm(a, b, out=out),
    }
    num_bytes = (m * k + k * n + m * n) * 2
    return Case("unaligned", shape, "bfloat16", "padded", 2.0 * m * n * k, num_bytes, contestants)


def full(group: str, size: int, precision: str) -> Case:
    """A square float32 product."""
    generator = _generator()
    a, b = (random_operand((size, size), torch.float32, generator) for _ in range(2))
    placed = lay_out(b, preferred_layout("matmul", "b", "float32", precision))
    out = torch.empty_like(a)
    ours = prepare_matmul(a, placed, out, precision=precision)
    contestants: dict[str, Call] = {OURS: lambda _: ours(a, placed, out), THEIRS: _torch_full(a, b, out, precision)}
    layout = "nt" if placed.stride(0) == 1 else "nn"
    return Case(group, (size,) * 3, f"float32 {precision}", layout, 2.0 * size**3, 12.0 * size**2, contestants)


def _torch_full(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str) -> Call:
    def call(_: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.mm(a, b, out=out)
        torch.backends.cuda.matmul.allow_tf32 = False

    return call


def narrow(shape: tuple[int, int, int], dtype: torch.dtype, *, is_cold: bool = False) -> Case:
    """An 8-bit product, `b` K-major, against the vendor library at the same accuracy of accumulation."""
    m, n, k = shape
    generator = _generator()
    num_bytes = m * k + k * n + m * n * (4 if dtype == torch.int8 else 2)
    num_sets = sets_beyond_l2(num_bytes, 16) if is_cold else 1
    a = [random_operand((m, k), dtype, generator) for _ in range(num_sets)]
    b = [random_operand((n, k), dtype, generator).mT for _ in range(num_sets)]
    out_dtype = torch.int32 if dtype == torch.int8 else torch.bfloat16
    out = [torch.empty((m, n), dtype=out_dtype, device="cuda") for _ in range(num_sets)]
    ours = prepare_matmul(a[0], b[0], out[0])
    contestants: dict[str, Call] = {OURS: lambda i: ours(a[i], b[i], out[i])}
    if dtype == torch.int8:
        # The vendor's needs more than 16 rows.
        taller = [torch.nn.functional.pad(each, (0, 0, 0, max(0, 17 - m))) for each in a]
        contestants[THEIRS] = lambda i: torch._int_mm(taller[i], b[i])
    else:
        one = torch.ones((), device="cuda")
        contestants[THEIRS] = lambda i: torch._scaled_mm(a[i], b[i], one, one, out_dtype=out_dtype)
    return Case(_name(dtype), shape, _name(dtype), "nt", 2.0 * m * n * k, num_bytes, contestants, num_sets)


def epilogue(shape: tuple[int, int, int], activation: str, *, is_cold: bool) -> Case:
    """Bias and activation fused, against our plain product and against separate torch ops."""
    m, n, k = shape
    generator = _generator()
    num_sets = sets_beyond_l2((m * k + k * n + m * n) * 2, 16) if is_cold else 1
    a = [random_operand((m, k), torch.bfloat16, generator) for _ in range(num_sets)]
    b = [random_operand((k, n), torch.bfloat16, generator) for _ in range(num_sets)]
    bias = random_operand((n,), torch.bfloat16, generator)
    out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    ours = prepare_matmul(a[0], b[0], out, bias=bias, activation=activation)
    plain = prepare_matmul(a[0], b[0], out)
    contestants: dict[str, Call] = {
        OURS: lambda i: ours(a[i], b[i], out, bias),
        THEIRS: lambda i: ACTIVATE[activation](torch.mm(a[i], b[i]) + bias),
        "plain": lambda i: plain(a[i], b[i], out),
    }
    num_bytes = (m * k + k * n + m * n) * 2
    return Case("epilogues", shape, "bfloat16", activation, 2.0 * m * n * k, num_bytes, contestants, num_sets)


def batched(batch: int, shape: tuple[int, int, int]) -> Case:
    """Independent products of one shape."""
    m, n, k = shape
    generator = _generator()
    a, b = (random_operand((batch, *s), torch.bfloat16, generator) for s in ((m, k), (k, n)))
    out = torch.empty((batch, m, n), dtype=torch.bfloat16, device="cuda")
    ours = prepare_matmul(a, b, out)
    contestants: dict[str, Call] = {
        OURS: lambda _: ours(a, b, out),
        THEIRS: lambda _: torch.bmm(a, b, out=out),
    }
    num_bytes = batch * (m * k + k * n + m * n) * 2
    return Case("batched", (batch, *shape), "bfloat16", "nn", 2.0 * batch * m * n * k, num_bytes, contestants)


def grouped(largest: int) -> Case:
    """64 products of unequal shape, in one launch, against a loop."""
    generator = _generator()
    sizes = torch.randint(2, largest // 8, (64, 3), generator=generator, device="cuda").mul(8).tolist()
    a = [random_operand((m, k), torch.bfloat16, generator) for m, _, k in sizes]
    b = [random_operand((k, n), torch.bfloat16, generator) for _, n, k in sizes]
    out = [torch.empty((m, n), dtype=torch.bfloat16, device="cuda") for m, n, _ in sizes]
    ours = GroupedLaunch(a, b, out, [None] * 64)

    def loop(_: int) -> None:
        for left, right, to in zip(a, b, out, strict=True):
            torch.mm(left, right, out=to)

    flops = sum(2.0 * m * n * k for m, n, k in sizes)
    num_bytes = sum((m * k + k * n + m * n) * 2 for m, n, k in sizes)
    return Case("grouped", (64, largest), "bfloat16", "nn", flops, num_bytes, {OURS: lambda _: ours(), THEIRS: loop})


def softmax(rows: int, n: int, dtype: torch.dtype) -> Case:
    """Softmax over the last dimension."""
    generator = _generator()
    num_bytes = 2 * rows * n * dtype.itemsize
    num_sets = sets_beyond_l2(num_bytes, 4)
    x = [random_operand((rows, n), dtype, generator) for _ in range(num_sets)]
    out = [torch.empty_like(each) for each in x]
    ours = prepare_softmax(x[0], out[0])
    contestants: dict[str, Call] = {
        OURS: lambda i: ours(x[i], out[i]),
        THEIRS: lambda i: torch._softmax(x[i], -1, False, out=out[i]),
    }
    return Case(f"softmax {_name(dtype)}", (rows, n), _name(dtype), "rows", 0.0, num_bytes, contestants, num_sets)


def add(rows: int, n: int, dtype: torch.dtype) -> Case:
    """Elementwise with one row; with more, a row vector broadcast over them."""
    generator = _generator()
    b_shape = (n,) if rows > 1 else (rows, n)
    num_bytes = (2 * rows * n + (n if rows > 1 else rows * n)) * dtype.itemsize
    num_sets = sets_beyond_l2(num_bytes, 16)
    a = [random_operand((rows, n), dtype, generator) for _ in range(num_sets)]
    b = [random_operand(b_shape, dtype, generator) for _ in range(num_sets)]
    out = [torch.empty_like(each) for each in a]
    ours = prepare_add(a[0], b[0], out[0])
    contestants: dict[str, Call] = {
        OURS: lambda i: ours(a[i], b[i], out[i]),
        THEIRS: lambda i: torch.add(a[i], b[i], out=out[i]),
    }
    layout = "row vector" if rows > 1 else "flat"
    return Case(f"add {_name(dtype)}", (rows, n), _name(dtype), layout, 0.0, num_bytes, contestants, num_sets)


def all_cases() -> Iterator[tuple[str, Make]]:
    """(group, what makes the case) for the whole table; operands exist only while their case is measured."""
    yield from _plain_products()
    yield from _other_arithmetic()
    yield from _special_products()
    yield from _memory_bound()


def _plain_products() -> Iterator[tuple[str, Make]]:
    half = torch.bfloat16
    for layout, dtype in (("nn", half), ("nt", half), ("nn", torch.float16)):
        for shape in LARGE:
            yield "large", partial(product, "large", shape, dtype, layout)
    for shape, dtype in itertools.product(SMALL, (half, torch.float16)):
        yield "small", partial(product, "small", shape, dtype, "nn")
    for shape in itertools.product((1, 4, 16, 64, 256), (4096, 14336, 11008), (4096, 14336, 11008)):
        yield "skinny", partial(product, "skinny", shape, half, "nn", is_cold=True)
    for shape in UNALIGNED:
        yield "unaligned", partial(unaligned, shape)


def _other_arithmetic() -> Iterator[tuple[str, Make]]:
    for precision, size in itertools.product(("tf32", "tf32x3", "ieee"), (1024, 4096, 8192)):
        yield f"fp32 {precision}", partial(full, f"fp32 {precision}", size, precision)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for size in (4096, 8192):
            yield _name(dtype), partial(narrow, (size, size, size), dtype)
        for m, n in ((16, 4096), (64, 4096), (16, 14336), (64, 14336)):
            yield _name(dtype), partial(narrow, (m, n, 4096), dtype, is_cold=True)


def _special_products() -> Iterator[tuple[str, Make]]:
    for activation in ACTIVATE:
        yield "epilogues", partial(epilogue, (4096, 4096, 4096), activation, is_cold=False)
        yield "epilogues", partial(epilogue, (16, 4096, 4096), activation, is_cold=True)
    for batch, size in ((64, 128), (256, 64), (32, 1024)):
        yield "batched", partial(batched, batch, (size, size, size))
    for largest in (256, 512):
        yield "grouped", partial(grouped, largest)


def _memory_bound() -> Iterator[tuple[str, Make]]:
    lengths = [*range(256, 12673, 128), 781, 16384, 32768, 65536, 131072]
    shapes = [*((4096, n) for n in lengths), (1823, 781), (1, 1 << 20)]
    additions = [*((1, 1 << power) for power in (12, 14, 16, 18, 20, 22, 24, 26, 27)), (16384, 4096)]
    for dtype in (torch.float32, torch.bfloat16):
        for rows, n in shapes:
            yield f"softmax {_name(dtype)}", partial(softmax, rows, n, dtype)
        for rows, n in additions:
            yield f"add {_name(dtype)}", partial(add, rows, n, dtype)
