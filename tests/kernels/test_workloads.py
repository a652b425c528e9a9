"""Workloads: read from lines, written back, and the same problems that the ops make of real tensors."""

import inspect

import pytest

from benchmarks.bench_dispatch import shapes
from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.benches import operands_of
from tilewire.kernels.autotune.defaults import defaults
from tilewire.kernels.autotune.workloads import Product, Rows, Sum, WorkloadError, as_line, parse, parse_line
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN

TARGETS = ["nvidia_h100", "nvidia_a100", "amd_mi300x"]


def test_a_file_of_workloads_is_read():
    text = (
        '# sizes\n\n{"op": "matmul", "m": 1, "n": 2, "k": 3, "dtype": "int8"}\n{"op": "softmax", "rows": 4, "n": 5}\n'
    )
    assert parse(text, "shapes.jsonl") == [Product(1, 2, 3, dtype="int8"), Rows(4, 5)]


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
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "precision": "tf32"}', "precision: only float32 has a choice"),
        ('{"op": "matmul", "m": 1, "n": 2, "k": 3, "dtype": "int8", "activation": "gelu"}', "activation: gelu needs"),
        ('{"op": "softmax", "rows": 1, "n": 2, "k": 3}', "k: softmax has no such field"),
        ('{"op": "add", "rows": 1, "n": "2"}', "n: expected a whole number from 1, got '2'"),
    ],
)
def test_a_bad_line_is_named(line, message):
    with pytest.raises(WorkloadError, match=r"shapes\.jsonl:2: ") as caught:
        parse(f"\n{line}\n", "shapes.jsonl")
    assert message in str(caught.value)


def test_lines_read_back_as_what_they_were():
    for workload in (*defaults(), *shapes(3, 100, KNOWN["nvidia_h100"])):
        assert parse_line(as_line(workload)) == workload


@pytest.mark.parametrize("name", TARGETS)
def test_what_dispatch_chooses_is_among_the_alternatives(name):
    target = KNOWN[name]
    for workload in shapes(5, 150, target):
        found = alternatives(workload, target)
        assert chosen(workload, target) in found
        assert len(found) == len(set(found))


SMALL = [
    *(Product(5, 48, 32, dtype=dtype) for dtype in ("float16", "int8", "float32")),
    Product(20, 24, 40, b_major="k"),
    Product(7, 9, 11, is_padded=False),
    Product(7, 9, 11, batch=2, a_major="m"),
    Product(70, 64, 32, activation="relu"),
    *(Rows(3, n, dtype) for n in (16, 33) for dtype in ("float32", "bfloat16")),
    Rows(6, 20, is_contiguous=False),
    *(Sum(3, n, "float32", b_shape) for n in (16, 33) for b_shape in ("full", "row")),
]


@pytest.mark.parametrize("workload", SMALL, ids=as_line)
def test_operands_are_what_the_workload_says(workload):
    """What the op makes of real tensors is the configuration and the binary of the pure problem."""
    make = operands_of(workload, 2, device="cpu").launcher
    by_itself, told = make(None), make(chosen(workload, INTERPRETER))
    for call in (by_itself, told):
        call(0)
        call(1)
    free, bound = (inspect.getclosurevars(call).nonlocals["prepared"] for call in (by_itself, told))
    if isinstance(workload, Product):
        assert free.problem == workload.problem
        assert free.config == bound.config
        assert free.variant is not None
    else:
        assert getattr(free, "variants", None) == getattr(bound, "variants", None)
        assert getattr(free, "variant", None) == getattr(bound, "variant", None)


def test_random_shapes_are_new_and_repeatable():
    target = KNOWN["nvidia_h100"]
    drawn = shapes(7, 200, target)
    assert drawn == shapes(7, 200, target)
    assert len(set(drawn)) > 190
    assert not set(drawn) & set(defaults())
    assert {workload.op for workload in drawn} == {"matmul", "softmax", "add"}
    assert drawn != shapes(8, 200, target)


def test_the_defaults_hold_every_arithmetic_once_each():
    assert len(set(defaults())) == len(defaults())
    kinds = {(workload.dtype, workload.precision) for workload in defaults() if isinstance(workload, Product)}
    assert len(kinds) == 6


def test_alternatives_of_a_large_product_reach_every_split():
    found = alternatives(Product(128, 128, 16384), KNOWN["nvidia_h100"])
    assert {1, 2, 4, 8, 16} <= {config.split_k for config in found if isinstance(config, Config)}
