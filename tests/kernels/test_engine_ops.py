"""Ops of the engine with the kernels, in the interpreter: what is launched, at once or prepared, gives what torch gives."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tilewire import kernels
from tilewire.service.engine.backends.host import TORCH_DTYPES, dtype_name
from tilewire.service.engine.ops.op import KernelCall, Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.ops.op import Limits, OpOptions, TensorType
from tilewire.service.ops.planning import parse_options, plan
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.program.op import PROGRAM, ProgramOptions
from tilewire.service.ops.registry import OPS, op_for

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
NAN, INF = float("nan"), float("inf")
Make = Mapping[str, tuple[Any, ...]]

# Op, options, and (shape, dtype) of each input.
CASES: list[tuple[str, dict[str, Any], Make]] = [
    ("topk", {"k": 3, "axis": 0}, {"x": ((7, 2, 3), BF16)}),
    ("topk", {"k": 5, "largest": False}, {"x": ((2, 3, 40), F16)}),
    ("topk", {"k": 1}, {"x": ((1,), F32)}),
    ("topk", {"k": 2}, {"x": ((0, 4), F32)}),
    ("search", {"k": 3}, {"a": ((2, 2, 7), F16), "b": ((9, 7), F16), "bias": ((9,), BF16)}),
    ("search", {"k": 9, "metric": "l2"}, {"a": ((3, 16), I8), "b": ((9, 16), I8)}),
    ("search", {"k": 2, "metric": "cosine"}, {"a": ((3, 8), BF16), "b": ((5, 8), BF16), "bias": ((5,), F32)}),
    ("search", {"k": 2}, {"a": ((3, 0), F32), "b": ((5, 0), F32)}),
    ("search", {"k": 1, "metric": "cosine"}, {"a": ((1, 0), F32), "b": ((1, 0), F32)}),
    ("search", {"k": 2}, {"a": ((0, 4), F32), "b": ((5, 4), F32)}),
    ("reduce", {"kind": "sum", "axis": "all"}, {"x": ((3, 4, 5), BF16)}),
    ("reduce", {"kind": "argmax", "axis": 1, "keepdims": True}, {"x": ((3, 4, 5), F32)}),
    ("reduce", {"kind": "mean", "axis": 0, "out_dtype": "float32"}, {"x": ((3, 4, 5), F16)}),
    ("reduce", {"kind": "max", "axis": 0}, {"x": ((6,), F16)}),
    ("reduce", {"kind": "sum"}, {"x": ((3, 0), F32)}),
    ("reduce", {"kind": "mean", "axis": "all"}, {"x": ((3, 0), F32)}),
    ("reduce", {"kind": "logsumexp", "axis": 0}, {"x": ((0, 5), F32)}),
    ("reduce", {"kind": "norm", "axis": 0}, {"x": ((5, 0), F32)}),
    ("normalize", {"kind": "rms", "axis": 0}, {"x": ((6, 4), BF16), "weight": ((6,), F32)}),
    ("normalize", {"kind": "layer", "axis": 1, "out_dtype": "float32"}, {"x": ((2, 8, 3), F16), "bias": ((8,), F16)}),
    ("normalize", {"kind": "l2", "eps": 0.5}, {"x": ((5,), F32)}),
    ("normalize", {"kind": "rms"}, {"x": ((3, 0), F32)}),
    ("pointwise", {"fn": "gelu"}, {"x": ((), F32)}),
    ("pointwise", {"fn": "abs", "scale": -0.5, "out_dtype": "float32"}, {"x": ((2, 3), BF16)}),
    ("pointwise", {"fn": "sub", "shift": 1}, {"x": ((4, 1, 3), F16), "y": ((5, 1), F16)}),
    ("pointwise", {"fn": "maximum"}, {"x": ((2, 1, 2, 1, 2, 1), F32), "y": ((2, 1, 2, 1, 2), F32)}),
    ("pointwise", {"fn": "neg"}, {"x": ((0, 3), F32)}),
]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers, whose sums and products are exact; equal ones are among them."""
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def empty_outs(name: str, options: OpOptions, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    types = {field: TensorType(dtype_name(one.dtype), tuple(one.shape)) for field, one in inputs.items()}
    outputs = plan(op_for(name, options), types, options, Limits()).outputs
    return [torch.empty(out.shape, dtype=TORCH_DTYPES[out.dtype]) for out in outputs]


def check(name: str, options: OpOptions, rounds: Sequence[Operands]) -> None:
    """Launches at once, then prepared on the first operands and launched with each of the others."""
    op, first = ENGINE_OPS[name], rounds[0]
    outs = empty_outs(name, options, first)
    op.gpu(KernelCall(kernels, first, options, outs, batch_invariant=False))
    compare(op.cpu(first, options, [out.dtype for out in outs]), outs)
    if all(out.numel() for out in outs):
        launch = op.prepare(KernelCall(kernels, first, options, outs, batch_invariant=True))
        for inputs in rounds:
            for out in outs:
                out.zero_()
            launch(inputs)
            compare(op.cpu(inputs, options, [out.dtype for out in outs]), outs)


def compare(expected: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    for wanted, out in zip(expected, outs, strict=True):
        torch.testing.assert_close(
            out, wanted.to(out.dtype), rtol=1e-2 if out.dtype in (F16, BF16) else 1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize(("name", "raw", "make"), CASES)
def test_an_op_gives_what_torch_gives(name: str, raw: dict[str, Any], make: Make) -> None:
    options = parse_options(OPS[name], raw)
    rounds = [
        Operands(
            {
                field: made(shape, dtype, 10 * seed + number)
                for number, (field, (shape, dtype)) in enumerate(make.items())
            },
            {},
        )
        for seed in range(3)
    ]
    check(name, options, rounds)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("name", OPS)
def test_the_warm_up_of_every_op_gives_what_torch_gives(name: str, dtype: torch.dtype) -> None:
    case = OPS[name].warmup
    operands = {field: torch.tensor(rows, dtype=dtype) for field, rows in case.inputs.items()}
    check(name, parse_options(OPS[name], case.options), [Operands(operands, {})])


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_more_than_the_kernels_choose_are_sorted(largest: bool, axis: int) -> None:
    """Smaller indices first among equals, zeros of either sign among them, and NaN of either sign above the numbers."""
    x = made((2, 1500), F32, seed=3)
    x[0, 7:20:4], x[1, 1], x[1, 2] = NAN, INF, -INF
    x[0, 9:1400:7] *= -1
    x[0, 19] = -x[0, 19]
    options = parse_options(OPS["topk"], {"k": 1200, "axis": axis, "largest": largest})
    check("topk", options, [Operands({"x": one if axis else one.T.contiguous()}, {}) for one in (x, x.flip(1))])


STEPS = [
    {"op": "normalize", "inputs": {"x": "x", "weight": "@w"}, "options": {"kind": "rms"}, "as": "n"},
    {"op": "search", "inputs": {"a": "n", "b": "@items"}, "options": {"k": 4, "metric": "cosine"}, "as": ["s", "i"]},
    {"op": "matmul", "inputs": {"a": "n", "b": "@m"}, "options": {"activation": "relu"}, "as": "h"},
    {"op": "add", "inputs": {"a": "h", "b": "x"}, "options": {"alpha": 2}, "as": "y"},
    {"op": "pointwise", "inputs": {"x": "y"}, "options": {"fn": "silu", "scale": 3}, "as": "z"},
    {"op": "softmax", "inputs": {"x": "z"}, "as": "p"},
    {"op": "topk", "inputs": {"x": "p"}, "options": {"k": 2}, "as": ["v", "at"]},
    {"op": "reduce", "inputs": {"x": "z"}, "options": {"kind": "logsumexp"}, "as": "l"},
]


def test_a_program_of_every_op_gives_what_torch_gives() -> None:
    further = [op for op in OPS.values() if op.name not in {step["op"] for step in STEPS}]
    names = {op.name: [f"{op.name}_{output}" for output in op.outputs] for op in further}
    steps = STEPS + [
        {"op": op.name, "inputs": dict.fromkeys(op.required, "x"), "options": op.example_options, "as": names[op.name]}
        for op in further
    ]
    outputs = ["s", "i", "v", "at", "l", "p", *itertools.chain(*names.values())]
    raw = {"inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}}, "steps": steps, "outputs": outputs}
    options = ProgramOptions(parse_program(json.dumps(raw), OPS).text)
    draw = torch.Generator().manual_seed(1)
    kept = {"@w": torch.rand(8, generator=draw), "@items": torch.randn(11, 8, generator=draw)}
    kept["@m"] = torch.randn(8, 8, generator=draw)
    check(PROGRAM, options, [Operands({"x": torch.randn(3, 8, generator=draw)}, kept) for _ in range(3)])
