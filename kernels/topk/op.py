"""Top-k: binaries, the public function, and the self-test with its oracle."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from tilewire.kernels.op import SelfTest
from tilewire.kernels.pointwise.copying import contiguous
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, name_of, pointer
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_aligned, device_number
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step
from tilewire.kernels.runtime.rows import check_rows, row_stride
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.topk.configs import (
    MAX_K,
    MAX_KEPT,
    SHIFTS,
    WIDTHS,
    Block,
    Config,
    Problem,
    block_for,
    choose,
    enumerate_configs,
    num_kept,
    select_blocks,
)
from tilewire.kernels.topk.kernel import (
    topk_finish_kernel,
    topk_groups_kernel,
    topk_row_kernel,
    topk_select_kernel,
)

# ── binaries ────────────────────────────────────────────────────────────────────────────────────────


def members(target: Target) -> Iterator[tuple[str, Config]]:
    """Yields the arguments of `built` for every configuration that can be chosen on `target`."""
    for config, dtype in itertools.product(enumerate_configs(target), FLOATS):
        yield dtype, config


def built(dtype: str, config: Config, target: Target) -> dict[str, Variant]:
    """The binaries of `config` by role, but for those that select: `row`, or `groups` and `finish`."""
    x = dict.fromkeys(("x_ptr", "values_ptr"), pointer(dtype))
    if config.row is not None:
        constants = constants_of(config.row, target, 16 // ITEM_BYTES[dtype])
        return {"row": binary(topk_row_kernel, x, constants, config.row.num_warps, target)}
    assert config.groups is not None, "This is a bug."
    assert config.finish is not None, "This is a bug."
    group = {"GROUP": config.group}
    groups = group | constants_of(config.groups, target)
    finish = group | constants_of(config.finish, target)
    return {
        "groups": binary(topk_groups_kernel, x, groups, config.groups.num_warps, target),
        "finish": binary(topk_finish_kernel, x | {"groups_ptr": "*i64"}, finish, config.finish.num_warps, target),
    }


def selecting(target: Target) -> list[tuple[Block, bool]]:
    """Returns the arguments of `select_variant` for every binary that can be launched on `target`."""
    blocks = dict.fromkeys(block for width in WIDTHS for block in select_blocks(width, target))
    return list(itertools.product(blocks, (False, True)))


def select_variant(block: Block, of_keys: bool, target: Target) -> Variant:
    """The binary that selects among orders, or among keys."""
    types = {"orders_ptr": "*i64"} if of_keys else {}
    return binary(topk_select_kernel, types, constants_of(block, target), block.num_warps, target)


def constants_of(block: Block, target: Target, unit: int = 1) -> dict[str, int]:
    """The constants of `block`, whose threads hold `unit` neighbours at a time."""
    threads = min(block.block_n, target.warp_size * block.num_warps)
    return {
        "BLOCK_ROWS": block.block_rows,
        "BLOCK_N": block.block_n,
        "SORT": block.sort,
        "THREADS": threads,
        "UNIT": min(unit, block.block_n // threads),
    }


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


_TENSORS = ("x", "values", "indices")


def topk(x: torch.Tensor, k: int, *, axis: int = -1, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the `k` best elements along `axis`, best first.

    Equal elements rank by the smaller index. NaN is above every number, as in PyTorch.

    Args:
        x: Any shape of rank 1 or more; float16, bfloat16 or float32; any strides.
        k: Number of elements, 1 to 1024 and not above the length of the axis.
        axis: Dimension that is searched.
        largest: Whether large elements are best.

    Returns:
        The elements, of the dtype of `x`, and their indices along the axis, int64; the axis has length `k`.

    Raises:
        ValueError: Shape, dtype, `k` or `axis` cannot be right.
    """
    axis = _check(x, k, axis)
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    indices = torch.empty(shape, dtype=torch.int64, device=x.device)
    if values.numel() > 0:
        prepare_topk(x, values, indices, axis=axis, largest=largest)(x, values, indices)
    return values, indices


def prepare_topk(
    x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, *, axis: int = -1, largest: bool = True
) -> Prepared:
    """Prepares top-k launches for tensors of these shapes, strides, dtypes and alignment.

    Args:
        x: As in `topk`.
        values: Shape of `x` but for the axis, whose length is k; the dtype of `x`; not empty.
        indices: Shape of `values`; int64.
        axis: As in `topk`.
        largest: As in `topk`.

    Returns:
        A launcher, called with `(x, values, indices)`. It belongs to the calling thread.

    Raises:
        ValueError: As in `topk`, or an output does not fit.
    """
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis: {axis} is not an axis of rank {x.dim()}")
    axis = _check(x, values.shape[axis], axis)
    shape = (*x.shape[:axis], values.shape[axis], *x.shape[axis + 1 :])
    if tuple(values.shape) != shape or values.dtype != x.dtype or values.numel() == 0:
        raise ValueError(
            f"values: expected {shape} of {x.dtype}, not empty, got {tuple(values.shape)} of {values.dtype}"
        )
    if tuple(indices.shape) != shape or indices.dtype != torch.int64:
        raise ValueError(f"indices: expected {shape} of int64, got {tuple(indices.shape)} of {indices.dtype}")
    return prepare(x, values, indices, axis=axis, largest=largest)


def _check(x: torch.Tensor, k: int, axis: int) -> int:
    """The axis, counted from the front."""
    axis = check_rows(x, axis)
    if not 1 <= k <= min(MAX_K, x.shape[axis]):
        raise ValueError(f"k: expected 1 to {min(MAX_K, x.shape[axis])}, got {k}")
    return axis


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    *,
    axis: int,
    largest: bool,
    config: Config | None = None,
    max_kept: int = MAX_KEPT,
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning.

    So many rows at a time that they keep at most `max_kept` keys in scratch memory.
    """
    shapes = (x.shape, x.stride(), values.stride(), indices.stride(), values.shape[axis])
    key = (shapes, x.dtype, are_aligned((x,)), axis, largest, config, max_kept, x.device)

    def make() -> Prepared:
        rows = x.movedim(axis, -1)
        is_last = axis == x.dim() - 1 and values.is_contiguous() and indices.is_contiguous()
        stride = row_stride(rows)
        is_direct = is_last and stride is not None
        stride = x.shape[axis] if stride is None else stride
        unit = 16 // x.element_size()
        is_aligned = (not is_direct or are_aligned((x,))) and stride % unit == 0
        num_rows = math.prod(rows.shape[:-1])
        problem = Problem(num_rows, rows.shape[-1], values.shape[axis], name_of(x.dtype), is_aligned)
        target = current(x.get_device())
        flip = 0 if largest else -1
        launches = _cut(problem, stride, flip, config or choose(problem, target), x.device, max_kept)
        return launches if is_direct else Detour(functools.partial(_through_copies, launches, axis), launches)

    return _launches.get(key, make)


def _through_copies(
    launches: Prepared, axis: int, x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """Launches on rows and outputs that lie as the kernels take them."""
    outputs = [out.movedim(axis, -1) for out in (values, indices)]
    written = [torch.empty_like(out, memory_format=torch.contiguous_format) for out in outputs]
    rows = x.movedim(axis, -1)
    launches(rows if row_stride(rows) is not None else contiguous(rows), *written)
    for out, found in zip(outputs, written, strict=True):
        out.copy_(found)


def _cut(problem: Problem, stride: int, flip: int, config: Config, device: torch.device, max_kept: int) -> Prepared:
    """Launches for all rows, or for some after others."""
    target = current(device_number(device))
    most = max(1, max_kept // max(1, config.scratch(problem.k)))
    counts = [min(most, problem.rows - first) for first in range(0, problem.rows, most)]
    pipelines = {
        count: _pipeline(replace(problem, rows=count), stride, flip, config, target, device) for count in set(counts)
    }
    if len(counts) == 1:
        return pipelines[problem.rows]
    return Detour(functools.partial(_in_cuts, pipelines, counts, stride), *map(pipelines.__getitem__, counts))


def _in_cuts(
    pipelines: dict[int, Prepared],
    counts: list[int],
    stride: int,
    x: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Launches `counts` rows, one after another, by the pipelines for as many."""
    rows = x.as_strided((sum(counts), x.shape[-1]), (stride, 1))
    tensors = (rows, *(out.view(len(rows), -1) for out in (values, indices)))
    for count, *parts in zip(counts, *(tensor.split(counts) for tensor in tensors), strict=True):
        pipelines[count](*parts)


def _pipeline(
    problem: Problem, stride: int, flip: int, config: Config, target: Target, device: torch.device
) -> Prepared:
    binaries = built(problem.dtype, config, target)
    rows = problem.rows
    sizes = {"rows": rows, "n": problem.n, "k": problem.k, "stride_row": stride, "flip": flip}
    sizes |= {"shift": SHIFTS[problem.dtype]}
    sizes["most"] = num_kept(problem.k)
    kept = {"kept": Part(torch.int64, (rows, max(1, config.scratch(problem.k))))}
    if config.row is not None:
        launch = Launch(binaries["row"], (-(-rows // config.row.block_rows),), sizes, device)
        return Pipeline(_TENSORS, [Step(launch, ("x", "kept", "values", "indices"))], device, kept)
    assert config.groups is not None, "This is a bug."
    groups = -(-problem.num_places // config.group)
    programs = rows * -(-groups // (config.groups.block_n // config.group))
    first = Launch(binaries["groups"], (programs,), sizes | {"groups": groups}, device)
    steps, parts = select_steps(rows, groups, problem.k, config.select, device, sizes["shift"])
    finish = Launch(binaries["finish"], (rows,), sizes, device)
    names = ("x", steps[-1].operands[-1], "kept", "values", "indices")
    return Pipeline(_TENSORS, [Step(first, ("x", "orders")), *steps, Step(finish, names)], device, parts | kept)


def select_steps(
    rows: int, orders: int, k: int, blocks: tuple[Block, ...], device: torch.device, shift: int = 0
) -> tuple[list[Step], dict[str, Part]]:
    """Steps from `orders` of each row, in the part of that name, to keys of its `k` best, by index.

    Returns:
        The steps, whose last operand names the part of the keys, (rows, k); the scratch parts.
    """
    target = current(device_number(device))
    steps: list[Step] = []
    parts, name, n, chunks = {"orders": Part(torch.int32, (rows, orders))}, "orders", orders, 0
    while chunks != 1:
        block = block_for(n, blocks)
        chunks = -(-n // block.block_n)
        variant = select_variant(block, bool(steps), target)
        sizes = {"rows": rows, "n": n, "k": k, "chunks": chunks, "shift": shift}
        launch = Launch(variant, (-(-rows * chunks // block.block_rows),), sizes, device)
        read, name, n = name, f"keys{len(steps)}", chunks * k
        parts[name] = Part(torch.int64, (rows, n))
        steps.append(Step(launch, (read, name)))
    return steps, parts


# ── self-test ───────────────────────────────────────────────────────────────────────────────────────


def self_test(dtype: str, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    if config.row is not None:
        n = config.row.block_n
        k = min(n // 2 + 1, MAX_K) if config.row.sort else 3
    else:
        assert config.groups is not None, "This is a bug."
        assert config.finish is not None, "This is a bug."
        k = config.finish.block_n // config.group
        n = max(2 * k * config.group, 2 * config.groups.block_n)
    # Rows that begin anywhere in 16 bytes.
    n -= 9
    k = min(k, n)
    rows = 1 + torch.arange(3, device=device)
    # Whole numbers up to 250 are exact in every dtype.
    x = (torch.arange(n, device=device) * 37 % (240 + rows[:, None])).to(getattr(torch, dtype))
    values = torch.full((3, k), float("nan"), dtype=x.dtype, device=device)
    indices = torch.full((3, k), -1, device=device)
    prepared = prepare(x, values, indices, axis=1, largest=True, config=config)
    prepared(x, values, indices)
    expected, order = topk_reference(x, k)
    return SelfTest(prepared.variants, (values == expected).all() & (indices == order).all())


def select_self_test(block: Block, of_keys: bool, device: torch.device) -> SelfTest:
    """Selects among orders or keys of three rows, two chunks each where a program has one row."""
    chunks = 2 if block.block_rows == 1 else 1
    n, k = chunks * block.block_n - 5, min(block.block_n // 2, MAX_K)
    order = torch.arange(3 * n, device=device).mul(7919).remainder(1009).view(3, n)
    index = torch.arange(n, device=device)
    keys = order << 32 | index ^ 0xFFFFFFFF
    found = torch.zeros((3, chunks * k), dtype=torch.int64, device=device)
    variant = select_variant(block, of_keys, current(device_number(device)))
    sizes = {"rows": 3, "n": n, "k": k, "chunks": chunks, "shift": 0}
    launch = Launch(variant, (-(-3 * chunks // block.block_rows),), sizes, device)
    launch(keys if of_keys else order.int(), found)
    best = [torch.sort(chunk, dim=1, descending=True).values[:, :k] for chunk in keys.split(block.block_n, dim=1)]
    found = torch.cat([torch.sort(part, dim=1, descending=True).values for part in found.split(k, dim=1)], dim=1)
    return SelfTest((variant,), (found == torch.cat(best, dim=1)).all())


def topk_reference(
    x: torch.Tensor, k: int, *, axis: int = -1, largest: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best elements along `axis` in order, equal ones by the smaller index, NaN above every number."""
    rows = x.movedim(axis, -1)
    # A stable descending sort keeps equal elements in order of their index, and puts NaN first.
    order = torch.sort(rows.double() + 0.0, dim=-1, descending=largest, stable=True).indices[..., :k]
    return rows.gather(-1, order).movedim(-1, axis), order.movedim(-1, axis)
