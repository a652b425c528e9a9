"""From a top-k problem and its configuration to the binaries that compute it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, pointer, unit_of
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import SORTED_WIDTH, Block, Config, enumerate_configs, merge_sizes
from tilewire.kernels.topk.kernel import (
    topk_finish_kernel,
    topk_groups_kernel,
    topk_merge_kernel,
    topk_row_kernel,
    topk_select_kernel,
)

_FINISH_WARPS = {16: 8, 64: 8, 256: 16, 1024: 16}


def members(target: Target) -> Iterator[tuple[str, int, Config, bool]]:
    """What `built` takes, for every configuration that can be chosen on `target`."""
    for (width, config), dtype, is_aligned in itertools.product(enumerate_configs(target), FLOATS, (True, False)):
        yield dtype, width, config, is_aligned


def row_unit_of(dtype: str, width: int, *, is_aligned: bool) -> int:
    """`unit_of` for the kernel of whole rows."""
    return unit_of(dtype, is_aligned=is_aligned and width < SORTED_WIDTH)


def built(dtype: str, width: int, config: Config, is_aligned: bool, target: Target) -> dict[str, Variant]:
    """The binaries of `config` by role: `row`, or `groups`, `select`, `merge` and `finish`."""
    x = dict.fromkeys(("x_ptr", "values_ptr"), pointer(dtype))
    by_kind = width >= SORTED_WIDTH
    sorted_x = dict.fromkeys(x, "*i8") if by_kind else x
    if config.row is not None:
        row = {"UNIT": row_unit_of(dtype, width, is_aligned=is_aligned), "BY_KIND": by_kind}
        row |= blocks_of(config.row, width)
        return {"row": binary(topk_row_kernel, sorted_x, row, config.row.num_warps, target)}
    assert config.groups is not None, "This is a bug."
    assert config.select is not None, "This is a bug."
    unit = {"UNIT": unit_of(dtype, is_aligned=is_aligned)}
    finish = {"BY_KIND": by_kind, "BLOCK_KEYS": config.finish, "GROUP": config.groups.group, "WIDTH": width}
    return {
        "groups": binary(
            topk_groups_kernel, x, unit | blocks_of(config.groups, width), config.groups.num_warps, target
        ),
        "select": select_variant(width, config.select, target),
        "merge": merge_variant(width, config.merge, target),
        "finish": binary(topk_finish_kernel, sorted_x, finish, _FINISH_WARPS[width], target),
    }


def merging(width: int, target: Target) -> Variant:
    """The binary that merges as many keys as `merge_sizes` says."""
    return merge_variant(width, merge_sizes(width, target)[0], target)


def select_variant(width: int, block: Block, target: Target) -> Variant:
    """The binary that selects among orders."""
    return binary(topk_select_kernel, {}, {"UNIT": 1} | blocks_of(block, width), block.num_warps, target)


def merge_variant(width: int, num_keys: int, target: Target) -> Variant:
    """The binary that merges `num_keys` keys."""
    return binary(topk_merge_kernel, {}, {"BLOCK_N": num_keys, "WIDTH": width}, 8, target)


def blocks_of(block: Block, width: int) -> dict[str, int]:
    """The constants of `block`."""
    return {"BLOCK_ROWS": block.block_rows, "BLOCK_N": block.block_n, "GROUP": block.group, "WIDTH": width}
