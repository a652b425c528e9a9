"""Maps a specialization and a configuration to the binary, and lists all that can be chosen."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from tilewire.kernels.add.configs import ITEM_BYTES, Config, Specialization, members
from tilewire.kernels.add.kernel import add_kernel
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target


def variants(target: Target) -> list[Variant]:
    """Every binary that `add` can launch on `target`."""
    return list(dict.fromkeys(build(specialization, config, target) for specialization, config in members(target)))


def unit_of(specialization: Specialization) -> int:
    """By what the kernel multiplies the strides of rows that it is given."""
    return 16 // ITEM_BYTES[specialization.dtype] if specialization.is_aligned else 1


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """The binary of `specialization` with the blocks of `config` on `target`."""
    dtype = getattr(torch, specialization.dtype)
    names = add_kernel.arg_names
    types = {
        "a_ptr": pointer(dtype),
        "b_ptr": pointer(dtype),
        "out_ptr": pointer(dtype) if specialization.is_typed else "*i8",
    }
    types |= {"alpha": "fp64" if dtype.is_floating_point else "i64", "out_kind": "i32"}
    types |= {"rows": "i64", "n": "i64", "extent_1": "i64", "extent_2": "i64"}
    types |= {name: "i64" for name in names if name.startswith("stride_")}
    constants = {
        "UNIT": unit_of(specialization),
        "A_INNER": specialization.inner[0],
        "B_INNER": specialization.inner[1],
        "OUT_INNER": specialization.inner[2],
        "OUTER_RANK": specialization.outer_rank,
        "COMPUTE": _compute_type(dtype),
        "IS_TYPED": specialization.is_typed,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "OVERLAP": target.has_overlap,
    }
    return Variant(
        add_kernel,
        tuple((name, types[name]) for name in names if name in types),
        tuple((name, constants[name]) for name in names if name in constants),
        ("a_ptr", "b_ptr", "out_ptr") if specialization.is_aligned else (),
        (("num_warps", config.num_warps), *((("launch_pdl", True),) if target.has_overlap else ())),
    )


def _compute_type(dtype: torch.dtype) -> Any:
    if dtype in (torch.float16, torch.bfloat16, torch.float32):
        return tl.float32
    return {torch.float64: tl.float64, torch.int32: tl.int32, torch.int64: tl.int64}[dtype]
