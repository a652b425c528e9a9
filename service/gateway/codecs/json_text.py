"""Tensors as JSON text, for trying things out in `/docs`. Owns the text form; numbers are copied into the arena.

Every level of nested lists is checked with set operations rather than per element, which keeps a body of millions of
numbers near the speed of the parser.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilewire.service.dtypes import DTYPES, dtype_named
from tilewire.service.errors import BeyondLimit, BodyTooLarge, InvalidRequest
from tilewire.service.gateway.codecs.protocol import Placed, Room
from tilewire.service.gateway.codecs.shapes import MAX_RANK, check_shape
from tilewire.service.gateway.codecs.strict_json import parse_object
from tilewire.service.ops.op import TensorType

# A Python list takes up to 20 times its text: past this, binary formats are what the user wants.
MAX_BODY_BYTES = 64 * 2**20
MAX_OUT_ELEMENTS = 2**22
# Key of a body that is no tensor, but a program to run.
PROGRAM_KEY = "program"
# Numbers that are written at once: about a millisecond.
PIECE_ELEMENTS = 2**11

_NUMPY: dict[str, np.dtype[np.generic]] = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in DTYPES}


class Json:
    """Codec of `application/json`: `{"a": [[…]], "b": [[…]], "dtype": "float32"}`."""

    name = "json"
    content_type = "application/json"
    is_text = True

    def decode(self, body: memoryview, offset: int, room: Room) -> Mapping[str, Placed]:
        """Parses the text and writes its tensors into `room`; see `Codec.decode`."""
        if body.nbytes > MAX_BODY_BYTES:
            raise BodyTooLarge(
                f"JSON body: {body.nbytes} bytes; at most {MAX_BODY_BYTES} are read, use safetensors for more"
            )
        document = parse_object(body, "JSON body")
        document.pop(PROGRAM_KEY, None)
        default = _dtype(document.pop("dtype", "float32"), "dtype")
        tensors: dict[str, Placed] = {}
        for name, value in document.items():
            dtype, shape, numbers = _read_tensor(repr(name[:64]), value, default)
            tensors[name] = place(repr(name[:64]), TensorType(dtype, shape), numbers, (offset, room))
        return tensors

    def metadata(self, body: memoryview) -> Mapping[str, str]:
        """Returns the text of the key `program`, an object; see `Codec.metadata`."""
        program = parse_object(body, "JSON body").get(PROGRAM_KEY)
        return {} if program is None else {PROGRAM_KEY: json.dumps(program)}

    def work_bytes(self, body: memoryview) -> int:
        """All of the text."""
        return body.nbytes

    def lead_bytes(self, body: memoryview) -> int | None:
        """None: the numbers themselves are text."""
        return None

    def writes(self, dtypes: Sequence[str]) -> bool:
        """Whether the format can hold the dtypes: all of ours, as numbers."""
        return all(dtype in DTYPES for dtype in dtypes)

    def encode(self, outputs: Mapping[str, TensorType], payloads: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        """Writes the numbers as text; an empty tensor is `[]`, and its shape says the rest.

        Of several tensors, `dtype` and `shape` are objects by name.

        Raises:
            BeyondLimit: More elements than are worth writing as text.
        """
        check_elements(outputs)
        members = [
            f"{json.dumps(name)}:{text_of(kind, payload, kind.shape)}"
            for (name, kind), payload in zip(outputs.items(), payloads, strict=True)
        ]
        dtypes: object = {name: kind.dtype for name, kind in outputs.items()}
        shapes: object = {name: kind.shape for name, kind in outputs.items()}
        if len(outputs) == 1:
            ((dtypes, shapes),) = [(kind.dtype, kind.shape) for kind in outputs.values()]
        members.append(f'"dtype":{_dumps(dtypes)},"shape":{_dumps(shapes)}')
        return [f"{{{','.join(members)}}}".encode()]


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


def text_of(kind: TensorType, payload: memoryview, shape: tuple[int, ...]) -> str:
    """The elements as nested lists of this shape, in C order; `[]` without elements.

    Numbers are written as Python and Triton write them: NaN and infinities bare.
    """
    if not kind.num_elements:
        return "[]"
    return "".join(_pieces(_numbers(kind, payload).reshape(shape)))


def _pieces(array: npt.NDArray[np.generic]) -> Iterator[str]:
    """Text of an array, in pieces: the interpreter's lock can be given up between them."""
    if array.size <= PIECE_ELEMENTS:
        yield _dumps(array.tolist())
        return
    rows_at_once = max(1, PIECE_ELEMENTS * len(array) // array.size)
    yield "["
    for at in range(0, len(array), rows_at_once):
        if at:
            yield ","
        piece = array[at : at + rows_at_once]
        if piece.size <= PIECE_ELEMENTS:
            yield _dumps(piece.tolist())[1:-1]
        else:
            yield from _pieces(piece[0])
    yield "]"


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _numbers(kind: TensorType, payload: memoryview) -> npt.NDArray[np.generic]:
    array = np.frombuffer(payload, dtype=_NUMPY[kind.dtype])
    # 8- and 16-bit floats have no Python number of their own; float32 holds each of them exactly.
    return array.astype(np.float32) if DTYPES[kind.dtype].is_float and array.itemsize < 4 else array


def _dtype(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}: expected the name of a dtype; got {type(value).__name__}")
    return dtype_named(value, field=field).name


def _read_tensor(field: str, value: object, default: str) -> tuple[str, tuple[int, ...], list[int | float]]:
    """Returns dtype, shape and flat numbers of one entry of the body."""
    if not isinstance(value, dict):
        return default, *flatten(field, value)
    if "data" not in value or not value.keys() <= {"data", "dtype", "shape"}:
        raise InvalidRequest(f"{field}: expected numbers, nested lists, or an object of data, dtype and shape")
    dtype = _dtype(value.get("dtype", default), f"{field}: dtype")
    shape, numbers = flatten(field, value["data"])
    if "shape" in value:
        shape = check_shape(value["shape"], f"{field}: shape")
        if math.prod(shape) != len(numbers):
            raise InvalidRequest(f"{field}: shape {list(shape)} does not hold {len(numbers)} numbers")
    return dtype, shape, numbers


def flatten(field: str, value: object) -> tuple[tuple[int, ...], list[int | float]]:
    """Takes nested lists apart.

    Args:
        field: Name of the tensor in error texts.
        value: As parsed: nested lists of numbers, or a single number.

    Returns:
        The shape and the numbers in C order.

    Raises:
        InvalidRequest: Anything but numbers in lists of equal lengths.
    """
    shape: list[int] = []
    level: list[object] = [value]
    while not (kinds := set(map(type, level))) <= {int, float}:
        if not kinds <= {int, float, list}:
            odd = min(kind.__name__ for kind in kinds - {int, float, list})
            raise InvalidRequest(
                f"{field}: holds a {odd}; expected numbers in nested lists (options go into the query)"
            )
        lists = [entry for entry in level if isinstance(entry, list)]
        lengths = set(map(len, lists))
        if len(lists) != len(level) or len(lengths) > 1:
            raise InvalidRequest(f"{field}: the nested lists are ragged at depth {len(shape)}")
        if len(shape) == MAX_RANK:
            raise InvalidRequest(f"{field}: more than {MAX_RANK} dimensions")
        shape.append(lengths.pop())
        level = list(chain.from_iterable(lists))
    return tuple(shape), level  # type: ignore[return-value]  # the loop ends when only numbers are left


def place(field: str, kind: TensorType, numbers: list[int | float], where: tuple[int, Room]) -> Placed:
    """Writes numbers into the arena.

    Args:
        field: Name of the tensor in error texts.
        kind: Dtype and shape.
        numbers: In C order, as many as the shape holds.
        where: Offset of an empty tensor, and room for any other.

    Raises:
        InvalidRequest: A number that the dtype cannot hold.
        BodyTooLarge: More than the request may hold.
        TooBusy: There is no room right now.
    """
    offset, room = where
    if not numbers:
        return Placed(kind, offset)
    array = _as_floats(field, numbers) if DTYPES[kind.dtype].is_float else _as_integers(field, kind.dtype, numbers)
    offset, view = room.take(kind.nbytes)
    with np.errstate(all="ignore"):  # past the range of a float is infinity, as in NumPy
        np.frombuffer(view, dtype=_NUMPY[kind.dtype])[:] = array
    return Placed(kind, offset)


def _as_floats(field: str, numbers: list[int | float]) -> npt.NDArray[np.float64]:
    try:
        return np.array(numbers, dtype=np.float64)
    except OverflowError:
        raise InvalidRequest(f"{field}: holds an integer beyond the range of float64") from None


def _as_integers(field: str, dtype: str, numbers: list[int | float]) -> npt.NDArray[np.int64]:
    if float in set(map(type, numbers)):
        raise InvalidRequest(f"{field}: holds a fraction or an exponent; {dtype} takes whole numbers")
    bound = 1 << (8 * DTYPES[dtype].itemsize - 1)  # all our integers are signed
    if min(numbers) < -bound or max(numbers) >= bound:
        raise InvalidRequest(f"{field}: holds a number outside [{-bound}, {bound - 1}] of {dtype}")
    return np.array(numbers, dtype=np.int64)
