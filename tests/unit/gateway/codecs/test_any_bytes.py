"""Every codec over generated input: round trips of every dtype and shape, and bytes of which nothing is promised."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.changed_bytes import changed_bytes
from tests.unit.gateway.codecs.arena_room import NUMPY, decode
from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BodyTooLarge, InvalidRequest, TilewireError, TooBusy, UnknownFormat
from tilewire.service.gateway.codecs.negotiation import CODECS, SNIFF_BYTES, codec_for_body
from tilewire.service.gateway.codecs.protocol import Codec
from tilewire.service.ops.op import TensorType

SHAPES = st.lists(st.integers(0, 3), max_size=8).filter(lambda shape: math.prod(shape) <= 500).map(tuple)
REFUSALS = (InvalidRequest, BodyTooLarge, UnknownFormat, TooBusy)


def refusal_of(codec: Codec, body: bytes) -> TilewireError | None:
    try:
        decode(codec, body, limit=2**16)
    except REFUSALS as refusal:
        return refusal
    return None


def refused_or_inside(codec: Codec, body: bytes) -> None:
    refusal = refusal_of(codec, body)
    if refusal is not None:
        assert 0 < len(refusal.detail) < 1000
        refusal.detail.encode()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(deadline=None, max_examples=150)
@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)), shape=SHAPES)
def test_round_trip(codec: Codec, data: st.DataObject, dtype: str, shape: tuple[int, ...]) -> None:
    if not codec.writes([dtype]):
        return
    raw = data.draw(st.binary(min_size=math.prod(shape), max_size=math.prod(shape)))
    # Small whole numbers: exact in every dtype, so text carries them too.
    array = (np.frombuffer(raw, dtype=np.int8) % 16).astype(NUMPY[dtype]).reshape(shape)
    body = b"".join(codec.encode({"out": TensorType(dtype, shape)}, [memoryview(array.tobytes())]))
    if codec.name == "json":
        body = body.replace(b'{"out":', b'{"out":{"data":').replace(b',"dtype', b',"dtype', 1) + b"}"
    got = decode(codec, body)
    (tensor,) = got.values()
    assert tensor.dtype == array.dtype
    assert tensor.shape == shape
    np.testing.assert_array_equal(tensor, array)


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=300), content_type=st.sampled_from([None, *(codec.content_type for codec in CODECS)]))
def test_any_bytes(body: bytes, content_type: str | None) -> None:
    try:
        codec = codec_for_body(content_type, body[:SNIFF_BYTES])
    except UnknownFormat:
        return
    refused_or_inside(codec, body)


def real_bodies() -> dict[str, bytes]:
    tensors: dict[str, Any] = {"a": np.arange(6, dtype=">f4").reshape(2, 3), "b": np.arange(3, dtype=np.int8)}
    npy, npz, deflated = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, tensors["a"])
    np.savez(npz, **tensors)
    np.savez_compressed(deflated, **tensors)
    return {
        "safetensors": safetensors.numpy.save({"a": tensors["b"], "b": np.zeros((0, 2), np.float32)}),
        "npy": npy.getvalue(),
        "npz": npz.getvalue(),
        "npz deflated": deflated.getvalue(),
        "json": b'{"a": [[1, 2.5], [3, -4e3]], "b": {"data": [1], "shape": [1, 1], "dtype": "int8"}}',
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "body"), real_bodies().items(), ids=real_bodies())
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_real_bodies_with_bytes_changed(kind: str, body: bytes, data: st.DataObject) -> None:
    codec = codec_for_body(None, body[:SNIFF_BYTES])
    refused_or_inside(codec, changed_bytes(data, body))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "dtype", "shape", "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(entry=JSON_VALUES)
def test_any_json(entry: object) -> None:
    import json

    refused_or_inside(codec_for_body("application/json", b""), json.dumps({"a": entry, "dtype": "float32"}).encode())
    header = json.dumps({"a": entry, "b": {"dtype": "I8", "shape": entry, "data_offsets": [0, 1]}}).encode()
    refused_or_inside(
        codec_for_body("application/x-safetensors", b""), len(header).to_bytes(8, "little") + header + b"x"
    )
