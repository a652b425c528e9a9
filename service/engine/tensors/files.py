"""Loads the files of `--tensors-dir` and `--programs-dir` before the engine is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tilewire.service.dtypes import BY_SAFETENSORS
from tilewire.service.engine.backends.contract import CannotStart, HostBytes
from tilewire.service.engine.backends.host import dtype_name
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.transfers import Steps
from tilewire.service.errors import InvalidRequest, ResidentQuota, TilewireError, TooBusy
from tilewire.service.ops.op import TensorType, can_be_shape
from tilewire.service.ops.program.definition import CALLS, check_program_name, parse_program
from tilewire.service.ops.registry import OPS, program_resident
from tilewire.service.tensor_names import problem_of


class TensorsDirError(CannotStart):
    """A file of `tensors_dir` or `programs_dir` cannot be read, or does not fit the quota."""


def files_of(folder: Path, setting: str, suffix: str) -> list[Path]:
    """Returns the files of a folder that a setting names, sorted.

    Raises:
        TensorsDirError: It is no folder, or cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except OSError as error:
        raise TensorsDirError(f"{setting}: {folder}: {error.strerror}") from error


def load_program(residents: Residents, path: Path, run: Callable[[Steps], None]) -> None:
    """Keeps the program of a JSON file under the file's stem.

    Raises:
        TensorsDirError: It cannot be read, is no program, or does not fit the quota.
    """
    try:
        if not path.is_file():
            raise InvalidRequest("not a regular file")
        check_program_name(path.stem, CALLS.union(OPS))
        changed_s = _changed_s(path)
        text = bytearray(parse_program(path.read_bytes(), OPS).text.encode())
        flat = torch.frombuffer(text, dtype=torch.uint8)
        kind = TensorType("int8", (len(text),))
        residents.add([(program_resident(path.stem), HostBytes(flat, kind, 0))], run, changed_s)
    except (OSError, TilewireError) as error:
        raise TensorsDirError(f"programs_dir: {path.name!r}: {error}") from error


def load_tensors(residents: Residents, path: Path, run: Callable[[Steps], None]) -> None:
    """Loads a safetensors file as `file-stem/tensor-name`: all of its tensors, or none.

    Raises:
        TensorsDirError: It cannot be read, or is no regular file. Its name can be reached by no request, its dtype is
            not served, or it does not fit the quota.
    """
    # Opening a pipe waits for its writer.
    if not path.is_file():
        raise TensorsDirError(f"tensors_dir: {path.name!r} is not a regular file")
    try:
        residents.add(_tensors_of(path), run, _changed_s(path))
    except (OSError, SafetensorError, ResidentQuota, TooBusy) as error:
        raise TensorsDirError(f"tensors_dir: {path.name!r}: {error}") from error


def _changed_s(path: Path) -> float:
    """Returns the Unix time of a file's last change, before it is read.

    That of its inode: the time of its content can be set, and is the same in every copy by `cp -p`.
    """
    return path.stat().st_ctime


def _tensors_of(path: Path) -> Iterator[tuple[str, HostBytes]]:
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (it is no mapping: it cannot be iterated)
            name = f"{path.stem}/{key}"
            if (problem := problem_of(name)) is not None:
                raise TensorsDirError(f"tensors_dir: {path.name!r}: {problem}")
            if file.get_slice(key).get_dtype() not in BY_SAFETENSORS:
                raise TensorsDirError(f"tensors_dir: {path.name!r}: {key} has a dtype that is not served")
            if not can_be_shape(file.get_slice(key).get_shape()):
                raise TensorsDirError(f"tensors_dir: {path.name!r}: {key} has a shape that is not served")
            tensor = file.get_tensor(key).contiguous()
            kind = TensorType(dtype_name(tensor.dtype), tuple(tensor.shape))
            yield name, HostBytes(tensor.reshape(-1).view(torch.uint8), kind, 0)
