"""Blocks of the normalisation kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES
from tilewire.kernels.runtime.targets import Target

# Kinds with their default eps, numbered by their place.
KINDS = {"layer": 1e-5, "rms": 1e-6, "l2": 1e-12}


@dataclass(frozen=True)
class Problem:
    """One normalisation as the choice of blocks sees it.

    Attributes:
        rows: Number of rows.
        n: Elements of a row.
        dtype: Name of the input's dtype.
        out_dtype: Name of the output's dtype.
        vector_dtype: Name of the dtype of weight and bias: the input's where all three are the same, else float32.
        is_aligned: Whether rows, weight and bias can be read and written in 16-byte pieces.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    vector_dtype: str
    is_aligned: bool = True

    @property
    def unit(self) -> int:
        """By what kernels multiply the lengths and strides that they are given."""
        return 16 // min(ITEM_BYTES[self.dtype], ITEM_BYTES[self.out_dtype]) if self.is_aligned else 1


@dataclass(frozen=True)
class Config:
    """Blocks of one launch.

    Attributes:
        block_rows: Rows of a program; 0 where a row is read in a loop.
        block_n: Elements of a row that are held at a time.
        num_warps: Warps of a program.
    """

    block_rows: int
    block_n: int
    num_warps: int


_ROWS = tuple(
    [Config(2048 // block_n, block_n, 4) for block_n in (64, 128, 256, 512, 1024)]
    # 32 elements a thread.
    + [Config(2, 2048, 4), Config(2, 4096, 8), Config(1, 8192, 8), Config(1, 16384, 16)]
)
# Rarer pairs of types have fewer binaries.
_FEW_ROWS = tuple(_ROWS[number] for number in (2, 4, 6, 8))
# Loops for many rows, and for few, of which each needs more of a multiprocessor (H200).
_LOOP, _FEW_LOOP = Config(0, 4096, 8), Config(0, 16384, 32)
_FEW = 2
_INTERPRETED = (Config(2, 16, 4), Config(1, 64, 4), Config(0, 32, 4))


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its types, one of `enumerate_configs`."""
    found = configs_for(problem, target)
    loops = [config for config in found if not config.block_rows]
    loop = loops[-1] if problem.rows <= _FEW * target.num_sms else loops[0]
    return next((config for config in found if config.block_n >= problem.n and config.block_rows), loop)


def configs_for(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Blocks by rising length of a row; the last ones read a row in a loop."""
    if target.backend == "interpreter":
        return _INTERPRETED
    return (*(_ROWS if problem.dtype == problem.out_dtype else _FEW_ROWS), _LOOP, _FEW_LOOP)


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and blocks that `choose` can return on `target`."""
    for dtype, out_dtype, is_aligned in itertools.product(FLOATS, FLOATS, (True, False)):
        for vector_dtype in dict.fromkeys([dtype, "float32"] if dtype == out_dtype else ["float32"]):
            problem = Problem(1, 1, dtype, out_dtype, vector_dtype, is_aligned)
            yield from ((problem, config) for config in configs_for(problem, target))
