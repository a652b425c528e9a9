"""The Open Inference Protocol's calls: a JSON header, tensors in it or behind it, content codings, and answers alike.

Owns the length of the inference header, codings and limits on JSON. Implements `request.adapter`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from tilewire.service.errors import BodyTooLarge, InvalidRequest
from tilewire.service.gateway.api.v2.answer import encode_answer
from tilewire.service.gateway.api.v2.compression import Coding, coding_of_answer, coding_of_body, deflate, inflate
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.api.v2.shared_memory import check_allowed
from tilewire.service.gateway.codecs.json_text import check_elements
from tilewire.service.gateway.codecs.protocol import Placed
from tilewire.service.gateway.request.adapter import Answer, Region
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, LoopRoom, offload
from tilewire.service.gateway.request.programs import KeptProgram, Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.program.definition import RESIDENT
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import PROGRAM_FAMILY, Options

MODELS = "/v2/models/"
HEADER_LENGTH = "inference-header-content-length"
BINARY, JSON = "application/octet-stream", "application/json"
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)
# Payloads begin on this: unaligned ones are copied to the device in smaller words, and with them their whole batch.
ALIGN_BYTES = 64


class InferLimits(msgspec.Struct, frozen=True):
    """Bounds of infer requests.

    Attributes:
        max_body_bytes: Largest body, inflated.
        max_json_bytes: Largest JSON in a body, and largest output in JSON.
        allows_regions: Shared memory is offered.
    """

    max_body_bytes: int
    max_json_bytes: int
    allows_regions: bool


class InferApi:
    """`POST /v2/models/{model}/infer`.

    Args:
        limits: Bounds.
        programs: Kept programs, which are models too.
    """

    def __init__(self, limits: InferLimits, programs: Programs) -> None:
        self._limits = limits
        self._programs = programs

    def read_call(self, op: AnyOp, head: Head) -> InferCall:
        """Reads the head of a request."""
        header_bytes = header_length(head)
        coding = coding_of_body(head.headers.get("content-encoding"))
        accepted = head.headers.get("accept-encoding")
        call = InferCall(op, self._limits, header_bytes, coding, accepted, self._programs, model_of(head.path))
        if coding is None:
            call.check_lengths(head.content_length)
        return call


def model_of(path: str) -> str:
    """Returns the model that the path of an infer call names."""
    return path.removeprefix(MODELS).partition("/")[0]


def header_length(head: Head) -> int | None:
    """Reads `Inference-Header-Content-Length`.

    Raises:
        InvalidRequest: Given twice, or not a length.
    """
    text = head.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if HEADER_LENGTH in head.repeated or _LENGTH.fullmatch(text) is None:
        raise InvalidRequest(f"Inference-Header-Content-Length: expected one whole number; got {text[:64]!r}")
    return int(text)


class InferCall(msgspec.Struct, frozen=True):
    """Parsed head of an infer request; see `Call`.

    Attributes:
        op: Model.
        limits: Bounds.
        header_bytes: Length of the JSON at the body's begin; None for a body that is all JSON.
        coding: Content coding of the body, or None.
        accept_encoding: Value of the header, or None.
        programs: Kept programs.
        model: Name of the model.
    """

    op: AnyOp
    limits: InferLimits
    header_bytes: int | None
    coding: Coding | None
    accept_encoding: str | None
    programs: Programs
    model: str

    residents: Mapping[str, str] = {}
    writes: tuple[str, ...] = ()
    needs_body: bool = True
    program_field: str = "model"

    @property
    def program(self) -> str | None:
        """Name of the kept program; None for an op."""
        return self.model if self.op is PROGRAM_FAMILY else None

    @property
    def lead_bytes(self) -> int:
        """See `Call`; a coded body is aligned when it is inflated."""
        return 0 if self.coding is not None else self.align_bytes

    @property
    def align_bytes(self) -> int:
        """Bytes in front of the JSON, so that the payloads behind it begin aligned."""
        return -(self.header_bytes or 0) % ALIGN_BYTES

    def check_lengths(self, body_bytes: int | None) -> None:
        """Refuses too much JSON, and a header beyond its body.

        Raises:
            InvalidRequest: The JSON is longer than the body.
            BodyTooLarge: Too much JSON.
        """
        header_bytes, max_bytes = self.header_bytes, self.limits.max_json_bytes
        if header_bytes is not None and body_bytes is not None and header_bytes > body_bytes:
            raise InvalidRequest(
                f"Inference-Header-Content-Length: {header_bytes}, but the body has {body_bytes} bytes"
            )
        json_bytes = body_bytes if header_bytes is None else header_bytes
        if json_bytes is not None and json_bytes > max_bytes:
            raise BodyTooLarge(
                f"body: {json_bytes} bytes of JSON; the limit is {max_bytes}, send tensors as binary data"
            )

    async def decode(self, body: Lease | None, leases: Leases) -> InferTask:
        """Reads the body of a request."""
        assert body is not None, "This is a bug: an infer request has a body."
        at = self.align_bytes
        if self.coding is not None:
            body = await inflate(body, leases, self.coding, self.limits.max_body_bytes, at)
        view = body.view[at:]
        self.check_lengths(view.nbytes)
        json_bytes = view.nbytes if self.header_bytes is None else self.header_bytes
        room = LoopRoom(leases) if json_bytes > OFFLOAD_BYTES else leases
        kept = (
            None if self.program is None else await self.programs.find(self.program, leases, field=self.program_field)
        )
        op = self.op if kept is None else kept.op
        request = await offload(json_bytes, decode_request, op, view, body.offset + at, self.header_bytes, room)
        # Numbers of the JSON lie elsewhere, and so does all of an inflated body.
        is_repeatable = self.coding is None and not request.has_numbers
        task = InferTask(self, request, json_bytes if is_repeatable else None, op, leases, kept)
        if task.regions or task.out_regions:
            check_allowed(self.limits.allows_regions)
        return task


class InferTask(msgspec.Struct, frozen=True):
    """An infer request whose operands are known; see `Task`.

    Attributes:
        call: Parsed head.
        request: Parsed body.
        lead_bytes: As in `Task`.
        op: Model.
        leases: Source of room for a program's text.
        kept: The kept program; None for an op.
    """

    call: InferCall
    request: InferRequest
    lead_bytes: int | None
    op: AnyOp
    leases: Leases
    kept: KeptProgram | None = None

    @property
    def pinned(self) -> Mapping[str, TensorInfo]:
        """Residents that the engine must have in this version, by input."""
        return {} if self.kept is None else {PROGRAM: self.kept.info}

    async def renew(self) -> InferTask:
        """Returns the task with the newest version of its program."""
        if self.kept is None:
            return self
        kept = await self.call.programs.fetch(self.kept.name, self.leases, field=self.call.program_field)
        return msgspec.structs.replace(self, op=kept.op, kept=kept)

    @property
    def options(self) -> Options:
        """Options of the op."""
        return self.op.complete(self.request.options)

    @property
    def store(self) -> str | None:
        """Name under which the result becomes resident, or None."""
        return next((one.resident for one in self.request.outputs.values()), None)

    @property
    def durable(self) -> bool:
        """The answer waits for the host copy of the result."""
        return self.request.durable

    @property
    def placed(self) -> Mapping[str, Placed]:
        """Tensors in the arena by input."""
        return {one.name: one.placed for one in self.request.inputs if one.placed is not None}

    @property
    def residents(self) -> Mapping[str, str]:
        """Names of resident tensors by input."""
        steps = {} if self.kept is None else {RESIDENT + name: name for name in self.kept.op.program.residents}
        return {**steps, **{one.name: one.resident for one in self.request.inputs if one.resident is not None}}

    @property
    def declared(self) -> Mapping[str, TensorType]:
        """Types that the client declares for residents, by input."""
        return {one.name: one.type for one in self.request.inputs if one.resident is not None and one.type is not None}

    @property
    def regions(self) -> Mapping[str, tuple[TensorType, Region]]:
        """Tensors in registered regions by input."""
        return {
            one.name: (one.type, one.region)
            for one in self.request.inputs
            if one.region is not None and one.type is not None
        }

    @property
    def out_regions(self) -> Mapping[str, Region]:
        """Regions that take outputs, by output."""
        return {name: one.region for name, one in self.request.outputs.items() if one.region is not None}

    @property
    def timeout_ns(self) -> int:
        """Longest time until the start, in nanoseconds; 0 for none."""
        return 1000 * self.request.timeout_us

    @property
    def priority(self) -> int:
        """Priority: 0 the default, 1 the most urgent."""
        return self.request.priority

    def encoder(self, outputs: Mapping[str, TensorType]) -> InferEncoder:
        """See `Task`; refuses outputs that do not fit their regions, or are too large for JSON."""
        max_bytes = self.call.limits.max_json_bytes
        for name, wanted in self.request.outputs.items():
            kind, region = outputs[name], wanted.region
            if region is not None and region.byte_size < kind.nbytes:
                raise InvalidRequest(
                    f"{name}: shared_memory_byte_size is {region.byte_size}; {kind} takes {kind.nbytes} bytes"
                )
            if region is None and wanted.resident is None and not wanted.is_binary:
                # A number takes more room as text than as bytes: the bound is on what must be formatted.
                if kind.nbytes > max_bytes:
                    raise BodyTooLarge(
                        f"{name}: {kind} is too large for JSON; the limit is {max_bytes} bytes, ask for binary_data"
                    )
                check_elements({name: kind})
        named = {
            name: outputs[name]
            for name, wanted in self.request.outputs.items()
            if wanted.region is None and wanted.resident is None
        }
        text_bytes = sum(kind.nbytes for name, kind in named.items() if not self.request.outputs[name].is_binary)
        nbytes = sum(kind.nbytes for kind in named.values())
        is_coded = coding_of_answer(self.call.accept_encoding, is_text=nbytes == text_bytes, nbytes=nbytes) is not None
        return InferEncoder(
            self.op, self.request, outputs, self.call.accept_encoding, nbytes if is_coded else text_bytes
        )


class InferEncoder(msgspec.Struct, frozen=True):
    """Writes the outputs of an infer request; see `Encoder`.

    Attributes:
        op: Model.
        request: Parsed request.
        types: Types of all outputs by name.
        accept_encoding: Codings that the client takes, or None.
        work_bytes: As in `Encoder`.
    """

    op: AnyOp
    request: InferRequest
    types: Mapping[str, TensorType]
    accept_encoding: str | None
    work_bytes: int

    def encode(self, payloads: Sequence[memoryview]) -> Answer:
        """Writes an answer around the payloads."""
        body = encode_answer(self.op, self.request, self.types, dict(zip(self.types, payloads, strict=True)))
        chunks, is_text = body.chunks, body.header_bytes is None
        lines = "" if is_text else f"{HEADER_LENGTH}: {body.header_bytes}\r\n"
        coding = None
        if self.accept_encoding is not None:
            nbytes = sum(len(chunk) for chunk in chunks)
            coding = coding_of_answer(self.accept_encoding, is_text=is_text, nbytes=nbytes)
        if coding is not None:
            chunks = [deflate(chunks, coding)]
            lines += f"content-encoding: {coding}\r\nvary: accept-encoding\r\n"
        return Answer(JSON if is_text else BINARY, chunks, lines)
