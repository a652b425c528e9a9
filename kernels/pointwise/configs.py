"""Blocks of the pointwise kernel. Pure: no torch, no Triton, no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewire.kernels.runtime.targets import Target

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
DTYPES = tuple(ITEM_BYTES)
MAX_RANK = 4
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
# How an output type that differs from the inputs' is passed to the kernel.


@dataclass(frozen=True)
class Problem:
    """One pointwise function as the choice of blocks sees it.

    Attributes:
        rows: Product of all extents but the last, after merging.
        n: Last extent.
        dtype: Name of the inputs' dtype.
        out_dtype: Name of the output's dtype.
        is_binary: Whether there are two inputs.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
        inner: Steps of `x`, `y` and the output along the last extent: `unit` (stride 1), `repeat` (stride 0) or `any`.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_binary: bool
    is_aligned: bool
    inner: tuple[str, str, str]

    @property
    def specialization(self) -> Specialization:
        """The specialization whose binaries compute this: the rarer a pattern, the fewer binaries are made for it."""
        is_typed = self.dtype == self.out_dtype
        is_flat = self.rows == 1 and self.inner == _UNIT
        is_common = is_typed and (is_flat or (self.is_aligned and self.inner in _COMMON))
        if not is_common:
            return Specialization(self.dtype, is_typed, self.is_binary, False, _ANY, 3)
        return Specialization(self.dtype, True, self.is_binary, self.is_aligned, self.inner, 0 if is_flat else 3)


@dataclass(frozen=True)
class Specialization:
    """All that a binary depends on besides its blocks.

    Attributes:
        dtype: Name of the inputs' dtype.
        is_typed: Whether the output has the same; else its type is passed at run time.
        is_binary: Whether there are two inputs.
        is_aligned: As in `Problem`.
        inner: As in `Problem`.
        outer_rank: Dimensions that number the rows: 0 for a single row, else 3.
    """

    dtype: str
    is_typed: bool
    is_binary: bool
    is_aligned: bool
    inner: tuple[str, str, str]
    outer_rank: int


@dataclass(frozen=True)
class Config:
    """Blocks and warps of one launch."""

    block_rows: int
    block_n: int
    num_warps: int


_UNIT = ("unit", "unit", "unit")
_COMMON = (_UNIT, ("unit", "repeat", "unit"), ("repeat", "unit", "unit"))
_ANY = ("any", "any", "any")
_LENGTHS = (32, 256, 1024)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its specialization, one of `enumerate_configs`."""
    configs = configs_for(problem.specialization, target)
    return next((config for config in configs if config.block_n >= problem.n), configs[-1])


def configs_for(specialization: Specialization, target: Target) -> tuple[Config, ...]:
    """Blocks by rising length of a row."""
    if target.backend == "interpreter":
        return (Config(1, 64, 4),) if specialization.outer_rank == 0 else (Config(4, 16, 4), Config(1, 64, 4))
    elements = 4096 // ITEM_BYTES[specialization.dtype]
    if specialization.outer_rank == 0:
        return (Config(1, elements, 4),)
    if specialization.inner == _ANY:
        # Each element has offsets of its own, which take registers.
        elements = 1024
    return tuple(Config(elements // length, length, 4) for length in _LENGTHS)


def enumerate_configs(target: Target) -> Iterator[tuple[Specialization, Config]]:
    """Every specialization and blocks that `choose` can return on `target`."""
    for dtype in DTYPES:
        for is_binary in (True, False):
            specializations = [
                Specialization(dtype, True, is_binary, is_aligned, _UNIT, 0) for is_aligned in (True, False)
            ]
            repeated = _COMMON if is_binary else _COMMON[:1]
            specializations += [Specialization(dtype, True, is_binary, True, inner, 3) for inner in repeated]
            specializations += [
                Specialization(dtype, is_typed, is_binary, False, _ANY, 3) for is_typed in (True, False)
            ]
            for specialization in specializations:
                yield from ((specialization, config) for config in configs_for(specialization, target))
