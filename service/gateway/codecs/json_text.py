"""Tensors as JSON text, for trying things out in `/docs`. Owns the text form; numbers are copied into the arena."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from tilewire.service.dtypes import DTYPES, dtype_named
from tilewire.service.errors import BeyondLimit, BodyTooLarge, InvalidRequest
from tilewire.service.gateway.codecs.json_numbers import Numbers, parse_document, read_numbers
from tilewire.service.gateway.codecs.protocol import Codec, Placed, Room, check_count, field_of
from tilewire.service.gateway.codecs.rests import rest
from tilewire.service.gateway.codecs.shapes import check_shape
from tilewire.service.gateway.codecs.strict_json import kind_of, refuse_overflow
from tilewire.service.ops.op import TensorType

# A Python list takes up to 20 times its text: past this, binary formats suit better.
MAX_BODY_BYTES = 64 * 2**20
MAX_OUT_ELEMENTS = 2**22
WHAT = "JSON body"
# Key of a body that carries the program to run.
PROGRAM_KEY = "program"
# Numbers that are written at once: a quarter of a millisecond.
PIECE_ELEMENTS = 2**12
# Letters of an answer that are joined and encoded at once: about a millisecond.
CHUNK_LETTERS = 2**19

_NUMPY: dict[str, np.dtype[np.generic]] = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in DTYPES}


class Json(Codec):
    """Codec of `application/json`: `{"a": [[…]], "b": [[…]], "dtype": "float32"}`."""

    name = "json"
    content_type = "application/json"
    aliases = ()
    is_text = True

    def begins(self, first: bytes) -> bool:
        return first.lstrip(b" \t\r\n").startswith(b"{")

    def decode(
        self, body: memoryview, offset: int, room: Room, *, beside: Collection[str] = ()
    ) -> Mapping[str, Placed]:
        if body.nbytes > MAX_BODY_BYTES:
            raise BodyTooLarge(
                f"{WHAT}: {body.nbytes} bytes; at most {MAX_BODY_BYTES} are read, use safetensors for more"
            )
        whole = parse_document(body, WHAT)
        document = whole.members
        for name in beside:
            document.pop(name, None)
        check_count(len(document) - ("dtype" in document), WHAT)
        default = _dtype(document.pop("dtype", "float32"), "dtype")
        tensors: dict[str, Placed] = {}
        infinite: dict[str, str] = {}
        for name, value in document.items():
            dtype, shape, numbers = _read_tensor(field_of(name), value, default)
            if numbers.has_infinity:
                infinite[name] = field_of(name)
            tensors[name] = place(TensorType(dtype, shape), numbers, (offset, room))
        if infinite:
            refuse_overflow(whole.rest, WHAT, infinite)
        return tensors

    def metadata(self, body: memoryview) -> Mapping[str, str]:
        program = parse_document(body, WHAT).members.get(PROGRAM_KEY)
        return {} if program is None else {PROGRAM_KEY: json.dumps(program, default=_refuse_long)}

    def work_bytes(self, body: memoryview) -> int:
        """All of the text."""
        return body.nbytes

    def encode_work_bytes(self, nbytes: int) -> int:
        """All that is formatted."""
        return nbytes

    def encode(self, outputs: Mapping[str, TensorType], payloads: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        """Writes the numbers as text; an empty tensor is `[]`, and its shape says the rest.

        Of several tensors, `dtype` and `shape` are objects by name.

        Raises:
            BeyondLimit: More elements than are worth writing as text.
        """
        check_elements(outputs)
        pieces: list[Iterable[str]] = []
        for (name, kind), payload in zip(outputs.items(), payloads, strict=True):
            pieces += [(f"{',' if pieces else '{'}{json.dumps(name)}:",), text_of(kind, payload, kind.shape)]
        dtypes: object = {name: kind.dtype for name, kind in outputs.items()}
        shapes: object = {name: kind.shape for name, kind in outputs.items()}
        if len(outputs) == 1:
            ((dtypes, shapes),) = [(kind.dtype, kind.shape) for kind in outputs.values()]
        pieces.append((f",{msgspec.json.encode({'dtype': dtypes, 'shape': shapes}).decode()[1:]}",))
        return joined(chain.from_iterable(pieces))


def check_elements(outputs: Mapping[str, TensorType]) -> None:
    """Refuses what is too much to be written as text.

    Raises:
        BeyondLimit: More elements than are worth it.
    """
    for name, kind in outputs.items():
        if kind.num_elements > MAX_OUT_ELEMENTS:
            raise BeyondLimit(
                f"{name}: {kind} has more than the {MAX_OUT_ELEMENTS} elements that JSON carries; ask for binary data"
            )


def text_of(kind: TensorType, payload: memoryview, shape: tuple[int, ...]) -> Iterator[str]:
    """The elements as nested lists of this shape, in C order and in pieces; `[]` without elements.

    Numbers are written as Python and Triton write them: NaN and infinities bare.
    """
    if not kind.num_elements:
        yield "[]"
        return
    yield from _pieces(_numbers(kind, payload).reshape(shape))


def joined(pieces: Iterable[str]) -> list[bytes]:
    """Joins pieces of text to chunks of a size that is soon copied."""
    chunks: list[bytes] = []
    chunk: list[str] = []
    length = 0
    for piece in pieces:
        chunk.append(piece)
        length += len(piece)
        if length > CHUNK_LETTERS:
            chunks.append("".join(chunk).encode())
            chunk.clear()
            length = 0
    return [*chunks, "".join(chunk).encode()]


def _pieces(array: npt.NDArray[np.generic]) -> Iterator[str]:
    """Text of an array, in pieces; other threads get the interpreter's lock between them."""
    if array.size <= PIECE_ELEMENTS:
        yield _text(array)
        return
    rows_at_once = max(1, PIECE_ELEMENTS * len(array) // array.size)
    yield "["
    for at in range(0, len(array), rows_at_once):
        rest()
        if at:
            yield ","
        piece = array[at : at + rows_at_once]
        if piece.size <= PIECE_ELEMENTS:
            yield _text(piece)[1:-1]
        else:
            yield from _pieces(piece[0])
    yield "]"


def _text(array: npt.NDArray[np.generic]) -> str:
    text = msgspec.json.encode(array.tolist()).decode()
    if "null" not in text:
        return text
    # msgspec's word for each NaN and infinity.
    odd = array[~np.isfinite(array)].tolist()
    return "".join(chain.from_iterable(zip(text.split("null"), [*map(json.dumps, odd), ""], strict=True)))


def _numbers(kind: TensorType, payload: memoryview) -> npt.NDArray[np.generic]:
    array = np.frombuffer(payload, dtype=_NUMPY[kind.dtype])
    # 8- and 16-bit floats have no Python number of their own; float32 holds each of them exactly.
    return array.astype(np.float32) if DTYPES[kind.dtype].is_float and array.itemsize < 4 else array


def _refuse_long(value: object) -> object:
    raise InvalidRequest(f"program: holds {kind_of(value)}; constants go beside it, as tensors")


def _dtype(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}: expected the name of a dtype; got {kind_of(value)}")
    return dtype_named(value, field=field).name


def _read_tensor(field: str, value: object, default: str) -> tuple[str, tuple[int, ...], Numbers]:
    """Returns dtype, shape and numbers of one entry of the body."""
    if isinstance(value, str) and value.startswith("@"):
        raise InvalidRequest(f"{field}: a resident is named in the query, not in the body: type ?{field}={value[:256]}")
    if value is None or isinstance(value, str | bool):
        raise InvalidRequest(
            f"{field}: expected numbers in nested lists, got {kind_of(value)}; options go into the query"
        )
    if not isinstance(value, dict):
        numbers = read_numbers(field, value, default)
        return default, numbers.shape, numbers
    if "data" not in value or not value.keys() <= {"data", "dtype", "shape"}:
        raise InvalidRequest(f"{field}: expected numbers, nested lists, or an object of data, dtype and shape")
    dtype = _dtype(value.get("dtype", default), f"{field}: dtype")
    numbers = read_numbers(field, value["data"], dtype)
    shape = numbers.shape
    if "shape" in value:
        shape = check_shape(value["shape"], f"{field}: shape")
        if math.prod(shape) != numbers.count:
            raise InvalidRequest(f"{field}: shape {list(shape)} does not hold {numbers.count} numbers")
    return dtype, shape, numbers


def place(kind: TensorType, numbers: Numbers, where: tuple[int, Room]) -> Placed:
    """Writes numbers into the arena.

    Args:
        kind: Dtype and shape.
        numbers: As many as the shape holds.
        where: Offset of an empty tensor, and room for any other.

    Raises:
        BodyTooLarge: More than the request may hold.
        TooBusy: There is no room right now.
    """
    offset, room = where
    if not numbers.pieces:
        return Placed(kind, offset)
    offset, view = room.take(kind.nbytes)
    into, at = np.frombuffer(view, dtype=_NUMPY[kind.dtype]), 0
    with np.errstate(all="ignore"):  # past the range of a float is infinity, as in NumPy
        for piece in numbers.pieces:
            into[at : at + len(piece)] = piece
            at += len(piece)
    return Placed(kind, offset)
