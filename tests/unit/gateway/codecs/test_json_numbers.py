"""Long arrays in JSON: read as short ones are, refused as short ones are, and without holding up anybody else."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.codecs.arena_room import decode
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.json_numbers import (
    LONG_BYTES,
    MAX_REST_BYTES,
    PIECE_BYTES,
    WHOLE_BYTES,
    parse_document,
    read_numbers,
)
from tilewire.service.gateway.codecs.json_text import Json
from tilewire.service.gateway.codecs.strict_json import LongArray
from tilewire.service.ops.op import TensorType

CODEC = Json()
MIB = 2**20
LONG = 20_000


def text_of(values: Any, spaces: str) -> bytes:
    return json.dumps(values).replace(", ", f",{spaces}").encode()


@given(
    shape=st.sampled_from(
        [(LONG,), (1, LONG), (LONG, 1), (40, 500), (3, 7000), (2, 2, 6000), (5000, 2, 2), (2, 1, LONG)]
    ),
    spaces=st.sampled_from(["", " ", "\n  "]),
    dtype=st.sampled_from(["float32", "float64", "int8", "int64"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_a_long_array_is_what_the_whole_parser_makes_of_it(
    shape: tuple[int, ...], spaces: str, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-100, 100, shape) if dtype.startswith("int") else rng.normal(size=shape)
    text = b'{"s": "a [ \\" ] \\\\", "x": ' + text_of(values.tolist(), spaces) + b', "y": [1, 2]}'
    document = parse_document(text, "body")
    assert isinstance(document.members["x"], LongArray) is (len(text) > WHOLE_BYTES)
    assert document.members["s"] == 'a [ " ] \\'
    assert document.members["y"] == [1, 2]
    got = read_numbers("x", document.members["x"], dtype)
    assert got.shape == shape
    np.testing.assert_array_equal(np.concatenate(got.pieces), values.reshape(-1))


NUMBERS = ",".join(["1.25"] * LONG)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (f"[{NUMBERS},]", "x: "),
        (f"[,{NUMBERS}]", "x: "),
        (f"[{NUMBERS},,{NUMBERS}]", "x: "),
        (f"[{NUMBERS} 2]", "x: Expecting ',' delimiter in '"),
        (f"[{NUMBERS},nul]", "x: "),
        (f"[{NUMBERS},null]", "holds null"),
        (f"[{NUMBERS},true]", "bool"),
        (f"[{NUMBERS},{{}}]", "an object"),
        (f'[{NUMBERS},"x",{NUMBERS}]', "holds a string"),
        (f'[{{"a":[{NUMBERS}]}}]', "holds an object"),
        (f'{{"data": [1], "shape": [{NUMBERS}]}}', "shape is a long list of numbers"),
        (f'{{"data": [1], "dtype": [{NUMBERS}]}}', "got a long list of numbers"),
        (f"[[{NUMBERS}],[{NUMBERS},1]]", "ragged"),
        (f"[[{NUMBERS}],1]", "ragged"),
        (f"[1,[{NUMBERS}]]", "ragged"),
        (f"[{','.join(['[1,2]'] * LONG)},[1]]", "ragged"),
        (f"[{','.join(['[]'] * LONG)},[1]]", "ragged"),
        ("[" * 70 + NUMBERS + "]" * 70, "dimensions"),
        ("[" * LONG + "]" * LONG, "nested"),
        (f"[{NUMBERS}", "Expecting ',' delimiter: line 1 column"),
        ("[" * 5 * LONG, "nested"),
        (f"[{'9' * 5000},{NUMBERS}]", "x: "),
        (f"[{'9' * WHOLE_BYTES},{NUMBERS}]", "expected numbers"),
        (f"[{NUMBERS},{'9' * 400}]", "float64"),
    ],
    ids=lambda text: text if len(text) < 20 else f"{text[:8]}…{text[-12:]}",
)
def test_a_long_array_that_cannot_be_right(array: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(CODEC, f'{{"x": {array}, "y": [1]}}'.encode())
    assert said in raised.value.detail
    assert len(raised.value.detail) < 400


def test_strings_are_never_taken_for_arrays() -> None:
    text = json.dumps({f"{number:016x}0": "x" for number in range(3000)} | {"x": [0.5] * LONG})
    members = parse_document(text.encode(), "body").members
    assert sum(isinstance(value, LongArray) for value in members.values()) == 1


def test_arrays_below_a_length_stay_in_the_document() -> None:
    short = [1.5] * (LONG_BYTES // 8)
    members = parse_document(json.dumps({str(number): short for number in range(20)}).encode(), "body").members
    assert members == {str(number): short for number in range(20)}


@pytest.mark.parametrize(
    "text", [b'{"a":"' + b"x" * MIB + b'"}', b'{"a": "\\' + b"\\" * MIB, b'{"a":[' + b'"a",' * MIB]
)
def test_other_text_is_bounded(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_REST_BYTES} bytes of text besides long arrays"):
        parse_document(text, "body")


def longest_wait_s(work: Callable[[], object]) -> float:
    """Longest work between two wakes of a thread that wakes each millisecond.

    In processor time of this process: other programs hold up threads, too.
    """
    ending, waits = threading.Event(), [0.0]

    def wake() -> None:
        before_s = time.process_time()
        while not ending.wait(0.001):
            now_s = time.process_time()
            waits.append(now_s - before_s)
            before_s = now_s

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        work()
    finally:
        ending.set()
        waker.join()
    return max(waits)


def read(text: bytes) -> None:
    read_numbers("x", parse_document(text, "body").members["x"], "float32")


def refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(text)


FLAT = b'{"x": [' + b",".join([b"1.5"] * 2 * MIB) + b"]}"
ROWS = json.dumps({"x": np.random.default_rng(0).normal(size=(800, 512)).round(9).tolist()}).encode()
KIND = TensorType("float32", (1000, 1000))
PAYLOAD = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32).tobytes()


TEXTS = {
    "numbers": (read, FLAT),
    "rows": (read, ROWS),
    "empty lists": (read, b'{"x": [' + b",".join([b"[]"] * 2 * MIB) + b"]}"),
    "objects": (refused, b'{"x": [' + b",".join([b"{}"] * 2 * MIB) + b"]}"),
    "long numbers": (refused, b'{"x": [' + b",".join([b"9" * 4000] * 2000) + b"]}"),
    "deep": (refused, b'{"x": ' + b"[" * 4 * MIB + b"]" * 4 * MIB + b"}"),
    "one string": (refused, b'{"x": "' + b"a" * 8 * MIB + b'"}'),
    "many keys": (refused, b"{" + b'"a":{"b":1},' * (MIB // 2) + b'"a":1}'),
    "answer": (lambda payload: CODEC.encode({"out": KIND}, [memoryview(payload)]), PAYLOAD),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_no_thread_waits_for_long_text(name: str) -> None:
    work, text = TEXTS[name]
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    gc.disable()
    try:
        assert min(longest_wait_s(lambda: work(text)) for _ in range(3)) < 0.02
    finally:
        gc.enable()
        sys.setswitchinterval(before_s)


def test_pieces_are_small() -> None:
    (array,) = parse_document(FLAT, "body").members.values()
    assert max(map(len, read_numbers("x", array, "float32").pieces)) <= PIECE_BYTES
