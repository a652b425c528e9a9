"""From a specialization and its blocks to the binary that computes it."""

from __future__ import annotations

import torch

from tilewire.kernels.pointwise.configs import ITEM_BYTES, Config, Specialization, enumerate_configs
from tilewire.kernels.pointwise.kernel import pointwise_kernel
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target


def variants(target: Target) -> list[Variant]:
    """Every binary that `pointwise` can launch on `target`."""
    return list(
        dict.fromkeys(build(specialization, config, target) for specialization, config in enumerate_configs(target))
    )


def unit_of(specialization: Specialization) -> int:
    """By what the kernel multiplies the strides of rows that it is given."""
    return 16 // ITEM_BYTES[specialization.dtype] if specialization.is_aligned else 1


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """The binary of `specialization` with the blocks of `config`."""
    names = pointwise_kernel.arg_names
    item = pointer(getattr(torch, specialization.dtype))
    types = {"x_ptr": item, "y_ptr": item, "out_ptr": item if specialization.is_typed else "*i8"}
    types |= dict.fromkeys(("scale", "shift"), "fp64") | dict.fromkeys(("fn", "out_kind"), "i32")
    constants = {
        "UNIT": unit_of(specialization),
        "X_INNER": specialization.inner[0],
        "Y_INNER": specialization.inner[1],
        "OUT_INNER": specialization.inner[2],
        "OUTER_RANK": specialization.outer_rank,
        "IS_BINARY": specialization.is_binary,
        "IS_TYPED": specialization.is_typed,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "OVERLAP": target.has_overlap,
    }
    return Variant(
        pointwise_kernel,
        tuple((name, types.get(name, "i64")) for name in names if name not in constants),
        tuple((name, constants[name]) for name in names if name in constants),
        ("x_ptr", "y_ptr", "out_ptr") if specialization.is_aligned else (),
        (("num_warps", config.num_warps), *((("launch_pdl", True),) if target.has_overlap else ())),
    )
