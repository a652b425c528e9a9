"""Loads CUDA kernels, and launches them with everything but the addresses prepared.

Triton's loader builds C code when a process starts, and again for each signature; here the driver is called as it is.
Triton's launcher parses a Python tuple, looks every pointer up in the driver at each launch, and encodes every tensor
descriptor anew. Here the argument block is laid out once; a launch writes addresses into it and makes one call. The
block follows Triton's convention: the arguments in order, a descriptor as its 128-byte map, extents (i32) and strides
(i64), then two scratch pointers. `BoundLaunch` checks that against the loaded kernel's own parameter sizes, and raises
`LayoutError` where another Triton lays them out differently. Its caller then uses Triton's launcher.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_SIZES = {"i32": 4, "i64": 8, "fp64": 8}
# cuTensorMapEncodeTiled numbers element types differently from the compiler.
_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
_MAX_THREADS, _LOCAL_BYTES, _NUM_REGISTERS, _MAX_DYNAMIC_SHARED = 0, 3, 4, 8
# Up to here a kernel has dynamic shared memory without asking.
_FREE_SHARED_BYTES = 48 * 1024
_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LayoutError(Exception):
    """The loaded kernel does not take its parameters the way this file lays them out."""


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, its value as an int."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


@functools.cache
def _cuda() -> ctypes.PyDLL:
    # PyDLL keeps the GIL: giving it up for a call of two microseconds can cost a switch interval to get back.
    return ctypes.PyDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(status, ctypes.byref(text))
    raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


@functools.cache
def _patient_cuda() -> ctypes.CDLL:
    # Loading takes a millisecond, in which other threads may run.
    return ctypes.CDLL("libcuda.so.1")


@dataclass(frozen=True)
class Function:
    """A kernel that the driver has loaded.

    Attributes:
        handle: the driver's CUfunction.
        registers: of each thread.
        spills: registers of each thread that did not fit and lie in memory.
    """

    handle: int
    registers: int
    spills: int


def load_function(image: bytes, name: str, *, num_threads: int, shared_bytes: int) -> Function:
    """Load the kernel `name` of a cubin into the current context; it stays until the process ends.

    Args:
        image: the cubin.
        name: of the kernel.
        num_threads: of a program.
        shared_bytes: dynamic shared memory of a program.

    Raises:
        RuntimeError: the driver refuses it.
    """
    cuda = _patient_cuda()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), image))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    if shared_bytes > _FREE_SHARED_BYTES:
        _check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes))
    most, local_bytes, registers = (
        _attribute(function, which) for which in (_MAX_THREADS, _LOCAL_BYTES, _NUM_REGISTERS)
    )
    if num_threads > most:
        raise RuntimeError(f"{name}: {num_threads} threads, and its registers leave room for {most}")
    assert function.value is not None, "This is a bug."
    return Function(function.value, registers, local_bytes // 4)


def _attribute(function: ctypes.c_void_p, name: int) -> int:
    value = ctypes.c_int()
    _check(_patient_cuda().cuFuncGetAttribute(ctypes.byref(value), name, function))
    return value.value


class _Block:
    """The argument block under construction: bytes at a 64-byte boundary, and a pointer to each parameter."""

    def __init__(self, capacity: int) -> None:
        self._memory = (ctypes.c_ubyte * (capacity + _MAP_ALIGNMENT))()
        start = ctypes.addressof(self._memory)
        self._base = -(-start // _MAP_ALIGNMENT) * _MAP_ALIGNMENT - start
        self._used = 0
        # Offset and size of each parameter.
        self.parameters: list[tuple[int, int]] = []

    def add(self, size: int, alignment: int) -> int:
        """Room for one parameter; its offset in the block."""
        offset = -(-self._used // alignment) * alignment
        self._used = offset + size
        self.parameters.append((offset, size))
        return offset

    def put(self, kind: Any, value: float = 0) -> Any:
        """A parameter of a ctypes `kind` with `value`; the live ctypes object."""
        size = ctypes.sizeof(kind)
        cell = kind.from_buffer(self._memory, self._base + self.add(size, size))
        cell.value = value
        return cell

    def address(self, offset: int) -> int:
        """Returns the address of `offset`."""
        return ctypes.addressof(self._memory) + self._base + offset

    def pointers(self) -> Any:
        """The driver's `kernelParams`."""
        places = [self.address(offset) for offset, _ in self.parameters]
        return (ctypes.c_void_p * len(places))(*places)


class BoundLaunch:
    """One kernel with grid and arguments bound; calling it with addresses launches it.

    Not for several threads at once: they would write into the same argument block.

    Args:
        metadata: Triton's, of the compiled kernel.
        function: the same kernel, loaded.
        signature: (name, type) of the arguments, constants left out.
        values: scalars by name, and an object with `shape`, `strides`, `block` and `is_read` for each descriptor.
        grid: programs along the three axes.

    Raises:
        LayoutError: see the module.
    """

    def __init__(
        self,
        metadata: Any,
        function: Function,
        signature: Sequence[tuple[str, str]],
        values: dict[str, Any],
        grid: tuple[int, int, int],
    ) -> None:
        if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise LayoutError("clusters and scratch memory are Triton's launcher's business")
        boxes = iter(metadata.tensordesc_meta or ())
        self._scalars: dict[str, Any] = {}
        self._block = _Block(256 * (len(signature) + 2))
        setters = [self._bind(name, kind, values.get(name), boxes) for name, kind in signature]
        self._setters: tuple[Callable[[int], None], ...] = tuple(setter for setter in setters if setter is not None)
        for _ in ("global scratch", "profile scratch"):
            self._block.put(ctypes.c_uint64)
        self._function = ctypes.c_void_p(function.handle)
        _verify(self._function, self._block.parameters)
        self._pointers = self._block.pointers()
        threads = 32 * metadata.num_warps
        kinds = [_COOPERATIVE] * metadata.launch_cooperative_grid
        kinds += [_PROGRAMMATIC_STREAM_SERIALIZATION] * metadata.launch_pdl
        self._attributes = (_LaunchAttribute * 2)(*[_LaunchAttribute(kind, 0, 1) for kind in kinds])
        self._config = _LaunchConfig(
            grid, (threads, 1, 1), metadata.shared, None, ctypes.addressof(self._attributes), len(kinds)
        )
        self._config_pointer = ctypes.byref(self._config)
        self._launch = _cuda().cuLaunchKernelEx

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream` with one address for each pointer and descriptor, in order."""
        for setter, address in zip(self._setters, addresses, strict=True):
            setter(address)
        self._config.stream = stream
        status = self._launch(self._config_pointer, self._function, self._pointers, None)
        if status:
            _check(status)

    def resize(self, grid: tuple[int, int, int], values: dict[str, int]) -> None:
        """Launch over another grid from now on, with other values of some of the scalars."""
        self._config.grid[:] = grid
        for name, value in values.items():
            self._scalars[name].value = value

    def _bind(self, name: str, kind: str, value: Any, boxes: Any) -> Callable[[int], None] | None:
        """Lay out one argument; what sets its address, None for a scalar."""
        if kind[0] == "*":
            cell = self._block.put(ctypes.c_uint64)
            return functools.partial(setattr, cell, "value")
        if kind.startswith("tensordesc"):
            return self._bind_descriptor(value, next(boxes))
        if kind not in _SIZES:
            raise LayoutError(f"{name}: no layout for {kind}")
        kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp64": ctypes.c_double}
        self._scalars[name] = self._block.put(kinds[kind], value)
        return None

    def _bind_descriptor(self, geometry: Any, box: dict[str, Any]) -> Callable[[int], None]:
        place = self._block.address(self._block.add(_MAP_BYTES, _MAP_ALIGNMENT))
        for extent in geometry.shape:
            self._block.put(ctypes.c_int32, extent)
        for stride in geometry.strides:
            self._block.put(ctypes.c_int64, stride)
        return _TensorMap(place, geometry, box).point_to


class _TensorMap:
    """A descriptor inside an argument block; encoded at its first address, then only moved."""

    def __init__(self, place: int, geometry: Any, box: dict[str, Any]) -> None:
        self._place = ctypes.c_void_p(place)
        self._geometry = geometry
        self._box = box
        self._address = 0
        self._replace = _cuda().cuTensorMapReplaceAddress

    def point_to(self, address: int) -> None:
        """Make the descriptor describe the tensor at `address`."""
        # Changing an address takes up to a microsecond.
        if address == self._address or (self._address and not self._geometry.is_read):
            return
        if self._address:
            _check(self._replace(self._place, ctypes.c_void_p(address)))
        else:
            self._encode(address)
        self._address = address

    def _encode(self, address: int) -> None:
        rank = len(self._geometry.shape)
        item_bytes, element_type = self._box["elem_size"], self._box["elem_type"]
        strides = [stride * item_bytes for stride in self._geometry.strides[:-1]]
        # Of a row, what the swizzle takes at a time; of rows, as many as the launch wants of those that have a place.
        block = map(min, self._box["block_size"], self._geometry.block)
        _check(
            _cuda().cuTensorMapEncodeTiled(
                self._place,
                _ELEMENT_TYPES.get(element_type, element_type),
                rank,
                ctypes.c_void_p(address),
                (ctypes.c_uint64 * rank)(*reversed(self._geometry.shape)),
                (ctypes.c_uint64 * rank)(*reversed(strides)),
                (ctypes.c_uint32 * rank)(*reversed([*block])),
                (ctypes.c_uint32 * rank)(*(1,) * rank),
                0,
                self._box["swizzle"],
                _L2_PROMOTION_128B,
                0,
            )
        )


def _verify(function: ctypes.c_void_p, parameters: Sequence[tuple[int, int]]) -> None:
    """Compare the number and sizes of our parameters with the loaded kernel's own."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    query = _cuda().cuFuncGetParamInfo
    for index, (_, given) in enumerate(parameters):
        status = query(function, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size))
        if status or size.value != given:
            raise LayoutError(f"parameter {index}: we give {given} bytes, the kernel takes {size.value}")
    if query(function, ctypes.c_size_t(len(parameters)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        raise LayoutError("the kernel takes more parameters than we give")
