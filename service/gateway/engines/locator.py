"""Finds residents on engines, and brings those of several engines together.

Runs in the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilewire.service.errors import Lost, Unavailable, UnknownName
from tilewire.service.gateway.engines.asking import when_followed
from tilewire.service.gateway.engines.client import Engine
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.ipc.messages import DescribeTensor, FetchTensor, TensorInfo
from tilewire.service.match import Match, check_match, is_match

# Attempts to find the engine of residents that move or change meanwhile.
MAX_SEARCHES = 8


class Locator:
    """Finds residents on several engines."""

    def __init__(self, engines: Sequence[Engine], directory: Directory) -> None:
        self._engines = engines
        self._directory = directory

    def check_ready(self) -> None:
        """Refuses early what no engine could compute.

        Raises:
            Unavailable: No engine is ready.
        """
        for engine in self._engines:
            if engine.welcome is not None:
                return
        raise starting()

    def least_busy(self, names: Collection[str], excluded: Collection[int] = ()) -> int | None:
        """Returns the index of the engine with the fewest requests of those that may serve all names; None without one.

        Args:
            names: Names of residents.
            excluded: Indices of engines that are not meant.
        """
        best = None
        for index, engine in enumerate(self._engines):
            if engine.welcome is None or (best is not None and engine.outstanding >= self._engines[best].outstanding):
                continue
            if index not in excluded and (not names or all(self._directory.serves(index, name) for name in names)):
                best = index
        return best

    async def describe(self, name: str, *, field: str = "name", match: Match | None = None) -> TensorInfo:
        """Fetches the description of a resident from an engine that holds it.

        Raises:
            UnknownName: There is none; the detail names `field`.
            Lost: It died with the engine that held it.
            PreconditionFailed: It has another version.
            Unavailable: No engine that holds it, or that has its last change, is ready.
        """
        mark, version = self._directory.mark_of(name), 0
        index = self._most_current(name)
        for _search in range(MAX_SEARCHES):
            try:
                # The engine that holds it may not have the change yet that another one has.
                info = await when_followed(self._engines[index], DescribeTensor(0, name, version, match))
            except (UnknownName, Lost) as error:
                self._directory.forget(name)
                if isinstance(error, UnknownName) and self._may_load(name, index, field):
                    index, version = self._directory.home_of(name), 0
                    continue
                reason = error.detail.partition(": ")[2]
                raise type(error)(f"{field}: {reason}") from error
            version = info.version
            self._directory.learn(info, mark, index)
            if index in info.engines or not info.engines:
                self._directory.learn_described(info, mark)
                if not is_match(match, info.tag):
                    # Its home engine looks at the store first, and was asked unless it is away.
                    self._may_load(name, index, field)
                check_match(name, match, info.tag)
                return info
            holder = next((one for one in info.engines if self._engines[one].welcome is not None), None)
            if holder is None:
                raise Unavailable(f"{field}: the engine that holds {name!r} is restarting")
            index = holder
        raise Unavailable(f"{field}: {name!r} keeps moving")

    def _may_load(self, name: str, index: int, field: str) -> bool:
        """Whether another engine than this one, which lacks a name, may load it from the store.

        Raises:
            Unavailable: It would, but is not ready.
        """
        welcome, home = self._engines[index].welcome, self._directory.home_of(name)
        if index == home or welcome is None or not welcome.has_store:
            return False
        if self._engines[home].welcome is None:
            raise Unavailable(f"{field}: the engine that loads {name!r} from the store is restarting")
        return True

    async def locate(self, fields: Mapping[str, str]) -> None:
        """Finds the engines of residents, by name and input.

        Raises:
            UnknownName: There is none of a name.
            Lost: One died with the engine that held it.
            Unavailable: No engine that is ready has them.
        """
        self.check_ready()
        marks = self._directory.marks_of(fields)
        infos = [await self.describe(name, field=field) for name, field in fields.items()]
        if not self._directory.has_sharded(fields) and self.least_busy(fields) is None:
            await self._bring_together(infos, marks)

    async def bring(self, index: int, info: TensorInfo, mark: int) -> None:
        """Brings a resident of another engine to this one, too; `mark` is the version of its slot, read before.

        Raises:
            ResidentQuota: There is no room for it.
            Unavailable: It takes too long.
        """
        try:
            fetched = await when_followed(self._engines[index], FetchTensor(0, info.name, info.version))
        except UnknownName:
            # It gave way meanwhile, and is looked for again.
            if not self._may_load(info.name, index, info.name):
                raise
        else:
            self._directory.learn(fetched, mark, index)

    async def _bring_together(self, infos: Sequence[TensorInfo], marks: Mapping[str, int]) -> None:
        """Brings residents of several engines to the one that holds most of their bytes."""
        directory = self._directory
        ready = [index for index, engine in enumerate(self._engines) if engine.welcome is not None]
        if not ready:
            raise starting()
        held = {index: sum(info.type.nbytes for info in infos if directory.serves(index, info.name)) for index in ready}
        index = max(ready, key=lambda one: held[one])
        for info in infos:
            if not directory.serves(index, info.name):
                await self.bring(index, info, marks[info.name])

    def _most_current(self, name: str) -> int:
        """Returns an engine that has every change of a name: its home if that is ready.

        Raises:
            Unavailable: None is ready.
        """
        self.check_ready()
        for index in self._directory.ranking_of(name):
            if self._engines[index].welcome is not None and self._directory.is_current(index, name):
                return index
        raise Unavailable(f"{name}: the engine that orders its changes is restarting")


def starting() -> Unavailable:
    """Returns the refusal while no engine is ready."""
    return Unavailable("the engine is starting or restarting")
