"""From a search and its configuration to the binaries that compute it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import descriptor, pointer
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.search.configs import SCORES, Config, Problem, product_precision
from tilewire.kernels.search.kernel import (
    search_centre_kernel,
    search_distances_kernel,
    search_finish_kernel,
    search_norms_kernel,
    search_pointer_kernel,
    search_score_kernel,
    search_tile_kernel,
    search_tma_kernel,
)
from tilewire.kernels.topk.configs import Block
from tilewire.kernels.topk.op import constants_of

NORM_ROWS, _NORM_K = 16, 128
# Elements of a query that one program counts from the centre.
CENTRE_K = 1024
# Groups of a query whose orders one program turns into those of distances.
DISTANCES = 256


def binaries(problem: Problem, config: Config, target: Target) -> Iterator[Variant]:
    """Yields the binaries that `problem` is searched with, but for norms, those that select, the last, and a product's."""
    if config.kernel == "tile":
        yield tile_variant(problem, config, target)
    if config.kernel in ("tile", "product"):
        return
    if config.kernel != "none":
        yield product_variant(problem, config, target)
        if not problem.is_plain:
            yield distances_variant(problem, config, target)
    yield score_variant(problem, config, target)


def norms_variant(dtype: str, target: Target) -> Variant:
    """The binary that computes norms of rows."""
    blocks = {"BLOCK_ROWS": NORM_ROWS, "BLOCK_K": _NORM_K}
    types = {"x_ptr": pointer(dtype), "out_ptr": "*fp32"}
    return binary(search_norms_kernel, types, blocks, 4, target)


def centre_variant(target: Target) -> Variant:
    """The binary that subtracts the centre from queries."""
    types = {"norms_ptr": "*fp32", "a_ptr": "*fp32", "centred_ptr": "*fp32"}
    return binary(search_centre_kernel, types, {"BLOCK_K": CENTRE_K}, 4, target)


def product_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that computes products and stores orders of groups."""
    types = dict.fromkeys(("norms_ptr", "factors_ptr", "bias_ptr"), "*fp32")
    constants = {
        "UNIT": problem.unit,
        "AFFINE": not problem.is_plain,
        "SWAPPED": config.is_swapped,
        "WHOLE": config.is_whole,
        "PRECISION": product_precision(problem.precision, target),
        "UPCAST": target.backend == "interpreter" and problem.dtype == "bfloat16",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "FLATTEN": True,
    }
    options: dict[str, Any] = {"num_stages": config.num_stages}
    if target.backend == "hip":
        options |= {"matrix_instr_nonkdim": 16}
    if config.kernel == "tma":
        types["a_desc"] = descriptor(problem.dtype, (config.block_m, config.block_k))
        types["b_desc"] = descriptor(problem.dtype, (config.block_n, config.block_k))
        return binary(search_tma_kernel, types, constants, config.num_warps, target, **options)
    types |= dict.fromkeys(("a_ptr", "b_ptr"), pointer(problem.dtype))
    return binary(search_pointer_kernel, types, constants, config.num_warps, target, **options)


def distances_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that turns orders of groups into those of distances."""
    item = pointer(problem.dtype)
    types = {"a_ptr": item, "b_ptr": item, "centred_ptr": item, "bias_ptr": "*fp32"}
    score = SCORES[config.group]
    constants = {
        "UNIT": problem.unit,
        "BLOCK_N": DISTANCES,
        "GROUP": config.group,
        "BLOCK_K": 32 if target.backend == "interpreter" else score.block_k,
    }
    return binary(search_distances_kernel, types, constants, score.num_warps, target)


def score_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that computes the scores of groups of items."""
    item = pointer(problem.dtype)
    types = {"a_ptr": item, "b_ptr": item, "norms_ptr": "*fp32", "bias_ptr": "*fp32", "groups_ptr": "*i64"}
    score = config.score
    constants = {
        "UNIT": problem.unit,
        "GROUPS": score.groups,
        "GROUP": config.group,
        "BLOCK_K": 32 if target.backend == "interpreter" else score.block_k,
    }
    return binary(search_score_kernel, types, constants, score.num_warps, target)


def tile_variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary that computes the distances of all items by tiles."""
    types = dict.fromkeys(("a_ptr", "b_ptr"), pointer(problem.dtype)) | {"bias_ptr": "*fp32"}
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return binary(search_tile_kernel, types, blocks, config.num_warps, target)


def finish_variant(block: Block, is_scores: bool, target: Target) -> Variant:
    """The binary that finds the best of as many keys, or scores, as `block` holds."""
    types = dict.fromkeys(("norms_ptr", "factors_ptr", "bias_ptr", "values_ptr"), "*fp32")
    types |= {"scored_ptr": "*fp32" if is_scores else "*i64"}
    # What is sorted is read one by one: neighbours in a thread would have to be parted.
    aligned = ("scored_ptr",) if is_scores and not block.sort else ()
    return binary(search_finish_kernel, types, constants_of(block, target), block.num_warps, target, aligned)
