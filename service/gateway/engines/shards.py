"""Requests on sharded residents: each engine computes with its part, and all write into the slots of one request.

A job names the version of each resident that it needs, so that parts of two versions never meet. An engine that has
another one answers `Stale`, and all parts are computed again. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from tilewire.service.errors import (
    ClientGone,
    DeadlinePassed,
    Lost,
    TilewireError,
    Unavailable,
    UnknownName,
)
from tilewire.service.gateway.engines.asking import NO_RESULT, SentJob, ask, have_ended, left_s, when_followed
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import Engine, Reply
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.gateway.engines.division import Division, divide
from tilewire.service.gateway.engines.locator import Locator
from tilewire.service.gateway.engines.templates import MAX_TEMPLATES, Templates
from tilewire.service.ipc.messages import (
    AdoptTensor,
    DescribeTensor,
    Done,
    GetTensor,
    PutTensor,
    Stale,
    Stored,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    Upload,
)
from tilewire.service.match import Match


class Runs(Protocol):
    """Calls of the router that requests in parts need."""

    async def compute(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> Done | Stale:
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


class Shards:
    """Uploads, downloads and computes with residents that lie in parts on all engines."""

    def __init__(
        self, engines: Sequence[Engine], directory: Directory, locator: Locator, templates: Templates, runs: Runs
    ) -> None:
        self._engines = engines
        self._directory = directory
        self._locator = locator
        self._templates = templates
        self._runs = runs
        # By the number of the template, with the versions of its residents.
        self._divisions: dict[int, tuple[tuple[int, ...], Division]] = {}

    async def put(self, name: str, source: Upload, axis: int, match: Match | None = None) -> tuple[TensorInfo, bool]:
        """Makes a tensor resident in parts along an axis, counted from the last, -1.

        Each engine takes its own from the slot; then the home engine orders it.

        Returns:
            Its description, and whether it replaced another.

        Raises:
            PreconditionFailed: The condition does not hold.
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
            ordered = await ask(self._engines[home], msgspec.structs.replace(message, match=match), Tensors)
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

    async def download(self, info: TensorInfo, out_offset: int) -> TensorInfo | None:
        """Has every engine write its part to where it belongs behind `out_offset`.

        Returns:
            `info` when all have; None when the tensor must be described anew.

        Raises:
            Unavailable: An engine is not ready, or dies meanwhile.
        """
        self._check_all_ready(f"name: a part of {info.name!r} is on an engine that is restarting")
        message = GetTensor(0, info.name, info.type, out_offset, info.version)
        futures = [engine.send(message)[1] for engine in self._engines]
        await asyncio.wait(futures)
        replies = [_outcome(future) for future in futures]
        return info if await self._is_whole(replies, {"name": Pinned(info, 0)}) else None

    async def check_parts(self, info: TensorInfo) -> None:
        """Checks that no engine has lost its part; one that is restarting may yet bring it.

        Raises:
            Lost: An engine failed to bring its part back.
        """
        ready = [index for index, engine in enumerate(self._engines) if engine.welcome is not None]
        checks = (self._catch_up(index, Pinned(info, 0)) for index in ready)
        for outcome in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(outcome, Lost) or (outcome is not None and not isinstance(outcome, TilewireError)):
                raise outcome

    async def compute(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> Done | Stale | None:
        """Runs a job on all engines.

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
        planned = [(spec, residents[spec.name].info) for spec in template.inputs if spec.name in residents]
        if changed := [info for spec, info in planned if not spec.fits(info)]:
            return Stale(0, tuple(changed))
        division = self._division(template, residents)
        if division.merge is None and template.outputs[0].resident is None:
            begin = len(offsets) - len(template.outputs)
            return await self._run(division, offsets[:begin], offsets[begin:], residents, caller)
        slots = [await caller.slots.wait(one.nbytes) for one in division.outputs]
        places = tuple(slot.offset for slot in slots)
        done = await self._run(division, offsets, places, residents, caller)
        if done is not None and division.merge is None:
            done = await self._stored(done, template, places[0])
        elif done is not None and division.merge is not None:
            begin = len(offsets) - len(template.outputs)
            done = await self._merged(done, division.merge, (*places, *offsets[begin:]), caller)
        for slot in slots:
            caller.slots.give_back(slot)
        return done

    def _division(self, template: Template, residents: Mapping[str, Pinned]) -> Division:
        """Returns the jobs of a template; those of the last versions of its residents are kept."""
        versions = tuple(one.info.version for one in residents.values())
        kept = self._divisions.get(template.id)
        if kept is None or kept[0] != versions:
            infos = {field: one.info for field, one in residents.items()}
            kept = versions, divide(template, infos, len(self._engines), self._templates)
            if len(self._divisions) >= MAX_TEMPLATES:
                self._divisions.clear()
            self._divisions[template.id] = kept
        return kept[1]

    async def _merged(self, parts: Done, merge: Template, offsets: tuple[int, ...], caller: Caller) -> Done:
        """Has one engine choose the best of what all have chosen, also past the deadline: the request has started."""
        merged = await self._runs.compute(merge, offsets, caller._replace(deadline_ns=0))
        assert isinstance(merged, Done), "This is a bug: a merge has no residents."
        return msgspec.structs.replace(parts, timings=_combined((parts.timings, merged.timings), sum))

    async def _stored(self, parts: Done, template: Template, place: int) -> Done:
        """Uploads a product of all parts: it may be on any engine, or sharded itself."""
        (output,) = template.outputs
        assert output.resident is not None, "This is a bug."
        info, was_there = await self._runs.put(output.resident, Upload(output.type, place))
        return msgspec.structs.replace(parts, stored=Stored(info, replaced=was_there))

    async def _run(
        self,
        division: Division,
        offsets: Sequence[int],
        places: Sequence[int],
        residents: Mapping[str, Pinned],
        caller: Caller,
    ) -> Done | None:
        """Runs the parts, and waits until every engine has ended with its own."""
        client, deadline_ns, field = caller.client, caller.deadline_ns, division.field
        # At the last moment: a part that was sent alone would write into slots that are given back.
        self._check_all_ready(f"{field}: a part of {residents[field].info.name!r} is on an engine that is restarting")
        sent: list[SentJob] = []
        for engine, job in zip(self._engines, division.jobs, strict=True):
            own = (at + shift for at, shift in zip(offsets, job.shifts, strict=False))
            outs = (place + begin for place, begin in zip(places, job.begins, strict=True))
            sent.append(SentJob(engine, *engine.submit(job.template, (*own, *outs), caller)))
        cancel = partial(_cancel, sent)
        client.watch(cancel)
        try:
            error = await _first_error(sent, deadline_ns)
            if error is not None:
                # The other parts are for nothing; those under way are awaited all the same.
                cancel()
            if not await have_ended(sent, deadline_ns):
                caller.slots.hold_until(asyncio.gather(*(job.reply for job in sent), return_exceptions=True))
                raise error or DeadlinePassed(NO_RESULT)
            replies = [_outcome(job.reply) for job in sent]
        finally:
            client.unwatch()
            del cancel, sent
        if error is not None:
            raise error
        if not await self._is_whole(replies, residents):
            return None
        if client.is_disconnected:
            raise ClientGone("the client left before its answer")
        done = [reply for reply in replies if isinstance(reply, Done)]
        return Done(0, _combined([one.timings for one in done], max), max(one.batch_size for one in done))

    async def _is_whole(self, replies: Sequence[Reply | TilewireError], residents: Mapping[str, Pinned]) -> bool:
        """Whether all engines did their parts; waits until those that did not have followed, or have what they lacked.

        Raises:
            Lost: An engine failed to bring its part back.
            TilewireError: Why an engine did not, when its residents are not the reason.
        """
        is_whole = True
        for index, reply in enumerate(replies):
            if isinstance(reply, Done):
                continue
            if isinstance(reply, TilewireError) and not _is_moved(reply):
                raise reply
            is_whole = False
            for field, one in residents.items():
                try:
                    await self._catch_up(index, one)
                except UnknownName:
                    continue
                except Lost as error:
                    raise Lost(f"{field}: {error.detail.partition(': ')[2]}") from error
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


def _cancel(sent: Iterable[SentJob]) -> None:
    for job in sent:
        job.engine.cancel(job.request_id)


async def _first_error(sent: Sequence[SentJob], deadline_ns: int) -> TilewireError | None:
    """Waits for all parts, or for the first that fails, up to the deadline; returns its error."""
    replies = [job.reply for job in sent]
    ended, _ = await asyncio.wait(replies, timeout=left_s(deadline_ns), return_when=asyncio.FIRST_EXCEPTION)
    for reply in [_outcome(one) for one in replies if one in ended]:
        if isinstance(reply, TilewireError) and not _is_moved(reply):
            return reply
    return None


def _combined(timings: Sequence[Timings], combine: Callable[[Iterable[int]], int]) -> Timings:
    """The stages of several jobs: `max` of those that ran beside one another, `sum` of those that ran one after the other."""
    stages = Timings(*map(combine, zip(*map(msgspec.structs.astuple, timings), strict=True)))
    return msgspec.structs.replace(stages, arrived_ns=min(one.arrived_ns for one in timings))
