"""From a problem and a configuration to the binary that computes it. Knows no tensor and launches nothing."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from kernels.add.configs import Config, Problem
from kernels.add.kernel import add_kernel
from kernels.launching import Variant, pointer
from kernels.targets import Target


def build(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that computes `problem` by `config`."""
    dtype, out_dtype = (getattr(torch, name) for name in (problem.dtype, problem.out_dtype))
    names = add_kernel.arg_names
    types = {"a_ptr": pointer(dtype), "b_ptr": pointer(dtype), "out_ptr": pointer(out_dtype)}
    types |= {"alpha": "fp64" if dtype.is_floating_point else "i64"}
    types |= {"rows": "i64", "n": "i64", "extent_1": "i64", "extent_2": "i64"}
    types |= {name: "i64" for name in names if name.startswith("stride_")}
    constants = {
        "IN_UNIT": 16 // dtype.itemsize if problem.is_aligned else 1,
        "OUT_UNIT": 16 // out_dtype.itemsize if problem.is_aligned else 1,
        "A_INNER": problem.a_inner,
        "B_INNER": problem.b_inner,
        "OUT_INNER": problem.out_inner,
        "OUTER_RANK": problem.outer_rank,
        "COMPUTE": _compute_type(dtype),
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "OVERLAP": target.has_overlap,
    }
    return Variant(
        add_kernel,
        tuple((name, types[name]) for name in names if name in types),
        tuple((name, constants[name]) for name in names if name in constants),
        ("a_ptr", "b_ptr", "out_ptr") if problem.is_aligned else (),
        (("num_warps", config.num_warps), *((("launch_pdl", True),) if target.has_overlap else ())),
    )


def _compute_type(dtype: torch.dtype) -> Any:
    if dtype in (torch.float16, torch.bfloat16, torch.float32):
        return tl.float32
    return {torch.float64: tl.float64, torch.int32: tl.int32, torch.int64: tl.int64}[dtype]
