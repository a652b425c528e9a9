"""Compiled kernels and how they are launched. Knows Triton's compiler, not what any kernel computes.

Triton's own `kernel[grid](...)` decides at every call, from the values of the arguments, which binary to use. Here the
caller decides: a `Variant` names the binary completely (types, constants, which arguments divide by 16). So the set of
binaries can be enumerated, compiled ahead, and counted. A held binary launches without looking anything up.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewire.kernels.runtime.driver import BoundLaunch, Function, LayoutError, load_function
from tilewire.kernels.runtime.kinds import block_of
from tilewire.kernels.runtime.layouts import LINE_BYTES
from tilewire.kernels.runtime.targets import Target, current, is_interpreting

Grid = tuple[int, int, int]
T = TypeVar("T")

# Nothing but the binary is kept, without tables of source lines: a tenth of the bytes to read at every start.
for _name in ("store_binary_only", "disable_line_info"):
    if f"TRITON_{_name.upper()}" not in os.environ:
        setattr(knobs.compilation, _name, True)


@dataclass(frozen=True)
class Variant:
    """One binary: a kernel with everything that its compilation depends on.

    Attributes:
        kernel: the `@triton.jit` or `@gluon.jit` function.
        signature: (argument, type) in order, constants left out; types are Triton's (`*bf16`, `i64`,
            `tensordesc<bf16[128, 64]>`).
        constants: (argument, value) of the `tl.constexpr` arguments.
        divisible: arguments whose value is promised to be a multiple of 16 (bytes, for pointers).
        options: (name, value) for the compiler: `num_warps`, `num_stages`, on HIP `waves_per_eu` and others.
    """

    # Triton hashes a kernel by its source, which takes milliseconds and fails where other functions are interpreted.
    kernel: Any = field(hash=False)
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def described(self) -> str:
        """The variant in words: kernel, types, constants, options."""
        signature = ", ".join(f"{name}: {kind}" for name, kind in self.signature)
        rest = ", ".join(f"{name}={value}" for name, value in (*self.constants, *self.options))
        return f"{self.kernel.__name__}({signature}; {', '.join(self.divisible)}; {rest})"

    def source(self) -> ASTSource:
        """Returns the source that Triton compiles for this variant."""
        key_of(self.kernel)
        names = self.kernel.arg_names
        constants = dict(self.constants)
        types = dict(self.signature) | dict.fromkeys(constants, "constexpr")
        attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        source = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        return source(self.kernel, {name: types[name] for name in names}, constants, attrs)

    def compile(self, target: Target) -> Any:
        """The compiled kernel for `target`, which need not be present."""
        gpu = GPUTarget(target.backend, target.arch, target.warp_size)
        return triton.compile(self.source(), target=gpu, options=dict(self.options))


# Functions whose keys are computed; those of modules live as long as the process.
_settled: set[int] = set()


def key_of(function: Any) -> str:
    """Triton's hash of a `@triton.jit` or `@gluon.jit` function, after those of the functions that it calls.

    Triton's own order is that of first use. The hash then depends on what a process has asked for before, and processes
    that share a cache do not find each other's binaries. So nothing reads `cache_key` but this.
    """
    # A function as a key of a dictionary would be hashed by that.
    if id(function) not in _settled:
        _settled.add(id(function))
        for name in function.fn.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, triton.JITFunction):
                key_of(called)
    return str(function.cache_key)


@dataclass(frozen=True)
class Loaded:
    """A binary on a device.

    Attributes:
        metadata: Triton's, of the compiled kernel.
        function: on CUDA, the driver's; else Triton holds it.
        digest: SHA-256 of its bytes.
        compiled: Triton's compiled kernel; None where it was loaded without Triton.
    """

    metadata: Any
    function: Function | None
    digest: bytes
    compiled: Any = None

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        return int(self.metadata.shared)

    @property
    def registers(self) -> int:
        """Of each thread."""
        return self.function.registers if self.function else int(self.compiled.n_regs)

    @property
    def spills(self) -> int:
        """Registers of each thread that lie in memory."""
        return self.function.spills if self.function else int(self.compiled.n_spills)


@dataclass(frozen=True)
class Descriptor:
    """Geometry of a tensor-descriptor argument; the address comes with each launch.

    Attributes:
        shape: extents in elements, outermost first.
        strides: in elements; the last is 1.
        block: the box that one load or store moves; of rows, fewer than the binary has room for where the launch wants so.
        is_read: whether the launch reads it; else it need not follow the tensor to other addresses.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    is_read: bool = True

    def in_whole_lines(self, item_bytes: int) -> Descriptor:
        """Returns the geometry with rows of whole lines, each reaching into the next, so that no row ends within a box.

        The last rows, which would reach out of the tensor, are left out. Where none is left the geometry has one row, as
        it was, since there are no empty ones.

        Args:
            item_bytes: Bytes of an element.
        """
        *outer, count, length = self.shape
        row_step = self.strides[-2]
        line = LINE_BYTES // item_bytes
        whole = -(-length // line) * line
        count = ((count - 1) * row_step + length - whole) // row_step + 1
        return replace(self, shape=(*outer, count, whole) if count > 0 else (*outer, 1, length))


def has_whole_boxes(variant: Variant, values: Mapping[str, Any]) -> bool:
    """Whether each descriptor in `values` moves boxes as large as `variant` has room for."""
    given = ((kind, values.get(name)) for name, kind in variant.signature)
    return all(value.block == block_of(kind) for kind, value in given if isinstance(value, Descriptor))


class Launch:
    """A kernel with its grid and every argument but the addresses bound.

    Not for several threads at once.

    Args:
        variant: the binary.
        grid: programs along up to three axes.
        values: by argument name: the scalars, and a `Descriptor` for each descriptor argument; others are left out.
        device: the GPU to launch on, which must be the current one; the CPU in the interpreter.

    Attributes:
        variants: The binary alone, as other prepared calls have several.
        addressed: names of the pointer and descriptor arguments, in order.
        bound: Launches on a stream with bare addresses, which the caller vouches for: alive, on the device, aligned as
            promised. None where the driver is not called directly.

    Raises:
        LayoutError: a box is smaller than the binary's, which takes a driver that is called directly.
        ValueError: `device` is not the current one.
    """

    def __init__(
        self, variant: Variant, grid: tuple[int, ...], values: Mapping[str, Any], device: torch.device
    ) -> None:
        self.variant, self.variants = variant, (variant,)
        x, y, z = (*grid, 1, 1)[:3]
        self.grid: Grid = (x, y, z)
        self._values = {name: values[name] for name, _ in variant.signature if name in values}
        self._device_index = device_index = device_number(device)
        self._target = target = current(device_index)
        self.addressed = tuple(name for name, kind in variant.signature if kind[0] in "*t")
        self._loaded: Loaded | None = None
        if not is_interpreting():
            if device_index != torch.cuda.current_device():
                raise ValueError(
                    f"tensors on device {device_index}, but device {torch.cuda.current_device()} is current"
                )
            self._loaded = load(variant, target, device_index)
        self.bound = self._bind_driver(self._loaded)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream with `tensors` as the pointer and descriptor arguments, in order."""
        if self.bound is not None:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            self.bound(current_stream(self._device_index), addresses)
        elif self._loaded is None:
            self._interpret(tensors)
        else:
            given = self._arguments(tensors)
            self._compiled[self.grid](*(given[name] for name in self.variant.kernel.arg_names))

    def resize(self, grid: Grid, **values: int) -> None:
        """Launch over another grid from now on, with other values of some of the scalars."""
        self.grid = grid
        self._values = {**self._values, **values}
        if self.bound is not None:
            self.bound.resize(grid, values)

    @property
    def is_bound(self) -> bool:
        return self.bound is not None

    def _bind_driver(self, loaded: Loaded | None) -> BoundLaunch | None:
        if loaded is None or loaded.function is None:
            return None
        try:
            return BoundLaunch(loaded.metadata, loaded.function, self.variant.signature, self._values, self.grid)
        except LayoutError:
            if not has_whole_boxes(self.variant, self._values):
                # Triton's launcher moves no others.
                raise
            return None

    @functools.cached_property
    def _compiled(self) -> Any:
        """For Triton's own launcher."""
        assert self._loaded is not None, "This is a bug."
        return self._loaded.compiled or self.variant.compile(self._target)

    def _interpret(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        # The interpreter takes no null pointers; any tensor serves for one that is never read.
        spare = next(tensor for tensor in tensors if tensor is not None)
        given = self._arguments(tuple(spare if tensor is None else tensor for tensor in tensors))
        self.variant.kernel[self.grid](**given)

    def _arguments(self, tensors: tuple[torch.Tensor | None, ...]) -> dict[str, Any]:
        bound = {name: self._describe(name, tensor) for name, tensor in zip(self.addressed, tensors, strict=True)}
        return self._values | bound | dict(self.variant.constants)

    def _describe(self, name: str, tensor: torch.Tensor | None) -> Any:
        geometry = self._values.get(name)
        if not isinstance(geometry, Descriptor):
            return tensor
        return TensorDescriptor(tensor, list(geometry.shape), list(geometry.strides), list(geometry.block))


def device_number(device: torch.device) -> int:
    """The number of a GPU, the current one where `device` has none; -1 for the CPU."""
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(device_index: int) -> int:
    """The handle of the stream that PyTorch launches on."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


class LaunchCache(Generic[T]):
    """Caches prepared launches by everything that they depend on. Each thread has its own, since a launch is one thread's.

    Bounded by forgetting everything when full: preparing again costs microseconds, and variants stay loaded.
    """

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._local = threading.local()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Returns the value under `key`, else that of `make`, which is kept."""
        entries: dict[Any, T] = self._local.__dict__
        try:
            return entries[key]
        except KeyError:
            if len(entries) >= self._max_entries:
                entries.clear()
            found = entries[key] = make()
            return found


_loaded: dict[tuple[Variant, int], Loaded] = {}


def load(variant: Variant, target: Target, device_index: int) -> Loaded:
    """Compile (or fetch from Triton's disk cache) and load `variant` onto the current device, once a process.

    Raises:
        RuntimeError: the driver refuses it.
    """
    assert device_index >= 0, "This is a bug."
    found = _loaded.get((variant, device_index))
    if found is not None:
        return found
    compiled = variant.compile(target)
    if target.backend == "cuda":
        return load_image(variant, target, device_index, compiled.kernel, compiled.metadata)
    compiled._init_handles()
    digest = hashlib.sha256(compiled.kernel).digest()
    loaded = _loaded[variant, device_index] = Loaded(compiled.metadata, None, digest, compiled)
    return loaded


def load_image(variant: Variant, target: Target, device_index: int, image: bytes, metadata: Any) -> Loaded:
    """Load `variant` onto the current device, a CUDA one, from its cubin and Triton's metadata.

    Raises:
        RuntimeError: the driver refuses it.
    """
    threads = metadata.num_warps * target.warp_size
    function = load_function(image, metadata.name, num_threads=threads, shared_bytes=metadata.shared)
    loaded = _loaded[variant, device_index] = Loaded(metadata, function, hashlib.sha256(image).digest())
    return loaded


def on_compile(hook: Callable[[str], None]) -> None:
    """Have `hook` called with the name of each kernel that Triton compiles in this process from now on.

    Those that its disk cache has are not compiled. Exceptions of `hook` reach the caller that needs the binary.
    """

    def listen(*, src: Any, cache_hit: bool, **_rest: object) -> None:
        if not cache_hit:
            hook(src.name)

    knobs.compilation.listener = listen


def are_aligned(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether each tensor present starts at a multiple of 16 bytes."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def are_each_aligned(tensors: Iterable[torch.Tensor | None]) -> tuple[bool, ...]:
    """For each tensor whether it starts at a multiple of 16 bytes; an absent one does."""
    return tuple(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
