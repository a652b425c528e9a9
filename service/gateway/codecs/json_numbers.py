"""Numbers of JSON text, read and converted; long arrays piece by piece.

The parser of a whole body of megabytes holds the interpreter's lock all the while, and nobody else is served. So long arrays
of numbers are cut out of the text first. The rest is small, and each array is read in pieces of whole elements. Between
the pieces the thread rests for an instant every few milliseconds, so that another gets the lock.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.rests import rest
from tilewire.service.gateway.codecs.strict_json import LongArray, parse_list, parse_object, refuse_overflow, word_of
from tilewire.service.ops.op import MAX_RANK

# Text of up to this is parsed at once: about a millisecond.
WHOLE_BYTES = 2**16
# Arrays below this stay in the text, so that a body may have many of them.
LONG_BYTES = 2**13
# Text of whole elements that is parsed at once: a third of a millisecond.
PIECE_BYTES = 2**14
# Text in which brackets are looked for at once: less than that.
WINDOW_BYTES = 2**15
# Numbers of a flat array that are converted at once: a third of a millisecond.
PIECE_NUMBERS = 2**12
# Most text besides long arrays: its parser takes some 10 ms.
MAX_REST_BYTES = 2**19

_SPACE = re.compile(rb"[ \t\r\n]*")
_OPEN, _CLOSE = b"[]"

Array = npt.NDArray[np.float64] | npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]


class Numbers(msgspec.Struct, eq=False):
    """An array that was read.

    Attributes:
        shape: Its shape.
        pieces: Its numbers in C order, (n,) float64 or int64 each.
    """

    shape: tuple[int, ...]
    pieces: list[Array]

    @property
    def count(self) -> int:
        """Number of numbers."""
        return sum(len(piece) for piece in self.pieces)

    @property
    def has_infinity(self) -> bool:
        """Whether a number is infinite."""
        return any(piece.dtype.kind == "f" and bool(np.isinf(piece).any()) for piece in self.pieces)


class FlatArray(msgspec.Struct, eq=False):
    """Numbers that are no JSON text: those of typed contents, which protobuf has read.

    Attributes:
        values: The numbers in C order; a slice of them is a list.
    """

    values: Sequence[int | float]


class Document(msgspec.Struct, eq=False):
    """A JSON object whose long arrays are not read yet.

    Attributes:
        members: The object; a `LongArray` stands for each long array that is the value of a key.
        rest: Its text without them.
    """

    members: dict[str, object]
    rest: bytes | memoryview


def parse_document(data: bytes | memoryview, what: str) -> Document:
    """Parses one JSON object of UTF-8 text.

    Raises:
        InvalidRequest: Not such an object, or too much text besides long arrays of numbers; the detail begins with `what`.
    """
    if len(data) <= WHOLE_BYTES:
        return Document(parse_object(data, what), data)
    text = bytes(data)
    rest, arrays = _cut_out(text, what)
    return Document(parse_object(rest, what, arrays), rest)


def read_numbers(field: str, value: object, dtype: str) -> Numbers:
    """Reads nested lists.

    Args:
        field: Name of the tensor in error texts.
        value: As parsed: nested lists of numbers, a long or a flat array, or a single number.
        dtype: Dtype of the tensor.

    Raises:
        InvalidRequest: Anything but numbers of the dtype in lists of equal lengths. A number beyond the range of a float is
            found in a long array; elsewhere it was parsed as infinity, and `refuse_overflow` finds it.
    """
    if isinstance(value, LongArray):
        return Numbers(*_read_long(field, value.text, dtype, 1))
    if isinstance(value, FlatArray):
        return _read_flat(field, value.values, dtype)
    shape, numbers = _flatten(field, value)
    return Numbers(shape, [_converted(field, dtype, numbers)] if numbers else [])


def _cut_out(text: bytes, what: str) -> tuple[bytes, dict[str, object]]:
    """Takes long arrays out of an object's text.

    Returns:
        The text with a string in the place of each, and the arrays by these strings.
    """
    # Nobody can guess it: a string of the body is never taken for an array.
    token = secrets.token_hex(8)
    rest: list[bytes] = []
    arrays: dict[str, object] = {}
    kept = scanned = rest_bytes = 0
    while scanned < len(text):
        quote = text.find(b'"', scanned)
        end = quote if quote >= 0 else len(text)
        begin = text.find(b"[", scanned, end) if end - scanned > LONG_BYTES else -1
        # Between two strings an array of numbers can only be the value of the first.
        is_value = begin >= 0 and text[scanned:begin].strip() == b":"
        closed = _end_of_array(text, begin, end, what) if is_value else None
        if closed is not None:
            scanned = closed
            if scanned - begin > LONG_BYTES:
                name = f"{token}{len(arrays)}"
                rest += [text[kept:begin], f'"{name}"'.encode()]
                rest_bytes += begin - kept
                arrays[name] = LongArray(memoryview(text)[begin:scanned])
                kept = scanned
        else:
            scanned = len(text) if quote < 0 else _end_of_string(text, quote)
        if rest_bytes + scanned - kept > MAX_REST_BYTES:
            raise InvalidRequest(f"{what}: more than {MAX_REST_BYTES} bytes of text besides long arrays of numbers")
    rest.append(text[kept:])
    return b"".join(rest), arrays


def _end_of_string(text: bytes, quote: int) -> int:
    """Index behind the string that begins at a quotation mark; the text's end when it does not end."""
    at = quote
    while (at := text.find(b'"', at + 1)) >= 0:
        before = at
        while text[before - 1] == ord("\\"):
            before -= 1
        if not (at - before) % 2:
            return at + 1
    return len(text)


def _end_of_array(text: bytes, begin: int, end: int, what: str) -> int | None:
    """Index behind the bracket that closes the one at `begin`; None where a string comes first, at `end`."""
    for at, _, places, levels in _windows(memoryview(text)[:end], begin):
        (closed,) = np.nonzero(levels[1:] == 0)
        inside = levels[: closed[0] + 1] if closed.size else levels
        if inside.max() > MAX_RANK:
            raise InvalidRequest(f"{what}: nested too deeply; {MAX_RANK} dimensions are possible")
        if closed.size:
            return at + int(places[closed[0]]) + 1
    if end == len(text):
        raise InvalidRequest(f"{what}: a list is not closed")
    return None


def _windows(text: memoryview, begin: int) -> Iterator[tuple[int, bytes, Places, Places]]:
    """Stretches of a text: first a piece, then longer ones.

    Yields:
        Where it begins, its text, where in it the n brackets are, and how many brackets are open before, between and behind
        them: (n + 1,).
    """
    level, nbytes = 0, PIECE_BYTES
    while begin < len(text):
        rest()
        window = bytes(text[begin : begin + nbytes])
        letters = np.frombuffer(window, np.uint8)
        opens = letters == _OPEN
        (places,) = np.nonzero(opens | (letters == _CLOSE))
        levels = level + np.cumsum(np.concatenate(([0], np.where(opens[places], 1, -1))))
        yield begin, window, places, levels
        level, begin, nbytes = int(levels[-1]), begin + len(window), WINDOW_BYTES


def _end_of_elements(text: memoryview, begin: int) -> int:
    """Index of the comma or end behind whole elements of a list: as many as fit a piece, or one that is longer."""
    if len(text) - begin <= PIECE_BYTES:
        return len(text)
    find, step = bytes.rfind, -1
    for at, window, places, levels in _windows(text, begin):
        bounds = np.concatenate(([-1], places, [len(window)]))
        for index in np.nonzero(levels == 0)[0][::step]:
            comma = find(window, b",", bounds[index] + 1, bounds[index + 1])
            if comma >= 0:
                return at + comma
        find, step = bytes.find, 1
    return len(text)


def _trimmed(text: memoryview) -> memoryview:
    """The text without white space around it."""
    space = _SPACE.match(text)
    assert space is not None, "This is a bug."
    begin, end = space.end(), len(text)
    while end > begin and text[end - 1] in b" \t\r\n":
        end -= 1
    return text[begin:end]


def _read_long(field: str, text: memoryview, dtype: str, depth: int) -> tuple[tuple[int, ...], list[Array]]:
    """Reads the elements of a list one piece after the other; those longer than a piece are lists of their own."""
    count, row, arrays = 0, None, []
    begin, end, inner = 0, -1, text[1:-1]
    while end < len(inner):
        end = _end_of_elements(inner, begin)
        piece = _trimmed(inner[begin:end])
        if len(piece) <= PIECE_BYTES:
            (num, *rest), numbers = _flatten(field, parse_list(b"[%b]" % bytes(piece), field))
            own = tuple(rest)
            if not num:
                raise InvalidRequest(f"{field}: a list holds a comma without a number")
            more = [_converted(field, dtype, numbers)] if numbers else []
            if Numbers((), more).has_infinity:
                refuse_overflow(bytes(piece), field)
        elif (piece[0], piece[-1]) == (_OPEN, _CLOSE):
            num = 1
            own, more = _read_long(field, piece, dtype, depth + 1)
        else:
            raise InvalidRequest(f"{field}: expected numbers in nested lists")
        if row not in (None, own):
            raise InvalidRequest(f"{field}: the nested lists are ragged at depth {depth}")
        count, row, begin = count + num, own, end + 1
        arrays += more
    shape = (count, *(row or ()))
    if len(shape) > MAX_RANK:
        raise InvalidRequest(f"{field}: more than {MAX_RANK} dimensions")
    return shape, arrays


def _read_flat(field: str, values: Sequence[int | float], dtype: str) -> Numbers:
    pieces = []
    for begin in range(0, len(values), PIECE_NUMBERS):
        rest()
        pieces.append(_converted(field, dtype, list(values[begin : begin + PIECE_NUMBERS])))
    return Numbers((len(values),), pieces)


def _flatten(field: str, value: object) -> tuple[tuple[int, ...], list[int | float]]:
    """Takes nested lists apart; every level is checked with set operations rather than per element.

    Returns:
        The shape and the numbers in C order.

    Raises:
        InvalidRequest: Anything but numbers in lists of equal lengths.
    """
    shape: list[int] = []
    level: list[object] = [value]
    while not (kinds := set(map(type, level))) <= {int, float}:
        if not kinds <= {int, float, list}:
            odd = min(map(word_of, kinds - {int, float, list}))
            raise InvalidRequest(f"{field}: holds {odd}; expected numbers in nested lists")
        lists = [entry for entry in level if isinstance(entry, list)]
        lengths = set(map(len, lists))
        if len(lists) != len(level) or len(lengths) > 1:
            raise InvalidRequest(f"{field}: the nested lists are ragged at depth {len(shape)}")
        if len(shape) == MAX_RANK:
            raise InvalidRequest(f"{field}: more than {MAX_RANK} dimensions")
        shape.append(lengths.pop())
        level = list(chain.from_iterable(lists))
    return tuple(shape), level  # type: ignore[return-value]  # the loop ends when only numbers are left


def _converted(field: str, dtype: str, numbers: list[int | float]) -> Array:
    """Numbers as an array that holds every value of the dtype."""
    if DTYPES[dtype].is_float:
        try:
            return np.array(numbers, dtype=np.float64)
        except OverflowError:
            raise InvalidRequest(f"{field}: holds an integer beyond the range of float64") from None
    if float in set(map(type, numbers)):
        raise InvalidRequest(f"{field}: holds a fraction or an exponent; {dtype} takes whole numbers")
    bound = 1 << (8 * DTYPES[dtype].itemsize - 1)  # all our integers are signed
    if min(numbers) < -bound or max(numbers) >= bound:
        raise InvalidRequest(f"{field}: holds a number outside [{-bound}, {bound - 1}] of {dtype}")
    return np.array(numbers, dtype=np.int64)
