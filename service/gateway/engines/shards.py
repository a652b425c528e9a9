"""Requests on sharded residents: each engine computes with its part, and all write into the slots of one request.

A job names the version of each resident that it needs, so that parts of two versions never meet; an engine that has another
one answers `Stale`, and all parts are computed again. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from tilewire.service.errors import (
    ClientGone,
    DeadlinePassed,
    InvalidRequest,
    Lost,
    TilewireError,
    Unavailable,
    UnknownName,
)
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.engines.asking import ask, when_followed
from tilewire.service.gateway.engines.client import Engine, Reply
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.gateway.engines.locator import Locator
from tilewire.service.gateway.engines.templates import Templates
from tilewire.service.ipc.arena import Lease
from tilewire.service.ipc.messages import (
    AdoptTensor,
    DescribeTensor,
    Done,
    GetTensor,
    InputSpec,
    OutputSpec,
    PutTensor,
    Stale,
    Stored,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    Upload,
)
from tilewire.service.ops.merge import MERGE, MergeOptions
from tilewire.service.ops.op import Sharding, TensorType
from tilewire.service.ops.registry import op_for
from tilewire.service.placement import Part, part_of

# An engine that works says itself that a deadline has passed, and then the slots are free; it has so long for that.
DEADLINE_GRACE_NS = 20_000_000


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

    def hold_until(self, answered: asyncio.Future[Any]) -> None:
        """Keeps the slots from being given back until the engine has answered."""
        ...

    async def wait(self, nbytes: int) -> Lease:
        """Takes one more slot, when there is room.

        Raises:
            TooBusy: There was none within the time-out.
        """
        ...

    def give_back(self, lease: Lease) -> None:
        """Gives one slot back early."""
        ...


class Request(NamedTuple):
    """What a job has beside its template and its offsets.

    Attributes:
        client: When it leaves, the job is cancelled.
        slots: Slots of the job's tensors.
        deadline_ns: Latest start on the machine's monotonic clock; 0 for none.
        priority: 0 is the default, 1 the most urgent of its flow.
        flow: Whose job it is.
    """

    client: Departure
    slots: Slots
    deadline_ns: int
    priority: int
    flow: Flow


class Runs(Protocol):
    """What requests in parts need of the router."""

    async def compute(
        self,
        template: Template,
        offsets: tuple[int, ...],
        client: Departure,
        slots: Slots,
        *,
        deadline_ns: int = 0,
        priority: int = 0,
        flow: Flow = ...,
    ) -> Done | Stale:
        """Runs a job on one engine."""
        ...

    async def put(self, name: str, source: Upload) -> tuple[TensorInfo, bool]:
        """Makes a tensor resident where it suits its size; returns its description, and whether it replaced another."""
        ...


class Pinned(NamedTuple):
    """A resident in the version that a request computes with.

    Attributes:
        info: Description.
        mark: Version of its slot, read before the description was fetched.
    """

    info: TensorInfo
    mark: int


class Division(NamedTuple):
    """A request, divided.

    Attributes:
        sharding: Division, as the op describes it.
        residents: Its residents.
        parts: Part of each engine of the main input.
        jobs: Template and offsets of each engine; those of outputs count from the begin of their slot.
        widths: Length of the last axis of each engine's outputs.
        outputs: Dtypes and shapes of the outputs before they are merged.
    """

    sharding: Sharding
    residents: Sequence[Pinned]
    parts: Sequence[Part]
    jobs: Sequence[tuple[Template, tuple[int, ...], tuple[int, ...]]]
    widths: Sequence[int]
    outputs: Sequence[TensorType]


class Shards:
    """Uploads, downloads and computes with residents that lie in parts on all engines.

    Args:
        engines: One for each device.
        directory: Memory of where residents are.
        locator: Finds residents.
        templates: Numbers the templates of parts.
        runs: Runs what is no part.
    """

    def __init__(
        self, engines: Sequence[Engine], directory: Directory, locator: Locator, templates: Templates, runs: Runs
    ) -> None:
        self._engines = engines
        self._directory = directory
        self._locator = locator
        self._templates = templates
        self._runs = runs

    # ── tensors ───────────────────────────────────────────────────────────────────────────────────

    async def put(self, name: str, source: Upload, axis: int) -> tuple[TensorInfo, bool]:
        """Makes a tensor resident in parts. Each engine takes its own from the slot; then the home engine orders it.

        Args:
            name: Name of the tensor.
            source: Bytes of the whole.
            axis: Axis that is cut, from the last, -1.

        Returns:
            What it is, and whether it replaced another.

        Raises:
            ResidentQuota: A part exceeds the quota of its engine.
            Unavailable: An engine is not ready.
        """
        self._check_all_ready(f"placement: {name!r} takes all engines, and one is restarting")
        home = self._directory.home_of(name)
        message = PutTensor(0, name, source, "shard", axis)
        others = [engine for index, engine in enumerate(self._engines) if index != home]
        taken = await asyncio.gather(*(ask(one, message, Tensors) for one in others), return_exceptions=True)
        tickets = [(one, reply) for one, reply in zip(others, taken, strict=True) if isinstance(reply, Tensors)]
        if (failure := next((one for one in taken if isinstance(one, BaseException)), None)) is not None:
            await self._settle(tickets, None)
            raise failure
        try:
            ordered = await ask(self._engines[home], message, Tensors)
        except BaseException:
            await self._settle(tickets, None)
            raise
        (info,) = ordered.tensors
        await self._settle(tickets, info)
        self._directory.learn(info, info.version, home)
        self._directory.learn_described(info, info.version)
        return info, ordered.replaced

    async def _settle(self, tickets: Sequence[tuple[Engine, Tensors]], info: TensorInfo | None) -> None:
        """Makes parts resident that engines have taken, or drops them. An engine that died takes its part from the vault."""
        asked = [
            ask(engine, AdoptTensor(0, reply.ticket, info or reply.tensors[0]), Tensors) for engine, reply in tickets
        ]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, TilewireError):
                raise outcome

    async def download(self, info: TensorInfo, out_offset: int) -> Done | Stale:
        """Has every engine write its part to where it belongs behind `out_offset`.

        Returns:
            `Done` when all have; `Stale` when the tensor must be described anew.

        Raises:
            Unavailable: An engine is not ready, or dies meanwhile.
        """
        self._check_all_ready(f"name: a part of {info.name!r} is on an engine that is restarting")
        message = GetTensor(0, info.name, info.type, out_offset, info.version)
        futures = [engine.send(message)[1] for engine in self._engines]
        await asyncio.wait(futures)
        replies = [_outcome(future) for future in futures]
        if await self._is_whole(replies, (Pinned(info, 0),)):
            return Done(0, Timings())
        return Stale(0, (info,))

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────

    async def compute(self, template: Template, offsets: tuple[int, ...], request: Request) -> Done | Stale | None:
        """Runs a job on all engines.

        Args:
            template: The template of the job.
            offsets: Offsets, as in `messages.Job`.
            request: The rest of the job.

        Returns:
            As `Engines.compute`; None when its residents have changed or moved, and it must be tried again.

        Raises:
            InvalidRequest: The op does not take a part of the resident.
            TilewireError: As the engines answered; or `ClientGone`, `DeadlinePassed`, or `Unavailable` for the residents.
        """
        residents: dict[str, Pinned] = {}
        for spec in template.inputs:
            if (name := spec.resident) is not None:
                mark, known = self._directory.mark_of(name), self._directory.current(name)
                residents[spec.name] = Pinned(known or await self._locator.describe(name, field=spec.name), mark)
        if not any(one.info.axis for one in residents.values()):
            return None
        if changed := [one.info for spec in template.inputs if (one := _changed(spec, residents)) is not None]:
            return Stale(0, tuple(changed))
        division = self._divide(template, offsets, residents)
        field = division.sharding.field
        self._check_all_ready(f"{field}: a part of {residents[field].info.name!r} is on an engine that is restarting")
        places = offsets[len(offsets) - len(template.outputs) :]
        if division.sharding.selection is not None:
            return await self._select(template, places, division, request)
        if template.outputs[0].resident is not None:
            return await self._store(template, division, request)
        return await self._run(division, places, request)

    def _divide(self, template: Template, offsets: tuple[int, ...], residents: Mapping[str, Pinned]) -> Division:
        """Divides a request into a job for each engine.

        Raises:
            InvalidRequest: The op does not take a part of a resident.
        """
        types = {spec.name: spec.type for spec in template.inputs}
        op = op_for(template.op, template.options)
        sharding = op.sharding(types, template.options)
        sharding = check_sharding(template.op, sharding, {field: one.info for field, one in residents.items()})
        if sharding.selection is None and any(one.region is not None for one in template.outputs):
            raise InvalidRequest(f"{op.outputs[0]}: shared memory takes no result of a sharded {sharding.field}")
        count, main = len(self._engines), types[sharding.field]
        parts = [part_of(main, sharding.axes[sharding.field], index, count) for index in range(count)]
        cuts = [_cut(template.inputs, offsets, sharding, residents, one) for one in parts]
        selection = sharding.selection
        options = [
            template.options
            if selection is None
            else msgspec.structs.replace(template.options, k=min(selection.k, one.end - one.begin))
            for one in parts
        ]
        inferred = [
            op.infer({spec.name: spec.type for spec in specs}, option)
            for (specs, _), option in zip(cuts, options, strict=True)
        ]
        widths = [outputs[0].shape[-1] for outputs, _ in inferred]
        wholes = [TensorType(one.dtype, (*one.shape[:-1], sum(widths))) for one in inferred[0][0]]
        pitches = [TensorType(one.dtype, one.shape[-1:]).nbytes for one in wholes]
        jobs = []
        begins = itertools.accumulate(widths, initial=0)
        for (specs, own), option, (outputs, flops), begin in zip(cuts, options, inferred, begins, strict=False):
            outs = tuple(OutputSpec(one, pitch=pitch) for one, pitch in zip(outputs, pitches, strict=True))
            nbytes = sum(spec.type.nbytes for spec in specs) + sum(one.nbytes for one in outputs)
            within = tuple(TensorType(one.dtype, (begin,)).nbytes for one in outputs)
            jobs.append((self._templates.find(template.op, specs, option, outs, (flops, nbytes)), own, within))
        return Division(sharding, tuple(residents.values()), parts, jobs, widths, wholes)

    async def _select(
        self, template: Template, places: tuple[int, ...], division: Division, request: Request
    ) -> Done | None:
        """Has every engine write its best elements into slots of their own, and an engine merge these."""
        selection = division.sharding.selection
        assert selection is not None, "This is a bug."
        slots = [await request.slots.wait(one.nbytes) for one in division.outputs]
        candidates = tuple(slot.offset for slot in slots)
        found = await self._run(division, candidates, request)
        if found is not None:
            parts = tuple((width, part.begin) for width, part in zip(division.widths, division.parts, strict=True))
            merge = self._templates.find(
                MERGE,
                tuple(InputSpec(name, one) for name, one in zip(("values", "indices"), division.outputs, strict=True)),
                MergeOptions(selection.k, selection.largest, selection.is_nan_large, parts),
                template.outputs,
                (0, sum(one.nbytes for one in division.outputs)),
            )
            merged = await self._runs.compute(merge, (*candidates, *places), **request._asdict())
            assert isinstance(merged, Done), "This is a bug: a merge has no residents."
            timings = _added(found.timings, merged.timings)
            found = msgspec.structs.replace(found, timings=timings)
        for slot in slots:
            request.slots.give_back(slot)
        return found

    async def _store(self, template: Template, division: Division, request: Request) -> Done | None:
        """Uploads the product of all parts: it may be on any engine, or sharded itself."""
        (output,) = template.outputs
        assert output.resident is not None, "This is a bug."
        slot = await request.slots.wait(output.type.nbytes)
        done = await self._run(division, (slot.offset,), request)
        if done is not None:
            info, was_there = await self._runs.put(output.resident, Upload(output.type, slot.offset))
            done = msgspec.structs.replace(done, stored=Stored(info, replaced=was_there))
        request.slots.give_back(slot)
        return done

    async def _run(self, division: Division, places: tuple[int, ...], request: Request) -> Done | None:
        """Runs the parts, and waits until every engine has ended with its own."""
        client, deadline_ns = request.client, request.deadline_ns
        sent: list[tuple[Engine, int]] = []
        futures: list[asyncio.Future[Reply]] = []
        for engine, (template, own, within) in zip(self._engines, division.jobs, strict=True):
            outs = (place + at for place, at in zip(places, within, strict=True))
            request_id, future = engine.submit(
                template, (*own, *outs), deadline_ns=deadline_ns, priority=request.priority, flow=request.flow
            )
            sent.append((engine, request_id))
            futures.append(future)
        cancel = partial(_cancel, sent)
        client.watch(cancel)
        try:
            error = await _first_error(futures, deadline_ns)
            if error is not None:
                # The other parts are for nothing; those under way are awaited all the same.
                cancel()
            if not await _have_ended(futures, deadline_ns):
                cancel()
                request.slots.hold_until(_joined(futures))
                raise error or DeadlinePassed("deadline: it passed, and an engine has not answered")
            replies = [_outcome(future) for future in futures]
        finally:
            client.unwatch()
            del futures
        if error is not None:
            raise error
        if not await self._is_whole(replies, division.residents):
            return None
        if client.is_disconnected:
            raise ClientGone("the client left before its answer")
        done = [reply for reply in replies if isinstance(reply, Done)]
        return Done(0, _longest([one.timings for one in done]), max(one.batch_size for one in done))

    async def _is_whole(self, replies: Sequence[Reply | TilewireError], residents: Iterable[Pinned]) -> bool:
        """Whether all engines did their parts; waits until those that did not have followed, or have what they lacked.

        Raises:
            TilewireError: Why an engine did not, when its residents are not the reason.
        """
        is_whole = True
        for index, reply in enumerate(replies):
            if isinstance(reply, Done):
                continue
            if isinstance(reply, TilewireError) and not _is_moved(reply):
                raise reply
            is_whole = False
            for one in residents:
                with contextlib.suppress(UnknownName, Lost):
                    await self._catch_up(index, one)
        return is_whole

    async def _catch_up(self, index: int, one: Pinned) -> None:
        """Waits until an engine has a resident, or a later change of it."""
        info = one.info
        if info.axis:
            await when_followed(self._engines[index], DescribeTensor(0, info.name, info.version))
        else:
            await self._locator.bring(index, info, one.mark)

    def _check_all_ready(self, problem: str) -> None:
        if any(engine.welcome is None for engine in self._engines):
            raise Unavailable(problem)


def check_sharding(op: str, sharding: Sharding | None, infos: Mapping[str, TensorInfo]) -> Sharding:
    """Refuses a request that needs more of a sharded resident than its parts.

    Args:
        op: Name of the op.
        sharding: Division of the request; None when it cannot be divided.
        infos: Residents by input.

    Returns:
        The division.

    Raises:
        InvalidRequest: The detail names the input.
    """
    for field, info in infos.items():
        if not info.axis:
            continue
        if sharding is None or field not in sharding.axes:
            raise InvalidRequest(f"{field}: {info.name!r} is sharded, and {op} needs it whole")
        if sharding.axes[field] != info.axis:
            raise InvalidRequest(
                f"{field}: {info.name!r} is sharded along axis {info.axis}; {op} needs axis={sharding.axes[field]} here"
            )
        if not (sharding.field in infos and infos[sharding.field].axis):
            raise InvalidRequest(f"{field}: {info.name!r} is sharded, but {sharding.field} is not")
    assert sharding is not None, "This is a bug: nothing is sharded."
    return sharding


def _changed(spec: InputSpec, residents: Mapping[str, Pinned]) -> Pinned | None:
    """Returns the resident of an input if it is not as it was planned."""
    one = residents.get(spec.name)
    if one is None or (one.info.type == spec.type and spec.version in (None, one.info.version)):
        return None
    return one


def _cut(
    inputs: Sequence[InputSpec],
    offsets: Sequence[int],
    sharding: Sharding,
    residents: Mapping[str, Pinned],
    part: Part,
) -> tuple[tuple[InputSpec, ...], tuple[int, ...]]:
    """Returns the inputs of one engine, and the offsets of those that are no residents."""
    specs: list[InputSpec] = []
    own: list[int] = []
    given = iter(offsets)
    for spec in inputs:
        axis, kind, offset, version, cut = sharding.axes.get(spec.name), spec.type, 0, None, None
        if axis is not None:
            cut = Part(axis, part.begin, part.end)
            kind, offset = cut.type_of(spec.type), cut.offset_in(spec.type)
        if spec.resident is not None:
            version = residents[spec.name].info.version
            specs.append(msgspec.structs.replace(spec, type=kind, version=version, part=cut))
        else:
            # What is cut in a body has one row: its part is in one piece.
            specs.append(msgspec.structs.replace(spec, type=kind))
            own.append(next(given) + offset)
    return tuple(specs), tuple(own)


def _is_moved(reply: Reply | TilewireError) -> bool:
    """Whether an engine did nothing because its residents are not those that the request was planned with."""
    return isinstance(reply, Stale | UnknownName | Lost)


def _outcome(future: asyncio.Future[Reply]) -> Reply | TilewireError:
    """Returns the answer or the error of an engine that has ended."""
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, TilewireError):
        raise error
    return error


def _cancel(sent: Iterable[tuple[Engine, int]]) -> None:
    for engine, request_id in sent:
        engine.cancel(request_id)


async def _first_error(futures: Sequence[asyncio.Future[Reply]], deadline_ns: int) -> TilewireError | None:
    """Waits for all parts, or for the first that fails; returns its error."""
    ended, _ = await asyncio.wait(futures, timeout=_left_s(deadline_ns), return_when=asyncio.FIRST_EXCEPTION)
    for reply in [_outcome(one) for one in futures if one in ended]:
        if isinstance(reply, TilewireError) and not _is_moved(reply):
            return reply
    return None


async def _have_ended(futures: Sequence[asyncio.Future[Reply]], deadline_ns: int) -> bool:
    _, pending = await asyncio.wait(futures, timeout=_left_s(deadline_ns))
    return not pending


def _left_s(deadline_ns: int) -> float | None:
    return max(0, deadline_ns + DEADLINE_GRACE_NS - time.monotonic_ns()) / 1e9 if deadline_ns else None


def _joined(futures: Sequence[asyncio.Future[Reply]]) -> asyncio.Future[list[Reply | BaseException]]:
    """Returns a future that is done when all are."""
    return asyncio.gather(*futures, return_exceptions=True)


def _longest(timings: Sequence[Timings]) -> Timings:
    """The stages of parts that ran beside one another."""
    return Timings(
        max(one.queue_ns for one in timings),
        max(one.h2d_ns for one in timings),
        max(one.kernel_ns for one in timings),
        max(one.d2h_ns for one in timings),
        min(one.arrived_ns for one in timings),
    )


def _added(first: Timings, second: Timings) -> Timings:
    """The stages of two jobs that ran one after the other."""
    return Timings(
        first.queue_ns + second.queue_ns,
        first.h2d_ns + second.h2d_ns,
        first.kernel_ns + second.kernel_ns,
        first.d2h_ns + second.d2h_ns,
        first.arrived_ns,
    )
