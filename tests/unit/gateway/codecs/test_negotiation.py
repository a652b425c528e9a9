"""Which codec: by Content-Type, by first bytes, by Accept."""

from __future__ import annotations

import io

import numpy as np
import pytest
import safetensors.numpy

from tilewire.service.errors import UnknownFormat
from tilewire.service.gateway.codecs.negotiation import CODECS, SNIFF_BYTES, codec_for_accept, codec_for_body
from tilewire.service.gateway.codecs.protocol import Codec

BY_NAME = {codec.name: codec for codec in CODECS}


def bodies() -> dict[str, bytes]:
    array = np.ones(3, dtype=np.float32)
    npy, npz, deflated = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, array)
    np.savez(npz, a=array)
    np.savez_compressed(deflated, a=array)
    return {
        "safetensors": safetensors.numpy.save({"a": array}),
        "npy": npy.getvalue(),
        "npz": npz.getvalue(),
        "npz deflated": deflated.getvalue(),
        "json": b' \r\n\t{"a": 1}',
    }


@pytest.mark.parametrize(("kind", "body"), bodies().items(), ids=bodies())
@pytest.mark.parametrize(
    "content_type", [None, "", "application/octet-stream", "application/x-www-form-urlencoded", "x"]
)
def test_first_bytes_tell(kind: str, body: bytes, content_type: str | None) -> None:
    assert codec_for_body(content_type, body[:SNIFF_BYTES]).name == kind.split(maxsplit=1)[0]


@pytest.mark.parametrize(
    ("content_type", "name"),
    [
        ("application/x-safetensors", "safetensors"),
        ("application/vnd.safetensors", "safetensors"),
        ("Application/X-NPZ", "npz"),
        ("application/x-npy; charset=binary", "npy"),
        (" application/json ;charset=utf-8", "json"),
    ],
)
def test_the_content_type_decides(content_type: str, name: str) -> None:
    assert codec_for_body(content_type, b"\x93NUMPY").name == name


def test_a_safetensors_header_of_123_bytes_is_not_json() -> None:
    assert codec_for_body(None, (123).to_bytes(8, "little") + b'{"a"').name == "safetensors"


def test_json_whose_ninth_byte_is_a_brace_is_json() -> None:
    assert codec_for_body(None, b'{"abc" :{"data": [1]}}').name == "json"


@pytest.mark.parametrize("first", [b"", b"GIF89a", b"\x1f\x8b", b"[1]", bytes(64), b"   "])
def test_nothing_matches(first: bytes) -> None:
    with pytest.raises(UnknownFormat, match="safetensors") as raised:
        codec_for_body("text/csv", first)
    assert "text/csv" in raised.value.detail


@pytest.mark.parametrize(
    ("accept", "body", "name"),
    [
        (None, None, "safetensors"),
        (None, "npy", "npy"),
        ("", "npz", "npz"),
        ("*/*", "json", "json"),
        ("*/*", None, "safetensors"),
        ("application/x-npy", "json", "npy"),
        ("application/*", "json", "json"),
        ("application/octet-stream", "json", "safetensors"),
        ("application/octet-stream", "npz", "npz"),
        ("text/html, application/json;q=0.9, */*;q=0.1", "npy", "json"),
        ("application/json;q=0.2, application/x-npy;q=0.8", None, "npy"),
        ("application/json;q=0, */*", "json", "safetensors"),
        ("APPLICATION/X-NPZ ; Q=0.5", None, "npz"),
        ("application/x-npy;q=nan", None, "npy"),
        ("application/vnd.safetensors", "npy", "safetensors"),
    ],
)
def test_accept(accept: str | None, body: str | None, name: str) -> None:
    assert codec_for_accept(accept, BY_NAME[body] if body else None, ["float32"]).name == name


@pytest.mark.parametrize("accept", ["text/html", "image/*", "application/json;q=0", "*/*;q=0"])
def test_nothing_acceptable(accept: str) -> None:
    with pytest.raises(UnknownFormat, match="Accept"):
        codec_for_accept(accept, BY_NAME["npy"], ["float32"])


@pytest.mark.parametrize("accept", [None, "*/*", "application/x-npy"])
def test_a_dtype_that_the_format_cannot_hold(accept: str | None) -> None:
    with pytest.raises(UnknownFormat, match="bfloat16"):
        codec_for_accept(accept, BY_NAME["npy"], ["bfloat16"])


def test_a_dtype_chooses_among_what_is_accepted() -> None:
    accept = "application/x-npy, application/x-safetensors;q=0.5"
    assert codec_for_accept(accept, None, ["float32"]).name == "npy"
    assert codec_for_accept(accept, None, ["bfloat16"]).name == "safetensors"
    assert codec_for_accept(None, None, ["float8_e5m2"]).name == "safetensors"


@pytest.mark.parametrize("codec", CODECS, ids=BY_NAME)
def test_every_codec_names_itself(codec: Codec) -> None:
    assert codec_for_body(codec.content_type, b"") is codec
    assert codec_for_accept(codec.content_type, None, ["float32"]) is codec


def test_a_form_is_refused_with_what_to_type_instead() -> None:
    with pytest.raises(UnknownFormat, match="--data-binary @file"):
        codec_for_body("multipart/form-data; boundary=x", b"--x\r\n")


def test_other_bodies_are_refused_with_the_formats_that_are_read() -> None:
    with pytest.raises(UnknownFormat, match=r"expected safetensors .*npz.*npy.*json"):
        codec_for_body("text/plain", b"words")
