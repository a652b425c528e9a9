"""From a reduction and its configuration to the binaries that compute it."""

from __future__ import annotations

from tilewire.kernels.reduce.configs import MAX_PARTS, Config, Problem
from tilewire.kernels.reduce.kernel import reduce_column_kernel, reduce_merge_kernel, reduce_row_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import pointer
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target

MERGED_ROWS = 4


def binaries(problem: Problem, config: Config, target: Target) -> tuple[Variant, Variant]:
    """The binary that reads the input, and the one that merges the states of a row."""
    return main_variant(problem, config, target), merge_variant(problem.state, target)


def main_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that reads the input."""
    types = {"x_ptr": pointer(problem.dtype), "out_ptr": "*i8", "partial_ptr": "*i32"}
    constants = {
        "UNIT": problem.unit,
        "STATE": problem.state,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        # Element by element, the neighbours of a lane would lie in other threads.
        "LANE": problem.unit,
        "UNIT_INNER": problem.is_unit_inner,
    }
    kernel = reduce_row_kernel if problem.is_row else reduce_column_kernel
    return binary(kernel, types, constants, config.num_warps, target)


def merge_variant(state: int, target: Target) -> Variant:
    """The binary that merges the states of the programs of a row."""
    constants = {"STATE": state, "BLOCK_ROWS": MERGED_ROWS, "MAX_PARTS": MAX_PARTS}
    return binary(reduce_merge_kernel, {"partial_ptr": "*i32", "out_ptr": "*i8"}, constants, 4, target)
