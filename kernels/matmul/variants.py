"""From a problem and a configuration to the binary that computes it. Knows no tensor and launches nothing."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from kernels.launching import Variant, pointer
from kernels.matmul.configs import ITEM_BYTES, Config, Finish, Problem, resolve_precision
from kernels.matmul.kernel import matmul_kernel, matmul_tma_kernel
from kernels.targets import Target

_TYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "int32": tl.int32}
_SCALE_MODES = {"none": 0, "one": 1, "each": 2}


def build(problem: Problem, finish: Finish, config: Config, target: Target) -> Variant:
    """The binary that computes `problem` with `finish` by `config` on `target`."""
    if config.kernel == "tma":
        return _build_tma(problem, finish, config, target)
    return _build_pointer(problem, finish, config, target)


def stores_boxes(problem: Problem, config: Config) -> bool:
    """Whether the descriptor kernel also stores through a descriptor.

    Such a store rounds the end of a row up to 16 bytes, so rows must be whole multiples: what follows is not ours.
    """
    return problem.is_padded_out and problem.is_aligned_out and config.split_k == 1


def units_of(problem: Problem) -> dict[str, int]:
    """By what the kernels multiply each size and stride that they are given."""
    units = dict.fromkeys(("m", "n", "k", "in", "out"), 1)
    if problem.is_aligned_out:
        units["out"] = units["n"] = 16 // ITEM_BYTES[problem.out_dtype]
    if problem.is_aligned_in:
        units["in"] = 16 // ITEM_BYTES[problem.dtype]
        for major in (problem.a_major, problem.b_major):
            units[major] = max(units[major], units["in"])
    return units


def tma_out_unit(problem: Problem, config: Config) -> int:
    """By what the descriptor kernel multiplies the strides of an output that it stores without a descriptor."""
    is_divided = problem.is_padded_out and not stores_boxes(problem, config)
    return 16 // ITEM_BYTES[problem.out_dtype] if is_divided else 1


def _build_pointer(problem: Problem, finish: Finish, config: Config, target: Target) -> Variant:
    types = _finish_types(problem, finish) | {
        "a_ptr": _pointer(problem.dtype),
        "b_ptr": _pointer(problem.dtype),
        "out_ptr": _pointer(problem.out_dtype),
    }
    types |= dict.fromkeys(("m", "n", "k", "batch_inner"), "i32")
    types |= {name: "i64" for name in matmul_kernel.arg_names if name.startswith("stride_")}
    divisible = ["partial_ptr", "count_ptr"]
    divisible += ["a_ptr", "b_ptr"] if problem.is_aligned_in else []
    divisible += ["out_ptr"] if problem.is_aligned_out else []
    units = units_of(problem)
    constants = {
        "OUT_CONTIGUOUS": problem.is_aligned_out,
        "M_UNIT": units["m"],
        "N_UNIT": units["n"],
        "K_UNIT": units["k"],
        "IN_UNIT": units["in"],
        "OUT_UNIT": units["out"],
        "EVEN_K": problem.k % config.block_k == 0,
        "SUMS_BLOCKS": problem.dtype == "float32" and config.block_m <= 32,
    }
    return _assemble(
        matmul_kernel, types, constants | _shared_constants(problem, finish, config, target), divisible, config
    )


def _build_tma(problem: Problem, finish: Finish, config: Config, target: Target) -> Variant:
    boxes = stores_boxes(problem, config)
    blocks = box_shapes(problem, config)
    types = _finish_types(problem, finish) | {
        "a_desc": _descriptor(problem.dtype, blocks["a"]),
        "b_desc": _descriptor(problem.dtype, blocks["b"]),
    }
    types |= {"out_desc": _descriptor(problem.out_dtype, blocks["out"])} if boxes else {}
    types |= {} if boxes else {"out_ptr": _pointer(problem.out_dtype)}
    types |= dict.fromkeys(("m", "n", "k", "batch", "step_a", "step_b"), "i32")
    types |= {"stride_oz": "i64", "stride_om": "i64"}
    divisible = ["partial_ptr", "count_ptr"]
    divisible += ["out_ptr"] if problem.is_padded_out and not boxes else []
    constants = {
        "out_ptr" if boxes else "out_desc": None,
        "IS_BATCHED": problem.batch > 1,
        "STORE_BOXES": boxes,
        "OUT_UNIT": tma_out_unit(problem, config),
        "OUT_TYPE": _TYPES[problem.out_dtype],
        "IS_SWAPPED": config.is_swapped,
        "HALVES": config.halves if boxes else 1,
        "FLATTEN": config.is_persistent and config.split_k == 1,
    }
    constants |= _shared_constants(problem, finish, config, target)
    return _assemble(matmul_tma_kernel, types, constants, divisible, config)


def box_shapes(problem: Problem, config: Config) -> dict[str, tuple[int, ...]]:
    """What one load or store of each descriptor moves."""
    m, n, k = config.block_m, config.block_n, config.block_k
    halves = config.halves if stores_boxes(problem, config) else 1
    boxes = {
        "a": (m, k) if problem.a_major == "k" else (k, m),
        "b": (k, n) if problem.b_major == "n" else (n, k),
        "out": (m, n // halves),
    }
    return {name: (1, *box) if problem.batch > 1 else box for name, box in boxes.items()}


def _finish_types(problem: Problem, finish: Finish) -> dict[str, str]:
    return {
        "bias_ptr": _pointer(finish.bias_dtype or "float32"),
        "a_scale_ptr": "*fp32",
        "b_scale_ptr": "*fp32",
        "partial_ptr": "*i32" if problem.dtype == "int8" else "*fp32",
        "count_ptr": "*i32",
    }


def _shared_constants(problem: Problem, finish: Finish, config: Config, target: Target) -> dict[str, Any]:
    return {
        "A_MAJOR": problem.a_major,
        "B_MAJOR": problem.b_major,
        "HAS_BIAS": bool(finish.bias_dtype),
        "A_SCALE": _SCALE_MODES[finish.a_scale],
        "B_SCALE": _SCALE_MODES[finish.b_scale],
        "ACTIVATION": finish.activation,
        "PRECISION": resolve_precision(problem.precision, target),
        "IMPRECISE_K": config.block_k if problem.dtype.startswith("float8") and config.promotes else None,
        "UPCAST": target.backend == "interpreter" and problem.dtype == "bfloat16",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k,
        "OVERLAP": target.has_overlap,
    }


def _assemble(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], divisible: list[str], config: Config
) -> Variant:
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.waves_per_eu:
        options |= {"waves_per_eu": config.waves_per_eu, "matrix_instr_nonkdim": 16}
    if constants["OVERLAP"]:
        options |= {"launch_pdl": True}
    names = kernel.arg_names
    return Variant(
        kernel,
        tuple((name, types[name]) for name in names if name in types),
        tuple((name, constants[name]) for name in names if name in constants),
        tuple(divisible),
        tuple(options.items()),
    )


def _pointer(dtype: str) -> str:
    return pointer(getattr(torch, dtype))


def _descriptor(dtype: str, box: tuple[int, ...]) -> str:
    return f"tensordesc<{_pointer(dtype)[1:]}{list(box)}>"
