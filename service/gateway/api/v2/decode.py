"""Decodes the body of an infer request to one description; the payload stays where it is.

Owns the places of binary inputs behind the JSON, and raw bodies. An input or an output in a shared region is described, not
resolved. Runs in a gateway's event loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.v2.header import read_header
from tilewire.service.gateway.api.v2.request import InferRequest, Input, Output
from tilewire.service.gateway.codecs.json_text import place
from tilewire.service.gateway.codecs.protocol import Placed, Room
from tilewire.service.ops.op import AnyOp, TensorType


def decode_request(op: AnyOp, body: memoryview, offset: int, header_bytes: int | None, room: Room) -> InferRequest:
    """Reads a whole request body.

    Args:
        op: Requested model.
        body: The bytes as received and inflated.
        offset: Offset of `body` in the arena's segment.
        header_bytes: Length of the JSON at its start, at most that of the body. It is 0 for a body that is one raw
            tensor, and None for one that is all JSON.
        room: Memory for numbers of the JSON text.

    Raises:
        InvalidRequest: Anything that cannot be right; the detail names the field.
        BodyTooLarge: The numbers take more than the request may hold.
        TooBusy: There is no room right now.
    """
    if header_bytes is None:
        header_bytes = body.nbytes
    elif not header_bytes:
        return _raw_request(op, body, offset)
    assert header_bytes <= body.nbytes, "This is a bug: the caller checks it."
    text = bytes(body[:header_bytes])
    request = read_header(op, text)
    binary_bytes = body.nbytes - header_bytes
    declared = sum(pending.binary_bytes or 0 for pending in request.pending)
    if declared != binary_bytes:
        raise InvalidRequest(
            f"body: {binary_bytes} bytes follow the JSON; the inputs' binary_data_size add up to {declared}"
        )
    lengths = [pending.binary_bytes for pending in request.pending if pending.binary_bytes is not None]
    places = [offset + header_bytes + before for before in itertools.accumulate(lengths, initial=0)]
    return place_inputs(request, places, offset, room)


def _raw_request(op: AnyOp, body: memoryview, offset: int) -> InferRequest:
    """A body without JSON: the bytes of one tensor."""
    if op.sole_input is None:
        raise InvalidRequest(
            f"Inference-Header-Content-Length: 0 is for models with one input; {op.model or op.name} has {', '.join(op.given)}"
        )
    name, declared = op.sole_input
    kind = TensorType(declared.dtype, _deduced_shape(name, declared, body.nbytes))
    only = Input(name, kind, placed=Placed(kind, offset))
    return InferRequest(None, (only,), {name: Output(is_binary=True) for name in op.outputs}, op.options())


def _deduced_shape(name: str, declared: TensorType, nbytes: int) -> tuple[int, ...]:
    """Finds the size that varies from the number of bytes; of two, the first is a batch of one, as in NVIDIA Triton."""
    shape = list(declared.shape)
    if shape.count(-1) > 1:
        shape[shape.index(-1)] = 1
    if shape.count(-1) > 1:
        raise InvalidRequest(f"{name}: more than one size of {list(declared.shape)} varies; send an inference header")
    row_bytes = math.prod(dim for dim in shape if dim != -1) * DTYPES[declared.dtype].itemsize
    count = nbytes // row_bytes if row_bytes and -1 in shape else 1
    if count * row_bytes != nbytes:
        expected = f"a multiple of {row_bytes}" if -1 in shape else f"{row_bytes}"
        raise InvalidRequest(f"body: {nbytes} bytes; {name} takes {expected} ({declared})")
    return tuple(count if dim == -1 else dim for dim in shape)


def place_inputs(request: InferRequest, places: Sequence[int], empty_offset: int, room: Room) -> InferRequest:
    """Finds the bytes of each input.

    Args:
        request: Request as read.
        places: Offsets in the arena's segment of those in binary, in order.
        empty_offset: Offset of empty tensors.
        room: Memory for numbers.

    Raises:
        InvalidRequest: A number that its dtype cannot hold.
        BodyTooLarge: The numbers take more than the request may hold.
        TooBusy: There is no room right now.
    """
    inputs = []
    offsets = iter(places)
    for one in request.pending:
        kind = one.input.type
        placed = None
        if one.binary_bytes is not None:
            assert kind is not None, "This is a bug."
            placed = Placed(kind, next(offsets))
        elif one.numbers is not None:
            assert kind is not None, "This is a bug."
            placed = place(kind, one.numbers, (empty_offset, room))
        inputs.append(msgspec.structs.replace(one.input, placed=placed) if placed is not None else one.input)
    has_numbers = any(one.numbers is not None for one in request.pending)
    return msgspec.structs.replace(request, inputs=tuple(inputs), pending=(), has_numbers=has_numbers)
