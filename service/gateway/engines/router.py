"""Routes requests to the engines of the machine: jobs to the least busy one that has their residents, changes to home engines.

Owns the routing. `directory` remembers where residents are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from tilewire.service.errors import (
    ClientGone,
    DeadlinePassed,
    InvalidRequest,
    ResidentQuota,
    TilewireError,
    Unavailable,
)
from tilewire.service.gateway.engines.asking import NO_RESULT, SentJob, ask, have_ended
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import Engine, Reply, state_of
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.gateway.engines.locator import MAX_SEARCHES, Locator, starting
from tilewire.service.gateway.engines.shards import Shards
from tilewire.service.gateway.engines.spread import Spread
from tilewire.service.gateway.engines.templates import Templates
from tilewire.service.ipc.board import VersionBoard
from tilewire.service.ipc.messages import (
    WRITE_TIMEOUT_S,
    AdoptTensor,
    AwaitCopy,
    DeleteTensor,
    DescribeKernels,
    Done,
    GetTensor,
    InputSpec,
    Kernels,
    ListRegions,
    ListTensors,
    OrderTensor,
    PutTensor,
    RegionInfo,
    RegionList,
    RegisterRegion,
    Stale,
    Stored,
    Template,
    TensorInfo,
    Tensors,
    UnregisterRegion,
    Upload,
    Welcome,
)
from tilewire.service.match import Match, is_match
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Placement, check_shard, long_axis, placement_of

# Descriptions that are merged before others have their turn: some milliseconds.
MERGED_AT_ONCE = 256


class Engines:
    """Routes requests to engines, one for each device.

    Attributes:
        templates: Templates of the jobs that are submitted.
    """

    def __init__(self, engines: Sequence[Engine], board: VersionBoard | None = None) -> None:
        self._engines = engines
        self._directory = Directory(engines, board or VersionBoard())
        self._types = self._directory.types
        self._locator = Locator(engines, self._directory)
        # Calls of its parts, as they are.
        self.check_ready, self.describe = self._locator.check_ready, self._locator.describe
        self.mark_of = self._directory.mark_of
        self._spread = Spread(engines, self._directory, self._locator)
        self.templates = Templates()
        self._shards = Shards(engines, self._directory, self._locator, self.templates, self)

    @property
    def welcomes(self) -> list[Welcome]:
        """Of the engines that are ready."""
        return [engine.welcome for engine in self._engines if engine.welcome is not None]

    @property
    def is_ready(self) -> bool:
        """Whether any engine can compute."""
        return bool(self.welcomes)

    @property
    def states(self) -> list[dict[str, object]]:
        """Of each engine: ready, warming up and how far, refusing this gateway and why, or not there."""
        return [state_of(engine) for engine in self._engines]

    @property
    def why_not_ready(self) -> str | None:
        """Why no engine can compute; None where one can."""
        if self.is_ready:
            return None
        states = {state["state"]: state for state in self.states}
        if "warming" in states:
            return "no engine is ready: warming up"
        return f"no engine is ready: {states.get('refusing', {}).get('reason', 'starting or restarting')}"

    async def kernels(self) -> list[bytes]:
        """Of each engine that is ready: its part of `/v1/kernels`, as JSON.

        Raises:
            Unavailable: No engine is ready.
        """
        self.check_ready()
        ready = [engine for engine in self._engines if engine.welcome is not None]
        replies = await asyncio.gather(*(ask(engine, DescribeKernels(0), Kernels) for engine in ready))
        return [reply.report for reply in replies]

    def are_current(self, types: Iterable[tuple[str, TensorType]]) -> bool:
        """Whether residents still have these types, as far as this gateway has learnt."""
        for name, kind in types:  # noqa: SIM110  (a generator costs more than the look)
            if self._types.get(name) != kind:
                return False
        return True

    async def compute(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> Done | Stale:
        """Runs a job on the least busy engine that has its residents.

        Returns:
            When the slots are the caller's again: `Done`, or `Stale` with the types to plan with.

        Raises:
            TilewireError: As the engine answered; or `ClientGone`, `DeadlinePassed`, or `Unavailable` for the residents.
        """
        names = self._residents_of(template)
        # What engines said that read a file at another time than the one whose version is demanded.
        excluded: dict[int, Stale] = {}
        for _search in range(MAX_SEARCHES):
            if names and self._directory.has_sharded(names):
                done = await self._shards.compute(template, offsets, caller)
                if done is not None:
                    return done
                continue
            marks = self._directory.marks_of(names) if names else {}
            index = self._locator.least_busy(names, excluded)
            if index is None and excluded:
                break
            if index is None:
                await self._locator.locate(names)
                continue
            if names:
                self._spread.note(index, names)
            reply = await _run(self._engines[index], template, offsets, caller)
            if isinstance(reply, Done):
                return await self._take(index, template, reply, caller)
            if reply.missing:
                await self._load(template, reply.missing)
                continue
            self._learn(reply, marks, index)
            unfit = _unfit(template, reply)
            if _are_other_files(unfit):
                excluded[index] = reply
            elif unfit or not reply.tensors:
                return reply
        if excluded:
            return excluded.popitem()[1]
        raise Unavailable("its resident tensors keep moving while it waits")

    def _learn(self, stale: Stale, marks: Mapping[str, int], index: int) -> None:
        for info in stale.tensors:
            self._directory.learn(info, marks.get(info.name, info.version), index)

    async def _take(self, index: int, template: Template, done: Done, caller: Caller) -> Done:
        """Makes a result resident that an engine keeps; an error where nobody waits for it any more."""
        if done.stored is not None:
            (output,) = template.outputs
            done = await self._store(index, done, done.stored, durable=output.durable)
        if caller.client.is_disconnected:
            raise ClientGone("the client left before its answer")
        return done

    async def _load(self, template: Template, names: Iterable[str]) -> None:
        """Has residents loaded from the store.

        Raises:
            UnknownName: The store has none of a name.
            ResidentQuota: The quota has no room for all of the request: loading one would evict another.
            Unavailable: It cannot be read, or one of them is large.
        """
        fields = {spec.resident: spec.name for spec in template.inputs}
        sizes = {spec.resident: spec.type.nbytes for spec in template.inputs if spec.resident is not None}
        quota_bytes = max((welcome.resident_bytes for welcome in self.welcomes), default=0)
        if len(sizes) > 1 and sum(sizes.values()) > quota_bytes > 0:
            raise ResidentQuota(
                f"{', '.join(sizes)}: {sum(sizes.values())} bytes in one request; the quota is {quota_bytes}"
            )
        for name in names:
            self._directory.forget(name)
            await self.describe(name, field=fields[name])

    async def _store(self, index: int, reply: Done, stored: Stored, *, durable: bool) -> Done:
        """Makes a result resident that an engine keeps; a durable one when its host copy exists."""
        if stored.ticket:
            info, was_there = await self._order(index, stored.info, stored.ticket, durable=durable)
            stored = Stored(info, replaced=was_there)
        else:
            self._directory.learn_stored(stored.info)
        return msgspec.structs.replace(reply, stored=stored)

    async def _order(
        self, index: int, info: TensorInfo, ticket: int, *, durable: bool = False, match: Match | None = None
    ) -> tuple[TensorInfo, bool]:
        """Has the home engine give a version to a tensor that waits for it."""
        engine, home, copied = self._engines[index], self._home_of(info.name), None
        is_sent = False
        try:
            if durable:
                late = f"{info.name}: its copy takes too long; it may still be made"
                copied = await ask(engine, AwaitCopy(0, ticket), Tensors, WRITE_TIMEOUT_S, late)
                (info,) = copied.tensors
            late = f"{info.name}: its version takes too long; it may still come"
            is_sent = home.welcome is not None
            reply = await ask(home, OrderTensor(0, info, ticket, match), Tensors, WRITE_TIMEOUT_S, late)
        except TilewireError as error:
            is_unsure = is_sent and isinstance(error, Unavailable)
            with contextlib.suppress(TilewireError):
                await ask(engine, AdoptTensor(0, ticket, info, is_unsure), Tensors)
            raise
        (ordered,) = reply.tensors
        if engine is not home:
            await ask(engine, AdoptTensor(0, ticket, ordered), Tensors)
        if ordered.version:
            self._directory.learn_stored(ordered)
        else:
            # Another host, or another request, came behind it.
            self._directory.forget(info.name)
        return ordered, copied.replaced if copied is not None and info.stored else reply.replaced

    def have_types(self, residents: Mapping[str, str]) -> bool:
        """Whether the types of these residents are known here."""
        for name in residents.values():  # noqa: SIM110  (a generator costs more than the look)
            if name not in self._types:
                return False
        return True

    async def type_of(self, name: str, *, field: str) -> TensorType:
        """The dtype and shape of a resident; may be out of date, which the engine notices.

        Raises:
            UnknownName: There is none; the detail names `field`.
            Lost: It died with the engine that held it.
            Unavailable: No engine is ready.
        """
        known = self._directory.types.get(name)
        return known if known is not None else (await self.describe(name, field=field)).type

    async def put(
        self,
        name: str,
        source: Upload,
        placement: Placement | None = None,
        axis: int = 0,
        match: Match | None = None,
    ) -> tuple[TensorInfo, bool]:
        """Makes a tensor resident. The home engine of its name gives it a version; other engines follow.

        Args:
            name: Name of the tensor.
            source: Bytes of the tensor.
            placement: Engines that shall hold it; None for those that suit its size.
            axis: Axis along which it is cut if it is sharded, from the last, -1; 0 for any that suits its shape.
            match: Condition on the tensor that it replaces.

        Returns:
            Its description, and whether it replaced another.

        Raises:
            InvalidRequest: It cannot be cut.
            PreconditionFailed: The condition does not hold.
            StoreFull: The store has no room.
            ResidentQuota: Past the quota.
            TooBusy: No memory on the device.
            Unavailable: The home engine is not ready.
        """
        home = self._directory.home_of(name)
        welcome = self._engines[home].welcome
        if welcome is None:
            raise Unavailable(f"{name}: the engine that orders its changes is restarting")
        # The folder of a store has whole tensors.
        count = 1 if welcome.has_store else len(self._engines)
        if placement == "shard" and count < len(self._engines):
            raise InvalidRequest("placement: a tensor in parts cannot be in the folder of --store")
        placement = placement or placement_of(source.type.nbytes, welcome.resident_bytes, count)
        if placement == "shard":
            axis = axis or long_axis(source.type)
            check_shard(source.type, axis, count)
            if count > 1:
                return await self._shards.put(name, source, axis, match)
            placement = "single"
        indices = (home,) if placement == "replicate" else self._directory.ranking_of(name)
        index, reply = await self._put_first(indices, PutTensor(0, name, source, placement, match=match))
        (info,) = reply.tensors
        if reply.ticket:
            # With a store, that has checked the condition.
            has_store = welcome.has_store
            return await self._order(index, info, reply.ticket, durable=has_store, match=None if has_store else match)
        self._directory.learn(info, info.version, index)
        return info, reply.replaced

    async def _put_first(self, indices: Iterable[int], message: PutTensor) -> tuple[int, Tensors]:
        """Uploads a tensor to the first of these engines that is ready and has room."""
        refusal: TilewireError = starting()
        for index in indices:
            if self._engines[index].welcome is None:
                continue
            try:
                return index, await ask(self._engines[index], message, Tensors)
            except ResidentQuota as error:
                refusal = error
        raise refusal

    async def delete(self, name: str, match: Match | None = None) -> None:
        """Forgets a tensor. The home engine of its name gives the deletion a version; other engines follow.

        Raises:
            UnknownName: There is none.
            PreconditionFailed: It does not meet `match`.
            Unavailable: The home engine is not ready, or the store cannot be written.
        """
        self._directory.forget(name)
        late = f"{name}: its deletion takes too long; it may still be done"
        try:
            await ask(self._home_of(name), DeleteTensor(0, name, match), Tensors, WRITE_TIMEOUT_S, late)
        finally:
            self._directory.forget(name)

    async def infos(self, prefix: str = "") -> list[TensorInfo]:
        """Residents whose names begin with `prefix`, with the engines that hold them and the uses on all engines added up.

        Raises:
            Unavailable: No engine is ready.
        """
        self.check_ready()
        ready = [index for index, engine in enumerate(self._engines) if engine.welcome is not None]
        asked = [_list(self._engines[index], prefix) for index in ready]
        replies: dict[int, dict[str, TensorInfo]] = {}
        for index, outcome in zip(ready, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(outcome, dict):
                replies[index] = outcome
            elif not isinstance(outcome, Unavailable):
                raise outcome
        merged: list[TensorInfo] = []
        for number, name in enumerate(sorted({name for reply in replies.values() for name in reply})):
            if number % MERGED_AT_ONCE == 0:
                await asyncio.sleep(0)
            info = self._merge(name, replies)
            if info is not None:
                merged.append(info)
        return merged

    def _merge(self, name: str, replies: Mapping[int, Mapping[str, TensorInfo]]) -> TensorInfo | None:
        """One description of what several engines say; None for a tensor that is deleted or lost."""
        if len(self._engines) == 1:
            return replies[0][name]
        home = self._directory.home_of(name)
        judge = home if home in replies else max(replies, key=lambda index: self._followed(index, home))
        last = replies[judge].get(name)
        if last is None:
            return None
        seen = {
            index: reply[name]
            for index, reply in replies.items()
            if name in reply and index in reply[name].engines and reply[name].version == last.version
        }
        held = sorted({*seen, *(index for index in last.engines if index not in replies)})
        used = [info.last_used for info in seen.values() if info.last_used is not None]
        # A request uses all parts.
        count_hits = max if last.axis else sum
        hits = count_hits(info.hits for info in seen.values())
        merged = msgspec.structs.replace(last, engines=tuple(held), last_used=max(used, default=None), hits=hits)
        return merged if held else None

    def _followed(self, index: int, home: int) -> int:
        versions = self._engines[index].residing.versions
        return versions[home] if home < len(versions) else 0

    async def download(self, info: TensorInfo, out_offset: int, match: Match | None = None) -> TensorInfo | None:
        """Writes a resident to `out_offset` of the segment.

        Args:
            info: Its description; another of its type may have replaced it since.
            out_offset: Where its bytes go.
            match: Condition on the version that is written.

        Raises:
            UnknownName: It is no more.
            Lost: It died with the engine that held it.

        Returns:
            Description of what was written; None when it must be described anew.
        """
        if info.axis:
            return await self._shards.download(info, out_offset)
        mark = self._directory.mark_of(info.name)
        index = self._locator.least_busy((info.name,))
        if index is None:
            return None
        _, future = self._engines[index].send(GetTensor(0, info.name, info.type, out_offset))
        reply = await asyncio.shield(future)
        if isinstance(reply, Stale):
            if reply.missing:
                self._directory.forget(info.name)
            else:
                self._directory.learn(reply.tensors[0], mark, index)
            return None
        assert isinstance(reply, Done), "This is a bug."
        assert reply.stored is not None, "This is a bug."
        written = reply.stored.info
        return written if is_match(match, written.tag) else None

    async def check_held(self, info: TensorInfo) -> None:
        """Checks that a resident which one engine has described is lost on no other.

        Raises:
            Lost: An engine failed to bring its part back.
        """
        if info.axis:
            await self._shards.check_parts(info)

    async def register_region(self, region: RegionInfo) -> None:
        """Makes a client's shared memory usable on every engine.

        The first engine decides: of two requests for one name at once it takes one, and stamps it. The others follow.

        Raises:
            AlreadyExists: The name is taken.
            InvalidRequest: The key or the range cannot be right.
            BeyondLimit: Too many regions or bytes.
            Unavailable: An engine is not ready: it would miss the region.
        """
        self._check_all_ready()
        first, *others = self._engines
        (stamped,) = (await ask(first, RegisterRegion(0, region), RegionList)).regions
        outcomes = await asyncio.gather(
            *(ask(engine, RegisterRegion(0, stamped), RegionList) for engine in others), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self._forget_region(stamped.name, stamped.stamp)
                raise outcome

    async def unregister_region(self, name: str | None) -> None:
        """Forgets a region, or all, on every engine; no error when there is none.

        Raises:
            Unavailable: An engine is not ready: it would keep the region.
        """
        self._check_all_ready()
        await self._forget_region(name, 0)

    async def regions(self, name: str | None = None) -> tuple[RegionInfo, ...]:
        """The region `name`, or all.

        Raises:
            UnknownName: There is none of that name.
            Unavailable: No engine is ready.
        """
        self.check_ready()
        first = next(engine for engine in self._engines if engine.welcome is not None)
        return (await ask(first, ListRegions(0, name), RegionList)).regions

    async def _forget_region(self, name: str | None, stamp: int) -> None:
        first, *others = self._engines
        stamp = (await ask(first, UnregisterRegion(0, name, stamp), RegionList)).stamp
        await asyncio.gather(
            *(ask(engine, UnregisterRegion(0, name, stamp), RegionList) for engine in others),
        )

    def _home_of(self, name: str) -> Engine:
        return self._engines[self._directory.home_of(name)]

    def _check_all_ready(self) -> None:
        if any(engine.welcome is None for engine in self._engines):
            raise Unavailable("an engine is starting or restarting")

    def _residents_of(self, template: Template) -> dict[str, str]:
        """Residents that decide on the engine, with their inputs; none when there is one engine."""
        if len(self._engines) == 1:
            return {}
        return {spec.resident: spec.name for spec in template.inputs if spec.resident is not None}


async def _list(engine: Engine, prefix: str) -> dict[str, TensorInfo]:
    """Fetches the descriptions of an engine's residents, by name."""
    found: dict[str, TensorInfo] = {}
    after = 0
    while True:
        reply = await ask(engine, ListTensors(0, prefix, after), Tensors)
        found |= {info.name: info for info in reply.tensors}
        if not (after := reply.next):
            return found


async def _run(engine: Engine, template: Template, offsets: tuple[int, ...], caller: Caller) -> Done | Stale:
    """Runs a job on an engine, and waits for its end, also when the client leaves: until then the slots are the engine's.

    Where the engine does not say at the deadline what became of it, the slots are held until it has answered.
    """
    client, slots, deadline_ns = caller.client, caller.slots, caller.deadline_ns
    request_id, future = engine.submit(template, offsets, caller)
    client.watch(partial(engine.cancel, request_id))
    try:
        if deadline_ns and not await have_ended((SentJob(engine, request_id, future),), deadline_ns):
            slots.hold_until(future)
            future.add_done_callback(partial(_drop_late, engine))
            raise DeadlinePassed(NO_RESULT)
        reply = await future
    finally:
        client.unwatch()
        # An error that it holds leads back to this frame: left here, both would wait for the garbage collector.
        del future
    assert isinstance(reply, Done | Stale), "This is a bug."
    return reply


def _unfit(template: Template, stale: Stale) -> list[tuple[InputSpec, TensorInfo]]:
    """Returns the inputs whose residents are not as they were planned; without any, one is only on another engine."""
    now = {info.name: info for info in stale.tensors}
    found = [(spec, now[spec.resident]) for spec in template.inputs if spec.resident in now]
    return [(spec, info) for spec, info in found if not spec.fits(info)]


def _are_other_files(unfit: Sequence[tuple[InputSpec, TensorInfo]]) -> bool:
    """Whether all of them are files of which other engines may have read the version that is demanded."""
    return bool(unfit) and all(spec.version is not None and not info.version for spec, info in unfit)


def _drop_late(engine: Engine, late: asyncio.Future[Reply]) -> None:
    """Drops a result that stays on the device when its request has ended without it."""
    if late.cancelled() or late.exception() is not None:
        return
    reply = late.result()
    if isinstance(reply, Done) and reply.stored is not None and reply.stored.ticket and engine.welcome is not None:
        engine.send(AdoptTensor(0, reply.stored.ticket, reply.stored.info))
