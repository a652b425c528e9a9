"""From a top-k problem and its configuration to the binaries that compute it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, pointer
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import WIDTHS, Block, Config, enumerate_configs, select_blocks
from tilewire.kernels.topk.kernel import (
    topk_finish_kernel,
    topk_groups_kernel,
    topk_row_kernel,
    topk_select_kernel,
)


def members(target: Target) -> Iterator[tuple[str, Config]]:
    """What `built` takes, for every configuration that can be chosen on `target`."""
    for config, dtype in itertools.product(enumerate_configs(target), FLOATS):
        yield dtype, config


def built(dtype: str, config: Config, target: Target) -> dict[str, Variant]:
    """The binaries of `config` by role, but for those that select: `row`, or `groups` and `finish`."""
    x = dict.fromkeys(("x_ptr", "values_ptr"), pointer(dtype))
    if config.row is not None:
        constants = constants_of(config.row, target, 16 // ITEM_BYTES[dtype])
        return {"row": binary(topk_row_kernel, x, constants, config.row.num_warps, target)}
    assert config.groups is not None, "This is a bug."
    assert config.finish is not None, "This is a bug."
    group = {"GROUP": config.group}
    groups = group | constants_of(config.groups, target)
    finish = group | constants_of(config.finish, target)
    return {
        "groups": binary(topk_groups_kernel, x, groups, config.groups.num_warps, target),
        "finish": binary(topk_finish_kernel, x | {"groups_ptr": "*i64"}, finish, config.finish.num_warps, target),
    }


def selecting(target: Target) -> list[tuple[Block, bool]]:
    """What `select_variant` takes, for everything that can be launched on `target`."""
    blocks = dict.fromkeys(block for width in WIDTHS for block in select_blocks(width, target))
    return list(itertools.product(blocks, (False, True)))


def select_variant(block: Block, of_keys: bool, target: Target) -> Variant:
    """The binary that selects among orders, or among keys."""
    types = {"orders_ptr": "*i64"} if of_keys else {}
    return binary(topk_select_kernel, types, constants_of(block, target), block.num_warps, target)


def constants_of(block: Block, target: Target, unit: int = 1) -> dict[str, int]:
    """The constants of `block`, whose threads hold `unit` neighbours at a time."""
    threads = min(block.block_n, target.warp_size * block.num_warps)
    return {
        "BLOCK_ROWS": block.block_rows,
        "BLOCK_N": block.block_n,
        "SORT": block.sort,
        "THREADS": threads,
        "UNIT": min(unit, block.block_n // threads),
    }
