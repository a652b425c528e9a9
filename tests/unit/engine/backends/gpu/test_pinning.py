"""Memory is cut at the seams of what is pinned, and copies lie between them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.gpu.pinning import PIECE_BYTES, spans_of
from tilewire.service.engine.backends.gpu.staging import LARGE_BYTES, move
from tilewire.service.ops.op import TensorType

P = PIECE_BYTES


@pytest.mark.parametrize(
    ("offset", "nbytes", "spans"),
    [
        (0, 0, []),
        (P - 1, 0, []),
        (P, 1, [(0, 1)]),
        (P, P, [(0, P)]),
        (P - 1, 1, [(0, 1)]),
        (P - 1, 2, [(0, 1), (1, 2)]),
        (3 * P + 5, 2 * P, [(0, P - 5), (P - 5, 2 * P - 5), (2 * P - 5, 2 * P)]),
        (7 * P, 2 * P + 1, [(0, P), (P, 2 * P), (2 * P, 2 * P + 1)]),
    ],
)
def test_seams_are_at_multiples_of_an_offset(offset: int, nbytes: int, spans: list[tuple[int, int]]) -> None:
    assert spans_of(offset, nbytes) == spans


@pytest.mark.slow
@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("is_foreign", [True, False])
@pytest.mark.parametrize("tail", [1, LARGE_BYTES - 1, LARGE_BYTES])
def test_every_byte_is_moved_once(is_gather: bool, is_foreign: bool, tail: int) -> None:
    memory = torch.zeros(3 * P, dtype=torch.uint8)
    # After one byte 5 MiB, a whole piece, and the tail in a third.
    begin, nbytes = P - 5 * 2**20, 5 * 2**20 + P + tail
    place = HostBytes(memory, TensorType("int8", (1 + nbytes,)), begin - 1, is_foreign=is_foreign)
    host = memory[begin : begin + nbytes]
    device = torch.zeros_like(host)
    source, target = (host, device) if is_gather else (device, host)
    source.copy_(torch.arange(source.numel()).remainder(251).to(torch.uint8))
    ranges = move(device, place, is_gather=is_gather, skipped=1)
    assert [one.nbytes for one in ranges] == ([tail] if is_foreign and tail < LARGE_BYTES else [])
    for one in ranges:
        assert not target[-tail:].any()
        ctypes.memmove(one.destination, one.source, one.nbytes)
    assert torch.equal(source, target)
    assert not (memory[:begin].any())
    assert not (memory[begin + host.numel() :].any())
