"""Results without elements on the CPU backend: they cost nothing, however many rows their shape says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.op_bench import OpBench
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.program.op import PROGRAM, ProgramOptions
from tilewire.service.ops.registry import OPS

# The most that a request may have. A float32 number for each is 32 GiB.
ROWS = 2**33
X = torch.empty(ROWS, 0)

CASES: list[tuple[str, dict[str, torch.Tensor], dict[str, Any]]] = [
    *(("normalize", {"x": X}, {"kind": kind}) for kind in ("layer", "rms", "l2")),
    ("softmax", {"x": X}, {}),
    ("softmax", {"x": X.to(torch.bfloat16)}, {"log": True}),
    ("pointwise", {"x": X}, {"fn": "gelu"}),
    ("pointwise", {"x": X, "y": torch.empty(1, 0)}, {"fn": "mul"}),
    ("add", {"a": X, "b": torch.empty(0)}, {}),
    ("matmul", {"a": X, "b": torch.empty(0, 0)}, {"activation": "relu"}),
    ("reduce", {"x": torch.empty(0, ROWS)}, {"kind": "sum", "axis": 1}),
    ("reduce", {"x": torch.empty(0, ROWS)}, {"kind": "argmax", "axis": 1}),
    ("topk", {"x": torch.empty(0, ROWS)}, {"k": 3}),
]


@pytest.mark.parametrize(("op", "inputs", "options"), CASES)
def test_ops(op: str, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    for result in OpBench().run(op, inputs, **options):
        assert not result.numel()


def test_steps_of_a_program() -> None:
    raw = {
        "inputs": {"x": {"dtype": "float32", "shape": [-1, 0]}},
        "steps": [
            {"op": "normalize", "inputs": {"x": "x"}, "options": {"kind": "rms"}, "as": "n"},
            {"op": "reduce", "inputs": {"x": "n"}, "options": {"kind": "sum", "axis": 0}, "as": "s"},
            {"op": "reduce", "inputs": {"x": "n"}, "options": {"kind": "sum", "axis": "all"}, "as": "total"},
        ],
        "outputs": ["s", "total"],
    }
    bench, options = OpBench(), ProgramOptions(parse_program(json.dumps(raw), OPS).text)
    ((sums, total),) = bench.compute([bench.job(PROGRAM, options, x=bench.put(X))])
    assert sums.shape == (0,)
    assert total.item() == 0
