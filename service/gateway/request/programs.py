"""Kept programs: stores their texts beside the resident tensors, and caches what was read.

A program is a resident whose name no tensor can have and whose bytes are its canonical text. So it has one order over all
engines, and outlives them. A request pins the version that it was planned with; the engine refuses any other.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from tilewire.service.errors import BeyondLimit, InvalidRequest, Lost, Unavailable, UnknownName
from tilewire.service.gateway.auth.authenticator import Access
from tilewire.service.gateway.engines.division import check_sharding
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.ipc.messages import TensorInfo, Upload
from tilewire.service.match import Match
from tilewire.service.ops.op import Limits, TensorType
from tilewire.service.ops.program.definition import CALLS, RESIDENT, Program, check_program_name, parse_program
from tilewire.service.ops.program.op import ProgramOp
from tilewire.service.ops.program.planning import check_possible, infer_types
from tilewire.service.ops.registry import OPS, program_of, program_resident

# Attempts to fetch a text that is replaced meanwhile.
MAX_FETCHES = 4
# Bytes of text of the programs that stay parsed, which take up to 15 times as much: some 60,000 short ones, 128 of the longest.
MAX_CACHED_BYTES = 2**23


class KeptProgram(msgspec.Struct, frozen=True):
    """A program as the engines keep it.

    Attributes:
        name: Name, as in the URL.
        info: Description of the resident that holds its text.
        op: The op that runs it.
        mark: Version of the resident's slot while this was the last program of its name.
    """

    name: str
    info: TensorInfo
    op: ProgramOp
    mark: int


class Programs:
    """The kept programs of one gateway; of those that were parsed, the ones that were used longest ago are dropped."""

    def __init__(self, engines: Engines, limits: Limits, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        self._engines = engines
        self._limits = limits
        self._max_cached_bytes = max_cached_bytes
        self._cache: OrderedDict[str, KeptProgram] = OrderedDict()
        self._cached_bytes = 0

    def bind(self, program: Program, name: str = "") -> ProgramOp:
        """Returns the op that runs a program within the limits."""
        return ProgramOp(program, self._limits, name)

    async def find(self, name: str, leases: Leases, *, field: str = "program") -> KeptProgram:
        """Returns a program; one that was parsed here before, unless its name may have changed since.

        Raises:
            UnknownName: There is none.
            InvalidRequest: Not a name.
        """
        kept = self._cache.get(name)
        if kept is None or kept.mark != self._engines.mark_of(program_resident(name)):
            return await self.fetch(name, leases, field=field)
        self._cache.move_to_end(name)
        return kept

    async def fetch(
        self, name: str, leases: Leases, *, field: str = "program", match: Match | None = None
    ) -> KeptProgram:
        """Returns a program as the engines keep it now.

        Raises:
            UnknownName: There is none.
            InvalidRequest: Not a name.
            PreconditionFailed: It has another version.
        """
        check_program_name(name, frozenset())
        self._drop(name)
        for _attempt in range(MAX_FETCHES):
            mark = self._engines.mark_of(program_resident(name))
            info = await self._describe(name, field, match)
            lease = await leases.wait(info.type.nbytes)
            written = await self._engines.download(info, lease.offset, match)
            text = bytes(lease.view)
            leases.give_back(lease)
            if written is not None:
                return self._keep(name, written, parse_program(text, OPS), mark)
        raise Unavailable(f"{field}: {name!r} keeps changing")

    async def put(
        self, name: str, text: bytes, leases: Leases, match: Match | None = None, *, access: Access
    ) -> tuple[KeptProgram, bool]:
        """Checks and keeps a program, given as JSON; residents that its sender may not read are as ones that are not there.

        Returns:
            The program, and whether it replaced another.

        Raises:
            InvalidRequest: Not a program, not a name, or one that can never work; the detail has the step's number.
            PreconditionFailed: The older one does not meet `match`.
            ResidentQuota: Past the quota.
        """
        check_program_name(name, CALLS.union(OPS))
        program = parse_program(text, OPS)
        check_possible(program, await self._residents_of(program, access), self._limits)
        canonical = program.text.encode()
        lease = await leases.wait(len(canonical))
        lease.view[:] = canonical
        source = Upload(TensorType("int8", (len(canonical),)), lease.offset)
        info, was_there = await self._engines.put(program_resident(name), source, match=match)
        return self._keep(name, info, program, info.version), was_there

    async def delete(self, name: str, match: Match | None = None) -> None:
        """Forgets a program.

        Raises:
            UnknownName: There is none.
            PreconditionFailed: It does not meet `match`.
        """
        check_program_name(name, frozenset())
        self._drop(name)
        try:
            await self._engines.delete(program_resident(name), match)
        except UnknownName:
            raise _unknown(name, "program") from None

    async def values(self, kept: KeptProgram, access: Access) -> Mapping[str, TensorType]:
        """Returns dtypes and shapes of a program's values, with -1 for sizes that may vary.

        They are known as far as its residents fit, and may be read.
        """
        try:
            return infer_types(kept.op.program, await self._residents_of(kept.op.program, access), self._limits)
        except (InvalidRequest, BeyondLimit, Lost):
            return {}

    async def names(self) -> list[str]:
        """Returns the names of all kept programs, sorted."""
        return [program_of(info.name) for info in await self._engines.infos(program_resident(""))]

    async def find_all(self, leases: Leases) -> list[KeptProgram]:
        """Returns all kept programs, by name, without those that are deleted meanwhile."""
        found = []
        for name in await self.names():
            with contextlib.suppress(UnknownName):
                found.append(await self.find(name, leases))
        return found

    def _keep(self, name: str, info: TensorInfo, program: Program, mark: int) -> KeptProgram:
        self._drop(name)
        kept = self._cache[name] = KeptProgram(name, info, self.bind(program, name), mark)
        self._cached_bytes += len(program.text)
        while self._cached_bytes > self._max_cached_bytes and len(self._cache) > 1:
            self._drop(next(iter(self._cache)))
        return kept

    def _drop(self, name: str) -> None:
        kept = self._cache.pop(name, None)
        if kept is not None:
            self._cached_bytes -= len(kept.op.program.text)

    async def _describe(self, name: str, field: str, match: Match | None) -> TensorInfo:
        try:
            return await self._engines.describe(program_resident(name), match=match)
        except UnknownName:
            raise _unknown(name, field) from None

    async def _residents_of(self, program: Program, access: Access) -> dict[str, TensorType]:
        """Types of the residents that exist and may be read.

        Raises:
            InvalidRequest: One of them is sharded: a program runs on one engine.
        """
        types = {}
        for name in filter(access.may_read, program.residents):
            field = RESIDENT + name
            try:
                info = await self._engines.describe(name, field=field)
            except UnknownName:
                continue
            if info.axis:
                check_sharding(self.bind(program), None, {field: info})
            types[name] = info.type
        return types


def _unknown(name: str, field: str) -> UnknownName:
    return UnknownName(f"{field}: no {field} {name[:64]!r}")
