"""Reads a request as the gateway does, and looks up what was placed in the arena."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.gateway.codecs.arena_room import ArenaRoom
from tilewire.service.gateway.api.v2.decode import decode_request
from tilewire.service.gateway.api.v2.request import InferRequest
from tilewire.service.ops.registry import OPS


def read(op: str, document: object, tail: bytes = b"") -> tuple[InferRequest, dict[str, Any]]:
    """Decodes, and looks up what was placed."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    room = ArenaRoom(text + tail)
    request = decode_request(OPS[op], room.body, room.start, len(text), room)
    placed = [one for one in request.inputs if one.placed is not None]
    assert all(one.placed is not None and room.holds(one.placed) for one in placed)
    return request, {one.name: room.read(one.placed) for one in placed if one.placed is not None}
