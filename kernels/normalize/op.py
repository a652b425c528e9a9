"""Normalisation: choice of blocks, binaries, the public function, and the self-test with its oracle."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tilewire.kernels.build.operands import numbers
from tilewire.kernels.normalize.kernel import (
    normalize_across_kernel,
    normalize_group_kernel,
    normalize_row_kernel,
)
from tilewire.kernels.op import SelfTest
from tilewire.kernels.pointwise.copying import contiguous, copy_into
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, name_of, pointer
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_aligned, device_number
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step
from tilewire.kernels.runtime.rows import RowsView, check_dtype, check_rows, row_stride, rows_of
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.softmax.across import (
    block_for,
    blocks_for,
    count_side_by_side,
    counts_side_by_side,
    is_across,
)
from tilewire.kernels.softmax.groups import can_wait, options_of

# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────


# Kinds with their default eps, numbered by their place.
KINDS = {"layer": 1e-5, "rms": 1e-6, "l2": 1e-12}


@dataclass(frozen=True)
class Problem:
    """One normalisation as the choice of blocks sees it.

    Attributes:
        rows: Number of rows.
        n: Elements of a row.
        dtype: Name of the input's dtype.
        out_dtype: Name of the output's dtype.
        vector_dtype: Name of the dtype of weight and bias: the input's where all three are the same, else float32.
        is_aligned: Whether rows, weight and bias can be read and written in 16-byte pieces.
        is_contiguous: Whether elements of a row follow one another, in input and output.
        side_by_side: Rows that are read at once, where they do not.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    vector_dtype: str
    is_aligned: bool = True
    is_contiguous: bool = True
    side_by_side: int = 1

    @property
    def is_across(self) -> bool:
        """Whether rows are read side by side."""
        return is_across(
            self.n,
            _SHORT_N,
            is_contiguous=self.is_contiguous,
            is_aligned=self.is_aligned,
            side_by_side=self.side_by_side,
        )

    @property
    def is_rare(self) -> bool:
        """Whether the pair of types has fewer binaries."""
        return self.dtype != self.out_dtype

    @property
    def unit(self) -> int:
        """By what kernels multiply the lengths and strides that they are given."""
        return 16 // min(ITEM_BYTES[self.dtype], ITEM_BYTES[self.out_dtype]) if self.is_aligned else 1


@dataclass(frozen=True)
class Config:
    """Blocks of one launch.

    Attributes:
        block_rows: Rows of a program; 0 where a row is one of a group of programs.
        block_n: Elements of a row that a program has at a time.
        num_warps: Warps of a program.
        group: Programs of a row.
        programs_per_sm: Programs of groups on each multiprocessor.
        is_held: Whether a program of a group holds its part of a row in registers.
        is_across: Whether rows are read side by side, their elements at any distance.
    """

    block_rows: int
    block_n: int
    num_warps: int
    group: int = 1
    programs_per_sm: int = 1
    is_held: bool = False
    is_across: bool = False

    def max_programs(self, target: Target) -> int:
        """Programs of groups that run at the same time."""
        return self.programs_per_sm * target.num_sms


# Elements up to which rows that are read one by one are read side by side.
_SHORT_N = 16
# Elements of rows across memory above which threads share each, as if rows were few: 2,000 rows of 300 took 12 µs with them and
# 27 without, 6,824 of 608 57 and 74, but 40,000 of 300 138 and 108 (H200).
_MANY = 256
_ROWS = tuple(
    [Config(2048 // block_n, block_n, 4) for block_n in (16, 64, 128, 256, 512, 1024)]
    # 32 elements a thread.
    + [Config(2, 2048, 4), Config(2, 4096, 8), Config(1, 8192, 8), Config(1, 16384, 16)]
)
# Rarer pairs of types have fewer binaries.
_FEW_ROWS = tuple(_ROWS[number] for number in (3, 5, 7, 9))
# Groups of programs that hold a row, and of those that read it again; the same for rows that are read element by element.
# Of several programs on a multiprocessor some read and write while others wait for their group. Element by element, four
# would spill registers.
_GROUPS = (Config(0, 4096, 8, programs_per_sm=4, is_held=True), Config(0, 4096, 8, programs_per_sm=3))
_ALONE_GROUPS = (Config(0, 4096, 8, programs_per_sm=3, is_held=True), Config(0, 4096, 16))
# Most programs of a row, whose parts each of them merges. With up to 64 the kernel was no faster (H200).
_MAX_GROUP = 512
_INTERPRETED = (Config(2, 16, 4), Config(1, 64, 4), Config(0, 128, 4, is_held=True), Config(0, 32, 4))


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its types and but for the group, one of `enumerate_configs`.

    They do not depend on the number of rows: a row has the same bits among any others.
    """
    if problem.is_across:
        is_few, count = problem.n > _MANY, problem.side_by_side
        block = block_for(problem.n, target, is_contiguous=problem.is_contiguous, side_by_side=count, is_few=is_few)
        return Config(*block, is_across=True)
    for config in configs_for(problem, target):
        if config.block_rows:
            if config.block_n >= problem.n:
                return config
            continue
        most = min(_MAX_GROUP, config.max_programs(target)) if can_wait(target) else 1
        if not config.is_held or most * config.block_n >= problem.n:
            return replace(config, group=min(most, -(-problem.n // config.block_n)))
    raise AssertionError("This is a bug.")


def configs_for(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Blocks of rows that are not read side by side, by rising length of a row; the last ones are those of groups."""
    if target.backend == "interpreter":
        return _INTERPRETED
    rows = _FEW_ROWS if problem.is_rare else _ROWS
    if not problem.is_aligned:
        rows = tuple(config for config in rows if config.block_n > _SHORT_N)
    groups = _GROUPS if problem.is_aligned else _ALONE_GROUPS
    return (*rows, *groups) if can_wait(target) else (*rows, groups[-1])


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and blocks that `choose` can return on `target`."""
    for dtype, out_dtype, is_aligned in itertools.product(FLOATS, FLOATS, (True, False)):
        for vector_dtype in dict.fromkeys([dtype, "float32"] if dtype == out_dtype else ["float32"]):
            problem = Problem(1, 1, dtype, out_dtype, vector_dtype, is_aligned)
            yield from ((problem, config) for config in configs_for(problem, target))
            if not is_aligned:
                yield from _enumerate_across(problem, target)


def _enumerate_across(problem: Problem, target: Target) -> Iterator[tuple[Problem, Config]]:
    for count in counts_side_by_side(problem.dtype, problem.out_dtype):
        across = replace(problem, is_contiguous=False, side_by_side=count)
        yield from ((across, Config(*block, is_across=True)) for block in blocks_for(target, count))


def variant(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of `problem` with the blocks of `config`."""
    types = {"x_ptr": pointer(problem.dtype), "out_ptr": pointer(problem.out_dtype), "eps": "fp64"}
    types |= dict.fromkeys(("weight_ptr", "bias_ptr"), pointer(problem.vector_dtype))
    types |= {"partial_ptr": "*fp32", "count_ptr": "*i32"}
    if config.is_across:
        unit = problem.side_by_side
        constants = {"UNIT": unit, "BLOCK_N": config.block_n, "BLOCK_ROWS": config.block_rows}
        pieces = ("x_ptr", "out_ptr") if unit > 1 else ()
        return binary(normalize_across_kernel, types, constants, config.num_warps, target, pieces)
    constants = {"UNIT": problem.unit, "BLOCK_N": config.block_n, "BLOCK_ROWS": config.block_rows}
    aligned = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr") if problem.is_aligned else ()
    if config.block_rows:
        return binary(normalize_row_kernel, types, constants, config.num_warps, target, aligned)
    constants |= {"IS_HELD": config.is_held, "MAX_GROUP": _MAX_GROUP, "OVERLAP": False}
    options = options_of(config.num_warps, config.programs_per_sm, target)
    return binary(normalize_group_kernel, types, constants, config.num_warps, target, aligned, **options)


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


def normalize(
    x: torch.Tensor,
    kind: str,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    axis: int = -1,
    eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalises along `axis` in float32: (x - mean) · scale · weight + bias.

    Args:
        x: Any shape of rank 1 or more; float16, bfloat16 or float32; any strides.
        kind: `layer`: less the mean, over √(variance + eps); `rms`: over √(mean square + eps); `l2`: over
            max(2-norm, eps).
        weight: (N,) factors along the axis; any of the same dtypes.
        bias: (N,) summands along the axis; any of the same dtypes.
        axis: Dimension of length N.
        eps: Default: 1e-5 for `layer`, 1e-6 for `rms`, 1e-12 for `l2`.
        out_dtype: Any of the same dtypes. Default: that of `x`.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: Shapes, dtypes, kind or axis do not fit.
    """
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    axis = _check(x, kind, weight, bias, axis, out)
    if out.numel() > 0:
        prepared = prepare_normalize(x, out, kind=kind, weight=weight, bias=bias, axis=axis, eps=eps)
        prepared(x, weight, bias, out)
    return out


def prepare_normalize(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    kind: str,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    axis: int = -1,
    eps: float | None = None,
) -> Prepared:
    """Prepares normalisations of tensors of these shapes, strides, dtypes and alignment.

    Args:
        x: As in `normalize`.
        out: Shape of `x`, not empty.
        kind: As in `normalize`.
        weight: As in `normalize`; a launch takes another tensor like it.
        bias: As in `normalize`; a launch takes another tensor like it.
        axis: As in `normalize`.
        eps: As in `normalize`.

    Returns:
        A launcher, called with `(x, weight, bias, out)`. It belongs to the calling thread.

    Raises:
        ValueError: As in `normalize`, or `out` does not fit.
    """
    axis = _check(x, kind, weight, bias, axis, out)
    if out.shape != x.shape or out.numel() == 0:
        raise ValueError(f"out: expected {tuple(x.shape)}, not empty, got {tuple(out.shape)}")
    return prepare(x, out, kind, KINDS[kind] if eps is None else eps, weight, bias, axis)


def _check(
    x: torch.Tensor,
    kind: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    out: torch.Tensor,
) -> int:
    """The axis, counted from the front."""
    axis = check_rows(x, axis)
    check_dtype("out_dtype", out.dtype, FLOATS)
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (tuple(vector.shape) != (x.shape[axis],) or name_of(vector.dtype) not in FLOATS):
            expected = f"({x.shape[axis]},) of {', '.join(FLOATS)}"
            raise ValueError(f"{name}: expected {expected}, got {tuple(vector.shape)} of {vector.dtype}")
    return axis


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    config: Config | None = None,
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    vectors = [vector for vector in (weight, bias) if vector is not None]
    flags = (weight is not None, bias is not None, *((vector.dtype, vector.stride(0)) for vector in vectors))
    are_vectors_aligned = are_aligned(vectors)
    shapes = (x.shape, x.stride(), out.stride(), are_aligned((x, out)), are_vectors_aligned)
    key = (shapes, x.dtype, out.dtype, kind, eps, flags, axis, config, x.device)

    def make() -> Prepared:
        is_same = x.dtype == out.dtype and all(vector.dtype == x.dtype for vector in vectors)
        vector_dtype = x.dtype if is_same else torch.float32
        names = (name_of(x.dtype), name_of(out.dtype), name_of(vector_dtype))
        problem, view, is_direct = _walk(x.movedim(axis, -1), out.movedim(axis, -1), names, vectors)
        target = current(x.get_device())
        chosen = config or choose(problem, target)
        sizes = {
            **(view.sizes_across(problem.side_by_side) if chosen.is_across else view.sizes(problem.unit)),
            "eps": float(eps),
            "kind": list(KINDS).index(kind),
            "has_weight": int(weight is not None),
            "has_bias": int(bias is not None),
        }
        launch = _launch(problem, chosen, target, sizes, x.device)
        if is_direct and all(vector.dtype == vector_dtype and vector.stride(0) == 1 for vector in vectors):
            return launch
        return Detour(functools.partial(_through_copies, launch, axis, vector_dtype, is_direct), launch)

    return _launches.get(key, make)


def _walk(
    x: torch.Tensor, out: torch.Tensor, dtypes: tuple[str, str, str], vectors: list[torch.Tensor]
) -> tuple[Problem, RowsView, bool]:
    """The problem of rows `x` (…, N) and `out`, how kernels walk them, and whether they do so without copies."""
    n = x.shape[-1]
    rows = x.numel() // n
    unit = 16 // min(x.element_size(), out.element_size())

    def is_aligned(view: RowsView, *tensors: torch.Tensor) -> bool:
        spans = (n, *(step for strides in view.strides for step in strides[:2]))
        return are_aligned((*vectors, *tensors)) and all(span % unit == 0 for span in spans)

    view = rows_of(x, out)
    if view is not None:
        is_contiguous = all(strides[2] == 1 for strides in view.strides)
        count = count_side_by_side(n, view.rows[1], view.strides, *dtypes[:2]) if are_aligned((x, out)) else 1
        problem = Problem(rows, n, *dtypes, is_contiguous and is_aligned(view, x, out), is_contiguous, count)
        if problem.is_across:
            return problem, view, True
    steps = [row_stride(tensor) for tensor in (x, out)]
    if None in steps:
        view = RowsView((1, rows), n, ((0, n, 1), (0, n, 1)))
        return Problem(rows, n, *dtypes, is_aligned(view)), view, False
    view = RowsView((1, rows), n, tuple((0, step or 0, 1) for step in steps))
    return Problem(rows, n, *dtypes, is_aligned(view, x, out)), view, True


def _launch(
    problem: Problem, config: Config, target: Target, sizes: dict[str, float], device: torch.device
) -> Prepared:
    if config.block_rows:
        return Launch(variant(problem, config, target), (-(-problem.rows // config.block_rows),), sizes, device)
    groups = problem.rows
    if can_wait(target):
        groups = min(groups, config.max_programs(target) // config.group)
    sizes |= {"group_size": config.group, "blocks": -(-problem.n // (config.group * config.block_n))}
    launch = Launch(variant(problem, config, target), (groups * config.group,), sizes, device)
    is_shared = config.group > 1
    partial = Part(torch.float32, (groups, 2, config.group, 2) if is_shared else (1,))
    steps = [Step(launch, (*_TENSORS, "partial", "count"))]
    return Pipeline(_TENSORS, steps, device, {"partial": partial}, num_counters=groups if is_shared else 0)


_TENSORS = ("x", "weight", "bias", "out")


def _through_copies(
    launch: Prepared,
    axis: int,
    vector_dtype: torch.dtype,
    is_direct: bool,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launches on a weight and a bias of `vector_dtype` and, unless `is_direct`, on rows that lie as the kernels take them."""
    weight, bias = (vector if vector is None else vector.to(vector_dtype).contiguous() for vector in (weight, bias))
    if is_direct:
        launch(x, weight, bias, out)
        return
    rows = contiguous(x.movedim(axis, -1))
    written = torch.empty(rows.shape, dtype=out.dtype, device=out.device)
    launch(rows, weight, bias, written)
    copy_into(out, written.movedim(-1, axis))


# ── self-test ───────────────────────────────────────────────────────────────────────────────────────


_EPS = 1e-5


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    # A multiple of those that are read at once, and of no more.
    rows, blocks = config.block_rows + problem.side_by_side, 1
    if not config.block_rows:
        config = replace(config, group=2 if can_wait(current(device_number(device))) else 1)
        blocks = config.group if config.is_held else config.group + 1
    # A block of one element is walked twice. Rows that are held have one block.
    blocks += config.block_n == 1
    n = config.block_n * blocks - (0 if problem.is_aligned else 1)
    dtype, out_dtype, vector_dtype = (
        getattr(torch, name) for name in (problem.dtype, problem.out_dtype, problem.vector_dtype)
    )
    x = numbers((rows, n), device).to(dtype)
    weight, bias = (numbers((n,), device).add(shift).to(vector_dtype) for shift in (0, 1))
    out = torch.full((rows, n), float("nan"), dtype=out_dtype, device=device)
    if config.is_across:
        x, out = (tensor.mT.contiguous().mT for tensor in (x, out))
    prepared = prepare(x, out, "layer", _EPS, weight, bias, 1, config)
    prepared(x, weight, bias, out)
    expected = normalize_reference(x, "layer", _EPS, weight=weight, bias=bias)
    # A unit of the output's type, which Triton's interpreter cuts off instead of rounding, and float32's own error.
    bound = expected.abs() * torch.finfo(out_dtype).eps + 1e-4
    return SelfTest(prepared.variants, ((out.double() - expected).abs() <= bound).all())


def normalize_reference(
    x: torch.Tensor,
    kind: str,
    eps: float,
    *,
    axis: int = -1,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The normalisation of `x` along `axis` in float64."""
    rows = x.double().movedim(axis, -1)
    if kind == "l2":
        out: torch.Tensor = rows / rows.norm(dim=-1, keepdim=True).clamp(min=eps)
    else:
        centred = rows - rows.mean(-1, keepdim=True) if kind == "layer" else rows
        out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight.double()
    out = out if bias is None else out + bias.double()
    return out.movedim(-1, axis)
