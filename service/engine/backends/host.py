"""Views of slots as CPU tensors: the one place that turns (segment, offset, type) into torch. Copies nothing it need not."""

from __future__ import annotations

import numpy as np
import torch

from tilewire.service.dtypes import DTYPES
from tilewire.service.engine.backends.contract import HostBytes

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, as in `TensorType`."""
    return _NAMES[dtype]


def bytes_of(source: HostBytes) -> torch.Tensor:
    """The tensor's bytes in the segment: uint8 (nbytes,), a view; not for rows with a pitch."""
    assert not source.pitch, "This is a bug: the rows do not follow one another."
    return source.mapped[source.offset : source.offset + source.type.nbytes]


def lacks_memory(error: Exception) -> bool:
    """Whether an error says that the host has no memory; torch says so in words alone."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def shaped(flat: torch.Tensor, source: HostBytes) -> torch.Tensor:
    """Gives flat bytes (uint8, aligned for the dtype, any device) the source's dtype, shape and order, as a view."""
    typed = flat.view(TORCH_DTYPES[source.type.dtype])
    if source.fortran:
        return typed.view(source.type.shape[::-1]).permute(tuple(reversed(range(len(source.type.shape)))))
    return typed.view(source.type.shape)


def tensor_of(source: HostBytes, alignment: int = 1) -> torch.Tensor:
    """The slot as a CPU tensor of its dtype and shape: a view where its bytes are aligned for the dtype, else a copy.

    Likewise where its address is no multiple of `alignment`, which may be 64 at the most: that of torch's own memory.
    Rows with a pitch are always a view: they lie among those of other engines, and are written.
    """
    if source.pitch:
        return _pitched(source)
    flat = bytes_of(source)
    # An offset behind the end is cut to the end, which need not suit the dtype: such a tensor is empty.
    if flat.storage_offset() % TORCH_DTYPES[source.type.dtype].itemsize or flat.data_ptr() % alignment:
        flat = flat.clone()
    return shaped(flat, source)


def copy_with_one_thread(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copies between host tensors of one dtype and shape, and lets go of the GIL.

    Torch would take all cores, and its threads spin behind each copy: whoever answers others would wait for a core.
    """
    np.copyto(_words_of(into), _words_of(source))


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a host tensor in C order: a view where they follow one another, else a copy, made by one thread."""
    return np.ascontiguousarray(_words_of(tensor)).reshape(-1).data.cast("B")


def _words_of(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as integers of its items' size: NumPy does not know all of torch's dtypes."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(words).numpy()


def _pitched(place: HostBytes) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[place.type.dtype], place.type.shape
    flat = place.mapped[place.offset : place.offset + place.extent].view(dtype)
    pitch, strides = place.pitch // dtype.itemsize, [1]
    for dim in reversed(shape[1:]):
        strides.insert(0, pitch if len(strides) == 1 else strides[0] * dim)
    return flat.as_strided(shape, strides)
