"""The text of a program: what is taken, and what is refused with the place and the step's number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.program.definition import MAX_STEPS, Program, check_program, check_program_name, parse_program
from tilewire.service.ops.registry import OPS


def definition(**changes: Any) -> dict[str, Any]:
    whole = {
        "inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}},
        "steps": [
            {
                "op": "matmul",
                "inputs": {"a": "x", "b": "@mlp/w1", "bias": "@mlp/b1"},
                "options": {"activation": "gelu"},
                "as": "h",
            },
            {"op": "matmul", "inputs": {"a": "h", "b": "@mlp/w2"}, "as": "logits"},
            {"op": "softmax", "inputs": {"x": "logits"}, "as": "p"},
        ],
        "outputs": ["p"],
    }
    return {**whole, **changes}


def step(**changes: Any) -> dict[str, Any]:
    return {"op": "softmax", "inputs": {"x": "x"}, "as": "p", **changes}


def parsed(raw: object) -> Program:
    return parse_program(json.dumps(raw), OPS)


@pytest.mark.parametrize(
    ("twice", "said"),
    [
        ('"x": {"dtype": "float32", "shape": [8]}', "program: key 'x' appears twice"),
        ('"x": {"dtype": "float32", "dtype": "float16", "shape": [8]}', "program: key 'dtype' appears twice"),
    ],
)
def test_a_name_that_is_given_twice_is_refused(twice: str, said: str) -> None:
    text = json.dumps(definition()).replace('{"x":', "{" + twice + ', "x":', 1)
    with pytest.raises(InvalidRequest, match=said):
        parse_program(text, OPS)


def test_a_program_is_taken_and_its_text_is_canonical() -> None:
    program = parsed(definition())
    assert [one.op.name for one in program.steps] == ["matmul", "matmul", "softmax"]
    assert program.residents == ("mlp/w1", "mlp/b1", "mlp/w2")
    assert program.outputs == ("p",)
    reordered = dict(reversed(list(definition().items())))
    assert parsed(reordered).text == program.text
    assert parse_program(program.text, OPS) == program
    assert check_program(definition(), OPS) == program


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "program: "),
        ({}, "program: expected an object with inputs, steps and outputs"),
        (definition(steps=[]), f"steps: expected 1 to {MAX_STEPS} steps; got 0"),
        (definition(steps=[step()] * 33), f"steps: expected 1 to {MAX_STEPS} steps; got 33"),
        (definition(more=1), "program: .*more"),
        (definition(inputs={"x": {"dtype": "float32"}}), "inputs.x: .*shape"),
        (definition(inputs={"x": {"dtype": "float32", "shape": ["8"]}}), "inputs.x: .*shape"),
        (definition(inputs={"x": None}), "inputs.x: Expected `object`"),
        (definition(outputs=[]), "outputs: expected at least one"),
        (definition(outputs=["q"]), "outputs: 'q' is no value"),
        (definition(outputs=["x"]), "outputs: 'x' is an input"),
        (definition(outputs=["p", "p"]), "outputs: a value is given twice"),
        (definition(inputs={"__metadata__": {"dtype": "float32", "shape": [8]}}), "inputs.__metadata__: this name"),
        (definition(steps=[step(**{"as": "dtype"})], outputs=["dtype"]), "outputs: 'dtype' is no tensor's name"),
        (definition(steps=[step(**{"as": "shape"})], outputs=["shape"]), "outputs: 'shape' is no tensor's name"),
        (definition(steps=[step(**{"as": "__metadata__"})], outputs=["__metadata__"]), "outputs: '__metadata__' is no"),
        (definition(inputs={"x": {"dtype": "float7", "shape": []}}), r"inputs\.x\.dtype: .*float7"),
        (definition(inputs={"x": {"dtype": "float32", "shape": [-2]}}), r"inputs\.x\.shape: .*-2"),
        (definition(inputs={"x": {"dtype": "float32", "shape": [1.5]}}), r"inputs\.x: .*int"),
        (definition(inputs={"store": {"dtype": "float32", "shape": []}}), r"inputs\.store: "),
        (definition(inputs={"a b": {"dtype": "float32", "shape": []}}), r"inputs\.a b: expected 1 to 64"),
        (definition(steps=[step(op="conv")]), "step 1: op: no op 'conv'"),
        (definition(steps=[step(), step(op="conv", **{"as": "q"})]), "step 2: op: no op"),
        (definition(steps=[step(inputs={})]), "step 1: x: softmax needs this input"),
        (definition(steps=[step(inputs={"x": "y"})]), "step 1: x: 'y' is no input of the program and no value"),
        (definition(steps=[step(inputs={"x": "p"})]), "step 1: x: 'p' is no input"),
        (definition(steps=[step(inputs={"x": "@a//b"})]), "step 1: x: a name has no empty"),
        (definition(steps=[step(inputs={"x": "x", "z": "x"})]), "step 1: z: softmax has no such input"),
        (definition(steps=[step(options={"axes": 1})]), "step 1: axes: softmax has no such option"),
        (definition(steps=[step(options={"axis": "last"})]), "step 1: axis: "),
        (definition(steps=[step(**{"as": "x"})]), "step 1: as: 'x' is given twice"),
        (definition(steps=[step(**{"as": ["p", "q"]})]), "step 1: as: softmax has 1 outputs"),
        (definition(steps=[step(), 7]), "step 2: "),
    ],
)
def test_what_is_no_program_is_refused_with_its_place(raw: object, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parsed(raw)


@pytest.mark.parametrize("text", [b"", b"{", b"nul", b'{"a": 1' + b"[" * 100_000, b"\xff"])
def test_text_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^program: "):
        parse_program(text, OPS)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "..", "x" * 256, "matmul", "é"])
def test_a_name_that_no_program_may_have(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^name: "):
        check_program_name(name, frozenset(OPS))


def test_names_of_programs() -> None:
    for name in ("mlp", "a.b-c_D9", "x" * 255):
        check_program_name(name, frozenset(OPS))
