"""Maps a specialization and a configuration to the binary, and lists all that can be chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.experimental.gluon.language import NVMMASharedLayout

from tilewire.kernels.matmul.configs import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    Config,
    Specialization,
    boxes_of,
    pitch_of,
    place_of,
    programs_on,
    resolve_precision,
    right_of,
    stages_beside,
)
from tilewire.kernels.matmul.element.kernel import matmul_element_kernel
from tilewire.kernels.matmul.fma.kernel import matmul_fma_kernel
from tilewire.kernels.matmul.hopper.form import Form
from tilewire.kernels.matmul.hopper.kernel import LOADER_REGISTERS, matmul_wgmma_kernel
from tilewire.kernels.matmul.hopper.stages import CHANGES
from tilewire.kernels.matmul.kernel import matmul_kernel, matmul_tma_kernel, matmul_vector_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import ITEM_BYTES, descriptor, pointer
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target

# Registers of a multiprocessor. Each group of four warps has its own; the warp that loads is in a group of four.
_SM_REGISTERS, _GROUP_THREADS = 1 << 16, 128
# Registers that a thread can have, and those that a consumer of the kernel for Hopper needs beside sums.
_MOST_REGISTERS, _OTHER_REGISTERS = 255, 48

# How the matrix unit multiplies for a precision, where that has another name.
_PRECISIONS = {"fast": "ieee", "tf32x3": "tf32"}
# Length of K for which the matrix unit adds up products of limbs.
_SUMMED_LIMBS = 512
_TYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "int32": tl.int32}


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """Returns the binary of a specialization with the blocks of `config`. The number of splits of K is the grid's."""
    builders = {"tma": _build_tma, "wgmma": _build_wgmma, "fma": _build_fma, "element": _build_element}
    build_kernel = builders.get(specialization.kernel, _build_pointer)
    return build_kernel(specialization, config, target)


def units_of(specialization: Specialization) -> dict[str, int]:
    """Units of the sizes and of the input strides that kernels with pointers take."""
    units = dict.fromkeys(("m", "n", "k", "in"), 1)
    if specialization.kernel == "fma":
        units["in"] = 16 // ITEM_BYTES[specialization.dtype]
    elif specialization.store == "vec16":
        units["in"] = 16 // ITEM_BYTES[specialization.dtype]
        for major in (specialization.a_major, specialization.b_major):
            units[major] = units["in"]
    return units


def _build_pointer(specialization: Specialization, config: Config, target: Target) -> Variant:
    units = units_of(specialization)
    has_limbs = specialization.precision == "tf32x3"
    constants = {
        "M_UNIT": units["m"],
        "N_UNIT": units["n"],
        "K_UNIT": units["k"],
        "IN_UNIT": units["in"],
        "SUMS_BLOCKS": specialization.dtype == "float32" and (config.block_m <= 32 or has_limbs),
        "STAGES": config.num_stages,
    }
    types = dict.fromkeys(("a_ptr", "b_ptr"), pointer(specialization.dtype))
    kernel = matmul_vector_kernel if specialization.kernel == "vector" else matmul_kernel
    return _assemble(kernel, types, constants, specialization, config, target)


def _build_fma(specialization: Specialization, config: Config, target: Target) -> Variant:
    constants = {
        "IN_UNIT": units_of(specialization)["in"],
        "SUMS_BLOCKS": config.block_m <= 32,
        "WARPS_M": warps_along_m(config),
        "STAGES": config.num_stages,
    }
    types = dict.fromkeys(("a_ptr", "b_ptr"), pointer(specialization.dtype))
    return _assemble(matmul_fma_kernel, types, constants, specialization, config, target)


def _build_element(specialization: Specialization, config: Config, target: Target) -> Variant:
    constants = {"SIDE": config.block_m, "LANES": config.lanes}
    types = dict.fromkeys(("a_ptr", "b_ptr"), pointer(specialization.dtype))
    return _assemble(matmul_element_kernel, types, constants, specialization, config, target)


def warps_along_m(config: Config) -> int:
    """Returns how many warps of the kernel for scalar units share the rows of a tile, so that threads read least; 0 if none."""
    found = {
        warps: config.block_m // warps + config.block_n // (2 * config.num_warps // warps)
        for warps in (1, 2, 4, 8)
        if 16 * warps <= config.block_m and 32 * (config.num_warps // warps) <= config.block_n
        if warps <= config.num_warps
    }
    return min(found, key=found.__getitem__, default=0)


def _build_tma(specialization: Specialization, config: Config, target: Target) -> Variant:
    is_boxed = specialization.store == "tma"
    types = {
        f"{name}_desc": descriptor(specialization.out_dtype if name == "out" else specialization.dtype, box)
        for name, box in box_shapes(specialization, config).items()
    }
    constants = {
        "out_ptr" if is_boxed else "out_desc": None,
        "STORE_BOXES": is_boxed,
        "IS_PLAIN": specialization.is_plain,
        "OUT_TYPE": _TYPES[specialization.out_dtype],
        "IS_SWAPPED": config.is_swapped,
        "HALVES": config.halves if is_boxed else 1,
        "SUM_STEPS": _SUMMED_LIMBS // config.block_k if specialization.precision == "tf32x3" else 0,
        "FLATTEN": config.is_persistent,
    }
    return _assemble(matmul_tma_kernel, types, constants, specialization, config, target)


def _build_wgmma(specialization: Specialization, config: Config, target: Target) -> Variant:
    is_boxed = specialization.store == "tma"
    left, right = specialization.a_major, specialization.b_major
    if config.is_swapped:
        left, right = right, left
    main, tail = boxes_of(right_of(config))
    types = {
        f"{name}_desc": _boxed(specialization.out_dtype if name.startswith("out") else specialization.dtype, box)
        for name, box in box_shapes(specialization, config).items()
    }
    optional = ("tail", "out", "out_tail", "a_whole", "b_whole", "tail_whole")
    absent = {f"{name}_desc" for name in optional} - types.keys()
    if left == right == "k":
        absent.add("whole_k")
    constants: dict[str, Any] = dict.fromkeys(absent | {"out_ptr"} if is_boxed else absent)
    consumers = config.num_warps // CONSUMER_WARPS
    stages = config.num_stages
    item_bytes, out_bytes = ITEM_BYTES[specialization.dtype], ITEM_BYTES[specialization.out_dtype]
    if specialization.splits > 1:
        stages = stages_beside(config, item_bytes, out_bytes, specialization.splits, target.shared_bytes)
    programs = programs_on(config, item_bytes, out_bytes, target.shared_bytes)
    groups = consumers + 1
    # Registers of a thread at the start; the warp that loads gives most of its own to the others.
    at_start = _SM_REGISTERS // (programs * groups * _GROUP_THREADS) // 8 * 8
    registers = (at_start * groups - LOADER_REGISTERS.value) // consumers // 8 * 8
    form = Form(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        group_m=config.group_m,
        consumers=consumers,
        stages=stages,
        halves=config.halves,
        main=place_of(main),
        tail=place_of(tail),
        pitch=pitch_of(config, item_bytes),
        columns=main,
        tail_columns=tail,
        registers=registers,
        out_type=_TYPES[specialization.out_dtype],
        stores_boxes=is_boxed,
        is_swapped=config.is_swapped,
        left_is_k=left == "k",
        right_is_k=right == "k",
        is_batched=specialization.is_batched,
        splits=specialization.splits,
        is_plain=specialization.is_plain,
        sharers=config.sharers,
        shares_left=config.sharers_of("b" if config.is_swapped else "a") > 1,
        promotes=_promotion(specialization, main, tail, consumers, registers),
        changes=CHANGES,
    )
    # Warps that the kernel is written for; those of the other partitions come on top.
    one = replace(config, num_warps=CONSUMER_WARPS)
    options = {"maxnreg": at_start} if programs > 1 else {}
    return _assemble(matmul_wgmma_kernel, types, constants | {"FORM": form}, specialization, one, target, **options)


def _promotion(specialization: Specialization, main: int, tail: int, consumers: int, registers: int) -> int:
    """`Form.promotes` where a thread of one of so many consumers has so many registers."""
    if not specialization.dtype.startswith("float8") or specialization.precision == "fast":
        return 0
    sums = main * CONSUMER_ROWS // (32 * CONSUMER_WARPS)
    has_room = 3 * sums + _OTHER_REGISTERS <= min(registers, _MOST_REGISTERS)
    # Three consumers fill the matrix unit by turns, and were 0.6 % slower so.
    return 2 if has_room and not tail and consumers < 3 else 1


def _boxed(dtype: str, box: tuple[int, ...]) -> str:
    """Type of a descriptor whose boxes lie in shared memory as matrix instructions read them, in places for them."""
    box = (*box[:-2], place_of(box[-2]), box[-1])
    row_bytes = box[-1] * ITEM_BYTES[dtype]
    swizzle = next(width for width in (128, 64, 32, 0) if width == 0 or row_bytes % width == 0)
    return descriptor(dtype, box, repr(NVMMASharedLayout(swizzle, 8 * ITEM_BYTES[dtype], len(box))))


def box_shapes(specialization: Specialization, config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the block that one load or store of each descriptor moves: (products, rows, columns), or without the first.

    Names are those of the kernels' arguments without `_desc`. Outputs have boxes where they are stored through descriptors.
    """
    if config.kernel == "wgmma":
        boxes = _hopper_boxes(specialization, config)
    else:
        boxes = _boxes(specialization, config.block_m, config.block_n, config.block_k)
        boxes["out"] = (config.block_m, config.block_n // config.halves)
    if specialization.store != "tma":
        boxes = {name: box for name, box in boxes.items() if not name.startswith("out")}
    return {name: (1, *box) if specialization.is_batched else box for name, box in boxes.items()}


def _boxes(specialization: Specialization, m: int, n: int, k: int) -> dict[str, tuple[int, ...]]:
    """Boxes of the operands for a tile of `m` rows and `n` columns and steps of `k`."""
    return {
        "a": (m, k) if specialization.a_major == "k" else (k, m),
        "b": (k, n) if specialization.b_major == "n" else (n, k),
    }


def _hopper_boxes(specialization: Specialization, config: Config) -> dict[str, tuple[int, ...]]:
    """The blocks of `box_shapes`: a consumer's part of the tile, and `tail`, `out_tail` where the right side has a tail.

    `…_whole` are for the second descriptors of operands whose rows do not lie along K.
    """
    is_swapped = config.is_swapped
    found: dict[str, tuple[int, ...]] = {}
    for length, halves, mark in zip(boxes_of(right_of(config)), (config.halves, 1), ("", "tail"), strict=True):
        if not length:
            continue
        m, n = (length, CONSUMER_ROWS) if is_swapped else (CONSUMER_ROWS, length)
        boxes = _boxes(specialization, m, n, config.block_k)
        found |= {"tail": boxes["a" if is_swapped else "b"]} if mark else boxes
        found[f"out_{mark}" if mark else "out"] = (m // halves, n) if is_swapped else (m, n // halves)
    majors = {"a": specialization.a_major, "b": specialization.b_major}
    majors["tail"] = majors["a" if is_swapped else "b"]
    return found | {f"{name}_whole": found[name] for name in majors if name in found and majors[name] != "k"}


def _assemble(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    specialization: Specialization,
    config: Config,
    target: Target,
    **options: Any,
) -> Variant:
    """The binary with what all kernels take alike."""
    types |= dict.fromkeys(("out_ptr", "bias_ptr"), "*i8") | dict.fromkeys(("a_scale_ptr", "b_scale_ptr"), "*fp32")
    types |= {"partial_ptr": "*i32" if specialization.dtype == "int8" else "*fp32", "count_ptr": "*i32"}
    is_fast = specialization.precision == "fast"
    in_pieces = specialization.store == "vec16"
    constants |= {
        "A_MAJOR": specialization.a_major,
        "B_MAJOR": specialization.b_major,
        "IN_PIECES": in_pieces,
        "PRECISION": resolve_precision(_PRECISIONS.get(specialization.precision, specialization.precision), target),
        "IMPRECISE_K": config.block_k if specialization.dtype.startswith("float8") and not is_fast else None,
        "UPCAST": target.backend == "interpreter" and specialization.dtype == "bfloat16",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }
    aligned = ["partial_ptr", "count_ptr"]
    if in_pieces or specialization.kernel == "fma":
        aligned += ["a_ptr", "b_ptr"]
    if in_pieces:
        aligned += ["out_ptr"]
    options |= {"num_stages": config.num_stages}
    if config.waves_per_eu:
        options |= {"waves_per_eu": config.waves_per_eu, "matrix_instr_nonkdim": 16}
    return binary(kernel, types, constants, config.num_warps, target, tuple(aligned), **options)
