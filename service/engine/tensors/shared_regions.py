"""Clients' shared memory under a name: registration, quota, uses, and their bytes on the way to and from a batch.

A region that the device reaches by itself (`Backend.adopt`) is staged from and to where it lies. Any other is copied
through its descriptor, in when its batch begins and out when it is done. The CPU never touches a mapping that a client
can cut. Owned by the engine's loop thread; takes no lock. Pinning and unpinning go beside it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from tilewire.service.engine.backends.contract import Backend, HostBytes
from tilewire.service.engine.tensors.host_mappings import Mappings, unmapping
from tilewire.service.engine.tensors.shm_files import FOLDER, SharedFile
from tilewire.service.errors import AlreadyExists, BeyondLimit, InvalidRequest, UnknownName
from tilewire.service.ipc.messages import RegionInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.handover import KeptRegion
from tilewire.service.supervisor.vault import VaultWriter

logger = logging.getLogger(__name__)

# Each holds a descriptor here and one in the supervisor.
MAX_REGIONS = 1024

# Stands for bytes that are copied in when the batch begins.
_NOWHERE = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class Region:
    """A registered region.

    Attributes:
        mapped_from: Offset of `mapped` in the object.
        mapped: The object from there on, for the device alone; None when bytes are copied through the descriptor.
        uses: Jobs that read or write it, and that it is being mapped.
        is_dropped: Unregistered; closed when its last use ends.
    """

    info: RegionInfo
    file: SharedFile
    mapped_from: int
    mapped: torch.Tensor | None = None
    uses: int = 0
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """A tensor in a region.

    Attributes:
        offset: Offset of the tensor in the object.
        field: Name of the input or output.
        is_reached: The region was mapped when the tensor was found: the device reaches it by itself. It stays so for this use.
    """

    region: Region
    offset: int
    type: TensorType
    field: str
    is_out: bool
    is_reached: bool

    def place(self) -> HostBytes:
        """Returns the tensor for a launch; a stand-in where its bytes are copied when the batch begins."""
        if not self.is_reached:
            return HostBytes(_NOWHERE, self.type, 0)
        assert self.region.mapped is not None, "This is a bug: unmapped while it is used."
        return HostBytes(self.region.mapped, self.type, self.offset - self.region.mapped_from, is_foreign=True)

    def stage_out(self, out: HostBytes) -> None:
        """Copies a result that was not written where it belongs.

        Raises:
            InvalidRequest: The object was cut.
        """
        if not out.is_foreign:
            with self._named():
                self.region.file.write(out.mapped.numpy().data, self.offset)

    def read(self, buffer: torch.Tensor) -> None:
        """Copies an input; see `stage_out`."""
        with self._named():
            self.region.file.read(buffer.numpy().data, self.offset)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.field}: {error.detail}") from None


# By name of the input or output; outputs have names that no input has.
Uses = Mapping[str, Use]


class Regions:
    """The regions of one engine.

    Args:
        backend: Backend, which may reach them by itself.
        vault: Receiver of every change.
        mappings: Has memory mapped and unmapped beside the loop.
        max_bytes: Their sum, at most.
        max_copied_bytes: Bytes of one request's inputs, at most, that have to be copied; an object may be larger than
            what it occupies.
        prefix: Prefix of allowed keys.
        folder: Folder of shared-memory objects.
        clock_ns: The machine's monotonic clock.
    """

    def __init__(
        self,
        backend: Backend,
        vault: VaultWriter,
        mappings: Mappings,
        *,
        max_bytes: int,
        max_copied_bytes: int,
        max_regions: int = MAX_REGIONS,
        prefix: str = "",
        folder: Path = FOLDER,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._backend = backend
        self._vault = vault
        self._mappings = mappings
        self._max_bytes = max_bytes
        self._max_copied_bytes = max_copied_bytes
        self._max_regions = max_regions
        self._prefix = prefix
        self._folder = folder
        self._clock_ns = clock_ns
        self._by_name: dict[str, Region] = {}
        self._last_stamp = 0
        # Dropped ones count until they are closed: their memory is still pinned.
        self.nbytes = 0

    def __len__(self) -> int:
        """Number of registered regions."""
        return len(self._by_name)

    # ── names ─────────────────────────────────────────────────────────────────────────────────────

    def register(self, asked: RegionInfo) -> RegionInfo:
        """Opens a region and gives it its name. Until it is mapped, jobs copy what lies in it; see `settle`.

        Args:
            asked: With stamp 0, the name must be free, and the region gets a stamp. With the stamp and the inode that another
                engine gave, an older registration gives way, and the object must be the same.

        Raises:
            AlreadyExists: The name is taken.
            InvalidRequest: The key or the range cannot be right.
            BeyondLimit: Too many regions or bytes.
        """
        older = self._by_name.get(asked.name)
        if older is not None and not asked.stamp:
            raise AlreadyExists(f"name: shared memory region {asked.name!r} is registered already")
        if older is not None and older.info.stamp >= asked.stamp:
            return older.info
        file = SharedFile.open(asked.key, self._prefix, self._folder)
        try:
            _check_object(asked, file)
            self._check_quota(asked, older)
            info = msgspec.structs.replace(asked, inode=file.inode, stamp=asked.stamp or self._next_stamp())
            self._vault.keep_region(info, file.fd)
        except BaseException:
            file.close()
            raise
        if older is not None:
            self._drop(older)
        self._map(self._add(info, file))
        return info

    def unregister(self, name: str | None, stamp: int = 0) -> int:
        """Forgets a region, or all; jobs that use it finish with it. Memory that nothing uses is soon free; see `settle`.

        Args:
            name: None for all.
            stamp: Only registrations up to this one; 0 for whatever there is now.

        Returns:
            The stamp of the change, for other engines.
        """
        stamp = stamp or self._next_stamp()
        for region in list(self._by_name.values()):
            if name in (None, region.info.name) and region.info.stamp <= stamp:
                self._vault.forget_region(region.info.name)
                self._drop(region)
        return stamp

    def settle(self, call: Callable[[], object]) -> None:
        """Calls, in the loop thread, when what is being mapped and unmapped now is."""
        self._mappings.begin(lambda: None, lambda _: call())

    def infos(self, name: str | None = None) -> tuple[RegionInfo, ...]:
        """The region of this name, or all by name.

        Raises:
            UnknownName: There is none of that name.
        """
        if name is not None:
            return (self._named(name).info,)
        return tuple(self._by_name[one].info for one in sorted(self._by_name))

    def restore(self, kept: KeptRegion) -> None:
        """Takes a region over from an engine that is gone, and maps it: before ready, nobody else waits."""
        self._last_stamp = max(self._last_stamp, kept.region.stamp)
        region = self._add(kept.region, SharedFile(kept.fd))
        self._on_mapped(region, self._adopt(region))

    def _named(self, name: str) -> Region:
        region = self._by_name.get(name)
        if region is None:
            raise UnknownName(f"no shared memory region {name[:64]!r} is registered")
        return region

    def _check_quota(self, asked: RegionInfo, older: Region | None) -> None:
        if len(self) - (older is not None) >= self._max_regions:
            raise BeyondLimit(f"name: {self._max_regions} regions are registered; unregister some")
        held = self.nbytes - (older.info.byte_size if older is not None else 0)
        if held + asked.byte_size > self._max_bytes:
            raise BeyondLimit(
                f"byte_size: {asked.byte_size} bytes and the {held} that are registered exceed the limit of {self._max_bytes}"
            )

    def _next_stamp(self) -> int:
        self._last_stamp = max(self._last_stamp + 1, self._clock_ns())
        return self._last_stamp

    def _add(self, info: RegionInfo, file: SharedFile) -> Region:
        region = Region(info, file, info.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY)
        self._by_name[info.name] = region
        self.nbytes += info.byte_size
        # Until it is mapped.
        region.uses += 1
        return region

    def _map(self, region: Region) -> None:
        self._mappings.begin(partial(self._adopt, region), partial(self._on_mapped, region))

    def _adopt(self, region: Region) -> torch.Tensor | None:
        """Maps a region; for any thread."""
        if not region.file.is_writable:
            return None
        end = region.info.offset + region.info.byte_size
        return self._backend.adopt(region.file.fd, region.mapped_from, end - region.mapped_from)

    def _on_mapped(self, region: Region, mapped: torch.Tensor | None) -> None:
        region.mapped = mapped
        how = "copied" if mapped is None else "pinned"
        logger.info("region %r: %d bytes, %s", region.info.name, region.info.byte_size, how)
        self._end_use(region)

    def _drop(self, region: Region) -> None:
        del self._by_name[region.info.name]
        region.is_dropped = True
        self._close_if_unused(region)

    def _end_use(self, region: Region) -> None:
        region.uses -= 1
        self._close_if_unused(region)

    def _close_if_unused(self, region: Region) -> None:
        if not region.is_dropped or region.uses:
            return
        work = unmapping(self._backend, region.mapped, region.file.close)
        region.mapped = None
        self._mappings.begin(work, lambda _: self._on_closed(region))

    def _on_closed(self, region: Region) -> None:
        self.nbytes -= region.info.byte_size

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────

    def find(self, name: str, offset: int, kind: TensorType, *, field: str, is_out: bool = False) -> Use:
        """Finds a tensor in a region, where it begins at `offset`; not yet a use, see `hold`. Error texts begin with `field`.

        Raises:
            UnknownName: No such region.
            InvalidRequest: It does not lie inside, the object is shorter by now, or it cannot be written.
        """
        region = self._named(name)
        info = region.info
        if not 0 <= offset <= offset + kind.nbytes <= info.byte_size:
            raise InvalidRequest(
                f"{field}: {kind.nbytes} bytes at {offset} do not lie inside the {info.byte_size} of region {name[:64]!r}"
            )
        if is_out and not region.file.is_writable:
            raise InvalidRequest(f"{field}: region {name[:64]!r} is read-only")
        begin = info.offset + offset
        if region.file.nbytes < begin + kind.nbytes:
            raise InvalidRequest(f"{field}: the shared memory of region {name[:64]!r} was cut after it was registered")
        return Use(region, begin, kind, field, is_out, region.mapped is not None)

    @staticmethod
    def hold(uses: Uses) -> None:
        """Counts the uses of a job; `release` undoes it."""
        for use in uses.values():
            use.region.uses += 1

    def release(self, uses: Uses) -> None:
        """Ends the uses of a job, once."""
        for use in uses.values():
            self._end_use(use.region)

    def stage_in(self, uses: Uses) -> dict[str, HostBytes]:
        """Copies inputs of a job that the device does not reach by itself.

        Returns:
            Memory for each tensor that the device does not reach, by name; that of an input is filled.

        Raises:
            InvalidRequest: An object was cut.
            BeyondLimit: The inputs are too large to be copied.
        """
        unreached = {name: use for name, use in uses.items() if not use.is_reached}
        copied = [name for name, use in unreached.items() if not use.is_out]
        nbytes = sum(uses[name].type.nbytes for name in copied)
        if nbytes > self._max_copied_bytes:
            raise BeyondLimit(
                f"{', '.join(copied)}: {nbytes} bytes in shared memory; this device has to copy them, and the limit is "
                f"{self._max_copied_bytes}"
            )
        buffers: dict[str, HostBytes] = {}
        for name, use in unreached.items():
            buffer = self._backend.host_buffer(use.type.nbytes)
            if not use.is_out:
                use.read(buffer)
            buffers[name] = HostBytes(buffer, use.type, 0)
        return buffers


def _check_object(asked: RegionInfo, file: SharedFile) -> None:
    if asked.offset < 0 or asked.byte_size < 1 or asked.offset + asked.byte_size > file.nbytes:
        raise InvalidRequest(
            f"byte_size: {asked.byte_size} bytes at {asked.offset} do not lie inside the object, which has {file.nbytes}"
        )
    if asked.inode not in (0, file.inode):
        raise InvalidRequest(f"key: {asked.key[:64]!r} was replaced while it was registered")
