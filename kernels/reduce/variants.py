"""From a reduction and its configuration to the binaries that compute it."""

from __future__ import annotations

from tilewire.kernels.reduce.configs import Config, Problem
from tilewire.kernels.reduce.kernel import reduce_column_kernel, reduce_row_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import pointer
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target


def build(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of a configuration."""
    types = {"x_ptr": pointer(problem.dtype), "out_ptr": "*i8", "partial_ptr": "*i32", "count_ptr": "*i32"}
    constants = {
        "UNIT": problem.unit,
        "STATE": problem.state,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "LANE": _lane(problem, config, target),
        "UNIT_INNER": problem.is_unit_inner,
    }
    kernel = reduce_row_kernel if problem.is_row else reduce_column_kernel
    return binary(kernel, types, constants, config.num_warps, target)


def _lane(problem: Problem, config: Config, target: Target) -> int:
    """Elements of a row that one thread holds at a time, as the compiler spreads a block over threads."""
    if problem.is_row:
        # Element by element, neighbours lie in other threads.
        return min(problem.unit, config.block_n)
    threads = target.warp_size * config.num_warps
    return max(1, config.block_n // max(1, threads * problem.unit // config.block_rows))
