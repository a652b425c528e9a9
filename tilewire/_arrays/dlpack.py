"""Arrays of other libraries as NumPy views and back, through DLPack. Imports none of the libraries.

NumPy's own `from_dlpack` refuses bfloat16 and float8, so the tensor's description is read here.

Source: the structures as documented in https://github.com/dmlc/dlpack, `include/dlpack/dlpack.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from tilewire._arrays.dtypes import EXTENSIONS, numpy_dtype

ResultT = TypeVar("ResultT")

_CPU = 1
# Types of devices whose memory the CPU reads as its own: CPU, CUDA's pinned memory, ROCm's.
_READABLE = (_CPU, 3, 11)
# DLDataTypeCode: signed, unsigned, float, bfloat; and float8 by format.
_PLAIN_CODES = {0: "int", 1: "uint", 2: "float"}
_EXTENSION_CODES = {4: "bfloat16", 10: "float8_e4m3fn", 12: "float8_e5m2"}
_BOOL_CODE = 6


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def is_foreign(value: object) -> bool:
    """Whether a value is an array of another library that speaks DLPack."""
    is_array = hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")
    return is_array and not isinstance(value, np.ndarray | np.generic)


def can_answer(value: object) -> bool:
    """Whether an array of its library can be made of a result; Arrow's arrays speak DLPack and cannot."""
    return is_foreign(value) and (_is_torch(value) or _is_cupy(value) or hasattr(value, "__array_namespace__"))


def from_foreign(value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """Reads another library's array.

    Args:
        value: Array of any device; memory that the CPU cannot read is copied by its library.

    Returns:
        The dtype's name, and a view of the array; of bfloat16 and float8 a view of the bits.

    Raises:
        TypeError: A dtype that cannot be sent, or an array without elements in memory, as a sparse one.
    """
    if getattr(value, "requires_grad", False):
        value = value.detach()
    # torch negates lazily, and its DLPack leaves that out.
    if _is_torch(value) and value.is_neg():
        value = value.resolve_neg()
    value = _on_the_host(value)
    name = str(value.dtype).removeprefix("torch.") if _is_torch(value) else ""
    if name in EXTENSIONS:
        # torch exports no float8; its bits it does.
        bits = sys.modules["torch"].uint8 if EXTENSIONS[name].itemsize == 1 else sys.modules["torch"].int16
        return name, _view_of(value.view(bits))[1].view(EXTENSIONS[name])
    return _view_of(value)


def to_foreign(name: str, array: np.ndarray[Any, Any], like: Any) -> Any:
    """Makes an array of another library, on the device of one that came from it.

    Args:
        name: Name of the dtype.
        array: The elements; of bfloat16 and float8 their bits.
        like: An array of the library.
    """
    if _is_torch(like):
        torch = sys.modules["torch"]
        tensor = torch.from_dlpack(array)
        return (tensor.view(getattr(torch, name)) if name in EXTENSIONS else tensor).to(like.device)
    whole = array.view(numpy_dtype(name)) if name in EXTENSIONS else array
    if _is_cupy(like):
        with like.device:
            return sys.modules["cupy"].asarray(whole)
    namespace = like.__array_namespace__()
    return namespace.asarray(whole, device=like.device) if _device_type_of(like) else namespace.asarray(whole)


def is_viewed(value: Any) -> bool:
    """Whether an array is torch's and in the host's memory: it is read and answered without a copy."""
    return _is_torch(value) and value.layout == sys.modules["torch"].strided and value.device.type == "cpu"


def num_bytes_of(array: Any) -> int:
    """Returns the bytes of an array of any library; 0 where the library does not say."""
    try:
        return int(array.nbytes)
    except (AttributeError, RuntimeError):
        # torch has no number for sparse ones.
        return 0


def as_here(work: Callable[[], ResultT], arrays: Iterable[object]) -> Callable[[], ResultT]:
    """Returns work for another thread, where it uses the devices and streams of this one, which torch and CuPy have by thread.

    Args:
        work: Goes through arrays.
        arrays: Arrays of any library.
    """
    uses = [use for array in arrays for use in _uses_of(array)]

    def run() -> ResultT:
        with contextlib.ExitStack() as stack:
            for use in uses:
                stack.enter_context(use)
            return work()

    return run


def _uses_of(array: Any) -> tuple[Any, ...]:
    """Returns contexts in which a thread uses the device and the stream that this thread uses for an array."""
    if _is_torch(array) and array.is_cuda:
        cuda = sys.modules["torch"].cuda
        return (cuda.stream(cuda.current_stream(array.device)),)
    if _is_cupy(array):
        return array.device, sys.modules["cupy"].cuda.get_current_stream(array.device.id)
    return ()


def _is_torch(value: object) -> bool:
    """Whether a value is torch's, of a class of its own too."""
    torch = sys.modules.get("torch")
    return isinstance(value, getattr(torch, "Tensor", ()))


def _is_cupy(value: object) -> bool:
    cupy = sys.modules.get("cupy")
    return isinstance(value, getattr(cupy, "ndarray", ()))


def _device_type_of(value: Any) -> int:
    """The type of the device that an array lies on; 0 where it lies in parts on several, which JAX refuses to export."""
    try:
        return int(value.__dlpack_device__()[0])
    except BufferError:
        return 0
    except (RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> TypeError:
    return TypeError(f"an array that cannot be read through DLPack: {error}")


def _on_the_host(value: Any) -> Any:
    if _device_type_of(value) in _READABLE:
        return value
    for method in ("cpu", "get"):
        if hasattr(value, method):
            return getattr(value, method)()
    return np.asarray(value)


def _view_of(value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        name = value.dtype.name
        return name, value.view(EXTENSIONS[name]) if name in EXTENSIONS else value
    try:
        capsule = value.__dlpack__()
    except (BufferError, RuntimeError) as error:
        raise _unreadable(error) from error
    tensor = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    name, dtype = _dtype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    if 0 in shape:
        return name, np.empty(shape, dtype)
    if tensor.data is None:
        raise TypeError(
            f"a {type(value).__name__} without memory of its own cannot be read; make a plain array of it first"
        )
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _strides_of(shape)
    if min(strides, default=0) < 0:
        raise TypeError("an array with negative strides cannot be read through DLPack; copy it first")
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (span * dtype.itemsize)).from_address(tensor.data + tensor.byte_offset)
    # The memory lives as long as its capsule.
    memory.capsule = capsule
    return name, np.ndarray(shape, dtype, memory, strides=tuple(stride * dtype.itemsize for stride in strides))


def _dtype_of(tensor: _Tensor) -> tuple[str, np.dtype[Any]]:
    if tensor.lanes == 1:
        if tensor.code in _EXTENSION_CODES:
            name = _EXTENSION_CODES[tensor.code]
            return name, EXTENSIONS[name]
        if tensor.code == _BOOL_CODE:
            return "bool", np.dtype(np.bool_)
        if tensor.code in _PLAIN_CODES:
            dtype = np.dtype(f"{_PLAIN_CODES[tensor.code]}{tensor.bits}")
            return dtype.name, dtype
    raise TypeError(f"DLPack type {tensor.code} of {tensor.bits} bits and {tensor.lanes} lanes cannot be sent")


def _strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
