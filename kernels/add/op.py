"""Sums: choice of blocks, binaries, the public function, and the self-test."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton.language as tl

from tilewire.kernels.add.kernel import add_kernel
from tilewire.kernels.build.operands import loose_operands, lying, numbers
from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime import elementwise
from tilewire.kernels.runtime.elementwise import (
    ALL_ACROSS,
    ALL_EACH,
    ALL_UNIT,
    REPEATS,
    Config,
    Specialization,
    choose_loose,
    loose_configs,
)
from tilewire.kernels.runtime.kinds import ITEM_BYTES, name_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_each_aligned
from tilewire.kernels.runtime.pipeline import Detour, Prepared, single_entries
from tilewire.kernels.runtime.rows import check_dtype, check_pair, output
from tilewire.kernels.runtime.strides import broadcast_shapes
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.runtime.walks import elementwise_binary, programs_of, walk_of
from tilewire.kernels.selection.tables import table_for

# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────


# How an output type that differs from the inputs' is passed to the kernel.
KINDS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "int32": 5, "int64": 6}
DTYPES = tuple(KINDS)


class Problem(elementwise.Problem):
    """One addition as the choice of blocks sees it."""

    @property
    def specialization(self) -> Specialization:
        """The specialization whose binaries compute this."""
        is_typed = self.dtype == self.out_dtype
        is_unit = self.inner == ALL_UNIT
        if is_unit and is_typed and self.outer_rank == 0:
            return Specialization(self.dtype, True, self.is_aligned, ALL_UNIT, 0)
        # Rarer patterns have fewer binaries.
        if self.is_aligned and not self.is_short and (is_unit or (self.inner in REPEATS and is_typed)):
            rank = self.outer_rank if is_unit and is_typed else 3
            return Specialization(self.dtype, is_typed, True, self.inner, rank)
        if is_unit and is_typed and self.n > _LOOSE_N:
            return Specialization(self.dtype, True, False, ALL_UNIT, 3)
        return Specialization(self.dtype, is_typed, False, self.loose, 3)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`: with its specialization, one of `members(target)`."""
    specialization = problem.specialization
    if specialization.inner in (ALL_ACROSS, ALL_EACH):
        return choose_loose(problem, specialization, target)
    configs = configs_for(specialization, target)
    if specialization.outer_rank == 0:
        entries = _measured(target)
        return next(config for config, entry in zip(configs, entries, strict=True) if problem.n <= entry[0])
    # Whole blocks move without a mask: the longest that a row fills. Few rows have programs to spare.
    filled = [config for config in configs if config.block_n <= problem.n]
    return configs[-1] if problem.rows <= target.num_sms or not filled else filled[-1]


def members(target: Target) -> Iterator[tuple[Specialization, Config]]:
    """Every specialization and configuration that `choose` can ask for on `target`."""
    for dtype in DTYPES:
        specializations = [Specialization(dtype, True, True, ALL_UNIT, rank) for rank in (0, 1, 3)]
        specializations += [Specialization(dtype, True, True, inner, 3) for inner in REPEATS]
        specializations += [Specialization(dtype, True, False, ALL_UNIT, rank) for rank in (0, 3)]
        specializations += [Specialization(dtype, False, True, ALL_UNIT, 3)]
        for inner in (ALL_ACROSS, ALL_EACH):
            specializations += [Specialization(dtype, is_typed, False, inner, 3) for is_typed in (True, False)]
        for specialization in specializations:
            yield from ((specialization, config) for config in configs_for(specialization, target))


def configs_for(specialization: Specialization, target: Target) -> list[Config]:
    """For a single row one for each measured size; else by rising length of a row."""
    if specialization.inner in (ALL_ACROSS, ALL_EACH):
        return list(loose_configs(specialization, target))
    if target.backend == "interpreter":
        if specialization.outer_rank == 0:
            return [Config(1, 64, 4) for _ in _measured(target)]
        return [Config(4, 16, 4), Config(1, 64, 4)]
    threads = [(target.warp_size * num_warps, vectors, num_warps) for _, num_warps, vectors in _measured(target)]
    sizes = [
        (count * vectors * 16 // ITEM_BYTES[specialization.dtype], num_warps) for count, vectors, num_warps in threads
    ]
    if specialization.outer_rank == 0:
        return [Config(1, elements, num_warps) for elements, num_warps in sizes]
    elements, num_warps = sizes[len(sizes) // 2]
    is_common = specialization.outer_rank == 1
    if not specialization.is_aligned:
        length = min(_UNALIGNED_LENGTH, elements)
        return [Config(elements // length, length, num_warps)]
    lengths = [length for length in _LENGTHS if length < elements and (is_common or length in _FEWER_LENGTHS)]
    return [Config(elements // length, length, num_warps) for length in (*lengths, elements)]


# Rows that are shorter than a block share one: blocks come in these lengths.
_LENGTHS = tuple(1 << power for power in range(4, 12))
_FEWER_LENGTHS = _LENGTHS[::2]
# Of two rows of eighteen million float16: tiles of 256 took 356 µs, and these take 53 (PyTorch 98; H200).
_UNALIGNED_LENGTH = 1024
# Rows of more elements have tiles where they begin anywhere, too.
_LOOSE_N = 1023


def _measured(target: Target) -> list[tuple[float, int, int]]:
    """Most elements, warps of a program, and 16-byte pieces of each operand for a thread; by rising size."""
    table = table_for(target).get("add") or [{"max_n": None, "num_warps": 4, "vectors": 2}]
    return [(entry["max_n"] or math.inf, entry["num_warps"], entry["vectors"]) for entry in table]


_COMPUTE = {"float64": tl.float64, "int32": tl.int32, "int64": tl.int64}


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """The binary of `specialization` with the blocks of `config` on `target`."""
    types = {"alpha": "fp64" if "float" in specialization.dtype else "i64"}
    # Types of 16 bits are computed in float32, the others in themselves.
    compute = _COMPUTE.get(specialization.dtype, tl.float32)
    return elementwise_binary(add_kernel, types, {"COMPUTE": compute}, specialization, config, target)


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


def add(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    alpha: float = 1,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A + alpha * b with NumPy broadcasting.

    Computed in float32 for float16 and bfloat16, else in the inputs' own dtype (integers wrap around), and converted
    once to the output's.

    Args:
        a: any shape and strides; float16, bfloat16, float32, float64, int32 or int64.
        b: a shape that broadcasts with that of `a`; the dtype of `a`.
        alpha: factor of `b`; whole for integers.
        out_dtype: any of the same dtypes. Default: that of the inputs.
        out: written instead of a new tensor; the broadcast shape, of the output dtype, any strides.

    Returns:
        A tensor of the broadcast shape.

    Raises:
        ValueError: shapes, dtypes, `alpha` or `out` do not fit together.
    """
    shape = _check(a, b, alpha)
    out_dtype = a.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype, DTYPES)
    out = output(out, shape, out_dtype, a.device)
    if out.numel() > 0:
        prepare(a, b, out, alpha=alpha)(a, b, out)
    return out


def prepare_add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1) -> Prepared:
    """A launcher for additions like this one: the same shapes, strides, dtypes, alignment and alpha.

    Calling it with `(a, b, out)` skips every check and choice. It belongs to the calling thread.

    Args:
        a: as in `add`.
        b: as in `add`.
        out: the broadcast shape, not empty.
        alpha: as in `add`.

    Returns:
        The launcher. Nothing is launched yet, but the kernel is compiled and loaded.

    Raises:
        ValueError: as in `add`, or the result is empty or its dimensions do not merge into four.
    """
    shape = _check(a, b, alpha)
    if tuple(out.shape) != shape or out.numel() == 0 or name_of(out.dtype) not in DTYPES:
        raise ValueError(f"out: expected {shape}, not empty, got {tuple(out.shape)} of {out.dtype}")
    prepared = prepare(a, b, out, alpha=alpha)
    if not prepared.variants:
        raise ValueError("the dimensions do not merge into four: use add")
    return prepared


def _check(a: torch.Tensor, b: torch.Tensor, alpha: float) -> tuple[int, ...]:
    """The broadcast shape."""
    check_dtype("a", a.dtype, DTYPES)
    check_pair("a and b", a, b)
    if not a.is_floating_point() and alpha != int(alpha):
        raise ValueError(f"alpha: integers need a whole factor, got {alpha}")
    return broadcast_shapes(a.shape, b.shape)


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1, config: Config | None = None
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    shapes = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    # As text: 0.0 equals -0.0, and NaN not itself.
    key = (shapes, a.dtype, out.dtype, are_each_aligned((a, b, out)), repr(alpha), config, a.device)

    def make() -> Prepared:
        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            prepare(a, b, out, alpha=alpha, config=config)(a, b, out)

        def run_entries(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            single_entries(launch, out, a.expand(out.shape), b.expand(out.shape))

        walk = walk_of(a, b, out)
        if walk is None:
            return Detour(run_entries)
        problem = walk.problem(Problem, a, b, out)
        target = current(a.get_device())
        chosen = config or choose(problem, target)
        specialization = problem.specialization
        values = walk.sizes("abo", specialization.unit) | {"out_kind": KINDS[problem.out_dtype]}
        values["alpha"] = float(alpha) if a.is_floating_point() else int(alpha)
        programs = programs_of(problem, specialization, chosen)
        return Launch(build(specialization, chosen, target), (programs,), values, a.device)

    return _launches.get(key, make)


# ── self-test ───────────────────────────────────────────────────────────────────────────────────────


def self_test(specialization: Specialization, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    dtype = getattr(torch, specialization.dtype)
    other = torch.float16 if specialization.dtype == "float32" else torch.float32
    dtypes = (dtype, dtype, dtype if specialization.is_typed else other)
    if specialization.inner in (ALL_ACROSS, ALL_EACH):
        a, b, out = loose_operands(specialization, config, dtypes, device)
    else:
        n = 2 * config.block_n
        if not specialization.is_aligned:
            n = max(n, _LOOSE_N + 2 if specialization.outer_rank else 0) - 1
        values = numbers({0: (n,), 1: (5, n), 3: (2, 3, n)}[specialization.outer_rank], device)
        shift = 0 if specialization.is_aligned else 1
        a, b, out = (
            lying(values, inner, kind, is_padded=True, shift=shift)
            for inner, kind in zip(specialization.inner, dtypes, strict=True)
        )
    launch = prepare(a, b, out, alpha=2, config=config)
    launch(a, b, out)
    return SelfTest(launch.variants, (out.float() == a.float() + 2 * b.float()).all())
