"""Routes requests to the engines of the machine: jobs to the least busy one, changes of a resident to its home engine.

Owns the routing and a cache of the residents' types, which engines check at use.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from tilewire.service.errors import ClientGone, DeadlinePassed, TilewireError, Unavailable, UnknownName
from tilewire.service.gateway.auth.flows import NO_FLOW, Flow
from tilewire.service.gateway.engines.client import Engine, Reply, Request
from tilewire.service.gateway.engines.templates import BoundTemplate, Templates
from tilewire.service.ipc.messages import (
    AwaitTensor,
    DeleteTensor,
    DescribeKernels,
    DescribeTensor,
    Done,
    GetTensor,
    Kernels,
    ListRegions,
    ListTensors,
    PutTensor,
    RegionInfo,
    RegionList,
    RegisterRegion,
    Stale,
    TensorInfo,
    Tensors,
    UnregisterRegion,
    Upload,
    Welcome,
)
from tilewire.service.ops.op import TensorType

# An engine that works says itself that a deadline has passed, and then the slots are free; it has so long for that.
DEADLINE_GRACE_NS = 20_000_000

ReplyT = TypeVar("ReplyT", Done, Stale, Tensors, RegionList, Kernels)


class Departure(Protocol):
    """Reports when a client leaves.

    Attributes:
        is_disconnected: It has left.
    """

    @property
    def is_disconnected(self) -> bool: ...

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` once if the client leaves before `unwatch`."""
        ...

    def unwatch(self) -> None:
        """Ends the watch."""
        ...


class Slots(Protocol):
    """Slots of a request."""

    def hold_until(self, answered: asyncio.Future[Reply]) -> None:
        """Keeps the slots from being given back until the engine has answered."""
        ...


class Engines:
    """Routes requests.

    Args:
        engines: One for each device.

    Attributes:
        templates: Templates of the jobs that are submitted.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.templates = Templates(self._forget_template)
        self._types: dict[str, TensorType] = {}

    @property
    def welcomes(self) -> list[Welcome]:
        """Of the engines that are ready."""
        return [engine.welcome for engine in self._engines if engine.welcome is not None]

    @property
    def is_ready(self) -> bool:
        """Whether any engine can compute."""
        for engine in self._engines:  # noqa: SIM110  (a generator costs more than the look)
            if engine.welcome is not None:
                return True
        return False

    @property
    def states(self) -> list[dict[str, object]]:
        """Of each engine: ready, warming up and how far, or not there."""
        return [_state_of(engine) for engine in self._engines]

    async def kernels(self) -> list[bytes]:
        """Of each engine that is ready: its part of `/v1/kernels`, as JSON.

        Raises:
            Unavailable: No engine is ready.
        """
        self.check_ready()
        ready = [engine for engine in self._engines if engine.welcome is not None]
        replies = await asyncio.gather(*(self._ask(engine, DescribeKernels(0), Kernels) for engine in ready))
        return [reply.report for reply in replies]

    def check_ready(self) -> None:
        """Refuses early what no engine could compute.

        Raises:
            Unavailable: No engine is ready.
        """
        self._least_busy()

    def knows(self, types: Iterable[tuple[str, TensorType]]) -> bool:
        """Whether residents have these types for all that is known here."""
        for name, kind in types:  # noqa: SIM110  (a generator costs more than the look)
            if self._types.get(name) != kind:
                return False
        return True

    def learn(self, stale: Stale) -> None:
        """Takes over the types that an engine told."""
        self._remember(stale.tensors)

    async def compute(
        self,
        bound: BoundTemplate,
        client: Departure,
        slots: Slots,
        *,
        deadline_ns: int = 0,
        priority: int = 0,
        flow: Flow = NO_FLOW,
    ) -> Done | Stale:
        """Runs a job on the least busy engine.

        Args:
            bound: The template of the job, and its offsets.
            client: When it leaves, the job is cancelled.
            slots: Where the job's tensors lie. When it ends before the engine has answered, they are held until then.
            deadline_ns: Latest start on the machine's monotonic clock; 0 for none.
            priority: 0 is the default, 1 the most urgent of its flow.
            flow: Whose job it is.

        Returns:
            When the slots are the caller's again: `Done`, or `Stale` with the types to plan with.

        Raises:
            TilewireError: Whatever the engine answered; `ClientGone` when the client left; `DeadlinePassed` when the
                engine has not answered by the deadline.
        """
        engine = self._least_busy()
        request_id, future = engine.submit(
            bound.template, bound.offsets, deadline_ns=deadline_ns, priority=priority, flow=flow
        )
        # Cancelled or not, the reply is awaited: until it comes, the slots are the engine's.
        client.watch(lambda: engine.cancel(request_id))
        try:
            if deadline_ns and not await _is_done_by(future, deadline_ns + DEADLINE_GRACE_NS):
                engine.cancel(request_id)
                slots.hold_until(future)
                raise DeadlinePassed("deadline: it passed, and the engine has not answered")
            reply = await future
        finally:
            client.unwatch()
            # An error that it holds leads back to this frame: left here, both would wait for the garbage collector.
            del future
        if client.is_disconnected:
            raise ClientGone("the client left before its answer")
        if not isinstance(reply, Done):
            assert isinstance(reply, Stale), "This is a bug."
            self.learn(reply)
        return reply

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
            Unavailable: No engine is ready.
        """
        known = self._types.get(name)
        return known if known is not None else (await self.describe(name, field=field)).type

    async def describe(self, name: str, *, field: str = "name") -> TensorInfo:
        """Fetches the description of a resident from an engine.

        Raises:
            UnknownName: There is none; the detail names `field`.
            Unavailable: No engine is ready.
        """
        try:
            reply = await self._ask(self._least_busy(), DescribeTensor(0, name), Tensors)
        except UnknownName as error:
            self._types.pop(name, None)
            raise UnknownName(f"{field}: no resident tensor {name!r}") from error
        self._remember(reply.tensors)
        return reply.tensors[0]

    async def put(self, name: str, source: Upload) -> tuple[TensorInfo, bool]:
        """Makes a tensor resident on every engine: the home engine gives it a version, and the others follow.

        Returns:
            What it is, and whether it replaced another.

        Raises:
            ResidentQuota: Past the quota.
            TooBusy: No memory on a device; no engine keeps the tensor.
            Unavailable: An engine is not ready.
        """
        self._check_all_ready()
        home = self._home_of(name)
        reply = await self._ask(home, PutTensor(0, name, source), Tensors)
        (info,) = reply.tensors
        try:
            await self._await_followers(home, info)
        except Unavailable:
            # An engine that restarts gets the tensor from the vault.
            raise
        except TilewireError:
            await self._take_back(home, info)
            raise
        self._remember(reply.tensors)
        return info, reply.replaced

    async def delete(self, name: str) -> None:
        """Forgets a tensor on every engine: the home engine gives the deletion a version, and the others follow.

        Raises:
            UnknownName: There is none.
            Unavailable: An engine is not ready.
        """
        self._types.pop(name, None)
        self._check_all_ready()
        home = self._home_of(name)
        (info,) = (await self._ask(home, DeleteTensor(0, name), Tensors)).tensors
        self._types.pop(name, None)
        await self._await_followers(home, info)

    async def infos(self) -> list[TensorInfo]:
        """All residents, with the uses on all engines added up.

        Raises:
            Unavailable: An engine is not ready.
        """
        replies = await self._ask_all(lambda: ListTensors(0))
        merged = {info.name: info for info in replies[0].tensors}
        for reply in replies[1:]:
            for info in reply.tensors:
                if info.name in merged:
                    merged[info.name] = _merge(merged[info.name], info)
        return list(merged.values())

    async def download(self, info: TensorInfo, out_offset: int) -> Done | Stale:
        """Writes a resident to `out_offset` of the segment.

        Raises:
            UnknownName: It is no more.
        """
        engine = self._least_busy()
        _, future = engine.send(GetTensor(0, info.name, info.type, out_offset))
        reply = await asyncio.shield(future)
        assert isinstance(reply, Done | Stale), "This is a bug."
        return reply

    async def register_region(self, region: RegionInfo) -> None:
        """Makes a client's shared memory usable on every engine.

        The first engine decides: of two that want the same name at once it takes one, and stamps it. The others follow.

        Raises:
            InvalidRequest: The name is taken, or the key or the range cannot be right.
            BeyondLimit: Too many regions or bytes.
            Unavailable: An engine is not ready: it would miss the region.
        """
        self._check_all_ready()
        first, *others = self._engines
        (stamped,) = (await self._ask(first, RegisterRegion(0, region), RegionList)).regions
        outcomes = await asyncio.gather(
            *(self._ask(engine, RegisterRegion(0, stamped), RegionList) for engine in others), return_exceptions=True
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
        return (await self._ask(first, ListRegions(0, name), RegionList)).regions

    async def _forget_region(self, name: str | None, stamp: int) -> None:
        first, *others = self._engines
        stamp = (await self._ask(first, UnregisterRegion(0, name, stamp), RegionList)).stamp
        await asyncio.gather(
            *(self._ask(engine, UnregisterRegion(0, name, stamp), RegionList) for engine in others),
        )

    def _forget_template(self, template_id: int) -> None:
        for engine in self._engines:
            engine.forget(template_id)

    def _home_of(self, name: str) -> Engine:
        """The engine that orders the changes of this name: one for all names, as all names are on all engines."""
        del name
        return self._engines[0]

    async def _await_followers(self, home: Engine, info: TensorInfo) -> None:
        """Returns when every engine has the change.

        Raises:
            TilewireError: As the first engine that could not take it over says.
        """
        asked = [
            self._ask(engine, AwaitTensor(0, info.name, info.version), Tensors)
            for engine in self._engines
            if engine is not home
        ]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _take_back(self, home: Engine, info: TensorInfo) -> None:
        """Deletes a tensor that not every engine could take over, unless it was replaced meanwhile."""
        with contextlib.suppress(UnknownName):
            await self._ask(home, DeleteTensor(0, info.name, info.version), Tensors)

    def _check_all_ready(self) -> None:
        if any(engine.welcome is None for engine in self._engines):
            raise Unavailable("an engine is starting or restarting")

    def _least_busy(self) -> Engine:
        best = None
        for engine in self._engines:
            if engine.welcome is not None and (best is None or engine.outstanding < best.outstanding):
                best = engine
        if best is None:
            raise Unavailable("the engine is starting or restarting")
        return best

    async def _ask(self, engine: Engine, request: Request, kind: type[ReplyT]) -> ReplyT:
        _, future = engine.send(request)
        reply = await asyncio.shield(future)
        assert isinstance(reply, kind), "This is a bug."
        return reply

    async def _ask_all(self, request: Callable[[], Request]) -> list[Tensors]:
        self._check_all_ready()
        asked = [self._ask(engine, request(), Tensors) for engine in self._engines]
        replies: list[Tensors] = []
        errors: list[BaseException] = []
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                replies.append(outcome)
        if errors:
            raise errors[0]
        return replies

    def _remember(self, tensors: Sequence[TensorInfo]) -> None:
        self._types.update({info.name: info.type for info in tensors})


def _merge(one: TensorInfo, other: TensorInfo) -> TensorInfo:
    used = [moment for moment in (one.last_used, other.last_used) if moment is not None]
    return msgspec.structs.replace(one, last_used=max(used, default=None), hits=one.hits + other.hits)


async def _is_done_by(future: asyncio.Future[Reply], deadline_ns: int) -> bool:
    done, _pending = await asyncio.wait((future,), timeout=max(0, deadline_ns - time.monotonic_ns()) / 1e9)
    return bool(done)


def _state_of(engine: Engine) -> dict[str, object]:
    if engine.welcome is not None:
        return {"device": engine.welcome.device, "state": "ready"}
    if engine.warming is not None:
        return {**msgspec.structs.asdict(engine.warming), "state": "warming"}
    return {"device": None, "state": "starting"}
