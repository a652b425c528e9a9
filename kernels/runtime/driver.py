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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_NUM_SCRATCH = 2
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


@dataclass(frozen=True)
class _Layout:
    """Where the parameters of a kernel lie in its argument blocks.

    Attributes:
        block: Type of a block: maps, addresses, and a field for each scalar, extent and stride.
        offsets: Offset of each parameter in a block, in the order of the kernel's.
        maps: Each descriptor's place among the addresses, and its name. Their maps begin the block, one after another.
        scalars: Names of the scalars.
    """

    block: type[ctypes.Structure]
    offsets: tuple[int, ...]
    maps: tuple[tuple[int, str], ...]
    scalars: tuple[str, ...]


@functools.cache
def _layout_of(handle: int, signature: tuple[tuple[str, str], ...], ranks: tuple[int, ...]) -> _Layout:
    """Lays the parameters of a loaded kernel out, once for all its launches.

    Args:
        handle: The driver's CUfunction.
        signature: (name, type) of the arguments, constants left out.
        ranks: Ranks of the descriptors, in order.

    Raises:
        LayoutError: See the module.
    """
    kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp64": ctypes.c_double}
    addressed = [name for name, kind in signature if _has_address(kind)]
    # Maps begin the block, so that their alignment is the block's. The scratch pointers stay null.
    maps = {name: place for place, (name, kind) in enumerate(pair for pair in signature if pair[1][0] == "t")}
    fields: list[tuple[str, Any]] = [("maps", ctypes.c_ubyte * (_MAP_BYTES * len(maps)))]
    fields += [("addresses", ctypes.c_uint64 * len(addressed)), ("scratch", ctypes.c_uint64 * _NUM_SCRATCH)]
    # Field of each parameter, and bytes behind its beginning.
    parameters: list[tuple[str, int]] = []
    for name, kind in signature:
        if kind[0] == "*":
            parameters.append(("addresses", 8 * addressed.index(name)))
        elif kind[0] == "t":
            parameters.append(("maps", _MAP_BYTES * maps[name]))
            for letter, number in (("extent", ctypes.c_int32), ("stride", ctypes.c_int64)):
                own = [(_part(name, letter, axis), number) for axis in range(ranks[maps[name]])]
                fields += own
                parameters += [(part, 0) for part, _ in own]
        elif kind in kinds:
            fields.append((name, kinds[kind]))
            parameters.append((name, 0))
        else:
            raise LayoutError(f"{name}: no layout for {kind}")
    parameters += [("scratch", 8 * number) for number in range(_NUM_SCRATCH)]
    block = type("Block", (ctypes.Structure,), {"_fields_": fields})
    sizes = [
        {"maps": _MAP_BYTES, "addresses": 8, "scratch": 8}.get(field, getattr(block, field).size)
        for field, _ in parameters
    ]
    _verify(ctypes.c_void_p(handle), sizes)
    return _Layout(
        block,
        tuple(getattr(block, field).offset + behind for field, behind in parameters),
        tuple((addressed.index(name), name) for name in maps),
        tuple(name for name, kind in signature if kind in kinds),
    )


def _has_address(kind: str) -> bool:
    """Whether an argument of this type is a pointer or a descriptor."""
    return kind[0] in "*t"


def _part(name: str, letter: str, axis: int) -> str:
    """The field of an extent or stride of a descriptor; no argument has a point in its name."""
    return f"{name}.{letter}{axis}"


class BoundLaunch:
    """One kernel with grid and arguments bound; calling it with addresses launches it.

    Not for several threads at once: they would write into the same argument block. Thousands are kept, one for each shape.

    Args:
        metadata: Triton's, of the compiled kernel.
        function: the same kernel, loaded.
        signature: (name, type) of the arguments, constants left out.
        values: scalars by name, and an object with `shape`, `strides`, `block` and `is_read` for each descriptor.
        grid: programs along the three axes.

    Raises:
        LayoutError: see the module.
    """

    __slots__ = (
        *("_addresses", "_attributes", "_block", "_config", "_config_pointer", "_function", "_launch", "_maps"),
        "_pointers",
    )

    def __init__(
        self,
        metadata: Any,
        function: Function,
        signature: tuple[tuple[str, str], ...],
        values: dict[str, Any],
        grid: tuple[int, int, int],
    ) -> None:
        if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise LayoutError("clusters and scratch memory are Triton's launcher's business")
        ranks = tuple(len(values[name].shape) for name, kind in signature if kind[0] == "t")
        layout = _layout_of(function.handle, signature, ranks)
        memory = (ctypes.c_ubyte * (ctypes.sizeof(layout.block) + _MAP_ALIGNMENT))()
        shift = -ctypes.addressof(memory) % _MAP_ALIGNMENT
        self._block: Any = layout.block.from_buffer(memory, shift)
        for name in layout.scalars:
            setattr(self._block, name, values[name])
        begin = ctypes.addressof(self._block)
        boxes = metadata.tensordesc_meta or ()
        self._maps = tuple(
            (place, self._map(name, begin + _MAP_BYTES * number, values[name], boxes[number]))
            for number, (place, name) in enumerate(layout.maps)
        )
        self._addresses = self._block.addresses
        self._function = ctypes.c_void_p(function.handle)
        self._pointers = (ctypes.c_void_p * len(layout.offsets))(*[begin + offset for offset in layout.offsets])
        self._attributes = _attributes(metadata.launch_cooperative_grid, metadata.launch_pdl)
        self._config = _LaunchConfig(
            grid,
            (32 * metadata.num_warps, 1, 1),
            metadata.shared,
            None,
            ctypes.addressof(self._attributes),
            metadata.launch_cooperative_grid + metadata.launch_pdl,
        )
        self._config_pointer = ctypes.byref(self._config)
        self._launch = _cuda().cuLaunchKernelEx

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream` with one address for each pointer and descriptor, in order."""
        self._addresses[:] = addresses
        for place, tensor_map in self._maps:
            tensor_map.point_to(addresses[place])
        self._config.stream = stream
        status = self._launch(self._config_pointer, self._function, self._pointers, None)
        if status:
            _check(status)

    def resize(self, grid: tuple[int, int, int], values: dict[str, int]) -> None:
        """Launch over another grid from now on, with other values of some of the scalars."""
        self._config.grid[:] = grid
        for name, value in values.items():
            setattr(self._block, name, value)

    def _map(self, name: str, place: int, geometry: Any, box: dict[str, Any]) -> _TensorMap:
        """Writes the extents and strides of a descriptor; the map itself waits for its first address."""
        for letter, numbers in (("extent", geometry.shape), ("stride", geometry.strides)):
            for axis, number in enumerate(numbers):
                setattr(self._block, _part(name, letter, axis), number)
        return _TensorMap(place, geometry, box)


@functools.cache
def _attributes(is_cooperative: bool, is_programmatic: bool) -> Any:
    """Attributes of launches, in the driver's form."""
    kinds = [_COOPERATIVE] * is_cooperative + [_PROGRAMMATIC_STREAM_SERIALIZATION] * is_programmatic
    return (_LaunchAttribute * 2)(*[_LaunchAttribute(kind, 0, 1) for kind in kinds])


class _TensorMap:
    """A descriptor inside an argument block; encoded at its first address, then only moved."""

    __slots__ = ("_address", "_box", "_geometry", "_place", "_replace")

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


def _verify(function: ctypes.c_void_p, sizes: Sequence[int]) -> None:
    """Compare the number and sizes of our parameters with the loaded kernel's own."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    query = _cuda().cuFuncGetParamInfo
    for index, given in enumerate(sizes):
        status = query(function, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size))
        if status or size.value != given:
            raise LayoutError(f"parameter {index}: we give {given} bytes, the kernel takes {size.value}")
    if query(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        raise LayoutError("the kernel takes more parameters than we give")
