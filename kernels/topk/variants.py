"""From a top-k problem and its configuration to the binaries that compute it."""

from __future__ import annotations

import itertools

import torch

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import DTYPES, ITEM_BYTES, SORTED_WIDTH, Block, Config, enumerate_configs
from tilewire.kernels.topk.kernel import (
    topk_finish_kernel,
    topk_groups_kernel,
    topk_merge_kernel,
    topk_row_kernel,
    topk_select_kernel,
)

_FINISH_WARPS = {16: 8, 64: 8, 256: 16, 1024: 16}


def variants(target: Target) -> list[Variant]:
    """Every binary that `topk` can launch on `target`."""
    found: list[Variant] = []
    for width, config in enumerate_configs(target):
        for dtype, is_aligned in itertools.product(DTYPES, (True, False)):
            found += built(dtype, width, config, target, is_aligned=is_aligned).values()
    return list(dict.fromkeys(found))


def unit_of(dtype: str, *, is_aligned: bool) -> int:
    """By what kernels multiply the lengths and strides that they are given."""
    return 16 // ITEM_BYTES[dtype] if is_aligned else 1


def row_unit_of(dtype: str, width: int, *, is_aligned: bool) -> int:
    """The same for the kernel of whole rows."""
    return unit_of(dtype, is_aligned=is_aligned and width < SORTED_WIDTH)


def built(dtype: str, width: int, config: Config, target: Target, *, is_aligned: bool) -> dict[str, Variant]:
    """The binaries of `config` by role: `row`, or `groups`, `select`, `merge` and `finish`."""
    x = {"x_ptr": pointer(getattr(torch, dtype)), "values_ptr": pointer(getattr(torch, dtype))}
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


def select_variant(width: int, block: Block, target: Target) -> Variant:
    """The binary that selects among orders."""
    return binary(topk_select_kernel, {}, {"UNIT": 1} | blocks_of(block, width), block.num_warps, target)


def merge_variant(width: int, num_keys: int, target: Target) -> Variant:
    """The binary that merges `num_keys` keys."""
    return binary(topk_merge_kernel, {}, {"BLOCK_N": num_keys, "WIDTH": width}, 8, target)


def blocks_of(block: Block, width: int) -> dict[str, int]:
    """The constants of `block`."""
    return {"BLOCK_ROWS": block.block_rows, "BLOCK_N": block.block_n, "GROUP": block.group, "WIDTH": width}
