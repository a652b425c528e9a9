"""From a reduction and its configuration to the binaries that compute it."""

from __future__ import annotations

import torch

from tilewire.kernels.reduce.configs import ITEM_BYTES, MAX_PARTS, STATES, Config, Problem, enumerate_configs
from tilewire.kernels.reduce.kernel import reduce_column_kernel, reduce_merge_kernel, reduce_row_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target

MERGED_ROWS = 4


def variants(target: Target) -> list[Variant]:
    """Every binary that `reduce` can launch on `target`."""
    found = [main_variant(problem, config, target) for problem, config in enumerate_configs(target)]
    return list(dict.fromkeys([*found, *(merge_variant(state, target) for state in STATES)]))


def unit_of(problem: Problem) -> int:
    """By what kernels multiply the lengths and strides that they are given."""
    return 16 // ITEM_BYTES[problem.dtype] if problem.is_aligned else 1


def main_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that reads the input."""
    types = {"x_ptr": pointer(getattr(torch, problem.dtype)), "out_ptr": "*i8", "partial_ptr": "*i32"}
    constants = {
        "UNIT": unit_of(problem),
        "STATE": problem.state,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
    }
    if problem.is_row:
        # Element by element, the neighbours of a lane would lie in other threads.
        lane = unit_of(problem)
        return binary(reduce_row_kernel, types, constants | {"LANE": lane}, config.num_warps, target)
    inner = {"UNIT_INNER": problem.is_unit_inner}
    return binary(reduce_column_kernel, types, constants | inner, config.num_warps, target)


def merge_variant(state: int, target: Target) -> Variant:
    """The binary that merges the states of the programs of a row."""
    constants = {"STATE": state, "BLOCK_ROWS": MERGED_ROWS, "MAX_PARTS": MAX_PARTS}
    return binary(reduce_merge_kernel, {"partial_ptr": "*i32", "out_ptr": "*i8"}, constants, 4, target)
