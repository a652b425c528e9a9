"""From checked tensors to a launch: binding kernel arguments, and keeping what was bound for the next time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tilewire.kernels.copy.operands import Copied, launch_of
from tilewire.kernels.matmul.configs import (
    ACTIVATIONS,
    BOX_KERNELS,
    LIMBS_OF_K,
    SCALE_STEPS,
    VENDOR,
    Config,
    EpilogueSpec,
    Problem,
    Specialization,
    as_read,
    cdiv,
    copied_operands,
    has_limbs,
    limb_k,
    resolved,
)
from tilewire.kernels.matmul.members import room_of, specialization_of
from tilewire.kernels.matmul.select import among_rows, select, select_invariant
from tilewire.kernels.matmul.variants import box_shapes, build, units_of
from tilewire.kernels.matmul.view import Strides, View, problem_of, view_of
from tilewire.kernels.runtime.kinds import ITEM_BYTES, KINDS, name_of
from tilewire.kernels.runtime.launch import Descriptor, Launch, LaunchCache, Variant, are_aligned, device_number
from tilewire.kernels.runtime.layouts import row_step
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step, single_entries
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.selection.learned import Calls, Product, learned_for


@dataclass(frozen=True)
class Epilogue:
    """Operands of the epilogue. Scales are None, or hold one element or one per row (a) or column (b)."""

    bias: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    b_scale: torch.Tensor | None = None
    activation: str = "none"

    @property
    def spec(self) -> EpilogueSpec:
        """Returns the part that the choice of a binary depends on."""
        bias_dtype = "" if self.bias is None else name_of(self.bias.dtype)
        return EpilogueSpec(bias_dtype, _num_scales(self.a_scale), _num_scales(self.b_scale), self.activation)


# Tensors of a launch, in order.
_TENSORS = ("a", "b", "out", "bias", "a_scale", "b_scale")
# End of the names of descriptors with rows of whole lines.
_WHOLE = "_whole"


def _pipeline(view: View, problem: Problem, config: Config, spec: EpilogueSpec, device: torch.device) -> Pipeline:
    """The product's launches: copies of operands where `config` has any, then the kernel."""
    target = current(device_number(device))
    # Which of the tensors that are given each operand is.
    given = {name: name for name in (*_TENSORS, "count")}
    if view.is_turned:
        given |= {"a": "b", "b": "a", "a_scale": "b_scale", "b_scale": "a_scale"}
        spec = replace(spec, a_scale=spec.b_scale, b_scale=spec.a_scale)
    view, copies = _copies(view, problem, config)
    read = as_read(problem, config)
    specialization = specialization_of(problem, config, is_plain=spec.is_plain)
    if config.kernel in BOX_KERNELS:
        values = _descriptor_values(view, read, config, specialization)
    else:
        values = _pointer_values(view, specialization)
    values |= _runtime_args(view, problem, spec, specialization)
    tiles, is_split = config.tiles(problem), config.split_k > 1 and config.kernel != "wgmma"
    # A program of a cluster that shares K has one tile.
    programs = min(tiles, room_of(problem, config, target)) if config.is_persistent and config.split_k == 1 else tiles
    launch = Launch(build(specialization, config, target), (programs, config.split_k), values, device)
    dtype = getattr(torch, problem.dtype)
    parts = {f"{name} rows": Part(dtype, operand.shape) for name, operand in copies.items()}
    if is_split:
        sums = torch.int32 if problem.dtype == "int8" else torch.float32
        parts["partial"] = Part(sums, (tiles * config.split_k, config.block_m, config.block_n))
    read_from = {name: f"{name} rows" if name in copies else given[name] for name in ("a", "b")}
    names = given | read_from
    names["partial"] = "partial" if is_split else "count"
    names |= {"tail": read_from["a" if config.is_swapped else "b"], "out_tail": "out"}
    operands = tuple(names[_operand_of(name)] for name in launch.addressed)
    steps = [Step(launch, operands)]
    if copies:
        first = launch_of(
            copies.get("a"), copies.get("b"), dtype.itemsize, device, has_limbs=has_limbs(problem, config)
        )
        steps.insert(0, Step(first, (given["a"], given["b"], *read_from.values())))
    return Pipeline(_TENSORS, steps, device, parts, tiles if is_split else 0)


class _VendorProduct:
    """PyTorch's product, prepared: nothing is bound.

    Args:
        is_tf32: Whether float32 is multiplied as tf32.

    Attributes:
        calls: Counter of the calls.
    """

    variants: tuple[Variant, ...] = ()
    is_bound = False

    def __init__(self, *, is_tf32: bool) -> None:
        self.calls = Calls()
        self._is_tf32 = is_tf32

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Multiplies on the current stream."""
        self.calls.count += 1
        a, b, out = tensors[:3]
        assert a is not None, "This is a bug."
        assert b is not None, "This is a bug."
        torch.backends.cuda.matmul.allow_tf32 = self._is_tf32
        torch.matmul(a, b, out=out)


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    precision: str,
    config: Config | Literal["invariant"] | None = None,
) -> Prepared:
    """Prepares out = act((a @ b) * scales + bias) on checked, already transposed operands.

    Args:
        a: (…, M, K).
        b: (…, K, N).
        out: (…, M, N), at least one element.
        epilogue: bias, scales, activation.
        precision: for float32 and float8 inputs.
        config: instead of the one that `select` gives, for tests and tuning; `invariant` for `select_invariant`.

    Returns:
        The launcher, called with (a, b, out, bias, a_scale, b_scale). It has no variants where the batch dimensions do not
        merge into two: each entry of the outermost is then a product of its own.
    """
    spec = epilogue.spec
    alignment = (a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0)
    shapes = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    learned = learned_for(current(a.get_device())) if config is None else None
    since = None if learned is None else (learned, learned.version)
    key = (shapes, a.dtype, out.dtype, alignment, spec, precision, config, a.device, since)

    def make() -> Prepared:
        def run_entries(
            a: torch.Tensor,
            b: torch.Tensor,
            out: torch.Tensor,
            bias: torch.Tensor | None = None,
            a_scale: torch.Tensor | None = None,
            b_scale: torch.Tensor | None = None,
        ) -> None:
            operands = Epilogue(bias, a_scale, b_scale, spec.activation)

            def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
                prepare(a, b, out, operands, precision, config)(a, b, out, bias, a_scale, b_scale)

            batch = out.shape[:-2]
            single_entries(launch, out, a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))

        plan = plan_of(a, b, out, spec, precision, config)
        if plan is None:
            return Detour(run_entries)
        _, problem, chosen = plan
        is_tf32 = problem.precision == "tf32"
        prepared = _VendorProduct(is_tf32=is_tf32) if chosen == VENDOR else _pipeline(*plan, spec, a.device)
        if learned is not None:
            prepared.calls = learned.calls_of(Product(problem, spec.is_plain))
        return prepared

    return _launches.get(key, make)


def plan_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    spec: EpilogueSpec,
    precision: str,
    config: Config | Literal["invariant"] | None = None,
) -> tuple[View, Problem, Config] | None:
    """How a product is computed; None where its batch dimensions do not merge into two. Arguments are those of `prepare`."""
    extents = (Extent(tuple(tensor.shape), tensor.stride()) for tensor in (a, b, out))
    can_turn = not spec.bias_dtype and config != "invariant"
    view = view_of(*extents, is_row_scaled=spec.a_scale == "each", can_turn=can_turn)
    if view is None:
        return None
    a_aligned, b_aligned, out_aligned = (are_aligned((tensor,)) for tensor in (a, b, out))
    dtypes = (name_of(a.dtype), name_of(out.dtype))
    problem = problem_of(view, *dtypes, precision, are_in_aligned=(a_aligned, b_aligned), is_out_aligned=out_aligned)
    target = current(a.get_device())
    problem = resolved(problem, target)
    if config == "invariant":
        problem = among_rows(problem)
        return view, problem, select_invariant(problem, target)
    return view, problem, config or select(problem, target, is_plain=spec.is_plain)


def _operand_of(argument: str) -> str:
    """The operand or array that a pointer or descriptor argument is for."""
    return argument.removesuffix("_ptr").removesuffix("_desc").removesuffix(_WHOLE)


def _num_scales(scale: torch.Tensor | None) -> str:
    if scale is None:
        return "none"
    return "one" if scale.numel() == 1 else "each"


def _runtime_args(view: View, problem: Problem, spec: EpilogueSpec, specialization: Specialization) -> dict[str, Any]:
    """Returns the arguments of both kernels for the epilogue and the output."""
    unit = 16 // ITEM_BYTES[problem.out_dtype] if specialization.store == "vec16" else 1
    return {
        "out_kind": KINDS[problem.out_dtype],
        "bias_kind": KINDS[spec.bias_dtype],
        "a_scale_step": SCALE_STEPS[spec.a_scale],
        "b_scale_step": SCALE_STEPS[spec.b_scale],
        "activation": ACTIVATIONS.index(spec.activation),
        "stride_oz": view.out[1 if specialization.kernel == "tma" else 0] // unit,
        "stride_oy": view.out[1] // unit,
        "stride_om": view.out[2] // unit,
        "stride_on": view.out[3],
    }


def _copies(view: View, problem: Problem, config: Config) -> tuple[View, dict[str, Copied]]:
    """The operands that are copied before the product, by name, and the view with the copies in their place."""
    if not config.is_copied:
        return view, {}
    read = as_read(problem, config)
    item_bytes, batch = ITEM_BYTES[problem.dtype], problem.batch
    is_a, is_b = copied_operands(problem, config.kernel)
    limbs = LIMBS_OF_K if has_limbs(problem, config) else 1
    found = {}
    if is_a:
        found["a"], a = _copy(view.a, (view.m, view.k), batch, item_bytes, limbs, is_by_row=read.a_major == "k")
        view = replace(view, a=a)
    if is_b:
        found["b"], b = _copy(view.b, (view.k, view.n), batch, item_bytes, limbs, is_by_row=read.b_major == "n")
        view = replace(view, b=b)
    return replace(view, k=read.k), found


def _copy(
    strides: Strides, extents: tuple[int, int], batch: int, item_bytes: int, limbs: int, *, is_by_row: bool
) -> tuple[Copied, Strides]:
    """One operand's copy, its rows contiguous or else its columns, `limbs` of each, and the strides to read it with."""
    _, entry_step, row_stride, column_stride = strides
    rows, columns, steps = *extents, (row_stride, column_stride)
    if not is_by_row:
        rows, columns, steps = columns, rows, (column_stride, row_stride)
    pitch = row_step(columns if limbs == 1 else limbs * limb_k(columns), item_bytes)
    copied = Copied(batch if entry_step else 1, rows, columns, (entry_step, *steps), pitch)
    entry_pitch = rows * pitch if entry_step else 0
    return copied, (0, entry_pitch, pitch, 1) if is_by_row else (0, entry_pitch, 1, pitch)


def _pointer_values(view: View, specialization: Specialization) -> dict[str, Any]:
    units = units_of(specialization)
    names = ("az", "ay", "am", "ak", "bz", "by", "bk", "bn")
    strides = dict(zip(names, (*view.a, *view.b), strict=True))
    values = {f"stride_{name}": stride // units["in"] for name, stride in strides.items()}
    return values | {
        "m": cdiv(view.m, units["m"]),
        "n": cdiv(view.n, units["n"]),
        "k": cdiv(view.k, units["k"]),
        "batch": view.batch[0] * view.batch[1],
        "batch_inner": view.batch[1],
    }


def _descriptor_values(view: View, problem: Problem, config: Config, specialization: Specialization) -> dict[str, Any]:
    m, n, k = view.m, view.n, view.k
    a_rows = (m, k) if problem.a_major == "k" else (k, m)
    b_rows = (k, n) if problem.b_major == "n" else (n, k)
    item_bytes = ITEM_BYTES[problem.dtype]
    operands = {
        "a": (a_rows, view.a, item_bytes),
        "b": (b_rows, view.b, item_bytes),
        "out": ((m, n), view.out, ITEM_BYTES[problem.out_dtype]),
    }
    operands |= {"tail": operands["a" if config.is_swapped else "b"], "out_tail": operands["out"]}
    values: dict[str, Any] = {
        "m": m,
        "n": n,
        "k": k,
        "batch": problem.batch,
        "step_a": int(view.a[1] != 0),
        "step_b": int(view.b[1] != 0),
    }
    wholes = {}
    for name, box in box_shapes(specialization, config).items():
        rows, strides, nbytes = operands[name.removesuffix(_WHOLE)]
        geometry = values[f"{name}_desc"] = _descriptor(rows, strides, view.batch[1], box, nbytes)
        if name.endswith(_WHOLE):
            wholes[f"{name}_desc"] = geometry.in_whole_lines(nbytes)
    # Nothing is gained where all rows are whole lines anyway.
    is_read = any(geometry != values[name] for name, geometry in wholes.items())
    values |= {name: replace(geometry, is_read=is_read) for name, geometry in wholes.items()}
    values["whole_k"] = min((geometry.shape[-2] for geometry in wholes.values()), default=0) if is_read else 0
    return values


def _descriptor(
    rows: tuple[int, int], strides: Strides, batch: int, box: tuple[int, ...], item_bytes: int
) -> Descriptor:
    """Geometry of one operand of `rows` = (number of rows, length), batched when its `box` is."""
    # A stride that is never walked may be anything; the hardware requires it to be sound all the same.
    padded = -(-rows[1] * item_bytes // 16) * 16 // item_bytes
    row_step = max(*strides[2:], padded) if rows[0] == 1 else max(strides[2:])
    if len(box) == 2:
        return Descriptor(rows, (row_step, 1), box)
    entries = batch if strides[1] != 0 else 1
    entry_step = strides[1] if entries > 1 else rows[0] * row_step
    return Descriptor((entries, *rows), (entry_step, row_step, 1), box)
