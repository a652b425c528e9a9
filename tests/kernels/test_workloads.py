"""Workloads: read from lines, written back, and the same problems that the ops make of real tensors."""

import inspect

import pytest
import torch

from tilewire.kernels.add.bench import AddShape
from tilewire.kernels.autotune.benches import operands_of
from tilewire.kernels.autotune.collect import draw, is_supported
from tilewire.kernels.autotune.workloads import as_line, parse_line
from tilewire.kernels.matmul.bench import MatmulOperands
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.plan import Epilogue, plan_of
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import ShapeError
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN
from tilewire.kernels.softmax.bench import SoftmaxShape

OPS = ["matmul", "softmax", "add"]
TARGETS = [pytest.param("nvidia_h100", marks=pytest.mark.slow), "nvidia_a100", "amd_mi300x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"op": "conv"}', "op: expected one of matmul, softmax, add, got 'conv'"),
        ('{"op": "matmul", "m": 1, "n": 2}', "k: is missing"),
        ('{"op": "matmul", "m": 0, "n": 2, "k": 3}', "m: expected a whole number from 1, got 0"),
        ('{"op": "matmul", "m": true, "n": 2, "k": 3}', "m: expected a whole number from 1, got True"),
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "dtype": "int4"}', "dtype: expected one of float16"),
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "is_padded": 1}', "is_padded: expected true or false, got 1"),
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "out_dtype": "int32"}', "out_dtype: expected one of bfloat16"),
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "precision": "tf32"}', "precision: bfloat16 has ieee, not tf32"),
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "dtype": "int8", "activation": "gelu"}', "activation: gelu needs"),
        ('{"op": "softmax", "rows": 1, "n": 2, "k": 3}', "k: softmax has no such field"),
        ('{"op": "add", "rows": 1, "n": "2"}', "n: expected a whole number from 1, got '2'"),
    ],
)
def test_a_bad_line_is_named(line, message):
    with pytest.raises(ShapeError) as caught:
        parse_line(line)
    assert message in str(caught.value)


def test_lines_read_back_as_what_they_were():
    for workload in draw(3, 0.2, OPS):
        assert parse_line(as_line(workload)) == workload


@pytest.mark.parametrize("name", TARGETS)
def test_what_dispatch_chooses_is_among_the_alternatives(name):
    target = KNOWN[name]
    for workload in draw(5, 0.2, OPS):
        if not is_supported(workload, target):
            continue
        found = list(workload.candidates(target))
        assert workload.chosen(target) in found
        assert len(found) == len(set(found))


SMALL = [
    *(MatmulShape(5, 48, 32, dtype=dtype) for dtype in ("float16", "int8", "float32")),
    MatmulShape(20, 24, 40, b_major="k"),
    MatmulShape(7, 9, 11, is_padded=False),
    MatmulShape(7, 9, 11, batch=2, a_major="m"),
    MatmulShape(70, 64, 32, activation="relu"),
    *(SoftmaxShape(3, n, dtype) for n in (16, 33) for dtype in ("float32", "bfloat16")),
    SoftmaxShape(6, 20, is_contiguous=False),
    *(AddShape(3, n, "float32", b_shape) for n in (16, 33) for b_shape in ("full", "row")),
]


@pytest.mark.parametrize("workload", SMALL, ids=as_line)
def test_operands_are_what_the_workload_says(workload):
    """What the op makes of real tensors is the configuration and the binary of the pure problem."""
    make = operands_of(workload, 2, device="cpu").launcher
    by_itself, chosen = make(None), make(workload.chosen(INTERPRETER))
    for call in (by_itself, chosen):
        call(0)
        call(1)
    held = inspect.getclosurevars(by_itself).nonlocals
    free, bound = held["prepared"], inspect.getclosurevars(chosen).nonlocals["prepared"]
    assert free.variants == bound.variants != ()
    if isinstance(workload, MatmulShape):
        spec = Epilogue(held["bias"], activation=workload.activation).spec
        a, b, out = held["sets"][0]
        plan = plan_of(a, b, out, spec, workload.precision)
        assert plan is not None
        assert plan[1:] == (workload.problem, workload.chosen(INTERPRETER))


def test_alternatives_of_a_large_product_reach_every_split():
    found = list(MatmulShape(128, 128, 16384).candidates(KNOWN["nvidia_h100"]))
    assert {1, 2, 4, 8, 16} <= {config.split_k for config in found if isinstance(config, Config)}


@pytest.mark.parametrize(
    ("activation", "names"),
    [("relu", {"torch", "torch fused"}), ("gelu", {"torch", "torch fused"}), ("silu", {"torch"})],
)
def test_the_other_side_has_the_same_bias_and_activation(activation, names):
    operands = MatmulOperands(MatmulShape(32, 64, 48, activation=activation), 1, torch.Generator().manual_seed(1))
    operands.launcher(None)(0)
    ours = operands.output.clone()
    # The other library of NVIDIA is not in every build.
    calls = {name: call for name, call in operands.vendors().items() if name != "torch lt"}
    assert set(calls) == names
    for call in calls.values():
        operands.poison()
        call(0)
        torch.testing.assert_close(operands.output, ours, rtol=0.02, atol=0.05)
