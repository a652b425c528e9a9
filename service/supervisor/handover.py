"""Describes what a new engine takes over: files, resident tensors and clients' regions, each with a descriptor.

Part of `EngineSettings`; the vault fills the `Handover`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tilewire.service.ipc.messages import RegionInfo, TensorInfo


class OpenFile(msgspec.Struct, frozen=True):
    """File of `--tensors-dir` or `--programs-dir` as it was when the service started, whatever has its name by now.

    Attributes:
        setting: Name of the setting of its folder.
        name: Name of the file.
        fd: Descriptor.
        changed_s: Unix time of the inode's last change.
        nbytes: Size.
        written_ns: Unix time of the content's last change, in nanoseconds.
    """

    setting: str
    name: str
    fd: int
    changed_s: float
    nbytes: int
    written_ns: int


class Kept(msgspec.Struct, frozen=True, tag="tensor"):
    """One change of a resident tensor, or the copy of one. Each version of a home engine is larger than the one before.

    Attributes:
        name: Name of the tensor; empty for a change of none, which only says how far the home engine is.
        info: Description; None when it was deleted.
        fd: Descriptor of its host copy, which the receiver owns; -1 without one, and where the tensor need not be.
        version: Version of the change.
        home: Index of the engine that gave the version.
        is_copy: The change is ordered already; this brings its host copy, or without `info` says that the copy is dropped.
        is_of_file: Whether a file of `--tensors-dir` has the name: its deletion must outlive the engine.
        holder: Index of the engine that offered the host copy of the change, and the ticket of that; the ticket is 0 for none.
    """

    name: str
    info: TensorInfo | None = None
    fd: int = -1
    version: int = 0
    home: int = 0
    is_copy: bool = False
    is_of_file: bool = False
    holder: tuple[int, int] = (0, 0)


class KeptRegion(msgspec.Struct, frozen=True):
    """A registered region that outlived its engine.

    Attributes:
        fd: Descriptor of the shared-memory object, inherited by the engine: the name may be gone by now.
    """

    region: RegionInfo
    fd: int


class Handover(msgspec.Struct, frozen=True):
    """All that a new engine takes over from the one before it.

    Attributes:
        tensors: Last change of each tensor.
        versions: Version of the last change that `tensors` contains, by the index of its home engine.
    """

    tensors: list[Kept] = []
    regions: list[KeptRegion] = []
    versions: tuple[int, ...] = (0,)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors; -1 for a tensor that was deleted."""
        return (*(one.fd for one in self.tensors), *(one.fd for one in self.regions))

    def moved(self, to: Mapping[int, int]) -> Handover:
        """Returns the same with the numbers that descriptors have in another process."""
        return Handover(
            [msgspec.structs.replace(one, fd=to[one.fd]) for one in self.tensors],
            [msgspec.structs.replace(one, fd=to[one.fd]) for one in self.regions],
            self.versions,
        )
