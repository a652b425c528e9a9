"""Maps a problem and a configuration to the binaries that compute it. Launches nothing."""

from __future__ import annotations

from typing import Any

import torch

from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import ITEM_BYTES, MAX_SPLITS, SMALL_GROUP, Config, Problem, members
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


def variants(target: Target) -> list[Variant]:
    """Every binary that `softmax` can launch on `target`."""
    built = (
        build(kernel, problem, config, target)
        for problem, config in members(target)
        for kernel in KERNELS[config.kernel]
    )
    return list(dict.fromkeys(built))


def unit_of(problem: Problem) -> int:
    """By what the kernels multiply the strides and the length that they are given."""
    return 16 // ITEM_BYTES[problem.dtype] if problem.is_aligned else 1


def build(kernel: Any, problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of `kernel` (one of `KERNELS[config.kernel]`) that computes `problem` by `config`."""
    x_type, out_type = (pointer(getattr(torch, name)) for name in (problem.dtype, problem.out_dtype))
    pointers = {"x_ptr": x_type, "out_ptr": out_type, "partial_ptr": "*fp32", "count_ptr": "*i32"}
    sizes = dict.fromkeys(("rows", "n", "blocks_per_split", "rows_inner", "group_size", "log"), "i32")
    names = kernel.arg_names
    types = pointers | sizes | {name: "i64" for name in names if name.startswith("stride_")}
    constants = {
        "UNIT": unit_of(problem),
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "TAIL_N": config.tail_n,
        "MAX_SPLITS": MAX_SPLITS,
        "MAX_GROUP": SMALL_GROUP if config.splits <= SMALL_GROUP else MAX_SPLITS,
        "OVERLAP": target.has_overlap and config.kernel != "cooperative",
    }
    aligned = ("x_ptr", "out_ptr", "partial_ptr") if problem.is_aligned else ()
    return Variant(
        kernel,
        tuple((name, types[name]) for name in names if name in types),
        tuple((name, constants[name]) for name in names if name in constants),
        tuple(name for name in aligned if name in names),
        _options(config, target),
    )


def _options(config: Config, target: Target) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if config.kernel == "cooperative":
        if target.backend == "cuda":
            # All programs at once, or none; and few enough registers, of which a thread gets eight at a time, that all fit.
            registers = 65536 // (32 * config.num_warps * config.programs_per_sm) // 8 * 8
            options |= {"launch_cooperative_grid": True, "maxnreg": min(255, registers)}
    elif target.has_overlap:
        options |= {"launch_pdl": True}
    return tuple(options.items())
