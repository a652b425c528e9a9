"""Parses JSON text of untrusted bodies and headers.

Stricter than `json.loads` where leniency has been used against servers. It requires UTF-8 without a BOM, and one object
at the top. It refuses duplicate keys, and lone surrogates in keys. Any nesting and any length of a number raise our
exceptions only. `NaN`, `Infinity` and `-Infinity` are read bare, as Python and Triton write them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping

import msgspec

from tilewire.service.errors import InvalidRequest


class LongArray(msgspec.Struct, eq=False):
    """The text of a long array in a parsed document, from bracket to bracket; not read yet."""

    text: memoryview


# JSON's words for the types of parsed values.
_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    LongArray: "a long list of numbers",
}


def kind_of(value: object) -> str:
    """Returns the word for the type of a parsed value in errors; it is null where a key is missing, too."""
    return "nothing" if value is None else word_of(type(value))


def word_of(kind: type) -> str:
    """Returns the word for a type of parsed values in errors."""
    return _KINDS.get(kind, kind.__name__)


def parse_object(
    data: bytes | memoryview, what: str, replaced: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Parses one JSON object.

    Args:
        data: UTF-8 text.
        what: Name in error texts, e.g. `safetensors header`.
        replaced: Values that take the place of strings, where these are values of keys.

    Raises:
        InvalidRequest: Not such an object; the detail begins with `what`.
    """

    def hook(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = _without_duplicates(pairs)
        for key, value in members.items():
            if isinstance(value, str) and replaced is not None and value in replaced:
                members[key] = replaced[value]
        return members

    value = _parse(data, what, json.JSONDecoder(object_pairs_hook=hook) if replaced else _DECODER)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what}: the top level is {word_of(type(value))}; expected an object")
    return value


def parse_list(data: bytes, what: str) -> object:
    """Parses one JSON list of anything but objects, a piece of a longer text; see `parse_object`."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # It is several times faster, but reads no NaN and no infinity.
        return _parse(data, what, _DECODER, is_piece=True)


def _parse(data: bytes | memoryview, what: str, decoder: json.JSONDecoder, *, is_piece: bool = False) -> object:
    try:
        return decoder.decode(_text_of(data))
    except UnicodeDecodeError as error:
        # A place in a piece says nothing.
        place = (
            f"in {bytes(data[max(0, error.start - 8) : error.start + 8])!r}" if is_piece else f"at byte {error.start}"
        )
        raise InvalidRequest(f"{what}: not UTF-8 {place}") from None
    except RecursionError:
        raise InvalidRequest(f"{what}: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, our own, and CPython's bound on the digits of an integer
        reason = str(error)[:200]
        if is_piece and isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} in {error.doc[max(0, error.pos - 16) : error.pos + 16]!r}"
        if "int_max_str_digits" in reason:
            reason = f"holds an integer of more than {sys.get_int_max_str_digits()} digits"
        raise InvalidRequest(f"{what}: {reason}") from None


def refuse_overflow(data: bytes | memoryview, what: str, fields: Mapping[str, str] | None = None) -> None:
    """Looks for numbers beyond the range of a float, which `parse_object` has read as infinity.

    It reads the text a second time and calls back for each fraction: for texts in which an infinity was found.

    Args:
        data: An object, or elements of a list, that were parsed before.
        what: Name in error texts.
        fields: Members of the object that are looked at, with the names that stand in error texts instead; None for all
            that the text has.

    Raises:
        InvalidRequest: A number such as 1e999. A bare `Infinity` is none.
    """
    elements = _MARKING_DECODER.decode(f"[{_text_of(data)}]")
    found = {what: elements} if fields is None else {field: elements[0][key] for key, field in fields.items()}
    for field, value in found.items():
        if (text := _overflow_in(value)) is not None:
            raise InvalidRequest(f"{field}: {text[:64]} is beyond the range of a float; infinity is written Infinity")


class _Overflow(msgspec.Struct, eq=False):
    """Stands for a number beyond the range of a float."""

    text: str


def _marked(text: str) -> float | _Overflow:
    number = float(text)
    return _Overflow(text) if math.isinf(number) else number


def _overflow_in(value: object) -> str | None:
    """Returns the text of a number that was marked, if there is one."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, _Overflow):
            return one.text
        if isinstance(one, list | dict):
            left.extend(one.values() if isinstance(one, dict) else one)
    return None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:64]!r} appears twice")
    for key in result:
        if not key.isascii() and any("\ud800" <= letter <= "\udfff" for letter in key):
            raise ValueError(f"key {key[:64]!r} holds a lone surrogate")
    return result


def _text_of(data: bytes | memoryview) -> str:
    text = str(data, "utf-8")
    if text.startswith("\ufeff"):
        raise ValueError("begins with a BOM; plain UTF-8 is expected")
    return text


# `json.loads` with a hook would build one of these for every call, at a third of the cost of a tensor's header.
_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)
_MARKING_DECODER = json.JSONDecoder(parse_float=_marked)
