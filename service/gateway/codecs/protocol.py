"""Defines the interface of a body format: what a codec reads out of a body and writes around a payload.

A codec reads headers only: payload bytes stay where they were received unless the format has them deflated or as text. Runs
in a gateway's event loop, or in a thread when there is much to go through.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Protocol

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.op import TensorType


class Placed(msgspec.Struct, frozen=True):
    """A tensor whose bytes lie in the gateway's arena segment.

    Attributes:
        type: Dtype and shape.
        offset: Offset of its first byte in the segment. Not aligned.
        fortran: Whether elements are in Fortran order rather than C order.
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


# Most tensors of a body: as many as a program has values. Each costs a slot, or an object, before its name is checked.
MAX_TENSORS = 128


# Longest name that a detail repeats, in characters.
MAX_SHOWN = 64


def field_of(name: str) -> str:
    """Returns how the detail of an error begins that is about one tensor of a body: with its name."""
    return name[:MAX_SHOWN] or "unnamed tensor"


def check_count(count: int, what: str) -> None:
    """Refuses a body of more tensors than any op or program has inputs.

    Raises:
        InvalidRequest: More than `MAX_TENSORS`; the detail begins with `what`.
    """
    if count > MAX_TENSORS:
        raise InvalidRequest(f"{what}: {count} tensors; at most {MAX_TENSORS} are read")


class Codec(abc.ABC):
    """One body format. What has a default is as in formats of bytes behind a header.

    Attributes:
        name: Short name, as in the docs: `safetensors`, `npz`, `npy`, `json`.
        content_type: Content type of answers in this format.
        aliases: Types that a client may accept an answer under besides.
        is_text: Numbers are text, which costs much more to read and write than bytes.
    """

    name: ClassVar[str]
    content_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ("application/octet-stream",)
    is_text: ClassVar[bool] = False

    @abc.abstractmethod
    def begins(self, first: bytes) -> bool:
        """Whether a body that begins with these bytes, 64 or all of a shorter one, is in this format."""

    @abc.abstractmethod
    def decode(
        self, body: memoryview, offset: int, room: Room, *, beside: Collection[str] = ()
    ) -> Mapping[str, Placed]:
        """Reads the metadata of a whole body.

        Args:
            body: The bytes as received; writable, and read by the engine from the same place later.
            offset: Offset of `body` in the segment.
            room: Memory for inflated or parsed tensors.
            beside: Names of `metadata` that the call reads: they are no tensors, where a format has both in one place.

        Returns:
            Tensors by name; an unnamed tensor has the name "".

        Raises:
            InvalidRequest: Anything that cannot be right; the detail names the tensor or the header field.
            BodyTooLarge: It inflates past the limit.
        """

    def metadata(self, body: memoryview) -> Mapping[str, str]:
        """Reads the strings that stand beside the tensors, by name; none where the format has no place for them.

        Raises:
            InvalidRequest: Not a body of this format.
        """
        return {}

    def work_bytes(self, body: memoryview) -> int:
        """Bytes of text and of inflated data that `decode` goes through.

        Raises:
            InvalidRequest: Not a body of this format.
        """
        return 0

    def lead_bytes(self, body: memoryview) -> int | None:
        """Length of a decoded body's begin that determines what `decode` finds.

        Returns:
            None when more than a begin determines it, or when `decode` changes payloads.
        """
        return None

    def writes(self, dtypes: Sequence[str]) -> bool:
        """Whether the format can hold tensors of these dtypes, and as many."""
        return all(dtype in DTYPES for dtype in dtypes)

    def encode_work_bytes(self, nbytes: int) -> int:
        """Bytes of text that would take as long to write as tensors of `nbytes` in this format."""
        return 0

    @abc.abstractmethod
    def encode(self, outputs: Mapping[str, TensorType], payloads: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        """Wraps results for sending; payloads are passed through, not copied, where the format allows.

        Args:
            outputs: Dtypes and shapes by name; formats without names drop those.
            payloads: Bytes of each in C order.
        """
