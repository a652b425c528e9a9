"""Counts of a product's launch, for the terms of its time, and facts to correct that by. Pure: no torch, no Triton."""

from __future__ import annotations

from typing import NamedTuple

from tilewire.kernels.matmul.configs import SHARES, Config, Problem, as_read, cdiv
from tilewire.kernels.runtime.targets import Target

_KERNELS = ("tma", "wgmma", "pointer", "fma", "vector", "element")


class Counts(NamedTuple):
    """Counts of one launch. A turn is one program of each multiprocessor; a wave, what the device runs at once.

    Attributes:
        rows: Rows of tiles.
        columns: Columns of tiles.
        programs: Programs.
        steps: Steps of K of a program.
        turns: Turns.
        waves: Waves.
    """

    rows: int
    columns: int
    programs: int
    steps: int
    turns: int
    waves: int


def counts_of(problem: Problem, config: Config, occupancy: int, target: Target) -> Counts:
    """The counts of a launch of `config` for `problem`, as its kernel reads it, with so many programs on a multiprocessor."""
    programs = config.tiles(problem) * config.split_k
    return Counts(
        cdiv(problem.m, config.block_m),
        cdiv(problem.n, config.block_n),
        programs,
        cdiv(cdiv(problem.k, config.block_k), config.split_k),
        cdiv(programs, target.num_sms),
        cdiv(programs, target.num_sms * occupancy),
    )


class Facts(NamedTuple):
    """Facts of one launch.

    Attributes:
        kernel: Its number.
        block_m: As in `Config`, like the following.
        block_n: Columns of a tile.
        block_k: Length of K in one step.
        num_stages: Steps of operands in flight.
        num_warps: Warps.
        is_swapped: Whether tiles are computed transposed.
        shares: 1 where two programs share `a`, 2 for `b`, 3 where four share `a`.
        is_copied: Whether operands are copied first.
        split_k: Programs that share a tile.
        occupancy: Programs on a multiprocessor at a time.
        a_is_k: Whether rows of `a` lie along K.
        b_is_k: Whether columns of `b` do.
        is_plain: Whether nothing follows the product.
        batch: Products.
        rows: Rows of tiles.
        columns: Columns of tiles.
        steps: Steps of K of a program.
        full_rows: Share of the rows of all tiles that the product has.
        full_columns: The same for columns.
        turns: Turns.
        waves: Waves.
        fill: Programs over multiprocessors.
        last_turn: Programs of the last turn over multiprocessors.
        last_wave: Programs of the last wave over what the device runs at once.
        in_flight: Elements of operands that a program has in flight.
    """

    kernel: float
    block_m: float
    block_n: float
    block_k: float
    num_stages: float
    num_warps: float
    is_swapped: float
    shares: float
    is_copied: float
    split_k: float
    occupancy: float
    a_is_k: float
    b_is_k: float
    is_plain: float
    batch: float
    rows: float
    columns: float
    steps: float
    full_rows: float
    full_columns: float
    turns: float
    waves: float
    fill: float
    last_turn: float
    last_wave: float
    in_flight: float


def facts_of(problem: Problem, config: Config, occupancy: int, target: Target, *, is_plain: bool) -> Facts:
    """The facts of a launch of `config` for `problem`.

    Args:
        problem: The product.
        config: Configuration.
        occupancy: Programs of it on a multiprocessor at a time.
        target: The device.
        is_plain: Whether nothing follows the product.
    """
    read = as_read(problem, config)
    rows, columns, programs, steps, turns, waves = counts_of(read, config, occupancy, target)
    return Facts(
        kernel=_KERNELS.index(config.kernel),
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        is_swapped=config.is_swapped,
        shares=("", *SHARES).index(config.shares),
        is_copied=config.is_copied,
        split_k=config.split_k,
        occupancy=occupancy,
        a_is_k=read.a_major == "k",
        b_is_k=read.b_major == "k",
        is_plain=is_plain,
        batch=read.batch,
        rows=rows,
        columns=columns,
        steps=steps,
        full_rows=read.m / (rows * config.block_m),
        full_columns=read.n / (columns * config.block_n),
        turns=turns,
        waves=waves,
        fill=programs / target.num_sms,
        last_turn=programs / target.num_sms - (turns - 1),
        last_wave=programs / (target.num_sms * occupancy) - (waves - 1),
        in_flight=config.num_stages * (config.block_m + config.block_n) * config.block_k,
    )
