"""Describes what a new engine takes over: resident tensors and clients' regions, each with a descriptor.

Part of `EngineSettings`; the vault fills it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tilewire.service.ipc.messages import RegionInfo, TensorInfo


class Kept(msgspec.Struct, frozen=True):
    """A resident tensor that outlived its engine, or the memory that it was deleted.

    Attributes:
        name: Name of the tensor.
        info: Description; None when it was deleted.
        fd: Descriptor of its host copy, inherited by the engine; -1 when deleted.
        version: Version of the change.
    """

    name: str
    info: TensorInfo | None = None
    fd: int = -1
    version: int = 0


class KeptRegion(msgspec.Struct, frozen=True):
    """A registered region that outlived its engine.

    Attributes:
        region: Registered range.
        fd: Descriptor of the shared-memory object, inherited by the engine: the name may be gone by now.
    """

    region: RegionInfo
    fd: int


class Keepsakes(msgspec.Struct, frozen=True):
    """All that a new engine takes over from the one before it.

    Attributes:
        tensors: Last change of each tensor.
        regions: Regions that are registered.
        version: Version of the last change that `tensors` contains.
    """

    tensors: list[Kept] = []
    regions: list[KeptRegion] = []
    version: int = 0

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors; -1 for a tensor that was deleted."""
        return (*(one.fd for one in self.tensors), *(one.fd for one in self.regions))

    def moved(self, to: Mapping[int, int]) -> Keepsakes:
        """Returns the same with the numbers that descriptors have in another process."""
        return Keepsakes(
            [msgspec.structs.replace(one, fd=to[one.fd]) for one in self.tensors],
            [msgspec.structs.replace(one, fd=to[one.fd]) for one in self.regions],
            self.version,
        )
