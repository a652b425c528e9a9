"""From a normalisation and its configuration to the binary that computes it."""

from __future__ import annotations

from tilewire.kernels.normalize.configs import Config, Problem
from tilewire.kernels.normalize.kernel import normalize_loop_kernel, normalize_row_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import pointer
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target


def variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of `problem` with the blocks of `config`."""
    types = {"x_ptr": pointer(problem.dtype), "out_ptr": pointer(problem.out_dtype), "eps": "fp64"}
    types |= dict.fromkeys(("weight_ptr", "bias_ptr"), pointer(problem.vector_dtype))
    constants = {"UNIT": problem.unit, "BLOCK_N": config.block_n, "BLOCK_ROWS": config.block_rows}
    kernel = normalize_row_kernel if config.block_rows else normalize_loop_kernel
    aligned = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr") if problem.is_aligned else ()
    return binary(kernel, types, constants, config.num_warps, target, aligned)
