"""NumPy's npy format, versions 1 to 3: one unnamed tensor. Owns its header grammar; nothing is ever evaluated.

Big-endian payloads are swapped in place; otherwise no payload byte is touched.

Source: the format as documented in `numpy.lib.format`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from tilewire.service.dtypes import BY_NPY, DTYPES, DType
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.protocol import Codec, Placed, Room
from tilewire.service.gateway.codecs.shapes import check_shape
from tilewire.service.ops.op import TensorType

MAGIC = b"\x93NUMPY"
# NumPy's own bound on what it reads without being told to trust the file.
MAX_HEADER_BYTES = 10_000
# Longer headers are read each time: the cache stays small whatever clients send.
CACHED_BYTES = 1024
_ALIGNMENT = 64
_ITEM = re.compile(
    r"""\s*(?P<quote>['"])(?P<key>\w{1,64})(?P=quote)\s*:\s*
        (?:(?P<mark>['"])(?P<text>[^'"\\]{0,64})(?P=mark) | (?P<flag>True|False) | \((?P<dims>[\d,\sL]*)\))
        \s*(?P<more>,|$)""",
    re.VERBOSE | re.ASCII,
)
_DESCR = re.compile(r"(?P<order>[<>=|]?)(?P<code>[a-zA-Z?]\d*)", re.ASCII)


class Npy(Codec):
    """Codec of `application/x-npy`: one unnamed tensor; no bfloat16 and no float8."""

    name = "npy"
    content_type = "application/x-npy"

    def begins(self, first: bytes) -> bool:
        return first.startswith(MAGIC)

    def decode(
        self, body: memoryview, offset: int, room: Room, *, beside: Collection[str] = ()
    ) -> Mapping[str, Placed]:
        return {"": read_npy(body, offset, "npy")}

    def lead_bytes(self, body: memoryview) -> int | None:
        """Length of the header; None for a big-endian payload, which `decode` swaps."""
        text, start = _header_text(body, "npy")
        return None if ">" in text else start

    def writes(self, dtypes: Sequence[str]) -> bool:
        """Whether NumPy has the dtype, of a single tensor."""
        return len(dtypes) == 1 and DTYPES[dtypes[0]].npy is not None

    def encode(self, outputs: Mapping[str, TensorType], payloads: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        ((kind,), (payload,)) = outputs.values(), payloads
        return [npy_header(kind), payload]


@lru_cache(maxsize=512)
def npy_header(kind: TensorType) -> bytes:
    """The bytes that stand before the payload, padded so that it starts aligned to 64."""
    descr = DTYPES[kind.dtype].npy
    assert descr is not None, "This is a bug."
    shape = (
        "".join(f"{dim}, " for dim in kind.shape).rstrip(" ")
        if len(kind.shape) == 1
        else ", ".join(map(str, kind.shape))
    )
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}".encode("ascii")
    prefix_bytes = len(MAGIC) + 4
    text += b" " * (-(prefix_bytes + len(text) + 1) % _ALIGNMENT) + b"\n"
    return MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text


def read_npy(data: memoryview, offset: int, field: str) -> Placed:
    """Reads one npy file and brings its payload into little-endian order.

    Args:
        data: The whole file, writable.
        offset: Offset of `data` in the segment.
        field: Name of the tensor in error texts.

    Raises:
        InvalidRequest: Not an npy file of a dtype that we serve, or of another size than it says.
    """
    text, start = _header_text(data, field)
    parse = _parse_header if len(text) <= CACHED_BYTES else _parse_header.__wrapped__
    descr, fortran, shape = parse(text, field)
    dtype, swapped = _dtype_of(descr, field)
    kind = TensorType(dtype.name, shape)
    if kind.nbytes != data.nbytes - start:
        raise InvalidRequest(f"{field}: {kind} takes {kind.nbytes} bytes, but {data.nbytes - start} follow the header")
    if swapped and kind.nbytes:
        np.frombuffer(data[start:], dtype=f"u{dtype.itemsize}").byteswap(inplace=True)
    return Placed(kind, offset + start, fortran)


def _header_text(data: memoryview, field: str) -> tuple[str, int]:
    """Returns the header dict as text and where the payload starts."""
    prefix = bytes(data[:12])
    if not prefix.startswith(MAGIC):
        raise InvalidRequest(f"{field}: not an npy file; it begins with {prefix[:6]!r}")
    if len(prefix) < 10:
        raise InvalidRequest(f"{field}: the npy header is cut off")
    version = (prefix[6], prefix[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise InvalidRequest(f"{field}: npy version {version[0]}.{version[1]}; expected 1.0, 2.0 or 3.0")
    length_bytes = 2 if version == (1, 0) else 4
    start = 8 + length_bytes
    length = int.from_bytes(prefix[8:start], "little")
    if length > MAX_HEADER_BYTES or start + length > data.nbytes:
        raise InvalidRequest(f"{field}: npy header of {length} bytes; at most {MAX_HEADER_BYTES} and those of the body")
    # Latin-1 reads version 3's UTF-8 as well: every key and dtype that we accept is ASCII.
    return str(data[start : start + length], "latin-1"), start + length


@lru_cache(maxsize=512)
def _parse_header(text: str, field: str) -> tuple[str, bool, tuple[int, ...]]:
    """Parses `{'descr': …, 'fortran_order': …, 'shape': …}`, keys in any order and each once."""
    text = text.strip()
    if re.search(r"['\"]descr['\"]\s*:\s*\[", text):
        raise InvalidRequest(f"{field}: structured dtypes are not served; expected one of {', '.join(BY_NPY)}")
    if not (text.startswith("{") and text.endswith("}")):
        raise InvalidRequest(f"{field}: the npy header is not a dict")
    found: dict[str, re.Match[str]] = {}
    inner, position = text[1:-1].rstrip(), 0
    while position < len(inner):
        item = _ITEM.match(inner, position)
        if item is None or item["key"] in found:
            raise InvalidRequest(f"{field}: npy header not understood at {inner[position : position + 32]!r}")
        found[item["key"]] = item
        position = item.end()
    if found.keys() != {"descr", "fortran_order", "shape"}:
        raise InvalidRequest(f"{field}: the npy header must hold exactly descr, fortran_order and shape")
    descr, flag = found["descr"]["text"], found["fortran_order"]["flag"]
    if descr is None or flag is None:
        raise InvalidRequest(f"{field}: npy header: descr must be a string and fortran_order True or False")
    return descr, flag == "True", _parse_shape(found["shape"]["dims"], field)


def _parse_shape(dims: str | None, field: str) -> tuple[int, ...]:
    """Parses the inside of `(2, 3)`, `(2,)` or `()`; the L is what Python 2 wrote."""
    if dims is None or not re.fullmatch(r"\s*|\s*\d{1,20}L?\s*,\s*|\s*\d{1,20}L?\s*(,\s*\d{1,20}L?\s*)+,?\s*", dims):
        raise InvalidRequest(f"{field}: npy header: shape {str(dims)[:64]!r} is not a tuple of whole numbers")
    return check_shape([int(dim) for dim in re.findall(r"\d+", dims)], f"{field}: shape")


def _dtype_of(descr: str, field: str) -> tuple[DType, bool]:
    """Returns the dtype and whether its bytes are in the other order."""
    match = _DESCR.fullmatch(descr)
    code = match["code"] if match else ""
    dtype = BY_NPY.get(f"<{code}") or BY_NPY.get(f"|{code}")
    if match is not None and dtype is not None:
        return dtype, match["order"] == ">" and dtype.itemsize > 1
    if code in ("V1", "V2"):
        raise InvalidRequest(f"{field}: dtype {descr!r}: bfloat16 and float8 have no npy form; use safetensors")
    raise InvalidRequest(f"{field}: dtype {descr[:64]!r} is not served; expected one of {', '.join(BY_NPY)}")
