"""A room of the arena for codec tests: one bytearray, the body at its start, bounded like the real one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BodyTooLarge
from tilewire.service.gateway.codecs.protocol import Codec, Placed

NUMPY = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in DTYPES}


class ArenaRoom:
    def __init__(self, body: bytes, limit: int = 2**20, start: int = 3) -> None:
        # The body starts unaligned: nothing promises a codec anything else.
        self.start = start
        self.used = start + len(body)
        self.segment = memoryview(bytearray(b"\xee" * start + body + b"\xee" * limit))
        self.body = self.segment[start : self.used]
        self.leased: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        if self.used + nbytes > self.segment.nbytes:
            raise BodyTooLarge("body: more than this request may hold")
        offset, self.used = self.used, self.used + nbytes
        self.leased.append((offset, nbytes))
        return offset, self.segment[offset : self.used]

    def read(self, placed: Placed) -> np.ndarray[Any, Any]:
        dtype = NUMPY[placed.type.dtype]
        flat = np.frombuffer(self.segment, dtype, math.prod(placed.type.shape), placed.offset)
        return flat.reshape(placed.type.shape, order="F" if placed.fortran else "C")

    def holds(self, placed: Placed) -> bool:
        """Whether the tensor lies within the body or within one lease."""
        end = placed.offset + placed.type.nbytes
        spans = [(self.start, self.body.nbytes), *self.leased]
        return any(start <= placed.offset and end <= start + nbytes for start, nbytes in spans)


def decode(codec: Codec, body: bytes, limit: int = 2**20) -> dict[str, np.ndarray[Any, Any]]:
    room = ArenaRoom(body, limit)
    placed: Mapping[str, Placed] = codec.decode(room.body, room.start, room)
    assert all(room.holds(tensor) for tensor in placed.values())
    return {name: room.read(tensor) for name, tensor in placed.items()}
