"""The native API's calls: options and residents in the query, tensors in a body of any format, and answers alike.

Owns the choice of formats. Implements `request.adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec

from tilewire.service.errors import BodyTooLarge, InvalidRequest
from tilewire.service.gateway.api.v1.query import Query, parse_query, parse_run_query
from tilewire.service.gateway.codecs.json_text import PROGRAM_KEY
from tilewire.service.gateway.codecs.negotiation import SNIFF_BYTES, advice_for, codec_for_accept, codec_for_body
from tilewire.service.gateway.codecs.protocol import Codec, Placed
from tilewire.service.gateway.request.adapter import Answer, Call, Encoder, Task
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import refuse_encodings
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import offload_with_room
from tilewire.service.gateway.request.programs import Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.registry import OPS, PROGRAM_FAMILY

# Paths of kept programs begin with it.
PROGRAMS = "/v1/programs/"


class NativeApi(msgspec.Struct, frozen=True):
    """`POST /v1/{op}`, `POST /v1/programs/{name}` and `POST /v1/run`; JSON carries bodies and results up to a size."""

    max_json_bytes: int
    programs: Programs

    def read_call(self, op: AnyOp, head: Head) -> NativeCall:
        headers = head.headers
        timeout = headers.get("x-timeout-ms")
        refuse_encodings(head)
        program = head.path.removeprefix(PROGRAMS) if head.path.startswith(PROGRAMS) else None
        if op is PROGRAM_FAMILY:
            query, needs_body = parse_run_query(head.query, timeout), program is None
        else:
            query = parse_query(op, head.query, timeout)
            needs_body = any(name not in query.residents for name in op.required)
        return NativeCall(
            op=op,
            programs=self.programs,
            residents=query.residents,
            writes=() if query.store is None else (query.store,),
            needs_body=needs_body,
            program=program,
            query=query,
            content_type=headers.get("content-type"),
            accept=headers.get("accept"),
            max_json_bytes=self.max_json_bytes,
            timeout_ns=math.ceil((query.timeout_ms or 0) * 1e6),
        )


class NativeCall(Call, frozen=True, kw_only=True):
    """Parsed head of a native request: its query, the values of two headers, and the bound of `NativeApi`."""

    query: Query
    content_type: str | None
    accept: str | None
    max_json_bytes: int

    async def decode(self, body: Lease | None, leases: Leases) -> Task:
        codec, placed, lead_bytes = None, dict[str, Placed](), 0 if body is None else None
        if body is not None:
            is_run = self.op is PROGRAM_FAMILY and self.program is None
            beside = (PROGRAM_KEY,) if is_run else ()
            codec, placed = await read_tensors(self.content_type, body, leases, self.max_json_bytes, beside)
            lead_bytes = codec.lead_bytes(body.view)
        kept = await self.find_program(leases)
        op = self.op if kept is None else kept.op
        if op is PROGRAM_FAMILY:
            op = self.programs.bind(parse_program(_program_in(codec, body), OPS))
        return Task(
            call=self,
            encoder=partial(self._encoder, codec),
            op=op,
            kept=kept,
            given_options=self.query.options,
            given_residents=self.query.residents,
            placed=placed,
            store=self.query.store,
            durable=self.query.durable,
            timeout_ns=self.timeout_ns,
            lead_bytes=lead_bytes,
        )

    def _encoder(self, sent: Codec | None, _op: AnyOp, outputs: Mapping[str, TensorType]) -> Encoder | None:
        """Returns the encoder of the outputs of a request whose body has the format `sent`."""
        if self.query.store is not None:
            return None
        codec = codec_for_accept(self.accept, sent, [kind.dtype for kind in outputs.values()])
        for name, kind in outputs.items():
            # A number takes more room than its bytes: the bound is on what must be formatted.
            if codec.is_text and kind.nbytes > self.max_json_bytes:
                raise BodyTooLarge(
                    f"{name}: {kind} is too large for JSON, over {self.max_json_bytes}, --max-json-bytes; "
                    "accept safetensors"
                )
        return encoder_for(codec, outputs)


def _program_in(codec: Codec | None, body: Lease | None) -> str:
    """The text of the program that a body carries.

    Raises:
        InvalidRequest: It carries none.
    """
    text = None if codec is None or body is None else codec.metadata(body.view).get(PROGRAM_KEY)
    if text is None:
        raise InvalidRequest(
            "program: the body carries none; send it as the string `program` of a safetensors header's __metadata__, "
            "or as the key `program` of a JSON body"
        )
    return text


def encoder_for(codec: Codec, outputs: Mapping[str, TensorType]) -> Encoder:
    """Returns the encoder that writes outputs in one format."""

    def encode(payloads: Sequence[memoryview]) -> Answer:
        return Answer(codec.content_type, codec.encode(outputs, payloads))

    return Encoder(codec.encode_work_bytes(sum(kind.nbytes for kind in outputs.values())), encode)


async def read_tensors(
    content_type: str | None, body: Lease, leases: Leases, max_json_bytes: int, beside: Collection[str] = ()
) -> tuple[Codec, dict[str, Placed]]:
    """Chooses the codec of a body, and reads the tensors' metadata; what is inflated or parsed gets slots of its own.

    `beside` has the names of what is no tensor, as `Codec.decode` takes them.

    Raises:
        TilewireError: Raised by `codec_for_body` and `Codec.decode`.
    """
    codec = codec_for_body(content_type, bytes(body.view[:SNIFF_BYTES]))
    if codec.is_text and body.nbytes > max_json_bytes:
        raise BodyTooLarge(
            f"body: {body.nbytes} bytes of JSON, over {max_json_bytes}, --max-json-bytes; use safetensors"
        )
    decode = partial(codec.decode, beside=beside)
    try:
        work_bytes = codec.work_bytes(body.view)
        return codec, dict(await offload_with_room(work_bytes, leases, decode, body.view, body.offset))
    except InvalidRequest as error:
        # Text may well be sent by -d.
        if codec.is_text or not (advice := advice_for(content_type)):
            raise
        raise InvalidRequest(error.detail + advice) from error
