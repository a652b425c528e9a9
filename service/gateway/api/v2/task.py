"""A parsed infer request as a task of the request path, whichever transport it came by. Implements `request.adapter.Task`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.gateway.codecs.protocol import Placed
from tilewire.service.gateway.request.adapter import Encoder, Region
from tilewire.service.gateway.request.programs import OpTask
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.registry import Options

# Name of a program's field in errors.
MODEL = "model"


class AnswerForm(Protocol):
    """Form in which one transport answers."""

    def encoder(self, op: AnyOp, request: InferRequest, outputs: Mapping[str, TensorType]) -> Encoder:
        """Chooses how outputs of these types are answered.

        Raises:
            TilewireError: They cannot be answered as asked.
        """
        ...


class InferTask(OpTask, frozen=True, kw_only=True):
    """An infer request whose operands are known; see `Task`.

    Attributes:
        request: Parsed request.
        lead_bytes: As in `Task`.
        form: Form of the answer.
    """

    request: InferRequest
    lead_bytes: int | None
    form: AnswerForm
    program_field: str = MODEL

    @property
    def options(self) -> Options:
        """Options of the op."""
        return self.op.complete(self.request.options)

    @property
    def placed(self) -> Mapping[str, Placed]:
        """Tensors in the arena by input."""
        return {one.name: one.placed for one in self.request.inputs if one.placed is not None}

    @property
    def residents(self) -> Mapping[str, str]:
        """Names of resident tensors by input."""
        return {
            **self.op.own_residents,
            **{one.name: one.resident for one in self.request.inputs if one.resident is not None},
        }

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
    def store(self) -> str | None:
        """Name under which the only output becomes resident, or None."""
        return next((one.resident for one in self.request.outputs.values()), None)

    @property
    def durable(self) -> bool:
        """The answer waits for the host copy of the output."""
        return self.request.durable

    @property
    def timeout_ns(self) -> int:
        """Longest time until the start, in nanoseconds; 0 for none."""
        return 1000 * self.request.timeout_us

    @property
    def priority(self) -> int:
        """Priority: 0 the default, 1 the most urgent."""
        return self.request.priority

    def encoder(self, outputs: Mapping[str, TensorType]) -> Encoder:
        """Returns the form's encoder for these outputs; refuses outputs that do not fit their regions."""
        for name, wanted in self.request.outputs.items():
            kind, region = outputs[name], wanted.region
            if region is not None and region.byte_size < kind.nbytes:
                raise InvalidRequest(
                    f"{name}: shared_memory_byte_size is {region.byte_size}; {kind} takes {kind.nbytes} bytes"
                )
        return self.form.encoder(self.op, self.request, outputs)
