"""Holds the tensors that stay on the device: names, quota, replacement, order of changes, host copies and hits.

Owned by the engine's loop thread; takes no lock. A tensor that is replaced or deleted lives on in the jobs that resolved it
before.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tilewire.service.dtypes import BY_SAFETENSORS
from tilewire.service.engine.backends.contract import Backend, HostBytes
from tilewire.service.engine.backends.host import TORCH_DTYPES, tensor_of
from tilewire.service.errors import ResidentQuota, TilewireError, TooBusy, UnknownName
from tilewire.service.ipc.arena import make_sealed
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultWriter
from tilewire.service.tensor_names import problem_of

# Descriptors of a process that are no host copies: sockets, regions, files.
OTHER_DESCRIPTORS = 128

NAMES_BY_TORCH = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def max_kept() -> int:
    """Returns the number of host copies that the system lets the supervisor hold, and an engine map, at once."""
    descriptors, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    return min(max(descriptors // 2, descriptors - OTHER_DESCRIPTORS), mappings // 2)


class TensorsDirError(Exception):
    """A file of `tensors_dir` cannot be read, or does not fit the quota."""


@dataclass(slots=True, eq=False)
class Resident:
    """One tensor on the device.

    Attributes:
        type: Dtype and shape.
        tensor: The tensor.
        created: Unix time in seconds of its upload.
        last_used: Unix time in seconds of the last request that read it, or None.
        hits: Number of requests that read it.
        generation: Number that no other tensor of this process has.
    """

    type: TensorType
    tensor: torch.Tensor
    created: float
    last_used: float | None = None
    hits: int = 0
    version: int = 0
    generation: int = 0

    def info(self, name: str) -> TensorInfo:
        """What clients may know of it."""
        return TensorInfo(name, self.type, self.created, self.last_used, self.hits, self.version)


class Residents:
    """The resident tensors of one device.

    The home engine orders the changes: it gives each a version (`put`, `delete`). The other engines take them over in that
    order (`follow`). An engine's state is the home engine's up to `version`.

    Args:
        backend: Backend of the device that holds them.
        quota_bytes: Their sum, at most; the home engine's to keep.
        vault: Gets every change of a home engine.
        max_kept: Number of host copies, at most: each is a descriptor in the supervisor.
        clock: Unix time in seconds.
        clock_ns: The machine's monotonic clock.

    Attributes:
        nbytes: Their sum.
        version: Version of the last change.
    """

    def __init__(
        self,
        backend: Backend,
        quota_bytes: int,
        vault: VaultWriter,
        max_kept: int = 2**20,
        clock: Callable[[], float] = time.time,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._backend = backend
        self._quota_bytes = quota_bytes
        self._vault = vault
        self._max_kept = max_kept
        # Names that files have: their deletion must be remembered, or the next engine would load them again.
        self._of_files: set[str] = set()
        self._kept: set[str] = set()
        self._clock = clock
        self._clock_ns = clock_ns
        self._by_name: dict[str, Resident] = {}
        self._last_generation = 0
        # Changes of the home engine that failed here, until the next change of the name.
        self._failures: dict[str, TilewireError] = {}
        self.nbytes = 0
        self.version = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._by_name)

    def put(self, name: str, source: HostBytes) -> tuple[TensorInfo, bool]:
        """Makes a tensor resident; atomic: on an error the old one stays.

        Returns:
            What it is, and whether it replaced another.

        Raises:
            ResidentQuota: The quota would be exceeded.
            TooBusy: No memory on the device, or no descriptor.
        """
        older = self._by_name.get(name)
        self._check_quota(name, source.type.nbytes - (older.type.nbytes if older else 0))
        if name not in self._kept and len(self._kept) >= self._max_kept:
            raise ResidentQuota(
                f"{name}: {len(self._kept)} tensors were uploaded; the system's limits of open files and mappings allow no more"
            )
        try:
            fd = make_sealed("tilewire-resident", max(1, source.type.nbytes))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise TooBusy(f"{name}: no host copy: {error.strerror}") from error
        try:
            kept = HostBytes(_map(fd, source.type.nbytes), source.type, 0)
            tensor_of(kept).copy_(tensor_of(source))
            resident = Resident(source.type, self._backend.upload(kept), self._clock(), version=self._next_version())
            self._vault.keep(resident.info(name), fd)
        finally:
            os.close(fd)
        self._set(name, resident)
        self._kept.add(name)
        return resident.info(name), older is not None

    def delete(self, name: str, version: int = 0) -> TensorInfo:
        """Forgets a tensor.

        Args:
            name: Name of the tensor.
            version: Only while it has this version; 0 for any.

        Returns:
            The tensor, with the version of its deletion.

        Raises:
            UnknownName: There is none of that name and version.
        """
        resident = self.get(name)
        if version not in (0, resident.version):
            raise UnknownName(f"name: {name!r} was replaced")
        resident.version = self._next_version()
        self._vault.forget(name, resident.version, is_of_file=name in self._of_files)
        self._drop(name)
        return resident.info(name)

    def follow(self, change: Kept) -> None:
        """Takes over a change of the home engine and closes its descriptor; one that is contained already does nothing.

        A tensor that cannot be taken over leaves none of its name; see `check`.
        """
        if change.version <= self.version:
            if change.fd >= 0:
                os.close(change.fd)
            return
        self.version = change.version
        self._failures.pop(change.name, None)
        try:
            self.restore(change)
        except TilewireError as error:
            self._failures[change.name] = error
            self._drop(change.name)

    def check(self, name: str) -> None:
        """Raises what kept the last change of this name from being taken over.

        Raises:
            TilewireError: As `Backend.upload` raised it.
        """
        if name in self._failures:
            raise self._failures[name]

    def get(self, name: str, *, field: str = "name") -> Resident:
        """Looks a tensor up without counting a use.

        Raises:
            UnknownName: There is none of that name; the detail names `field`.
        """
        resident = self._by_name.get(name)
        if resident is None:
            raise UnknownName(f"{field}: no resident tensor {name!r}")
        return resident

    def use(self, resident: Resident) -> torch.Tensor:
        """Counts a use; returns the tensor."""
        resident.hits += 1
        resident.last_used = self._clock()
        return resident.tensor

    def infos(self) -> tuple[TensorInfo, ...]:
        """All of them, by name."""
        return tuple(self._by_name[name].info(name) for name in sorted(self._by_name))

    def restore(self, kept: Kept) -> None:
        """Takes over the vault's last change of a name."""
        if kept.info is None:
            self._of_files.add(kept.name)
            self._drop(kept.name)
            return
        info = kept.info
        try:
            mapped = _map(kept.fd, info.type.nbytes)
        finally:
            os.close(kept.fd)
        tensor = self._backend.upload(HostBytes(mapped, info.type, 0))
        self._set(kept.name, Resident(info.type, tensor, info.created, info.last_used, info.hits, info.version))
        self._kept.add(kept.name)

    def load_file(self, path: Path) -> None:
        """Loads a safetensors file as `file-stem/tensor-name`: all of its tensors, or none.

        Raises:
            TensorsDirError: It cannot be read, is no regular file, has a name that no request can reach or a dtype that is
                not served, or does not fit the quota.
        """
        try:
            tensors = self._read_file(path)
        except (OSError, SafetensorError, ResidentQuota, TooBusy) as error:
            raise TensorsDirError(f"tensors_dir: {path.name!r}: {error}") from error
        for name, resident in tensors.items():
            self._set(name, resident)
        self._of_files |= tensors.keys()

    def _read_file(self, path: Path) -> dict[str, Resident]:
        # Whoever opens a pipe waits for its writer.
        if not path.is_file():
            raise TensorsDirError(f"tensors_dir: {path.name!r} is not a regular file")
        tensors: dict[str, Resident] = {}
        nbytes = 0
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (it is no mapping: it cannot be iterated)
                name = f"{path.stem}/{key}"
                if (problem := problem_of(name)) is not None:
                    raise TensorsDirError(f"tensors_dir: {path.name!r}: {problem}")
                if file.get_slice(key).get_dtype() not in BY_SAFETENSORS:
                    raise TensorsDirError(f"tensors_dir: {path.name!r}: {key} has a dtype that is not served")
                tensor = file.get_tensor(key).contiguous()
                kind = TensorType(NAMES_BY_TORCH[tensor.dtype], tuple(tensor.shape))
                nbytes += kind.nbytes
                self._check_quota(name, nbytes)
                flat = tensor.reshape(-1).view(torch.uint8)
                tensors[name] = Resident(kind, self._backend.upload(HostBytes(flat, kind, 0)), self._clock())
        return tensors

    def _check_quota(self, name: str, more_bytes: int) -> None:
        if self.nbytes + more_bytes > self._quota_bytes:
            raise ResidentQuota(
                f"{name}: {more_bytes} bytes more than the {self.nbytes} that are resident exceed the quota "
                f"of {self._quota_bytes}"
            )

    def _next_version(self) -> int:
        # The clock outlives this process: a version that was given and not deposited is not given again.
        self.version = max(self.version + 1, self._clock_ns())
        return self.version

    def _drop(self, name: str) -> None:
        resident = self._by_name.pop(name, None)
        self._kept.discard(name)
        self.nbytes -= resident.type.nbytes if resident else 0

    def _set(self, name: str, resident: Resident) -> None:
        older = self._by_name.get(name)
        self.nbytes += resident.type.nbytes - (older.type.nbytes if older else 0)
        self._last_generation += 1
        resident.generation = self._last_generation
        self._by_name[name] = resident


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # By torch, whose mapping needs no descriptor; that of Python keeps one for each tensor.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=max(1, nbytes), dtype=torch.uint8)


def files_of(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder, sorted.

    Raises:
        TensorsDirError: It is no folder, or cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise TensorsDirError(f"tensors_dir: {folder}: {error.strerror}") from error
