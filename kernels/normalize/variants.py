"""From a normalisation and its configuration to the binary that computes it."""

from __future__ import annotations

import torch

from tilewire.kernels.normalize.configs import ITEM_BYTES, Config, Problem, enumerate_configs
from tilewire.kernels.normalize.kernel import normalize_loop_kernel, normalize_row_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target


def variants(target: Target) -> list[Variant]:
    """Every binary that `normalize` can launch on `target`."""
    return list(dict.fromkeys(variant(problem, config, target) for problem, config in enumerate_configs(target)))


def unit_of(problem: Problem) -> int:
    """By what kernels multiply the lengths and strides that they are given."""
    if not problem.is_aligned:
        return 1
    return 16 // min(ITEM_BYTES[dtype] for dtype in (problem.dtype, problem.out_dtype))


def variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of `problem` with the blocks of `config`."""
    vector = pointer(getattr(torch, problem.vector_dtype))
    types = {
        "x_ptr": pointer(getattr(torch, problem.dtype)),
        "out_ptr": pointer(getattr(torch, problem.out_dtype)),
        "weight_ptr": vector,
        "bias_ptr": vector,
        "eps": "fp64",
    }
    constants = {"UNIT": unit_of(problem), "BLOCK_N": config.block_n}
    kernel = normalize_row_kernel if config.block_rows else normalize_loop_kernel
    constants |= {"BLOCK_ROWS": config.block_rows} if config.block_rows else {}
    return binary(kernel, types, constants, config.num_warps, target, ("x_ptr", "out_ptr"))
