"""The Open Inference Protocol's calls: a JSON header, tensors in it or behind it, content codings, and answers alike.

Owns the length of the inference header, codings and limits on JSON. Implements `request.adapter`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar

import msgspec

from tilewire.service.config.process import GatewaySettings
from tilewire.service.errors import BodyTooLarge, InvalidRequest
from tilewire.service.gateway.api.v2.answer import encode_answer
from tilewire.service.gateway.api.v2.compression import Coding, coding_of_answer, coding_of_body, deflate, inflate
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.api.v2.shared_memory import check_allowed
from tilewire.service.gateway.api.v2.task import MODEL, AnswerForm, InferTask
from tilewire.service.gateway.codecs.json_text import check_elements
from tilewire.service.gateway.request.adapter import Answer
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, LoopRoom, offload
from tilewire.service.gateway.request.programs import Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.registry import PROGRAM_FAMILY

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


def limits_of(settings: GatewaySettings) -> InferLimits:
    """The bounds that a gateway's settings say."""
    return InferLimits(settings.max_body_bytes, settings.max_json_bytes, settings.allow_shared_memory)


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
        call = InferCall(op, self._limits, self._programs, model_of(head.path), header_bytes, coding, accepted)
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


class ModelCall(msgspec.Struct, frozen=True):
    """The part of a call that every transport has; see `Call`.

    Attributes:
        op: Model.
        limits: Bounds.
        programs: Kept programs.
        model: Name of the model.
    """

    op: AnyOp
    limits: InferLimits
    programs: Programs
    model: str

    residents: ClassVar[Mapping[str, str]] = {}
    writes: ClassVar[tuple[str, ...]] = ()
    needs_body: ClassVar[bool] = True
    program_field: ClassVar[str] = MODEL

    @property
    def program(self) -> str | None:
        """Name of the kept program; None for an op."""
        return self.model if self.op is PROGRAM_FAMILY else None

    @property
    def lead_bytes(self) -> int:
        """Bytes left free in front of the body, so that its payload begins aligned."""
        return 0

    async def task(
        self, leases: Leases, request: Callable[[AnyOp], Awaitable[tuple[InferRequest, int | None]]], form: AnswerForm
    ) -> InferTask:
        """Reads a request for the op, or for that of the kept program.

        Args:
            leases: Source of slots.
            request: Reads the body for an op; returns the request and `lead_bytes` of its task.
            form: Form of the answer.
        """
        kept = None if self.program is None else await self.programs.find(self.program, leases, field=MODEL)
        op = self.op if kept is None else kept.op
        read, lead_bytes = await request(op)
        task = InferTask(
            request=read, lead_bytes=lead_bytes, op=op, leases=leases, programs=self.programs, form=form, kept=kept
        )
        if task.regions or task.out_regions:
            check_allowed(self.limits.allows_regions)
        return task


class InferCall(ModelCall, frozen=True):
    """Parsed head of an infer request; see `Call`.

    Attributes:
        header_bytes: Length of the JSON at the body's begin; None for a body that is all JSON.
        coding: Content coding of the body, or None.
        accept_encoding: Value of the header, or None.
    """

    header_bytes: int | None
    coding: Coding | None
    accept_encoding: str | None

    @property
    def lead_bytes(self) -> int:
        """Bytes left free in front of the body; a coded body is aligned when it is inflated."""
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

        async def read(op: AnyOp) -> tuple[InferRequest, int | None]:
            request = await offload(json_bytes, decode_request, op, view, body.offset + at, self.header_bytes, room)
            # Numbers of the JSON lie elsewhere, and so does all of an inflated body.
            return request, json_bytes if self.coding is None and not request.has_numbers else None

        return await self.task(leases, read, HttpForm(self.limits.max_json_bytes, self.accept_encoding))


class HttpForm(msgspec.Struct, frozen=True):
    """Form of answers over HTTP. It is JSON, with requested binary payloads behind it; see `AnswerForm`.

    Attributes:
        max_json_bytes: Largest output in JSON.
        accept_encoding: Codings that the client takes, or None.
    """

    max_json_bytes: int
    accept_encoding: str | None

    def encoder(self, op: AnyOp, request: InferRequest, outputs: Mapping[str, TensorType]) -> InferEncoder:
        """Returns the encoder of JSON and binary payloads; refuses outputs that are too large for JSON."""
        for name, wanted in request.outputs.items():
            kind = outputs[name]
            if wanted.is_sent and not wanted.is_binary:
                # A number takes more room as text than as bytes: the bound is on what must be formatted.
                if kind.nbytes > self.max_json_bytes:
                    raise BodyTooLarge(
                        f"{name}: {kind} is too large for JSON; the limit is {self.max_json_bytes} bytes, "
                        "ask for binary_data"
                    )
                check_elements({name: kind})
        named = {name: outputs[name] for name, wanted in request.outputs.items() if wanted.is_sent}
        text_bytes = sum(kind.nbytes for name, kind in named.items() if not request.outputs[name].is_binary)
        nbytes = sum(kind.nbytes for kind in named.values())
        is_coded = coding_of_answer(self.accept_encoding, is_text=nbytes == text_bytes, nbytes=nbytes) is not None
        return InferEncoder(op, request, outputs, self.accept_encoding, nbytes if is_coded else text_bytes)


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
        body = encode_answer(self.op, self.request, self.types, dict(zip(self.types, payloads, strict=bool(payloads))))
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
