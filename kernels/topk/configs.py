"""Blocks of the top-k kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewire.kernels.runtime.targets import Target

MAX_K = 1024
# From this width on sorting takes most of the time, and its code most of the compiler's: one binary serves every type.
SORTED_WIDTH = 256
# Keys that a kernel keeps of each row: the least that is not below k.
WIDTHS = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Problem:
    """One top-k as the choice of kernels sees it.

    Attributes:
        rows: Number of rows.
        n: Elements of a row.
        k: Elements kept of each row.
        dtype: Name of the input's dtype.
        is_aligned: Whether rows can be read in 16-byte pieces.
    """

    rows: int
    n: int
    k: int
    dtype: str
    is_aligned: bool = True

    @property
    def width(self) -> int:
        """Keys kept of each row."""
        return next(width for width in WIDTHS if width >= self.k)


@dataclass(frozen=True)
class Block:
    """Blocks of one kernel.

    Attributes:
        block_n: Elements, orders or keys of one program.
        group: Neighbours that leave one order; 1 for none.
        num_warps: Warps of a program.
        block_rows: Rows of a program.
    """

    block_n: int
    group: int
    num_warps: int
    block_rows: int = 1


@dataclass(frozen=True)
class Config:
    """Kernels and blocks of one top-k.

    Attributes:
        row: Blocks where a row is held by one program; None for the four kernels below.
        groups: Blocks that read a long row once.
        select: Blocks that select groups.
        merge: Keys that one program merges.
        finish: Keys of groups that the last kernel takes.
    """

    row: Block | None = None
    groups: Block | None = None
    select: Block | None = None
    merge: int = 0
    finish: int = 0


# By width: what a whole row is held in, by rising length.
_ROWS = {
    16: (Block(64, 1, 4, 16), Block(256, 4, 4, 4), Block(1024, 8, 4), Block(4096, 16, 4), Block(8192, 16, 8)),
    64: (Block(64, 1, 4, 16), Block(256, 1, 4, 4), Block(1024, 4, 4), Block(4096, 8, 8), Block(8192, 16, 8)),
    256: (Block(256, 1, 4), Block(1024, 1, 8), Block(4096, 4, 8)),
    1024: (Block(1024, 1, 8), Block(4096, 2, 16)),
}
_GROUPS = {16: Block(8192, 128, 8), 64: Block(8192, 64, 8), 256: Block(4096, 16, 8), 1024: Block(4096, 8, 8)}
_SELECT = {
    16: (Block(1024, 8, 4), Block(8192, 16, 8)),
    64: (Block(1024, 4, 4), Block(8192, 16, 8)),
    256: (Block(1024, 1, 8), Block(4096, 4, 8)),
    1024: (Block(4096, 2, 16),),
}
_MERGE = {16: 1024, 64: 2048, 256: 4096, 1024: 4096}
_FINISH = {16: 256, 64: 512, 256: 1024, 1024: 2048}
_INTERPRETED = {
    width: Config(groups=Block(width * 2, 2, 4), select=Block(width * 2, 2, 4), merge=width * 4, finish=width * 2)
    for width in WIDTHS
}


def choose(problem: Problem, target: Target) -> Config:
    """The kernels and blocks for `problem` on `target`: with its width, one of `enumerate_configs`."""
    width = problem.width
    fitting = [block for block in row_blocks(width, target) if block.block_n >= problem.n]
    if fitting:
        return Config(row=fitting[0])
    if target.backend == "interpreter":
        return _INTERPRETED[width]
    groups = _GROUPS[width]
    return Config(
        None, groups, select_block(width, -(-problem.n // groups.group), target), _MERGE[width], _FINISH[width]
    )


def row_blocks(width: int, target: Target) -> tuple[Block, ...]:
    """Blocks that hold a whole row, by rising length."""
    if target.backend == "interpreter":
        return (Block(width * 2, 1, 4, 2), Block(width * 4, 2, 4))
    return _ROWS[width]


def select_block(width: int, orders: int, target: Target) -> Block:
    """Blocks that select among `orders` orders of a row."""
    if target.backend == "interpreter":
        return _INTERPRETED[width].select or Block(width * 2, 2, 4)
    blocks = _SELECT[width]
    return next((block for block in blocks if block.block_n >= orders), blocks[-1])


def merge_sizes(width: int, target: Target) -> tuple[int, int]:
    """Keys that one program merges, and keys that a last kernel takes."""
    if target.backend == "interpreter":
        return _INTERPRETED[width].merge, _INTERPRETED[width].finish
    return _MERGE[width], _FINISH[width]


def enumerate_configs(target: Target) -> Iterator[tuple[int, Config]]:
    """Every width and configuration that `choose` can return on `target`."""
    for width in WIDTHS:
        yield from ((width, Config(row=block)) for block in row_blocks(width, target))
        if target.backend == "interpreter":
            yield width, _INTERPRETED[width]
            continue
        for select in _SELECT[width]:
            yield width, Config(None, _GROUPS[width], select, _MERGE[width], _FINISH[width])
