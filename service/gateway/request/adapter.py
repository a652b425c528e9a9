"""Defines the interface between the request path and an API: call, task and encoder.

`api/v1` and `api/v2` implement it. `handle` uses requests only through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tilewire.service.gateway.codecs.protocol import Placed
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.programs import KeptProgram, Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import Options


class Region(msgspec.Struct, frozen=True):
    """A range of a registered shared-memory region, in bytes, as the client names it; not checked against any region."""

    name: str
    byte_size: int
    offset: int = 0


class Answer(msgspec.Struct):
    """A body in order, with views of slots among its chunks; its type, and further header lines, each with its line end."""

    content_type: str
    chunks: Sequence[bytes | memoryview]
    lines: str = ""


class Encoder(msgspec.Struct, frozen=True):
    """Writes the answers of one task.

    Attributes:
        work_bytes: Bytes that are formatted or compressed; more than a few do not run in the event loop.
        encode: Writes an answer of the bytes of the outputs in C order, with empty views of those that went into regions.
            There are none at all when the only output stays on the device.
    """

    work_bytes: int
    encode: Callable[[Sequence[memoryview]], Answer]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed head of a request; each API has a subclass.

    Attributes:
        op: Operation.
        programs: Kept programs.
        residents: Names of resident tensors by input, as far as the head names them.
        writes: Names of residents that it stores, as far as the head names them.
        pad_bytes: Bytes left free in front of the body, so that its payload begins aligned.
        needs_body: A body is read; False when residents stand for all inputs.
        program: Name of the kept program that is run; None for an op, and for a program in the body.
        program_field: Name of that field in errors.
        timeout_ns: Longest time from the request's begin until it starts, as far as the head says; 0 for none.
    """

    op: AnyOp
    programs: Programs
    residents: Mapping[str, str] = {}
    writes: tuple[str, ...] = ()
    pad_bytes: int = 0
    needs_body: bool = True
    program: str | None = None
    program_field: str = "program"
    timeout_ns: int = 0

    async def find_program(self, leases: Leases) -> KeptProgram | None:
        """Returns the kept program that is run, if any.

        Raises:
            UnknownName: It is not there.
        """
        if self.program is None:
            return None
        return await self.programs.find(self.program, leases, field=self.program_field)

    async def decode(self, body: Lease | None, leases: Leases) -> Task:
        """Reads a whole body.

        Args:
            body: Slot with `pad_bytes` free bytes and the body behind them; None without a body.
            leases: Source of further slots.

        Raises:
            TilewireError: Anything that cannot be right; the detail names the field.
        """
        raise NotImplementedError


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A computation whose operands are known.

    Attributes:
        call: Head of its request.
        encoder: Chooses how outputs of these types of an op are answered, and refuses what cannot be; None when the stored
            output's description is the answer.
        op: Operation, which may be a program.
        kept: The kept program; None for an op, and for a program in the body.
        given_options: Options, as the request gives them.
        given_residents: Names of resident tensors by input, as far as the request gives them.
        placed: Tensors in the arena by input; "" stands for an unnamed one.
        declared: Types that the client says residents have, by input; checked.
        regions: Tensors in registered regions by input.
        out_regions: Regions that take outputs instead of the arena, by output.
        store: Name under which the result becomes resident; None to answer it.
        durable: The answer waits for the host copy of that.
        timeout_ns: Longest time from the request's begin until it starts; 0 for none.
        priority: 0 for the default, 1 for the most urgent.
        lead_bytes: Bytes at the body's begin that determine all of this; None when no part of the body does.
    """

    call: Call
    encoder: Callable[[AnyOp, Mapping[str, TensorType]], Encoder | None]
    op: AnyOp
    kept: KeptProgram | None
    given_options: Options
    given_residents: Mapping[str, str]
    placed: Mapping[str, Placed]
    declared: Mapping[str, TensorType] = {}
    regions: Mapping[str, tuple[TensorType, Region]] = {}
    out_regions: Mapping[str, Region] = {}
    store: str | None
    durable: bool
    timeout_ns: int
    priority: int = 0
    lead_bytes: int | None

    @property
    def options(self) -> Options:
        """Options of the op."""
        return self.op.complete(self.given_options)

    @property
    def residents(self) -> Mapping[str, str]:
        """Names of resident tensors by input.

        Raises:
            InvalidRequest: The request names one for something else.
        """
        self.op.check_given(self.given_residents)
        return {**self.op.own_residents, **self.given_residents}

    @property
    def pinned(self) -> Mapping[str, TensorInfo]:
        """Residents that the engine must have in this very version, by input."""
        return {} if self.kept is None else {PROGRAM: self.kept.info}

    async def renew(self, leases: Leases) -> Task:
        """Returns the task with the newest version of its program.

        Raises:
            UnknownName: It is there no more.
        """
        if self.kept is None:
            return self
        call = self.call
        kept = await call.programs.fetch(self.kept.name, leases, field=call.program_field)
        return msgspec.structs.replace(self, op=kept.op, kept=kept)


class Api(Protocol):
    """One API over HTTP."""

    def read_call(self, op: AnyOp, head: Head) -> Call:
        """Reads all that a head says.

        Raises:
            TilewireError: Anything that cannot be right; the detail names the parameter or header.
        """
        ...


# Returns the API and the op of the path of a POST that `request.handle` answers, or None for another path.
FindTarget = Callable[[str], tuple[Api, AnyOp] | None]
