"""The contract of a body format: what a codec reads out of a body and writes around a payload.

Owns the value objects and the Protocols; knows no format and no HTTP. Runs in a gateway's event loop, so a codec looks
at headers only: payload bytes stay where they were received unless the format has them deflated or as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tilewire.service.ops.op import TensorType


class Placed(msgspec.Struct, frozen=True):
    """A tensor whose bytes lie in the gateway's arena segment.

    Attributes:
        type: Dtype and shape.
        offset: Of its first byte, from the start of the segment. Not aligned to anything.
        fortran: Its elements are in Fortran order rather than C order.
    """

    type: TensorType
    offset: int
    fortran: bool = False


class Room(Protocol):
    """More of the arena, for tensors that do not stand in the body as they are."""

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """Leases `nbytes` more for as long as the request lives.

        Returns:
            The offset in the segment and a writable view of exactly `nbytes`.

        Raises:
            BodyTooLarge: More than one request may hold.
            TooBusy: No room right now.
        """
        ...


class Codec(Protocol):
    """One body format.

    Attributes:
        name: Short name, as in the docs: `safetensors`, `npz`, `npy`, `json`.
        content_type: What our answers in this format say.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def content_type(self) -> str:
        """See the class."""
        ...

    def decode(self, body: memoryview, offset: int, room: Room) -> Mapping[str, Placed]:
        """Reads the metadata of a whole body.

        Args:
            body: The bytes as received; writable, and read by the engine from the same place later.
            offset: Of `body` in the segment.
            room: Where inflated or parsed tensors go.

        Returns:
            Tensors by name; an unnamed tensor has the name "".

        Raises:
            InvalidRequest: Anything that cannot be right; the detail names the tensor or the header field.
            BodyTooLarge: It inflates past the limit.
        """
        ...

    def writes(self, dtype: str) -> bool:
        """Whether the format can hold the dtype."""
        ...

    def encode(self, name: str, kind: TensorType, payload: memoryview) -> Sequence[bytes | memoryview]:
        """Wraps one result for sending; the payload is passed through, not copied, where the format allows.

        Args:
            name: Of the tensor; formats without names drop it.
            kind: Its dtype and shape.
            payload: Its bytes in C order.
        """
        ...
