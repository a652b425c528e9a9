"""Remembers types and places of residents, and decides which engines may serve them.

An engine may serve a name when it has followed the name's home engine up to the version on the board. It may also when
it was seen to hold that very version. So no request reads behind a change that another request has seen. Runs in the
gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tilewire.service.gateway.engines.client import Engine
from tilewire.service.ipc.board import VersionBoard, ranking, slot_of
from tilewire.service.ipc.messages import Residing, TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Placement

# Largest number of residents that a gateway remembers, of 800 bytes each: one that another gateway deletes is not heard of.
MAX_KNOWN = 65_536


class Known(msgspec.Struct):
    """A resident as it was seen last.

    Attributes:
        placement: As in `TensorInfo`.
        mark: Version of its slot, read before the engines were asked.
        engines: Engines that said that they hold it, while its slot has version `mark`.
        missing: Progress that an engine had reported when it did not hold the tensor, by its index.
        described: Description by an engine that had every change of the name, while its slot has version `mark`.
    """

    placement: Placement
    mark: int
    engines: set[int] = set()
    missing: dict[int, Residing] = {}
    described: TensorInfo | None = None


class Directory:
    """The residents that a gateway has seen, at most `max_known`: the one that was seen first is forgotten.

    Attributes:
        types: Dtypes and shapes by name; may be out of date, which engines notice.
    """

    def __init__(self, engines: Sequence[Engine], board: VersionBoard, max_known: int = MAX_KNOWN) -> None:
        self._engines = engines
        self._max_known = max_known
        self._versions = board.versions
        self._known: dict[str, Known] = {}
        self.types: dict[str, TensorType] = {}

    def home_of(self, name: str) -> int:
        """Returns the index of the engine that orders the changes of a name."""
        return self.ranking_of(name)[0]

    def ranking_of(self, name: str) -> tuple[int, ...]:
        """Returns the engines in the order in which they should hold a name that is on one of them."""
        return ranking(slot_of(name), len(self._engines))

    def mark_of(self, name: str) -> int:
        """Returns the version of a name's slot, to be read before an engine is asked."""
        return self._versions[slot_of(name)]

    def marks_of(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the versions of several names' slots, to be read before the engine is chosen."""
        return {name: self._versions[slot_of(name)] for name in names}

    def is_current(self, index: int, name: str) -> bool:
        """Whether an engine has every change of a name."""
        home = self.home_of(name)
        if index == home:
            return True
        followed = self._engines[index].residing.versions
        return home < len(followed) and followed[home] >= self.mark_of(name)

    def serves(self, index: int, name: str) -> bool:
        """Whether an engine may serve a name, as far as it is known."""
        known = self._known.get(name)
        if known is None:
            return self.is_current(index, name)
        if index in known.engines:
            return known.mark == self.mark_of(name) or self.is_current(index, name)
        if known.placement == "single" or known.missing.get(index) is self._engines[index].residing:
            return False
        return self.is_current(index, name)

    def has_sharded(self, names: Iterable[str]) -> bool:
        """Whether one of these residents lies in parts on all engines, as far as it is known."""
        known = (self._known.get(name) for name in names)
        return any(one is not None and one.placement == "shard" for one in known)

    def current(self, name: str) -> TensorInfo | None:
        """Returns the description of a resident if it is the last change of its name."""
        known = self._known.get(name)
        return known.described if known is not None and known.mark == self.mark_of(name) else None

    def learn_described(self, info: TensorInfo, mark: int) -> None:
        """Takes over the description by an engine that has every change of the name; `mark` was read before."""
        known = self._known[info.name]
        if known.mark == mark:
            known.described = info

    def learn_stored(self, info: TensorInfo) -> None:
        """Takes over a result that stays on the engine that made it; the others do not have it yet."""
        self.learn(info, info.version, info.engines[0])
        others = (index for index in range(len(self._engines)) if index not in info.engines)
        self._known[info.name].missing = {index: self._engines[index].residing for index in others}

    def learn(self, info: TensorInfo, mark: int, asked: int) -> None:
        """Takes over what the engine `asked` said of itself; what it said of others may not have reached them.

        `mark` is the version of the slot, read before.
        """
        self.types[info.name] = info.type
        known = self._known.get(info.name)
        if known is None or known.mark != mark or known.placement != info.placement:
            known = self._known[info.name] = Known(info.placement, mark)
            if len(self._known) > self._max_known:
                self.forget(next(iter(self._known)))
        if asked in info.engines:
            known.engines.add(asked)
            known.missing.pop(asked, None)
        else:
            known.engines.discard(asked)
            known.missing[asked] = self._engines[asked].residing

    def forget(self, name: str) -> None:
        """Drops what is known of a name."""
        self.types.pop(name, None)
        self._known.pop(name, None)
