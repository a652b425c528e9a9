"""Programs as values: inputs, steps and outputs, to the contract's JSON and back. Sends nothing and computes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

# As the contract bounds them.
MAX_STEPS = 32


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Type of one input of a program.

    Attributes:
        dtype: Name of the dtype.
        shape: Dimensions, -1 for any size.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a program.

    Attributes:
        op: Name of the op.
        inputs: By input name: an earlier value, a program input, or `@resident`.
        options: Options of the op.
        outputs: Names of its results.
    """

    op: str
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """Several ops in one request.

    Attributes:
        inputs: Types by name.
        steps: Ops in order.
        outputs: Names of the values that are answered.
    """

    inputs: Mapping[str, InputSpec]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the program as the contract's JSON has it."""
        return {
            "inputs": {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in self.inputs.items()},
            "steps": [_step_to_dict(step) for step in self.steps],
            "outputs": list(self.outputs),
        }

    @classmethod
    def from_dict(cls, document: Any) -> Program:
        """Reads the contract's JSON.

        Raises:
            ValueError: Not a program; the message names the field.
        """
        _check(isinstance(document, Mapping), "program: expected an object with inputs, steps and outputs")
        _refuse_unknown("program", document, ("inputs", "steps", "outputs"))
        inputs, steps = document.get("inputs", {}), document.get("steps")
        _check(isinstance(inputs, Mapping), "inputs: expected an object, an input by name")
        _check(isinstance(steps, Sequence) and not isinstance(steps, str), "steps: expected a list")
        return cls(
            {name: _spec_of(name, spec) for name, spec in inputs.items()},
            tuple(_step_of(number, step) for number, step in enumerate(steps)),
            _names("outputs", document.get("outputs", ())),
        )

    @classmethod
    def read(cls, path: str | Path) -> Program:
        """Reads a JSON file.

        Raises:
            OSError: It cannot be read.
            ValueError: Not a program; begins with the path.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _repr_html_(self) -> str:
        cells = [(", ".join(step.outputs), step.op, ", ".join(step.inputs.values())) for step in self.steps]
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        return f"<table><tr><th>value</th><th>op</th><th>of</th></tr>{rows}</table>"


def _step_to_dict(step: Step) -> dict[str, Any]:
    document: dict[str, Any] = {"op": step.op, "inputs": dict(step.inputs)}
    if step.options:
        document["options"] = {name: _plain(f"{step.op}: {name}", value) for name, value in step.options.items()}
    return {**document, "as": step.outputs[0] if len(step.outputs) == 1 else list(step.outputs)}


def _plain(place: str, value: Any) -> Any:
    """Returns an option as JSON has it.

    Raises:
        TypeError: JSON has no such value.
    """
    if isinstance(value, np.generic | np.ndarray) and not value.ndim:
        value = value.item()
    # JSON has no infinities; the server reads them as text.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # The server refuses lists and objects in words of its own.
    if value is not None and not isinstance(value, str | int | float | list | dict):
        raise TypeError(f"{place}: expected a number, a text, True or False; got {value!r}")
    return value


def _spec_of(name: str, document: Any) -> InputSpec:
    is_spec = isinstance(document, Mapping) and isinstance(document.get("shape"), list | tuple)
    _check(
        is_spec and isinstance(document.get("dtype"), str), f"inputs.{name}: expected an object with dtype and shape"
    )
    _refuse_unknown(f"inputs.{name}", document, ("dtype", "shape"))
    return InputSpec(document["dtype"], tuple(document["shape"]))


def _step_of(number: int, document: Any) -> Step:
    is_step = isinstance(document, Mapping) and isinstance(document.get("op"), str)
    _check(is_step, f"steps[{number}]: expected an object with op, inputs and as")
    _refuse_unknown(f"steps[{number}]", document, ("op", "inputs", "options", "as"))
    for field_name, what in (("inputs", "value"), ("options", "option")):
        is_object = isinstance(document.get(field_name, {}), Mapping)
        _check(is_object, f"steps[{number}].{field_name}: expected an object, a {what} by name")
    outputs = _names(f"steps[{number}].as", document.get("as", ()))
    return Step(document["op"], dict(document.get("inputs", {})), outputs, dict(document.get("options", {})))


def _refuse_unknown(place: str, document: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuses what the server would refuse: a misspelt field would be left out, and the result another one."""
    for name in document:
        _check(name in known, f"{place}: unknown field {name!r}; expected {', '.join(known)}")


def _names(field_name: str, value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, list | tuple) else (value,)
    _check(all(isinstance(name, str) for name in names), f"{field_name}: expected a name or a list of names")
    return names


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ValueError(message)
