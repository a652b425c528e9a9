"""Holds a parsed request of the Open Inference Protocol as value objects."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tilewire.service.gateway.codecs.json_numbers import Numbers
from tilewire.service.gateway.codecs.protocol import Placed
from tilewire.service.gateway.request.adapter import Region
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.registry import Options


class Input(msgspec.Struct, frozen=True):
    """One input. Its values are in exactly one of `placed`, `region` and `resident`.

    Attributes:
        name: Name of the op's input.
        type: Dtype and shape; None for a resident input whose request leaves them out.
        placed: Place in the arena: of binary data in the body, or of numbers of the JSON text.
        region: Place in shared memory.
        resident: Name of the resident tensor that stands for it.
    """

    name: str
    type: TensorType | None
    placed: Placed | None = None
    region: Region | None = None
    resident: str | None = None


class Output(msgspec.Struct, frozen=True):
    """Requested form of one output.

    Attributes:
        is_binary: Behind the answer's JSON rather than in it.
        region: Place in shared memory; nothing of it is then in the answer.
        resident: Name under which it stays on the device; nothing of it is then in the answer.
    """

    is_binary: bool = False
    region: Region | None = None
    resident: str | None = None

    @property
    def is_sent(self) -> bool:
        """Whether its values are in the answer."""
        return self.region is None and self.resident is None


class InferRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        id: To be echoed; None when the client gave none, or an empty one.
        inputs: In the client's order; none before they are placed.
        outputs: Requested form of outputs by name, in the client's order.
        options: Option values of the op.
        priority: 0 is the default, 1 the most urgent.
        timeout_us: It must have started by then; 0 for never.
        has_numbers: The JSON holds numbers of inputs.
        durable: Wait for the host copy of an output that stays on the device.
        says_final: Over gRPC, say that the answer is the last one of its request. Each request has one.
        pending: Inputs as they were read; none once they are placed.
    """

    id: str | None
    inputs: tuple[Input, ...]
    outputs: Mapping[str, Output]
    options: Options
    priority: int = 0
    timeout_us: int = 0
    has_numbers: bool = False
    durable: bool = False
    says_final: bool = False
    pending: tuple[Pending, ...] = ()


class Pending(msgspec.Struct, frozen=True):
    """An input whose values are not placed yet: `binary_bytes` behind the header, or `numbers` in it."""

    input: Input
    binary_bytes: int | None = None
    numbers: Numbers | None = None
