"""Functions of each element: choice of blocks, binaries, the public function, and the self-test with its oracle."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from tilewire.kernels.build.operands import loose_operands, lying, numbers
from tilewire.kernels.op import SelfTest
from tilewire.kernels.pointwise.kernel import pointwise_kernel
from tilewire.kernels.runtime import elementwise
from tilewire.kernels.runtime.elementwise import (
    ALL_ACROSS,
    ALL_EACH,
    ALL_UNIT,
    REPEATS,
    Config,
    Specialization,
    choose_loose,
    loose_configs,
)
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, KINDS, name_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_each_aligned
from tilewire.kernels.runtime.pipeline import Detour, Prepared, single_entries
from tilewire.kernels.runtime.rows import check_dtype, check_pair
from tilewire.kernels.runtime.strides import broadcast_shapes
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.runtime.walks import elementwise_binary, programs_of, walk_of

# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────


# Functions by the numbers that the kernel is given.
UNARY = {
    "relu": 1,
    "gelu": 3,
    "silu": 4,
    "sigmoid": 5,
    "tanh": 6,
    "exp": 7,
    "log": 8,
    "sqrt": 9,
    "rsqrt": 10,
    "abs": 11,
    "neg": 12,
}
BINARY = {"mul": 0, "sub": 1, "div": 2, "maximum": 3, "minimum": 4}


class Problem(elementwise.Problem):
    """One pointwise function as the choice of blocks sees it."""

    @property
    def specialization(self) -> Specialization:
        """The specialization whose binaries compute this: the rarer a pattern, the fewer binaries are made for it."""
        is_typed = self.dtype == self.out_dtype
        is_flat = self.rows == 1 and self.inner == ALL_UNIT
        is_common = is_typed and (is_flat or (self.is_aligned and not self.is_short and self.inner in _COMMON))
        if not is_common:
            return Specialization(self.dtype, is_typed, False, self.loose, 3, self.is_binary)
        return Specialization(self.dtype, True, self.is_aligned, self.inner, 0 if is_flat else 3, self.is_binary)


_COMMON = (ALL_UNIT, *REPEATS)
# Blocks of pieces of 16 bytes by rising length of a row, and up to which length each is for (H200, `tilewire bench ops
# --random`).
_PIECES = ((511, Config(16, 64, 4)), (math.inf, Config(4, 256, 4)))
# Up to so many bytes a multiprocessor, blocks for few threads of a single row (H200, likewise).
_FEW_BYTES = 18 * 1024
# The block of four elements a thread, and the length from where on it is for: where a multiprocessor has so few elements
# that how long one thread takes decides (H200, likewise).
_FEWEST, _FEWEST_N, _FEWEST_PIECES = 2048, 96, Config(1, 256, 2)
# The block of more elements in so few rows that a higher one has none for its threads: 24 million float16 times one that
# repeats took 116 µs by the block above and 168 by a higher one, now 28 (PyTorch 57; H200).
_FEW_ROWS, _FEW_ROWS_PIECES = 2, Config(1, 2048, 4)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its specialization, one of `enumerate_configs`."""
    specialization = problem.specialization
    if specialization.inner in (ALL_ACROSS, ALL_EACH):
        return choose_loose(problem, specialization, target)
    is_single = specialization.outer_rank == 0
    is_fewest = problem.rows * problem.n <= _FEWEST * target.num_sms
    if is_fewest and (is_single or problem.n >= _FEWEST_N) and target.backend != "interpreter":
        return _FEWEST_PIECES
    if not is_single and problem.rows <= _FEW_ROWS and target.backend != "interpreter":
        return _FEW_ROWS_PIECES
    return next(config for most, config in _blocks(specialization, target) if problem.n <= most)


def configs_for(specialization: Specialization, target: Target) -> tuple[Config, ...]:
    """Blocks by rising length of a row, and those for the fewest elements."""
    if specialization.inner in (ALL_ACROSS, ALL_EACH):
        return loose_configs(specialization, target)
    found = tuple(config for _, config in _blocks(specialization, target))
    if target.backend == "interpreter":
        return found
    return (*found, _FEWEST_PIECES) if specialization.outer_rank == 0 else (*found, _FEWEST_PIECES, _FEW_ROWS_PIECES)


def _blocks(specialization: Specialization, target: Target) -> Sequence[tuple[float, Config]]:
    """Up to which length of a row blocks are for, and the blocks."""
    is_single = specialization.outer_rank == 0
    if target.backend == "interpreter":
        return ((math.inf, Config(1, 64, 4)),) if is_single else ((63, Config(4, 16, 4)), (math.inf, Config(1, 64, 4)))
    if not is_single:
        return _PIECES
    item_bytes = ITEM_BYTES[specialization.dtype]
    elements = 2048 // item_bytes
    most = _FEW_BYTES * target.num_sms // item_bytes
    return (most, Config(1, elements, 2)), (math.inf, Config(1, 2 * elements, 4))


def enumerate_configs(target: Target) -> Iterator[tuple[Specialization, Config]]:
    """Every specialization and blocks that `choose` can return on `target`."""
    for dtype, is_binary in itertools.product(FLOATS, (True, False)):
        patterns = [(True, is_aligned, ALL_UNIT, 0) for is_aligned in (True, False)]
        patterns += [(True, True, inner, 3) for inner in (_COMMON if is_binary else _COMMON[:1])]
        patterns += [(is_typed, False, inner, 3) for is_typed in (True, False) for inner in (ALL_ACROSS, ALL_EACH)]
        for pattern in patterns:
            specialization = Specialization(dtype, *pattern, is_binary)
            yield from ((specialization, config) for config in configs_for(specialization, target))


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """The binary of `specialization` with the blocks of `config`."""
    types = dict.fromkeys(("scale", "shift"), "fp64")
    return elementwise_binary(pointwise_kernel, types, {}, specialization, config, target)


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


def pointwise(
    x: torch.Tensor,
    fn: str,
    *,
    y: torch.Tensor | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes fn · scale + shift element by element, in float32.

    Args:
        x: Any shape and strides; float16, bfloat16 or float32.
        fn: With `y` one of `mul sub div maximum minimum`, without `exp log sqrt rsqrt abs neg relu gelu silu sigmoid tanh`.
        y: A shape that broadcasts with that of `x`; the dtype of `x`.
        scale: Factor.
        shift: Summand; a zero changes nothing, not even the sign of a zero.
        out_dtype: Any of the same dtypes. Default: that of `x`.

    Returns:
        A tensor of the broadcast shape.

    Raises:
        ValueError: Shapes, dtypes or the function do not fit.
    """
    shape = _check(x, y, fn)
    out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
    _check_out(out, shape)
    if out.numel() > 0:
        prepare_pointwise(x, out, fn=fn, y=y, scale=scale, shift=shift)(x, y, out)
    return out


def prepare_pointwise(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    fn: str,
    y: torch.Tensor | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Prepared:
    """Prepares launches for tensors of these shapes, strides, dtypes and alignment.

    Args:
        x: As in `pointwise`.
        out: The broadcast shape, not empty.
        fn: As in `pointwise`.
        y: As in `pointwise`; a launch takes another tensor like it.
        scale: As in `pointwise`.
        shift: As in `pointwise`.

    Returns:
        A launcher, called with `(x, y, out)`. It belongs to the calling thread.

    Raises:
        ValueError: As in `pointwise`, or `out` does not fit.
    """
    shape = _check(x, y, fn)
    _check_out(out, shape)
    if out.numel() == 0:
        raise ValueError("out: expected one element or more")
    return prepare(x, y, out, fn, scale, shift)


def _check(x: torch.Tensor, y: torch.Tensor | None, fn: str) -> tuple[int, ...]:
    """The broadcast shape."""
    check_dtype("x", x.dtype, FLOATS)
    known = UNARY if y is None else BINARY
    if fn not in known:
        raise ValueError(f"fn: expected one of {', '.join(known)} {'without' if y is None else 'with'} y, got {fn}")
    if y is None:
        return tuple(x.shape)
    check_pair("x and y", x, y)
    return broadcast_shapes(x.shape, y.shape)


def _check_out(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape or name_of(out.dtype) not in FLOATS:
        raise ValueError(f"out: expected {shape} of {', '.join(FLOATS)}, got {tuple(out.shape)} of {out.dtype}")


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor,
    y: torch.Tensor | None,
    out: torch.Tensor,
    fn: str,
    scale: float,
    shift: float,
    config: Config | None = None,
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    like_y = None if y is None else (y.shape, y.stride())
    shapes = (x.shape, x.stride(), like_y, out.shape, out.stride(), are_each_aligned((x, y, out)))
    # As text: 0.0 equals -0.0, and NaN not itself.
    key = (shapes, x.dtype, out.dtype, fn, repr((float(scale), float(shift))), config, x.device)

    def make() -> Prepared:
        def launch(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> None:
            prepare(x, y, out, fn, scale, shift)(x, y, out)

        def run_entries(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> None:
            single_entries(launch, out, x.expand(out.shape), y if y is None else y.expand(out.shape))

        walk = walk_of(x, x if y is None else y, out)
        if walk is None:
            return Detour(run_entries)
        problem = walk.problem(Problem, x, y, out)
        target = current(x.get_device())
        chosen = config or choose(problem, target)
        # 0.0 would make -0.0 of a result 0.0.
        options = {"scale": float(scale), "shift": float(shift) or -0.0}
        specialization = problem.specialization
        values = walk.sizes("xyo", specialization.unit) | options
        values |= {"fn": (UNARY if y is None else BINARY)[fn], "out_kind": KINDS[problem.out_dtype]}
        programs = programs_of(problem, specialization, chosen)
        return Launch(build(specialization, chosen, target), (programs,), values, x.device)

    return _launches.get(key, make)


# ── self-test ───────────────────────────────────────────────────────────────────────────────────────


def self_test(specialization: Specialization, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    dtype = getattr(torch, specialization.dtype)
    other = torch.float16 if specialization.dtype == "float32" else torch.float32
    dtypes = (dtype, dtype, dtype if specialization.is_typed else other)
    if specialization.inner in (ALL_ACROSS, ALL_EACH):
        x, y, out = loose_operands(specialization, config, dtypes, device)
    else:
        n = 2 * config.block_n - (0 if specialization.is_aligned else 1)
        shape = (n,) if specialization.outer_rank == 0 else (2, config.block_rows + 1, n)
        values = numbers(shape, device)
        shift = 0 if specialization.is_aligned else 1
        x, y, out = (
            lying(values, inner, kind, is_padded=specialization.outer_rank > 0, shift=shift)
            for inner, kind in zip(specialization.inner, dtypes, strict=True)
        )
    out.fill_(float("nan"))
    second = y if specialization.is_binary else None
    prepared = prepare(x, second, out, "mul" if specialization.is_binary else "neg", 2.0, 1.0, config)
    prepared(x, second, out)
    expected = (x.float() * y.float() if specialization.is_binary else -x.float()) * 2 + 1
    return SelfTest(prepared.variants, (out.float() == expected).all())


# Functions of the oracle that torch has by another name.
_OWN: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def pointwise_reference(
    x: torch.Tensor, fn: str, *, y: torch.Tensor | None = None, scale: float = 1.0, shift: float = 0.0
) -> torch.Tensor:
    """The function `fn`, times `scale`, plus `shift`, in float64."""
    function: Callable[..., torch.Tensor] = _OWN.get(fn) or getattr(torch, fn)
    operands = [tensor.double() for tensor in (x, y) if tensor is not None]
    return function(*operands) * scale + (shift or -0.0)
