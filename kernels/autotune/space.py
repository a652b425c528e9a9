"""The configurations that are worth trying on a device, by op. Pure: no torch, no Triton, no device.

Limits here are what is known beforehand: what fits shared memory by count, and how many elements a thread can hold. What
the compiler makes of a candidate decides the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewire.kernels.add.configs import Config as AddConfig
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.table import ANY_ROWS
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import ITEM_BYTES as SOFTMAX_ITEM_BYTES
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig

# Bytes of an input element, by arithmetic.
ITEM_BYTES = {"half": 2, "int8": 1, "float8": 1, "tf32": 4, "tf32x3": 4, "ieee": 4}
_OUT_BYTES = {"half": 2, "int8": 4, "float8": 2, "tf32": 4, "tf32x3": 4, "ieee": 4}
# Rows of a product up to which one rule holds.
BUCKETS = (16, 32, 64)
POINTER_BUCKETS = (16, 64, ANY_ROWS)
_TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64), (64, 256), (64, 32))
_MOST_STAGES = 6
_MOST_HELD = 128
_PERSISTENT_FROM = 128 * 256


def tall(arithmetic: str, target: Target) -> list[Config]:
    """Configurations of the descriptor kernel for products of many rows."""
    found = []
    row = 128 // ITEM_BYTES[arithmetic]
    for (block_m, block_n), block_k, num_warps in itertools.product(_TILES, (row, 2 * row), (4, 8)):
        held = block_m * block_n // (32 * num_warps)
        is_coarse = arithmetic == "tf32x3" and (block_k > row or held > 64)
        if not 8 <= held <= _MOST_HELD or is_coarse:
            continue
        is_large = block_m * block_n >= (128 * 128 if arithmetic == "tf32x3" else _PERSISTENT_FROM)
        # Two large programs do not share a multiprocessor: their sums would need all registers twice.
        beside = (1,) if is_large else (1, 2, 3)
        for halves in (2,) if is_large else (1, 2) if block_m * block_n == 128 * 128 else (1,):
            store_bytes = block_m * block_n * _OUT_BYTES[arithmetic] // halves
            stage_bytes = (block_m + block_n) * block_k * ITEM_BYTES[arithmetic]
            for num_stages in _stages(stage_bytes, store_bytes, beside, target):
                found.append(  # noqa: PERF401 - a comprehension of five loops would be hard to read
                    Config(
                        *("tma", block_m, block_n, block_k),
                        num_warps=num_warps,
                        num_stages=num_stages,
                        is_persistent=is_large,
                        halves=halves,
                    )
                )
    return found


def few_rows(arithmetic: str, max_m: int, target: Target) -> list[Config]:
    """Configurations of the descriptor kernel for products of up to `max_m` rows (one of `BUCKETS`)."""
    item_bytes = ITEM_BYTES[arithmetic]
    found = []
    for block_n, k_bytes, is_swapped in itertools.product((32, 64, 128), (256, 512), (False, True)):
        # Swapped, the matrix unit's 64 rows are columns of the weight.
        if is_swapped and (block_n < 64 or max_m > 32):
            continue
        stage_bytes = (max_m + block_n) * k_bytes
        for num_stages in _stages(stage_bytes, 0, (1, 2), target, most=9):
            config = Config("tma", max_m, block_n, k_bytes // item_bytes, 1, num_warps=4, num_stages=num_stages)
            found.append(_swapped(config) if is_swapped else config)
    return found


def _swapped(config: Config) -> Config:
    return Config(
        *(config.kernel, config.block_m, config.block_n, config.block_k, config.group_m),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        is_swapped=True,
    )


def pointer(arithmetic: str, max_m: int, target: Target) -> list[Config]:
    """Configurations of the pointer kernel for products of up to `max_m` rows (one of `POINTER_BUCKETS`)."""
    item_bytes = ITEM_BYTES[arithmetic]
    heights = {16: (16,), 64: (32, 64)}.get(max_m, (32, 64, 128, 256))
    is_scalar = arithmetic == "ieee"
    widths = {16: (32, 64, 128), 64: (32, 64, 128)}.get(max_m, (64, 128, 256))
    # 128 bytes of a row are one line of memory; the scalar units hold both operands in registers besides.
    lengths = (32, 64, 128) if is_scalar else (128 // item_bytes, 256 // item_bytes, 512 // item_bytes)
    found = []
    for block_m, block_n, block_k, num_warps in itertools.product(heights, widths, lengths, (4, 8)):
        held = block_m * block_n // (32 * num_warps)
        most = 64 if is_scalar else _MOST_HELD
        if not 4 <= held <= most or (block_m + block_n) * block_k > 256 * 256:
            continue
        stage_bytes = (block_m + block_n) * block_k * item_bytes
        group_m = 1 if max_m < ANY_ROWS else 8
        if target.backend == "hip":
            # The pipeliner wants two stages, of which one lies in LDS.
            waves = [0, 2] if block_m * block_n >= 128 * 128 else [0]
            stages = [2] if stage_bytes <= target.shared_bytes else []
        else:
            waves, stages = [0], _stages(stage_bytes, 0, (1, 2), target, most=5)
        found += [
            Config(
                *("pointer", block_m, block_n, block_k, group_m),
                num_warps=num_warps,
                num_stages=num_stages,
                waves_per_eu=waves_per_eu,
            )
            for num_stages, waves_per_eu in itertools.product(stages, waves)
        ]
    return found


def _stages(
    stage_bytes: int, store_bytes: int, beside: tuple[int, ...], target: Target, *, most: int = _MOST_STAGES
) -> list[int]:
    """Numbers of stages that use the shared memory up with so many programs on a multiprocessor."""
    # Barriers and alignment take a little.
    fitting = ((target.shared_bytes // programs - 1024 - store_bytes) // stage_bytes for programs in beside)
    counts = [min(most, count) for count in fitting]
    # The deepest pipeline is not always the fastest.
    return sorted({count for count in (*counts, counts[0] - 1) if count >= 2}, reverse=True)


def row_blocks(block_n: int, target: Target) -> Iterator[SoftmaxConfig]:
    """Configurations of softmax that hold rows of up to `block_n` elements whole."""
    most_warps = 32 if target.warp_size == 32 else 16
    for block_rows, num_warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        held = block_rows * block_n // (target.warp_size * num_warps)
        if num_warps <= most_warps and 4 <= held <= 64 and block_rows * block_n <= max(block_n, 8192):
            yield SoftmaxConfig("row", block_rows, block_n, num_warps)


def teams(dtype: str, target: Target) -> Iterator[SoftmaxConfig]:
    """Configurations of softmax that hold a row in a team of programs; nothing where teams cannot be kept together."""
    if target.backend != "cuda":
        return
    for block_n, num_warps, programs in itertools.product((4096, 8192, 16384), (4, 8, 16, 32), (1, 2, 3, 4, 7, 8)):
        held, registers = block_n // (32 * num_warps), 65536 // (32 * num_warps * programs)
        fits = 32 * num_warps * programs <= 2048 and registers >= held * SOFTMAX_ITEM_BYTES[dtype] // 4 + 24
        if fits and 8 <= held <= 64:
            yield SoftmaxConfig("team", 1, block_n, num_warps, programs_per_sm=programs)


def flat_blocks(item_bytes: int, target: Target) -> list[tuple[AddConfig, int]]:
    """Configurations of a flat addition, each with its 16-byte pieces for a thread."""
    return [
        (AddConfig(1, target.warp_size * num_warps * vectors * 16 // item_bytes, num_warps), vectors)
        for num_warps, vectors in itertools.product((1, 2, 4, 8), (1, 2, 4))
    ]
