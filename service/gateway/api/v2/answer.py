"""The answer to an infer request of the Open Inference Protocol: JSON, and the payload behind it or in it.

Owns the answer's grammar; passes a binary payload through. Knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.gateway.api.v2.header import OUTPUT
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.codecs.json_text import numbers_of
from tilewire.service.ops.op import AnyOp, TensorType

VERSION = "1"


class InferAnswer(msgspec.Struct, frozen=True):
    """An answer's body.

    Attributes:
        chunks: In order; a view of the slot among them when the payload is binary.
        header_bytes: Length of the JSON when something follows it, else None.
    """

    chunks: Sequence[bytes | memoryview]
    header_bytes: int | None


def encode_answer(op: AnyOp, request: InferRequest, out: TensorType, payload: memoryview) -> InferAnswer:
    """Writes an answer.

    Args:
        op: The model.
        request: What was asked.
        out: Type of the result.
        payload: Its bytes in C order; not read when it went into a region.
    """
    wanted = request.output
    if wanted.region is not None:
        return InferAnswer([_head.__wrapped__(op.name, request.id, out, "")], None)
    if not wanted.is_binary:
        # Numbers as Python and Triton write them: NaN and infinities bare.
        text = json.dumps(numbers_of(out, payload), separators=(",", ":"))
        return InferAnswer([_head.__wrapped__(op.name, request.id, out, f',"data":{text}')], None)
    write = _head if request.id is None else _head.__wrapped__
    head = write(op.name, request.id, out, f',"parameters":{{"binary_data_size":{out.nbytes}}}')
    return InferAnswer([head, payload], len(head)) if out.nbytes else InferAnswer([head], None)


@lru_cache(maxsize=256)
def _head(op_name: str, request_id: str | None, out: TensorType, rest: str) -> bytes:
    echoed = "" if request_id is None else f'"id":{json.dumps(request_id)},'
    shape = ",".join(map(str, out.shape))
    return (
        f'{{{echoed}"model_name":"{op_name}","model_version":"{VERSION}","outputs":[{{"name":"{OUTPUT}",'
        f'"datatype":"{DTYPES[out.dtype].oip}","shape":[{shape}]{rest}}}]}}'
    ).encode("ascii")
