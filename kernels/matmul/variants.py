"""Maps a specialization and a configuration to the binary, and lists all that can be chosen."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from tilewire.kernels.matmul.configs import ITEM_BYTES, Config, Specialization, resolve_precision
from tilewire.kernels.matmul.kernel import matmul_kernel, matmul_tma_kernel, matmul_vector_kernel
from tilewire.kernels.matmul.members import by_specialization
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target

_TYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "int32": tl.int32}


def variants(target: Target) -> list[Variant]:
    """Every binary that `matmul` can launch on `target`."""
    return [
        build(specialization, config, target)
        for specialization, configs in by_specialization(target).items()
        for config in configs
    ]


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """Returns the binary of a specialization with the blocks of `config`. The splits of K are the grid's, not the binary's."""
    return (_build_tma if specialization.kernel == "tma" else _build_pointer)(specialization, config, target)


def units_of(specialization: Specialization) -> dict[str, int]:
    """By what the pointer kernel multiplies the sizes and input strides that it is given."""
    units = dict.fromkeys(("m", "n", "k", "in"), 1)
    if specialization.store == "vec16":
        units["in"] = 16 // ITEM_BYTES[specialization.dtype]
        for major in (specialization.a_major, specialization.b_major):
            units[major] = units["in"]
    return units


def _build_pointer(specialization: Specialization, config: Config, target: Target) -> Variant:
    types = _common_types(specialization) | {
        "a_ptr": _pointer(specialization.dtype),
        "b_ptr": _pointer(specialization.dtype),
    }
    types |= dict.fromkeys(("m", "n", "k", "batch_inner"), "i32")
    kernel = matmul_vector_kernel if specialization.kernel == "vector" else matmul_kernel
    types |= {name: "i64" for name in kernel.arg_names if name.startswith("stride_")}
    units = units_of(specialization)
    constants = {
        "M_UNIT": units["m"],
        "N_UNIT": units["n"],
        "K_UNIT": units["k"],
        "IN_UNIT": units["in"],
        "SUMS_BLOCKS": specialization.dtype == "float32" and config.block_m <= 32,
        "STAGES": config.num_stages,
    }
    divisible = ["a_ptr", "b_ptr"] if specialization.store == "vec16" else []
    return _assemble(kernel, types, constants | _common_constants(specialization, config, target), divisible, config)


def _build_tma(specialization: Specialization, config: Config, target: Target) -> Variant:
    is_boxed = specialization.store == "tma"
    blocks = box_shapes(specialization, config)
    types = _common_types(specialization) | {
        "a_desc": _descriptor(specialization.dtype, blocks["a"]),
        "b_desc": _descriptor(specialization.dtype, blocks["b"]),
    }
    if is_boxed:
        del types["out_ptr"]
        types["out_desc"] = _descriptor(specialization.out_dtype, blocks["out"])
    types |= dict.fromkeys(("m", "n", "k", "batch", "step_a", "step_b"), "i32")
    types |= dict.fromkeys(("stride_oz", "stride_om"), "i64")
    constants = {
        "out_ptr" if is_boxed else "out_desc": None,
        "IS_BATCHED": specialization.is_batched,
        "STORE_BOXES": is_boxed,
        "IS_PLAIN": specialization.is_plain,
        "OUT_TYPE": _TYPES[specialization.out_dtype],
        "IS_SWAPPED": config.is_swapped,
        "HALVES": config.halves if is_boxed else 1,
        "FLATTEN": config.is_persistent,
    }
    return _assemble(
        matmul_tma_kernel, types, constants | _common_constants(specialization, config, target), [], config
    )


def box_shapes(specialization: Specialization, config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the block that one load or store of each descriptor moves."""
    m, n, k = config.block_m, config.block_n, config.block_k
    boxes = {
        "a": (m, k) if specialization.a_major == "k" else (k, m),
        "b": (k, n) if specialization.b_major == "n" else (n, k),
        "out": (m, n // config.halves),
    }
    return {name: (1, *box) if specialization.is_batched else box for name, box in boxes.items()}


def _common_types(specialization: Specialization) -> dict[str, str]:
    pointers = dict.fromkeys(("out_ptr", "bias_ptr"), "*i8") | dict.fromkeys(("a_scale_ptr", "b_scale_ptr"), "*fp32")
    scratch = {"partial_ptr": "*i32" if specialization.dtype == "int8" else "*fp32", "count_ptr": "*i32"}
    runtime_args = ("out_kind", "bias_kind", "a_scale_step", "b_scale_step", "activation")
    return pointers | scratch | dict.fromkeys(runtime_args, "i32")


def _common_constants(specialization: Specialization, config: Config, target: Target) -> dict[str, Any]:
    return {
        "A_MAJOR": specialization.a_major,
        "B_MAJOR": specialization.b_major,
        "IN_PIECES": specialization.store == "vec16",
        "PRECISION": "ieee"
        if specialization.precision == "fast"
        else resolve_precision(specialization.precision, target),
        "IMPRECISE_K": config.block_k
        if specialization.dtype.startswith("float8") and specialization.precision != "fast"
        else None,
        "UPCAST": target.backend == "interpreter" and specialization.dtype == "bfloat16",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "OVERLAP": target.has_overlap,
    }


def _assemble(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], divisible: list[str], config: Config
) -> Variant:
    divisible = [*divisible, "partial_ptr", "count_ptr"]
    divisible += ["out_ptr"] if constants["IN_PIECES"] else []
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
