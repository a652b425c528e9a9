"""The configurations of softmaxes that are worth measuring on a device, whether the catalogue has them or not. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tilewire.kernels.op import Tuning
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import (
    LONGEST_ROW,
    LOOP,
    MAX_SPLITS,
    MODEL,
    SPLIT,
    Config,
    is_long,
    key_of,
    power_of_two,
)
from tilewire.kernels.softmax.select import amounts_of
from tilewire.kernels.softmax.shape import SoftmaxShape
from tilewire.kernels.softmax.variants import binaries

_REGISTERS_OF_SM = 65536
_THREADS_OF_SM = 2048
# Elements of a tail below which the next power of two costs no more.
_SHORTEST_TAIL = 16


def space(shape: SoftmaxShape, target: Target) -> Iterator[Config]:
    """Returns the configurations worth measuring for a shape."""
    problem = shape.problem
    if not problem.is_contiguous:
        return
    if problem.n <= LONGEST_ROW:
        whole = power_of_two(problem.n)
        for block_n in {whole, max(whole, 256)}:
            yield from _rows(block_n, 0, target)
        tails = (tail for tail in (whole // 8, whole // 4) if tail >= _SHORTEST_TAIL)
        yield from itertools.chain.from_iterable(
            _rows(whole // 2, tail, target) for tail in tails if whole // 2 < problem.n <= whole // 2 + tail
        )
    if is_long(problem, target):
        yield LOOP
        splits = (1 << power for power in range(1, MAX_SPLITS.bit_length()))
        yield from (replace(SPLIT, splits=each) for each in splits if each <= -(-problem.n // SPLIT.block_n))
        yield from _cooperative(shape, target)


def _rows(block_n: int, tail_n: int, target: Target) -> Iterator[Config]:
    """Whole rows in registers: 4 to 64 elements a thread, blocks of up to 8,192 elements, or of one row."""
    max_warps = 32 if target.warp_size == 32 else 16
    for power, num_warps in itertools.product(range(12), (1, 2, 4, 8, 16, 32)):
        elements = block_n << power
        held = elements // (target.warp_size * num_warps)
        if num_warps <= max_warps and 4 <= held <= 64 and elements <= max(block_n, 8192):
            yield Config("row", 1 << power, block_n, num_warps, tail_n=tail_n)


def _cooperative(shape: SoftmaxShape, target: Target) -> Iterator[Config]:
    """A row in the registers of programs that run together; nothing where they cannot be kept so."""
    if target.backend != "cuda":
        return
    for block_n, num_warps, programs in itertools.product((4096, 8192, 16384), (4, 8, 16, 32), (1, 2, 3, 4, 8)):
        held, threads = block_n // (32 * num_warps), 32 * num_warps * programs
        registers = _REGISTERS_OF_SM // threads
        fits = threads <= _THREADS_OF_SM and registers >= held * ITEM_BYTES[shape.dtype] // 4 + 24
        group = -(-shape.n // block_n)
        if fits and 8 <= held <= 64 and 1 < group <= min(MAX_SPLITS, target.num_sms * programs):
            yield Config("cooperative", 1, block_n, num_warps, group, programs)


def _key(shape: SoftmaxShape) -> str:
    return key_of(shape.problem) if shape.problem.is_contiguous else ""


def _amounts(shape: SoftmaxShape, config: Config, _occupancy: int, target: Target) -> tuple[float, ...]:
    return amounts_of(shape.problem, config, target)


TUNING = Tuning(
    space=space,
    binaries=lambda shape, config, target: tuple(binaries(replace(shape.problem, rows=1, n=1), config, target)),
    model=MODEL,
    amounts=_amounts,
    key=_key,
    entry_of=lambda config: replace(config, splits=1),
    is_common=lambda shape, _target: shape.dtype == shape.stored_dtype,
    sizes=lambda _key: (0, 30, 0.004),
    config=Config,
    keeps=True,
)
