"""Compiled kernels and how they are launched. Knows Triton's compiler, not what any kernel computes.

Triton's own `kernel[grid](...)` decides at every call, from the values of the arguments, which binary to use. Here the
caller decides: a `Variant` names the binary completely (types, constants, which arguments divide by 16), so the set of
binaries can be enumerated, compiled ahead, and counted, and a held binary launches without looking anything up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.targets import Target, is_interpreting

Grid = tuple[int, int, int]
Hook = Callable[["Variant"], None]

TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class Variant:
    """One binary: a kernel with everything that its compilation depends on.

    Attributes:
        kernel: the `@triton.jit` function.
        signature: (argument, type) in order, constants left out; types are Triton's (`*bf16`, `i64`,
            `tensordesc<bf16[128, 64]>`).
        constants: (argument, value) of the `tl.constexpr` arguments.
        divisible: arguments whose value is promised to be a multiple of 16 (bytes, for pointers).
        options: (name, value) for the compiler: `num_warps`, `num_stages`, on HIP `waves_per_eu` and others.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def source(self) -> ASTSource:
        """What Triton compiles for this variant."""
        names = self.kernel.arg_names
        constants = dict(self.constants)
        types = dict(self.signature) | dict.fromkeys(constants, "constexpr")
        attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        return ASTSource(self.kernel, {name: types[name] for name in names}, constants, attrs)

    def compile(self, target: Target) -> Any:
        """The compiled kernel for `target`, which need not be present."""
        gpu = GPUTarget(target.backend, target.arch, target.warp_size)
        return triton.compile(self.source(), target=gpu, options=dict(self.options))


@dataclass(frozen=True)
class Descriptor:
    """Geometry of a tensor-descriptor argument; the address comes with each launch.

    Attributes:
        shape: extents in elements, outermost first.
        strides: in elements; the last is 1.
        block: the box that one load or store moves.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Launch:
    """A kernel with its grid and every argument but the addresses bound.

    Args:
        variant: the binary.
        target: what it was compiled for.
        grid: programs along the three axes.
        values: by argument name: the scalars, and a `Descriptor` for each descriptor argument.
    """

    def __init__(self, variant: Variant, target: Target, grid: Grid, values: dict[str, Any]) -> None:
        self.variant = variant
        self.grid = grid
        self._values = values
        self._addressed = tuple(name for name, kind in variant.signature if kind[0] in "*t")
        self._compiled = None if is_interpreting() else load(variant, target)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream with `tensors` as the pointer and descriptor arguments, in order."""
        given = self._values | {
            name: self._bind(name, tensor) for name, tensor in zip(self._addressed, tensors, strict=True)
        }
        constants = dict(self.variant.constants)
        if self._compiled is None:
            # The interpreter takes no null pointers; any tensor serves for one that is never read.
            spare = next(tensor for tensor in tensors if tensor is not None)
            interpreted = {name: spare if value is None else value for name, value in given.items()}
            self.variant.kernel[self.grid](**interpreted, **constants)
            return
        everything = given | constants
        self._compiled[self.grid](*(everything[name] for name in self.variant.kernel.arg_names))

    def _bind(self, name: str, tensor: torch.Tensor | None) -> Any:
        geometry = self._values.get(name)
        if not isinstance(geometry, Descriptor):
            return tensor
        return TensorDescriptor(tensor, list(geometry.shape), list(geometry.strides), list(geometry.block))


_load_hooks: list[Hook] = []


def on_load(hook: Hook) -> None:
    """Have `hook` called with each variant that is loaded for the first time in this process."""
    _load_hooks.append(hook)


@functools.cache
def load(variant: Variant, target: Target) -> Any:
    """Compile (or fetch from Triton's disk cache) and load `variant`, once a process."""
    for hook in _load_hooks:
        hook(variant)
    return variant.compile(target)


def pointer(dtype: torch.dtype) -> str:
    """Triton's type of a pointer to `dtype`."""
    return f"*{TYPE_NAMES[dtype]}"


def are_aligned(tensors: Iterable[torch.Tensor | None], num_bytes: int = 16) -> bool:
    """Whether each tensor present starts at a multiple of `num_bytes`."""
    return all(tensor is None or tensor.data_ptr() % num_bytes == 0 for tensor in tensors)
