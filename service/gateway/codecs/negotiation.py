"""Which codec reads a body and which writes the answer. Owns content types and Accept; no codec."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewire.service.errors import UnknownFormat
from tilewire.service.gateway.codecs.json_text import Json
from tilewire.service.gateway.codecs.npy import Npy
from tilewire.service.gateway.codecs.npz import Npz
from tilewire.service.gateway.codecs.protocol import Codec
from tilewire.service.gateway.codecs.safetensors import Safetensors

# Number of a body's first bytes that determine its format. JSON may be preceded by blanks: those within this many are
# skipped.
SNIFF_BYTES = 64

_SAFETENSORS = Safetensors()
# In the order in which an answer's format is chosen when Accept likes several the same, and in which a body's is looked for.
# Safetensors before JSON: a header of 123 bytes begins with '{' too, while JSON text is never so small a length.
CODECS: tuple[Codec, ...] = (_SAFETENSORS, Npz(), Npy(), Json())

_BY_TYPE: dict[str, Codec] = {
    "application/vnd.safetensors": _SAFETENSORS,
    **{codec.content_type: codec for codec in CODECS},
}
# What curl says of any body when it is told nothing else.
_CURLS_OWN = "application/x-www-form-urlencoded"
_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)", re.ASCII)


def codec_for_body(content_type: str | None, first_bytes: bytes) -> Codec:
    """Picks the codec that reads a body.

    Args:
        content_type: The header's value, or None. A type that names no format leaves the choice to the bytes.
        first_bytes: The first `SNIFF_BYTES` of the body, or all of a shorter one.

    Raises:
        UnknownFormat: Neither the type nor the bytes are of a format that is read.
    """
    named = _BY_TYPE.get(_essence(content_type or ""))
    codec = named or next((one for one in CODECS if one.begins(first_bytes)), None)
    if codec is None:
        if _essence(content_type or "").startswith("multipart/"):
            raise UnknownFormat("body: forms are not read; send the file itself, with curl by --data-binary @file")
        seen = f"Content-Type {content_type[:64]!r}" if content_type else "no Content-Type"
        begin = f"first bytes {first_bytes[:8]!r}" if first_bytes else "and it is empty"
        raise UnknownFormat(f"body: {seen}, {begin}; expected {_spoken(CODECS)}{advice_for(content_type)}")
    return codec


def advice_for(content_type: str | None) -> str:
    """Returns what to type instead where a body that cannot be read may come from curl: its -d leaves bytes of files out."""
    is_of_curl = _essence(content_type or "") == _CURLS_OWN
    return "; send a file with curl by --data-binary @file, for -d leaves bytes out" if is_of_curl else ""


def codec_for_accept(accept: str | None, body: Codec | None, dtypes: Sequence[str]) -> Codec:
    """Picks the codec that writes the answer.

    Args:
        accept: The header's value, or None, which means anything.
        body: The codec of the request's body, preferred among equals; None prefers safetensors.
        dtypes: Dtypes of the answer's tensors: only formats that can hold them come into question.

    Raises:
        UnknownFormat: No format that Accept names can be written.
    """
    preferred = body or _SAFETENSORS
    # A client that names nothing gets what it sent, never a surprise.
    is_open = accept is None or accept.strip() in ("", "*/*")
    if is_open and preferred.writes(dtypes):
        return preferred
    order = (preferred,) if is_open else (preferred, *(codec for codec in CODECS if codec is not preferred))
    ranges = {"*/*": 1.0} if is_open else qualities_of(accept or "")
    best = max(
        (codec for codec in order if codec.writes(dtypes)), key=lambda codec: _quality(codec, ranges), default=None
    )
    if best is None or _quality(best, ranges) == 0:
        able = [codec for codec in CODECS if codec.writes(dtypes)]
        wanted = repr(accept[:64]) if accept else f"{preferred.name}, the format of the body,"
        spelled = dtypes[0] if len(dtypes) == 1 else f"{len(dtypes)} tensors of {', '.join(dtypes)}"
        is_known = any(_quality(codec, ranges) for codec in CODECS)
        why = f"cannot hold {spelled}" if is_known else "names no format that is written here"
        raise UnknownFormat(f"Accept: {wanted} {why}; type one of {_spoken(able)}")
    return best


def _essence(value: str) -> str:
    return value.partition(";")[0].strip().lower()


def _spoken(codecs: tuple[Codec, ...] | list[Codec]) -> str:
    return ", ".join(f"{codec.name} ({codec.content_type})" for codec in codecs)


def qualities_of(accept: str) -> dict[str, float]:
    """Returns the media ranges of an Accept header and their q; a q that is no number counts as 1."""
    ranges: dict[str, float] = {}
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((value.removeprefix("q=") for value in parameters if value.startswith("q=")), "1")
        if media:
            ranges[media] = float(quality) if _QUALITY.fullmatch(quality) else 1.0
    return ranges


def _quality(codec: Codec, ranges: dict[str, float]) -> float:
    """Returns the quality of a codec: that of the most specific range of Accept that matches it."""
    for media in (codec.content_type, *codec.aliases, "application/*", "*/*"):
        if media in ranges:
            return ranges[media]
    return 0.0
