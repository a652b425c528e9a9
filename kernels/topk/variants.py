"""From a top-k problem and its configuration to the binaries that compute it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, pointer, unit_of
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import WIDTHS, Block, Config, enumerate_configs, select_blocks
from tilewire.kernels.topk.kernel import (
    topk_finish_kernel,
    topk_groups_kernel,
    topk_row_kernel,
    topk_select_kernel,
)


def members(target: Target) -> Iterator[tuple[str, Config, bool]]:
    """What `built` takes, for every configuration that can be chosen on `target`."""
    for config, dtype, is_aligned in itertools.product(enumerate_configs(target), FLOATS, (True, False)):
        yield dtype, config, is_aligned


def built(dtype: str, config: Config, is_aligned: bool, target: Target) -> dict[str, Variant]:
    """The binaries of `config` by role, but for those that select: `row`, or `groups` and `finish`."""
    x = dict.fromkeys(("x_ptr", "values_ptr"), pointer(dtype))
    unit = {"UNIT": unit_of(dtype, is_aligned=is_aligned)}
    if config.row is not None:
        return {"row": binary(topk_row_kernel, x, unit | blocks_of(config.row), config.row.num_warps, target)}
    assert config.groups is not None, "This is a bug."
    assert config.finish is not None, "This is a bug."
    group = {"GROUP": config.group}
    groups = binary(topk_groups_kernel, x, unit | group | blocks_of(config.groups), config.groups.num_warps, target)
    types = x | {"groups_ptr": "*i64"}
    finish = binary(topk_finish_kernel, types, group | blocks_of(config.finish), config.finish.num_warps, target)
    return {"groups": groups, "finish": finish}


def selecting(target: Target) -> list[tuple[Block, bool]]:
    """What `select_variant` takes, for everything that can be launched on `target`."""
    blocks = dict.fromkeys(block for width in WIDTHS for block in select_blocks(width, target))
    return list(itertools.product(blocks, (False, True)))


def select_variant(block: Block, of_keys: bool, target: Target) -> Variant:
    """The binary that selects among orders, or among keys."""
    types = {"orders_ptr": "*i64"} if of_keys else {}
    return binary(topk_select_kernel, types, {"UNIT": 1} | blocks_of(block), block.num_warps, target)


def blocks_of(block: Block) -> dict[str, int]:
    """The constants of `block`."""
    return {"BLOCK_ROWS": block.block_rows, "BLOCK_N": block.block_n, "SORT": block.sort}
