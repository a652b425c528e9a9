"""The answer to an infer request of the Open Inference Protocol: JSON, and payloads behind it or in it.

Owns the answer's grammar; passes binary payloads through.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from tilewire.service.dtypes import DTYPES
from tilewire.service.gateway.api.v2.request import InferRequest, Output
from tilewire.service.gateway.codecs.json_text import joined, text_of
from tilewire.service.ops.op import AnyOp, TensorType

VERSION = "1"


def encode_answer(
    op: AnyOp, request: InferRequest, types: Mapping[str, TensorType], payloads: Mapping[str, memoryview]
) -> tuple[Sequence[bytes | memoryview], int | None]:
    """Writes an answer.

    Args:
        op: Model.
        request: Parsed request.
        types: Types of all outputs by name.
        payloads: Bytes of each in C order; not read when it went into a region or stays on the device.

    Returns:
        The body in order, with views of slots when payloads are binary; and the length of its JSON when something follows
        that, else None.
    """
    pieces: list[Iterable[str]] = []
    behind = []
    echoed = "" if request.id is None else f'"id":{json.dumps(request.id)},'
    lead = f'{{{echoed}"model_name":"{op.model}","model_version":"{VERSION}","outputs":['
    for name, wanted in request.outputs.items():
        kind = types[name]
        if wanted.is_sent and not wanted.is_binary:
            # Numbers lie flat, whatever the shape.
            text = text_of(kind, payloads[name], (kind.num_elements,))
            pieces += [(f'{lead}{_entry.__wrapped__(name, kind, wanted)},"data":',), text, "}"]
        else:
            pieces.append((f"{lead}{_entry(name, kind, wanted)}}}",))
            if wanted.is_sent and kind.nbytes:
                behind.append(payloads[name])
        lead = ","
    head = joined(chain(*pieces, "]}"))
    return [*head, *behind], sum(map(len, head)) if behind else None


@lru_cache(maxsize=256)
def _entry(name: str, kind: TensorType, wanted: Output) -> str:
    """One output without its closing brace."""
    shape = ",".join(map(str, kind.shape))
    entry = f'{{"name":"{name}","datatype":"{DTYPES[kind.dtype].oip}","shape":[{shape}]'
    if wanted.resident is not None:
        entry += f',"parameters":{{"resident":"{wanted.resident}"}}'
    elif wanted.region is None and wanted.is_binary:
        entry += f',"parameters":{{"binary_data_size":{kind.nbytes}}}'
    return entry
