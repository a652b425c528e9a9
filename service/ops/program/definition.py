"""Parses and checks the text of a program: inputs, steps and outputs, before any tensor is known.

A program is a JSON object. Its canonical text (sorted keys, no spaces) is what crosses processes and what is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest, TilewireError
from tilewire.service.ops.op import AnyOp, OpOptions
from tilewire.service.ops.planning import parse_options
from tilewire.service.tensor_names import problem_of

MAX_STEPS = 32
MAX_VALUES = 128
MAX_TEXT_BYTES = 2**16
# Any size.
ANY = -1
RESIDENT = "@"
# Keys of JSON answers and of safetensors headers that are no tensors: an output of such a name could not be read.
NO_TENSORS = frozenset({"dtype", "shape", "__metadata__"})
# Those, parameters of the call and keys of JSON bodies: an input of such a name could not be given.
RESERVED = NO_TENSORS | {"program", "store", "durable", "timeout_ms"}

_PROGRAM_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_VALUE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_StructT = TypeVar("_StructT")


class InputDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input of a program.

    Attributes:
        shape: Size of each dimension; -1 for any.
    """

    dtype: str
    shape: tuple[int, ...]


class StepDefinition(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename={"names": "as"}
):
    """One step as it is written.

    Attributes:
        inputs: Value, program input or `@resident` for each input of the op.
        names: Name of the step's output, or a name for each of several outputs.
        options: Option values of the op.
    """

    op: str
    inputs: dict[str, str]
    names: str | tuple[str, ...]
    options: dict[str, Any] = {}


class Definition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program as it is written.

    Attributes:
        outputs: Names of the values that are answered.
    """

    inputs: dict[str, InputDefinition]
    steps: tuple[StepDefinition, ...]
    outputs: tuple[str, ...]


class Step(msgspec.Struct, frozen=True):
    """One step whose names and options are checked.

    Attributes:
        inputs: Name of a value, or `@` and a resident's name, by input of the op.
        outputs: Names of the step's values, in the order of the op's outputs.
    """

    op: AnyOp
    options: OpOptions
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]


class Program(msgspec.Struct, frozen=True):
    """A program whose names and options are checked.

    Attributes:
        text: Canonical JSON.
        inputs: Dtype and shape of each input; -1 stands for any size.
        outputs: Names of the values that are answered.
        residents: Names of the residents that the steps read, without `@`, each once.
    """

    text: str
    inputs: Mapping[str, InputDefinition]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    residents: tuple[str, ...]


# Calls of `/v2/models` that stand where the name of a model does.
CALLS = frozenset({"stats"})


def check_program_name(name: str, taken: frozenset[str]) -> None:
    """Checks the name of a program; those of ops and of calls are taken.

    Raises:
        InvalidRequest: A name that is no program's.
    """
    if _PROGRAM_NAME.fullmatch(name) is None or name in {".", ".."}:
        raise InvalidRequest(
            f"name: expected 1 to 255 characters of A-Z a-z 0-9 . _ -, and not . or .. alone; got {name[:64]!r}"
        )
    if name in taken:
        raise InvalidRequest(f"name: {name!r} is not a program's to have; choose another")


def parse_program(text: bytes | str, ops: Mapping[str, AnyOp]) -> Program:
    """Parses and checks the JSON of a program.

    Raises:
        InvalidRequest: Not a program; the detail names the place, with the step's number.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"program: {len(text)} bytes of JSON; the limit is {MAX_TEXT_BYTES}")
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
        json.loads(text, object_pairs_hook=_refuse_twice)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"program: {error}") from None
    return check_program(raw, ops)


def _refuse_twice(pairs: list[tuple[str, object]]) -> None:
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise InvalidRequest(f"program: key {key[:64]!r} appears twice")
        keys.add(key)


def check_program(raw: Mapping[str, Any], ops: Mapping[str, AnyOp]) -> Program:
    """Checks a program that is parsed JSON already; see `parse_program`.

    Raises:
        InvalidRequest: Not a program; the detail names the place, with the step's number.
    """
    definition = _definition_of(raw)
    values: set[str] = set()
    for name, one in definition.inputs.items():
        _add_value(values, name, f"inputs.{name[:64]}")
        if name in RESERVED:
            raise InvalidRequest(f"inputs.{name}: this name is a parameter of the call; choose another")
        _check_input(name, one)
    steps: list[Step] = []
    for number, written in enumerate(definition.steps, 1):
        try:
            steps.append(_check_step(written, values, ops))
        except TilewireError as error:
            raise InvalidRequest(f"step {number}: {error}") from None
    _check_outputs(definition, values)
    residents = dict.fromkeys(
        source[1:] for step in steps for source in step.inputs.values() if source.startswith(RESIDENT)
    )
    text = msgspec.json.encode(definition, order="sorted").decode()
    return Program(text, definition.inputs, tuple(steps), definition.outputs, tuple(residents))


def _definition_of(raw: Mapping[str, Any]) -> Definition:
    if not isinstance(raw.get("steps"), list) or not isinstance(raw.get("inputs"), dict):
        raise InvalidRequest("program: expected an object with inputs, steps and outputs")
    if not 1 <= len(raw["steps"]) <= MAX_STEPS:
        raise InvalidRequest(f"steps: expected 1 to {MAX_STEPS} steps; got {len(raw['steps'])}")
    for name, one in raw["inputs"].items():
        _converted(one, InputDefinition, f"inputs.{name[:64]}")
    for number, step in enumerate(raw["steps"], 1):
        _converted(step, StepDefinition, f"step {number}")
    return _converted(raw, Definition, "program")


def _converted(value: object, kind: type[_StructT], place: str) -> _StructT:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"{place}: {error}") from None


def _add_value(values: set[str], name: str, place: str) -> None:
    if _VALUE_NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{place}: expected 1 to 64 characters of A-Z a-z 0-9 . _ -; got {name[:64]!r}")
    if name in values:
        raise InvalidRequest(f"{place}: {name!r} is given twice")
    values.add(name)
    if len(values) > MAX_VALUES:
        raise InvalidRequest(f"program: more than {MAX_VALUES} values")


def _check_input(name: str, one: InputDefinition) -> None:
    if one.dtype not in DTYPES:
        raise InvalidRequest(f"inputs.{name}.dtype: expected one of {', '.join(DTYPES)}; got {one.dtype[:64]!r}")
    for dim in one.shape:
        if not ANY <= dim < 2**63:
            raise InvalidRequest(f"inputs.{name}.shape: expected sizes of 0 or more, or -1 for any; got {dim}")


def _check_step(written: StepDefinition, values: set[str], ops: Mapping[str, AnyOp]) -> Step:
    op = ops.get(written.op)
    if op is None:
        raise InvalidRequest(f"op: no op {written.op[:64]!r}; there are {', '.join(ops)}")
    for field, source in written.inputs.items():
        if field not in op.inputs:
            raise InvalidRequest(f"{field[:64]}: {op.name} has no such input; it has {', '.join(op.inputs)}")
        if source.startswith(RESIDENT):
            if (problem := problem_of(source[1:])) is not None:
                raise InvalidRequest(f"{field}: {problem}")
        elif source not in values:
            raise InvalidRequest(f"{field}: {source[:64]!r} is no input of the program and no value of an earlier step")
    for field in op.required:
        if field not in written.inputs:
            raise InvalidRequest(f"{field}: {op.name} needs this input; got {', '.join(written.inputs) or 'none'}")
    names = (written.names,) if isinstance(written.names, str) else written.names
    if len(names) != len(op.outputs):
        raise InvalidRequest(
            f"as: {op.name} has {len(op.outputs)} outputs, {', '.join(op.outputs)}; got {len(names)} names"
        )
    options = parse_options(op, written.options)
    for name in names:
        _add_value(values, name, "as")
    return Step(op, options, written.inputs, names)


def _check_outputs(definition: Definition, values: set[str]) -> None:
    if not definition.outputs:
        raise InvalidRequest("outputs: expected at least one value")
    for name in definition.outputs:
        if name not in values:
            raise InvalidRequest(f"outputs: {name[:64]!r} is no value of any step")
        if name in definition.inputs:
            raise InvalidRequest(f"outputs: {name!r} is an input of the program; expected a value of a step")
        if name in NO_TENSORS:
            raise InvalidRequest(f"outputs: {name!r} is no tensor's name in an answer; choose another")
    if len(set(definition.outputs)) < len(definition.outputs):
        raise InvalidRequest("outputs: a value is given twice")
