"""Loads the files of `--tensors-dir` and `--programs-dir` before the engine is ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tilewire.service.dtypes import BY_SAFETENSORS
from tilewire.service.engine.backends.contract import CannotStart, HostBytes
from tilewire.service.engine.backends.host import dtype_name
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.transfers import Steps
from tilewire.service.errors import TilewireError
from tilewire.service.ops.op import TensorType, can_be_shape
from tilewire.service.ops.program.definition import CALLS, check_program_name, parse_program
from tilewire.service.ops.registry import OPS, program_resident
from tilewire.service.supervisor.handover import OpenFile
from tilewire.service.tensor_names import problem_of


class TensorsDirError(CannotStart):
    """A file of `--tensors-dir` or `--programs-dir` cannot be read, or does not fit the quota."""


def load_file(residents: Residents, file: OpenFile, run: Callable[[Steps], None]) -> None:
    """Loads what a file holds: all of its tensors as `file-stem/tensor-name`, or none; or a program under the file's stem.

    Raises:
        TensorsDirError: It cannot be read, is no program, or does not fit the quota. The name of a tensor can be reached by no
            request, or its dtype is not served.
    """
    read = _tensors_of if file.setting == "--tensors-dir" else _program_of
    try:
        changed_s = _changed_s(file)
        residents.add(read(file), run, changed_s)
    except (OSError, SafetensorError, TilewireError) as error:
        raise TensorsDirError(f"{file.setting}: {file.name!r}: {error}") from error


def is_as_opened(file: OpenFile) -> bool:
    """Whether nobody has written to a file since the service's start."""
    found = os.fstat(file.fd)
    return (found.st_size, found.st_mtime_ns) == (file.nbytes, file.written_ns)


def _path_of(file: OpenFile) -> Path:
    """Returns the path under which this process opens a file again, which may be in no folder any more."""
    return Path(f"/proc/self/fd/{file.fd}")


def _changed_s(file: OpenFile) -> float:
    """Returns the Unix time of a file's last change, before it is read: as it was opened, unless it was written since."""
    return file.changed_s if is_as_opened(file) else os.fstat(file.fd).st_ctime


def _program_of(file: OpenFile) -> Iterator[tuple[str, HostBytes]]:
    stem = Path(file.name).stem
    check_program_name(stem, CALLS.union(OPS))
    text = bytearray(parse_program(_path_of(file).read_bytes(), OPS).text.encode())
    flat = torch.frombuffer(text, dtype=torch.uint8)
    yield program_resident(stem), HostBytes(flat, TensorType("int8", (len(text),)), 0)


def _tensors_of(opened: OpenFile) -> Iterator[tuple[str, HostBytes]]:
    with safe_open(_path_of(opened), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (it is no mapping: it cannot be iterated)
            name = f"{Path(opened.name).stem}/{key}"
            if (problem := problem_of(name)) is not None:
                raise TensorsDirError(f"{opened.setting}: {opened.name!r}: {problem}")
            if file.get_slice(key).get_dtype() not in BY_SAFETENSORS:
                raise TensorsDirError(f"{opened.setting}: {opened.name!r}: {key} has a dtype that is not served")
            if not can_be_shape(file.get_slice(key).get_shape()):
                raise TensorsDirError(f"{opened.setting}: {opened.name!r}: {key} has a shape that is not served")
            tensor = file.get_tensor(key).contiguous()
            kind = TensorType(dtype_name(tensor.dtype), tuple(tensor.shape))
            yield name, HostBytes(tensor.reshape(-1).view(torch.uint8), kind, 0)
