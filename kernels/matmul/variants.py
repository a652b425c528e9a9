"""From a problem and a configuration to the binary that computes it. Knows no tensor and launches nothing."""

from __future__ import annotations

from typing import Any

import torch

from kernels.launching import Variant, pointer
from kernels.matmul.configs import ITEM_BYTES, Config, Finish, Problem, resolve_precision
from kernels.matmul.kernel import matmul_kernel
from kernels.targets import Target

_SCALE_MODES = {"none": 0, "one": 1, "each": 2}


def build(problem: Problem, finish: Finish, config: Config, target: Target) -> Variant:
    """The binary that computes `problem` with `finish` by `config` on `target`."""
    pointers = {
        "a_ptr": _pointer(problem.dtype),
        "b_ptr": _pointer(problem.dtype),
        "out_ptr": _pointer(problem.out_dtype),
        "bias_ptr": _pointer(finish.bias_dtype or "float32"),
        "a_scale_ptr": "*fp32",
        "b_scale_ptr": "*fp32",
        "partial_ptr": "*i32" if problem.dtype == "int8" else "*fp32",
        "count_ptr": "*i32",
    }
    names = matmul_kernel.arg_names
    sizes = {"m": "i32", "n": "i32", "k": "i32", "batch_inner": "i32"}
    sizes |= {name: "i64" for name in names if name.startswith("stride_")}
    divisible = ["partial_ptr", "count_ptr"]
    divisible += ["a_ptr", "b_ptr"] if problem.is_aligned_in else []
    divisible += ["out_ptr"] if problem.is_aligned_out else []
    signature = pointers | sizes
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if target.backend == "hip":
        options |= {"waves_per_eu": config.waves_per_eu, "matrix_instr_nonkdim": 16}
    constants = _layout_constants(problem, config) | {
        "HAS_BIAS": bool(finish.bias_dtype),
        "A_SCALE": _SCALE_MODES[finish.a_scale],
        "B_SCALE": _SCALE_MODES[finish.b_scale],
        "ACTIVATION": finish.activation,
        "PRECISION": resolve_precision(problem.precision, target),
        "IMPRECISE_K": 0 if not problem.dtype.startswith("float8") else config.block_k,
        "UPCAST": target.backend == "interpreter" and problem.dtype == "bfloat16",
    }
    return Variant(
        matmul_kernel,
        tuple((name, signature[name]) for name in names if name in signature),
        tuple((name, constants[name]) for name in names if name in constants),
        tuple(divisible),
        tuple(options.items()),
    )


def _layout_constants(problem: Problem, config: Config) -> dict[str, Any]:
    units = units_of(problem)
    return {
        "A_MAJOR": problem.a_major,
        "B_MAJOR": problem.b_major,
        "OUT_CONTIGUOUS": problem.is_aligned_out,
        "M_UNIT": units["m"],
        "N_UNIT": units["n"],
        "K_UNIT": units["k"],
        "IN_UNIT": units["in"],
        "OUT_UNIT": units["out"],
        "EVEN_K": problem.k % config.block_k == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
    }


def units_of(problem: Problem) -> dict[str, int]:
    """By what the kernel multiplies each size and stride that it is given."""
    units = dict.fromkeys(("m", "n", "k", "in", "out"), 1)
    if problem.is_aligned_out:
        units["out"] = units["n"] = 16 // ITEM_BYTES[problem.out_dtype]
    if problem.is_aligned_in:
        units["in"] = 16 // ITEM_BYTES[problem.dtype]
        for major in (problem.a_major, problem.b_major):
            units[major] = max(units[major], units["in"])
    return units


def _pointer(dtype: str) -> str:
    return pointer(getattr(torch, dtype))
