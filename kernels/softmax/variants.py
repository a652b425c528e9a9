"""Maps a problem and a configuration to the binaries that compute it. Launches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import pointer, unit_of
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import MAX_SPLITS, SMALL_GROUP, Config, Problem
from tilewire.kernels.softmax.kernel import (
    softmax_apply_kernel,
    softmax_column_kernel,
    softmax_cooperative_kernel,
    softmax_loop_kernel,
    softmax_partial_kernel,
    softmax_row_kernel,
)

# Kernels that `Config.kernel` stands for, in the order of launch.
KERNELS = {
    "row": (softmax_row_kernel,),
    "loop": (softmax_loop_kernel,),
    "cooperative": (softmax_cooperative_kernel,),
    "column": (softmax_column_kernel,),
    "split": (softmax_partial_kernel, softmax_apply_kernel),
}


def binaries(problem: Problem, config: Config, target: Target) -> Iterator[Variant]:
    """Yields the binaries that compute `problem` by `config`, in the order of launch."""
    return (build(kernel, problem, config, target) for kernel in KERNELS[config.kernel])


def build(kernel: Any, problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of `kernel` (one of `KERNELS[config.kernel]`) that computes `problem` by `config`."""
    types = {
        "x_ptr": pointer(problem.dtype),
        "out_ptr": pointer(problem.out_dtype),
        "partial_ptr": "*fp32",
        "count_ptr": "*i32",
    }
    constants = {
        "UNIT": unit_of(problem.dtype, is_aligned=problem.is_aligned),
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "TAIL_N": config.tail_n,
        "MAX_SPLITS": MAX_SPLITS,
        "MAX_GROUP": SMALL_GROUP if config.splits <= SMALL_GROUP else MAX_SPLITS,
    }
    options: dict[str, Any] = {}
    if config.kernel == "cooperative":
        constants["OVERLAP"] = False
        if target.backend == "cuda":
            # All programs at once, or none; and few enough registers, of which a thread gets eight at a time, that all fit.
            registers = 65536 // (32 * config.num_warps * config.programs_per_sm) // 8 * 8
            options = {"launch_cooperative_grid": True, "maxnreg": min(255, registers)}
    aligned = ("x_ptr", "out_ptr", "partial_ptr") if problem.is_aligned else ()
    return binary(kernel, types, constants, config.num_warps, target, aligned, **options)
