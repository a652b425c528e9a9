"""The Open Inference Protocol's calls: a JSON header, tensors in it or behind it, content codings, and answers alike.

Owns the length of the inference header, codings and limits on JSON. Implements `request.adapter`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from tilewire.service.config.process import GatewaySettings
from tilewire.service.errors import BodyTooLarge, InvalidRequest
from tilewire.service.gateway.api.v2.answer import encode_answer
from tilewire.service.gateway.api.v2.compression import Coding, coding_of_answer, coding_of_body, deflate, inflate
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.api.v2.shared_memory import check_allowed
from tilewire.service.gateway.codecs.json_text import check_elements
from tilewire.service.gateway.request.adapter import Answer, Call, Encoder, Task
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import ALIGN_BYTES
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import offload_with_room
from tilewire.service.gateway.request.programs import Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.registry import PROGRAM_FAMILY

MODELS = "/v2/models/"
# Name of a program's field in errors.
MODEL = "model"
HEADER_LENGTH = "inference-header-content-length"
BINARY, JSON = "application/octet-stream", "application/json"
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)


class InferApi(msgspec.Struct, frozen=True):
    """`POST /v2/models/{model}/infer`; kept programs are models too."""

    settings: GatewaySettings
    programs: Programs

    def read_call(self, op: AnyOp, head: Head) -> InferCall:
        header_bytes = header_length(head)
        coding = coding_of_body(head.headers.get("content-encoding"))
        align_bytes = -(header_bytes or 0) % ALIGN_BYTES
        call = InferCall(
            op=op,
            programs=self.programs,
            # A coded body is aligned when it is inflated.
            pad_bytes=align_bytes if coding is None else 0,
            program=head.path.removeprefix(MODELS).partition("/")[0] if op is PROGRAM_FAMILY else None,
            settings=self.settings,
            header_bytes=header_bytes,
            align_bytes=align_bytes,
            coding=coding,
            accept_encoding=head.headers.get("accept-encoding"),
        )
        if coding is None:
            call.check_lengths(head.content_length)
        return call


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


class ModelCall(Call, frozen=True, kw_only=True):
    """The part of a call that every transport has."""

    settings: GatewaySettings
    program_field: str = MODEL

    async def decode(self, body: Lease | None, leases: Leases) -> Task:
        assert body is not None, "This is a bug: an infer request has a body."
        kept = await self.find_program(leases)
        op = self.op if kept is None else kept.op
        request, lead_bytes = await self.read(op, body, leases)
        regions = {
            one.name: (one.type, one.region)
            for one in request.inputs
            if one.region is not None and one.type is not None
        }
        out_regions = {name: one.region for name, one in request.outputs.items() if one.region is not None}
        if regions or out_regions:
            check_allowed(self.settings.allow_shared_memory)
        return Task(
            call=self,
            encoder=partial(self.encoder, request),
            op=op,
            kept=kept,
            given_options=request.options,
            given_residents={one.name: one.resident for one in request.inputs if one.resident is not None},
            placed={one.name: one.placed for one in request.inputs if one.placed is not None},
            declared={
                one.name: one.type for one in request.inputs if one.resident is not None and one.type is not None
            },
            regions=regions,
            out_regions=out_regions,
            store=next((one.resident for one in request.outputs.values()), None),
            durable=request.durable,
            timeout_ns=1000 * request.timeout_us,
            priority=request.priority,
            lead_bytes=lead_bytes,
        )

    async def read(self, op: AnyOp, body: Lease, leases: Leases) -> tuple[InferRequest, int | None]:
        """Reads a body for an op; returns the request and `lead_bytes` of its task."""
        raise NotImplementedError

    def encoder(self, request: InferRequest, op: AnyOp, outputs: Mapping[str, TensorType]) -> Encoder:
        """Chooses how outputs of these types are answered.

        Raises:
            TilewireError: They cannot be answered as asked.
        """
        raise NotImplementedError


class InferCall(ModelCall, frozen=True, kw_only=True):
    """Parsed head of an infer request.

    Attributes:
        header_bytes: Length of the JSON at the body's begin; None for a body that is all JSON.
        align_bytes: Bytes in front of the JSON, so that the payloads behind it begin aligned.
        coding: Content coding of the body, or None.
        accept_encoding: Value of the header, or None.
    """

    header_bytes: int | None
    align_bytes: int
    coding: Coding | None
    accept_encoding: str | None

    def check_lengths(self, body_bytes: int | None) -> None:
        """Refuses too much JSON, and a header beyond its body.

        Raises:
            InvalidRequest: The JSON is longer than the body.
            BodyTooLarge: Too much JSON.
        """
        header_bytes, max_bytes = self.header_bytes, self.settings.max_json_bytes
        if header_bytes is not None and body_bytes is not None and header_bytes > body_bytes:
            raise InvalidRequest(
                f"Inference-Header-Content-Length: {header_bytes}, but the body has {body_bytes} bytes"
            )
        json_bytes = body_bytes if header_bytes is None else header_bytes
        if json_bytes is not None and json_bytes > max_bytes:
            raise BodyTooLarge(
                f"body: {json_bytes} bytes of JSON, over {max_bytes}, --max-json-bytes; send tensors as binary data"
            )

    async def read(self, op: AnyOp, body: Lease, leases: Leases) -> tuple[InferRequest, int | None]:
        at = self.align_bytes
        if self.coding is not None:
            body = await inflate(body, leases, self.coding, self.settings.max_body_bytes, at)
        view = body.view[at:]
        self.check_lengths(view.nbytes)
        json_bytes = view.nbytes if self.header_bytes is None else self.header_bytes
        request = await offload_with_room(
            json_bytes, leases, decode_request, op, view, body.offset + at, self.header_bytes
        )
        # Numbers of the JSON lie elsewhere, and so does all of an inflated body.
        return request, json_bytes if self.coding is None and not request.has_numbers else None

    def encoder(self, request: InferRequest, op: AnyOp, outputs: Mapping[str, TensorType]) -> Encoder:
        """Returns the encoder of JSON and binary payloads; refuses outputs that are too large for JSON."""
        max_bytes = self.settings.max_json_bytes
        for name, wanted in request.outputs.items():
            kind = outputs[name]
            if wanted.is_sent and not wanted.is_binary:
                # A number takes more room as text than as bytes: the bound is on what must be formatted.
                if kind.nbytes > max_bytes:
                    raise BodyTooLarge(
                        f"{name}: {kind} is too large for JSON, over {max_bytes}, --max-json-bytes; ask for binary_data"
                    )
                check_elements({name: kind})
        named = {name: outputs[name] for name, wanted in request.outputs.items() if wanted.is_sent}
        text_bytes = sum(kind.nbytes for name, kind in named.items() if not request.outputs[name].is_binary)
        nbytes = sum(kind.nbytes for kind in named.values())
        accept = self.accept_encoding
        is_coded = coding_of_answer(accept, is_text=nbytes == text_bytes, nbytes=nbytes) is not None

        def encode(payloads: Sequence[memoryview]) -> Answer:
            chunks, header_bytes = encode_answer(
                op, request, outputs, dict(zip(outputs, payloads, strict=bool(payloads)))
            )
            is_text = header_bytes is None
            lines = "" if is_text else f"{HEADER_LENGTH}: {header_bytes}\r\n"
            coding = None
            if accept is not None:
                coding = coding_of_answer(accept, is_text=is_text, nbytes=sum(map(len, chunks)))
            if coding is not None:
                chunks = [deflate(chunks, coding)]
                lines += f"content-encoding: {coding}\r\nvary: accept-encoding\r\n"
            return Answer(JSON if is_text else BINARY, chunks, lines)

        return Encoder(nbytes if is_coded else text_bytes, encode)
