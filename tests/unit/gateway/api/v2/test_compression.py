"""Content codings: what is chosen, round trips, streams that are none, and the bound on what a body inflates to."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewire.service.errors import BodyTooLarge, InvalidRequest, TilewireError, TooBusy, UnknownFormat
from tilewire.service.gateway.api.v2.compression import (
    MAX_MEMBERS,
    Coding,
    coding_of_answer,
    coding_of_body,
    deflate,
    inflate,
)
from tilewire.service.gateway.auth.flows import NO_FLOW
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.room import Room
from tilewire.service.ipc.arena import SLOT_ALIGN, Arena, Segment

COMPRESS: dict[Coding, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
MIB = 2**20


def inflated(data: bytes, coding: Coding, *, max_bytes: int = MIB, arena_bytes: int = 8 * MIB, lead: int = 0) -> bytes:
    """Inflates through a real arena; nothing may be held at the end."""
    segment = Segment.create("tests", arena_bytes)
    arena = Arena(segment)
    leases = Admission(Room(arena, 0.0), 1, arena_bytes).admit(NO_FLOW)
    try:
        source = asyncio.run(leases.wait(len(data)))
        source.view[:] = data
        target = asyncio.run(inflate(source, leases, coding, max_bytes, lead))
        assert arena.used_bytes <= target.nbytes + SLOT_ALIGN, "the compressed slot went back"
        return bytes(target.view[lead:])
    finally:
        leases.release()
        assert arena.used_bytes == 0
        segment.close()


@pytest.mark.parametrize("coding", COMPRESS)
@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=5000), lead=st.integers(0, 64))
def test_round_trips(coding: Coding, data: bytes, lead: int) -> None:
    assert inflated(COMPRESS[coding](data), coding, lead=lead) == data


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB])
def test_bodies_of_many_steps(coding: Coding, nbytes: int) -> None:
    data = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    assert inflated(COMPRESS[coding](data), coding, max_bytes=5 * MIB, arena_bytes=32 * MIB) == data


def test_what_does_not_shrink() -> None:
    data = b"".join(zlib.crc32(number.to_bytes(4, "little")).to_bytes(4, "little") for number in range(MIB // 4))
    assert inflated(gzip.compress(data), "gzip") == data


@pytest.mark.parametrize("pieces", [[b"", b"a"], [b"a" * MIB, b"", b"b" * 3], [b"x" * 300] * 5000])
def test_members_of_a_gzip_stream_follow_one_another(pieces: list[bytes]) -> None:
    whole = b"".join(map(gzip.compress, pieces))
    assert inflated(whole, "gzip", max_bytes=2 * MIB) == b"".join(pieces)
    with pytest.raises(InvalidRequest, match="cut off"):
        inflated(whole[:-1], "gzip", max_bytes=2 * MIB)
    with pytest.raises(BodyTooLarge):
        inflated(whole, "gzip", max_bytes=sum(map(len, pieces)) - 1)


def test_members_are_bounded() -> None:
    assert inflated(gzip.compress(b"") * MAX_MEMBERS, "gzip") == b""
    with pytest.raises(InvalidRequest, match="members"):
        inflated(gzip.compress(b"") * (MAX_MEMBERS + 1), "gzip")


@pytest.mark.parametrize("coding", COMPRESS)
def test_a_bomb_is_refused_at_the_limit(coding: Coding) -> None:
    bomb = COMPRESS[coding](bytes(256 * MIB))
    assert len(bomb) < MIB
    with pytest.raises(BodyTooLarge, match="inflates"):
        inflated(bomb, coding)


def test_exactly_the_limit_passes() -> None:
    assert len(inflated(gzip.compress(bytes(MIB)), "gzip", max_bytes=MIB)) == MIB
    with pytest.raises(BodyTooLarge):
        inflated(gzip.compress(bytes(MIB + 1)), "gzip", max_bytes=MIB)


def test_no_room_is_too_busy_or_too_large() -> None:
    with pytest.raises((TooBusy, BodyTooLarge)):
        inflated(gzip.compress(bytes(4 * MIB)), "gzip", max_bytes=4 * MIB, arena_bytes=2 * MIB)


@pytest.mark.parametrize("coding", COMPRESS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_streams_that_are_none(coding: Coding, data: st.DataObject) -> None:
    whole = bytearray(COMPRESS[coding](b"tensors " * 50))
    match data.draw(st.sampled_from(["cut", "longer", "changed", "other"])):
        case "cut":
            broken = bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        case "longer":
            broken = bytes(whole) + data.draw(st.binary(min_size=1, max_size=5))
        case "changed":
            # The checksum; bits elsewhere may be without meaning.
            whole[-5 if coding == "gzip" else -1] ^= data.draw(st.integers(1, 255))
            broken = bytes(whole)
        case _:
            broken = data.draw(st.binary(max_size=40))
    with pytest.raises(InvalidRequest, match=coding):
        inflated(broken, coding)


def test_a_raw_deflate_stream_is_no_zlib_stream() -> None:
    deflater = zlib.compressobj(wbits=-15)
    with pytest.raises(TilewireError):
        inflated(deflater.compress(b"tensors") + deflater.flush(), "deflate")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("identity", None),
        ("gzip", "gzip"),
        (" GZip ", "gzip"),
        ("deflate", "deflate"),
        ("x-gzip", "gzip"),
    ],
)
def test_codings_of_bodies(value: str | None, expected: str | None) -> None:
    assert coding_of_body(value) == expected


@pytest.mark.parametrize("value", ["", "br", "gzip, gzip", "gzip,deflate", "x-deflate", "*"])
def test_codings_that_are_not_offered(value: str) -> None:
    if value:
        with pytest.raises(UnknownFormat, match="Content-Encoding"):
            coding_of_body(value)
    else:
        assert coding_of_body(value) is None


@pytest.mark.parametrize(
    ("accept", "of_text", "of_tensor"),
    [
        (None, None, None),
        ("", None, None),
        ("identity", None, None),
        ("*", None, None),
        ("br", None, None),
        ("gzip", "gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("GZIP;q=0.5", "gzip", "gzip"),
        ("gzip, identity", "gzip", "gzip"),
        ("gzip;q=0", None, None),
        ("gzip;q=0.000, deflate", "deflate", "deflate"),
        ("gzip, deflate, br", "gzip", None),
        ("gzip, deflate, br, zstd", "gzip", None),
        ("deflate, br", "deflate", None),
    ],
)
def test_codings_of_answers(accept: str | None, of_text: str | None, of_tensor: str | None) -> None:
    assert coding_of_answer(accept, is_text=True, nbytes=2000) == of_text
    assert coding_of_answer(accept, is_text=False, nbytes=2000) == of_tensor


def test_a_short_text_is_compressed_by_choice_only() -> None:
    assert coding_of_answer("gzip, deflate", is_text=True, nbytes=100) is None
    assert coding_of_answer("gzip", is_text=True, nbytes=100) == "gzip"


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("size", [1, 100, 2**17])
def test_answers_are_readable_by_others(coding: Coding, size: int) -> None:
    chunks: list[bytes | memoryview] = [b"head", memoryview(bytes(size))]
    answer = deflate(chunks, coding)
    plain = gzip.decompress(answer) if coding == "gzip" else zlib.decompress(answer)
    assert plain == b"head" + bytes(size)
