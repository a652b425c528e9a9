"""Which axis of an operand products are summed along: residents of some dtypes are laid out for that."""

from __future__ import annotations

import json

import pytest

from tilewire.service.engine.ops.op import Summed
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import OpOptions
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.program.op import PROGRAM, ProgramOptions
from tilewire.service.ops.registry import OPS
from tilewire.service.ops.search import SearchOptions
from tilewire.service.ops.softmax import SoftmaxOptions

STEPS = [
    {"op": "add", "inputs": {"a": "x", "b": "@w"}, "as": "h"},
    {"op": "matmul", "inputs": {"a": "h", "b": "@w"}, "options": {"transpose_b": True, "precision": "tf32"}, "as": "y"},
    {"op": "matmul", "inputs": {"a": "y", "b": "@w"}, "as": "z"},
]
PROGRAM_TEXT = json.dumps({"inputs": {"x": {"dtype": "float32", "shape": [8, 8]}}, "steps": STEPS, "outputs": ["z"]})


@pytest.mark.parametrize(
    ("op", "options", "name", "expected"),
    [
        ("matmul", MatmulOptions(), "a", Summed(-1, "ieee")),
        ("matmul", MatmulOptions(), "b", Summed(-2, "ieee")),
        ("matmul", MatmulOptions(transpose_a=True, precision="tf32"), "a", Summed(-2, "tf32")),
        ("matmul", MatmulOptions(transpose_b=True), "b", Summed(-1, "ieee")),
        ("matmul", MatmulOptions(), "bias", None),
        ("search", SearchOptions(k=1), "b", Summed(-1, "ieee")),
        ("search", SearchOptions(k=1), "bias", None),
        ("softmax", SoftmaxOptions(), "x", None),
        # The first step that sums products of it.
        (PROGRAM, ProgramOptions(parse_program(PROGRAM_TEXT, OPS).text), "@w", Summed(-1, "tf32")),
        (PROGRAM, ProgramOptions(parse_program(PROGRAM_TEXT, OPS).text), "x", None),
    ],
)
def test_products_are_summed_along(op: str, options: OpOptions, name: str, expected: Summed | None) -> None:
    assert ENGINE_OPS[op].summed(name, options) == expected
