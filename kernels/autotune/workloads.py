"""Shapes of any op as lines of JSON. Pure; imports no op by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tilewire.kernels.op import Shape, ShapeError
from tilewire.kernels.registry import measured_ops

_KINDS: dict[str, type[Any]] = {op.name: op.shape for op in measured_ops() if op.shape is not None}


def parse_line(line: str) -> Shape:
    """Reads one shape.

    Args:
        line: JSON object, such as `{"op": "matmul", "m": 64, "n": 4096, "k": 4096, "dtype": "float16"}`. The other keys are
            the fields of the op's shape.

    Raises:
        ShapeError: it is none; the message names the field.
    """
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ShapeError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ShapeError("expected a JSON object")
    op = given.pop("op", None)
    if op not in _KINDS:
        raise ShapeError(f"op: expected one of {', '.join(_KINDS)}, got {op!r}")
    fields = {field.name: field for field in dataclasses.fields(_KINDS[op])}
    for name in given:
        if name not in fields:
            raise ShapeError(f"{name}: {op} has no such field; there are {', '.join(fields)}")
    for name, field in fields.items():
        if name in given:
            _check(_KINDS[op].choices.get(name), field, given[name])
        elif field.default is dataclasses.MISSING:
            raise ShapeError(f"{name}: is missing")
    shape: Shape = _KINDS[op](**given)
    shape.check()
    return shape


def _check(choices: Sequence[str] | None, field: dataclasses.Field[Any], value: object) -> None:
    if choices is not None and value not in choices:
        raise ShapeError(f"{field.name}: expected one of {', '.join(filter(None, choices))}, got {value!r}")
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if field.type == "int" and not (is_whole and value >= 1):  # type: ignore[operator]
        raise ShapeError(f"{field.name}: expected a whole number from 1, got {value!r}")
    if field.type == "bool" and not isinstance(value, bool):
        raise ShapeError(f"{field.name}: expected true or false, got {value!r}")


def as_line(shape: Shape) -> str:
    """The shape as `parse_line` reads it, defaults left out."""
    shown = {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)
        if getattr(shape, field.name) != field.default
    }
    return json.dumps({"op": shape.op, **shown})
