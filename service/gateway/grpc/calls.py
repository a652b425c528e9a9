"""ModelInfer as an API of the request path: decodes a frame to a task, and writes `ModelInferResponse`.

Implements `request.adapter`; what an infer request means is in `api.v2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BodyTooLarge
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.api.v2.calls import InferLimits, ModelCall
from tilewire.service.gateway.api.v2.decode import place_inputs
from tilewire.service.gateway.api.v2.header import read_document
from tilewire.service.gateway.api.v2.models import check_version
from tilewire.service.gateway.api.v2.request import Header, InferRequest
from tilewire.service.gateway.api.v2.task import InferTask
from tilewire.service.gateway.grpc.document import document_of
from tilewire.service.gateway.grpc.open_inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from tilewire.service.gateway.grpc.wire import parse, read_frame, varint
from tilewire.service.gateway.request.adapter import Answer
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, LoopRoom, offload
from tilewire.service.gateway.request.programs import Programs
from tilewire.service.ipc.arena import Lease
from tilewire.service.ops.op import AnyOp, TensorType

CONTENT_TYPE = "application/grpc"
# Tag of `raw_output_contents`.
_RAW = b"\x32"


class RpcApi(msgspec.Struct, frozen=True):
    """ModelInfer of one model.

    Attributes:
        limits: Bounds.
        programs: Kept programs, which are models too.
        model: Name of the model.
        version: Version of the model; empty for any.
    """

    limits: InferLimits
    programs: Programs
    model: str
    version: str

    def read_call(self, op: AnyOp, head: Head) -> RpcInferCall:
        """Checks the version.

        Raises:
            UnknownName: There is no such version.
        """
        check_version(self.model, self.version or None)
        return RpcInferCall(op, self.limits, self.programs, self.model)


class RpcInferCall(ModelCall, frozen=True):
    """An infer call before its frame is read."""

    async def decode(self, body: Lease | None, leases: Leases) -> InferTask:
        """Reads a frame."""
        assert body is not None, "This is a bug: a message is a body."
        lead_bytes, message, places = read_frame(body.view)
        if len(message) > self.limits.max_json_bytes:
            raise BodyTooLarge(
                f"contents: {len(message)} bytes outside raw_input_contents; "
                f"the limit is {self.limits.max_json_bytes}, send tensors as raw contents"
            )
        room = LoopRoom(leases) if len(message) > OFFLOAD_BYTES else leases
        offsets = [body.offset + at for at, _ in places]

        async def read(op: AnyOp) -> tuple[InferRequest, int | None]:
            header = await offload(len(message), read_message, op, message, [nbytes for _, nbytes in places])
            inputs = await offload(len(message), place_inputs, header.pending, offsets, body.offset, room)
            has_numbers = any(pending.numbers is not None for pending in header.pending)
            request = msgspec.structs.replace(header.request, inputs=inputs, has_numbers=has_numbers)
            return request, None if has_numbers else lead_bytes

        return await self.task(leases, read, RpcForm(self.model))


def read_message(op: AnyOp, message: bytes, raw_bytes: Sequence[int]) -> Header:
    """Reads a message without its raw contents.

    Raises:
        InvalidRequest: Anything that cannot be right; the detail names the field.
    """
    return read_document(op, document_of(parse(ModelInferRequest, message), raw_bytes))


class RpcForm(msgspec.Struct, frozen=True):
    """Form of answers over gRPC: every output in raw contents; see `AnswerForm`.

    Attributes:
        model: Name of the model.
    """

    model: str

    def encoder(self, op: AnyOp, request: InferRequest, outputs: Mapping[str, TensorType]) -> RpcEncoder:
        """Writes the message but for its payloads, and returns the encoder that adds them."""
        answer = ModelInferResponse(model_name=self.model, model_version=VERSION, id=request.id or "")
        if request.says_final:
            answer.parameters["triton_final_response"].CopyFrom(InferParameter(bool_param=True))
        heads: list[bytes] = []
        sent: list[int | None] = []
        places = {name: place for place, name in enumerate(outputs)}
        for name, wanted in request.outputs.items():
            kind, region = outputs[name], wanted.region
            entry = answer.outputs.add(name=name, datatype=DTYPES[kind.dtype].oip, shape=kind.shape)
            if wanted.resident is not None:
                entry.parameters["resident"].CopyFrom(InferParameter(string_param=wanted.resident))
                heads.append(_RAW + varint(0))
                sent.append(None)
            elif region is None:
                heads.append(_RAW + varint(kind.nbytes))
                sent.append(places[name])
            else:
                entry.parameters["shared_memory_region"].CopyFrom(InferParameter(string_param=region.name))
                entry.parameters["shared_memory_byte_size"].CopyFrom(InferParameter(int64_param=kind.nbytes))
                heads.append(_RAW + varint(0))
                sent.append(None)
        heads[0] = answer.SerializeToString() + heads[0]
        return RpcEncoder(tuple(heads), tuple(sent))


class RpcEncoder(msgspec.Struct, frozen=True):
    """Writes the outputs of a request; see `Encoder`.

    Attributes:
        heads: Bytes in front of each payload.
        sent: Number of the output that each payload is; None for one that is not sent.
        work_bytes: As in `Encoder`; nothing is formatted.
    """

    heads: tuple[bytes, ...]
    sent: tuple[int | None, ...]
    work_bytes: int = 0

    def encode(self, payloads: Sequence[memoryview]) -> Answer:
        """Writes an answer around the payloads."""
        chunks: list[bytes | memoryview] = []
        for head, place in zip(self.heads, self.sent, strict=True):
            chunks.append(head)
            if place is not None:
                chunks.append(payloads[place])
        return Answer(CONTENT_TYPE, chunks)
