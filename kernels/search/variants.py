"""From a search and its configuration to the binaries that compute it."""

from __future__ import annotations

import torch

from tilewire.kernels.matmul.configs import resolve_precision
from tilewire.kernels.runtime.binaries import OPERANDS, binary
from tilewire.kernels.runtime.launch import Variant, pointer
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.search.configs import DTYPES, ITEM_BYTES, Config, Problem, enumerate_configs
from tilewire.kernels.search.kernel import (
    search_finish_kernel,
    search_norms_kernel,
    search_pointer_kernel,
    search_rescore_kernel,
    search_tma_kernel,
)
from tilewire.kernels.topk.configs import WIDTHS, merge_sizes, select_block
from tilewire.kernels.topk.variants import merge_variant, select_variant

_NORM_ROWS, _NORM_K = 16, 128
# Items of one program that computes scores again.
_RESCORED = 32
_FINISH_WARPS = {16: 8, 64: 8, 256: 8, 1024: 16}


def variants(target: Target) -> list[Variant]:
    """Every binary that `search` can launch on `target`."""
    found = [norms_variant(dtype, target) for dtype in DTYPES]
    for problem, config in enumerate_configs(target):
        found += [product_variant(problem, config, target), rescore_variant(problem, config, target)]
        found.append(finish_variant(problem.width, config.group, target))
    for width in WIDTHS:
        found += [select_variant(width, select_block(width, orders, target), target) for orders in (1, 1 << 30)]
        found.append(merge_variant(width, merge_sizes(width, target)[0], target))
    return list(dict.fromkeys(found))


def unit_of(problem: Problem) -> int:
    """By what kernels multiply the row lengths and strides that they are given."""
    return 16 // ITEM_BYTES[problem.dtype] if problem.is_aligned else 1


def part_of(group: int) -> int:
    """Groups of one program that computes scores again."""
    return max(1, _RESCORED // group)


def norms_variant(dtype: str, target: Target) -> Variant:
    """The binary that computes norms of rows."""
    blocks = {"BLOCK_ROWS": _NORM_ROWS, "BLOCK_K": _NORM_K}
    types = {"x_ptr": pointer(getattr(torch, dtype)), "out_ptr": "*fp32"}
    return binary(search_norms_kernel, types, blocks, 4, target)


def product_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that computes products and stores orders of groups."""
    item = pointer(getattr(torch, problem.dtype))
    types = dict.fromkeys(("norms_ptr", "factors_ptr", "bias_ptr"), "*fp32")
    constants = {
        "UNIT": unit_of(problem),
        "AFFINE": not problem.is_plain,
        "SWAPPED": config.is_swapped,
        "WHOLE": config.is_whole,
        "PRECISION": resolve_precision(problem.precision, target),
        "UPCAST": target.backend == "interpreter" and problem.dtype == "bfloat16",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "FLATTEN": True,
    }
    options = {"num_stages": config.num_stages}
    if target.backend == "hip":
        options |= {"matrix_instr_nonkdim": 16}
    if config.kernel == "tma":
        types["a_desc"] = f"tensordesc<{item[1:]}[{config.block_m}, {config.block_k}]>"
        types["b_desc"] = f"tensordesc<{item[1:]}[{config.block_n}, {config.block_k}]>"
        return binary(search_tma_kernel, types, constants, config.num_warps, target, OPERANDS, **options)
    types |= {"a_ptr": item, "b_ptr": item}
    return binary(search_pointer_kernel, types, constants, config.num_warps, target, OPERANDS, **options)


def rescore_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that computes scores again."""
    item = pointer(getattr(torch, problem.dtype))
    types = {"a_ptr": item, "b_ptr": item, "norms_ptr": "*fp32", "bias_ptr": "*fp32", "groups_ptr": "*i64"}
    constants = {
        "UNIT": unit_of(problem),
        "GROUP": config.group,
        "PART": part_of(config.group),
        "WIDTH": problem.width,
        "BLOCK_K": 32 if target.backend == "interpreter" else 128,
    }
    return binary(search_rescore_kernel, types, constants, 4, target)


def finish_variant(width: int, group: int, target: Target) -> Variant:
    """The binary that sorts scores."""
    constants = {"BLOCK_KEYS": width * group, "WIDTH": width}
    return binary(search_finish_kernel, {"values_ptr": "*fp32"}, constants, _FINISH_WARPS[width], target)
