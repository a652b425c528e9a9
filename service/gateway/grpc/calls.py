"""ModelInfer as an API of the request path: decodes a frame to a task, and writes `ModelInferResponse`.

Implements `request.adapter`; what an infer request means is in `api.v2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tilewire.service.config.process import GatewaySettings
from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BodyTooLarge
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.api.v2.calls import ModelCall
from tilewire.service.gateway.api.v2.decode import place_inputs
from tilewire.service.gateway.api.v2.header import read_document
from tilewire.service.gateway.api.v2.models import check_version
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.codecs.protocol import Room
from tilewire.service.gateway.grpc.document import document_of
from tilewire.service.gateway.grpc.open_inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from tilewire.service.gateway.grpc.wire import parse, read_frame, varint
from tilewire.service.gateway.request.adapter import Answer, Encoder
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import offload_with_room
from tilewire.service.gateway.request.programs import Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.registry import PROGRAM_FAMILY

CONTENT_TYPE = "application/grpc"
# Tag of `raw_output_contents`.
_RAW = b"\x32"


class RpcApi(msgspec.Struct, frozen=True):
    """ModelInfer of one model, which may be a kept program; an empty version is any."""

    settings: GatewaySettings
    programs: Programs
    model: str
    version: str

    def read_call(self, op: AnyOp, head: Head) -> RpcInferCall:
        program = self.model if op is PROGRAM_FAMILY else None
        return RpcInferCall(
            op=op, programs=self.programs, program=program, settings=self.settings, version=self.version or None
        )


class RpcInferCall(ModelCall, frozen=True, kw_only=True):
    """An infer call before its frame is read. Every output is answered in raw contents.

    Attributes:
        version: Version of the model; None for any.
    """

    version: str | None

    async def read(self, op: AnyOp, body: Lease, leases: Leases) -> tuple[InferRequest, int | None]:
        # Only now is it known that there is such a model: a kept program is looked up first.
        check_version(op.model, self.version)
        max_bytes = self.settings.max_json_bytes
        lead_bytes, message, places = read_frame(body.view)
        if len(message) > max_bytes:
            raise BodyTooLarge(
                f"contents: {len(message)} bytes outside raw_input_contents; "
                f"the limit is {max_bytes}, send tensors as raw contents"
            )
        request = await offload_with_room(len(message), leases, _read_message, op, message, places, body.offset)
        return request, None if request.has_numbers else lead_bytes

    def encoder(self, request: InferRequest, op: AnyOp, outputs: Mapping[str, TensorType]) -> Encoder:
        """Writes the message but for its payloads, and returns the encoder that adds them."""
        answer = ModelInferResponse(model_name=op.model, model_version=VERSION, id=request.id or "")
        if request.says_final:
            answer.parameters["triton_final_response"].CopyFrom(InferParameter(bool_param=True))
        heads: list[bytes] = []
        sent: list[int | None] = []
        places = {name: place for place, name in enumerate(outputs)}
        for name, wanted in request.outputs.items():
            kind, region = outputs[name], wanted.region
            entry = answer.outputs.add(name=name, datatype=DTYPES[kind.dtype].oip, shape=kind.shape)
            heads.append(_RAW + varint(kind.nbytes if wanted.is_sent else 0))
            sent.append(places[name] if wanted.is_sent else None)
            if wanted.resident is not None:
                entry.parameters["resident"].CopyFrom(InferParameter(string_param=wanted.resident))
            elif region is not None:
                entry.parameters["shared_memory_region"].CopyFrom(InferParameter(string_param=region.name))
                entry.parameters["shared_memory_byte_size"].CopyFrom(InferParameter(int64_param=kind.nbytes))
        heads[0] = answer.SerializeToString() + heads[0]

        def encode(payloads: Sequence[memoryview]) -> Answer:
            chunks: list[bytes | memoryview] = []
            for head, place in zip(heads, sent, strict=True):
                chunks.append(head)
                if place is not None:
                    chunks.append(payloads[place])
            return Answer(CONTENT_TYPE, chunks)

        # Nothing is formatted.
        return Encoder(0, encode)


def _read_message(
    op: AnyOp, message: bytes, places: Sequence[tuple[int, int]], offset: int, room: Room
) -> InferRequest:
    """Reads a message without its raw contents, which have places in the body at an offset of the segment."""
    request = read_document(op, document_of(parse(ModelInferRequest, message), [nbytes for _, nbytes in places]))
    return place_inputs(request, [offset + at for at, _ in places], offset, room)
