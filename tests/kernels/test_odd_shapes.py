"""The benchmark over odd shapes: its cases are right in Triton's interpreter, and what it makes of measurements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.bench_odd_shapes import run, table
from benchmarks.odd_shapes import DRAWS, FORMS, Case, Operand, cases

NUM_CASES = 6


@pytest.mark.parametrize("op", DRAWS)
def test_small_cases_give_what_pytorch_gives(op: str) -> None:
    for case in itertools.islice(cases(7, [op], 1 << 10), NUM_CASES):
        assert case.is_right(case.tensors("cpu")), case.name


def test_a_seed_draws_the_same_cases_whichever_ops_are_wanted() -> None:
    def names(*ops: str) -> list[str]:
        drawn = itertools.islice(cases(11, ops), 40 * len(ops))
        return [case.name for case in drawn if case.op == "matmul"]

    assert names("matmul") == names("add", "matmul", "topk")
    assert names("matmul")[:2] == [
        "thin tf32 339280x8 8x8 permuted1,0 float32",
        "outer ieee 323x2 narrowed 2x272 narrowed bfloat16",
    ]
    assert next(cases(11, ["reduce"])).name == "sum axis 1 of 1467246x23 float32"


def test_operands_have_every_form_and_room() -> None:
    drawn = list(itertools.islice(cases(5, list(DRAWS)), 80 * len(DRAWS)))
    assert {operand.form for case in drawn for operand in case.operands} == {"plain", *FORMS}
    assert {case.op for case in drawn} == set(DRAWS)
    for form, axes, stride in (
        ("plain", (), (12, 4, 1)),
        ("permuted", (2, 0, 1), (3, 1, 6)),
        ("shifted", (), (12, 4, 1)),
        ("narrowed", (), (21, 7, 1)),
        ("stepped", (), (24, 8, 2)),
        ("expanded", (1,), (4, 0, 1)),
    ):
        x = Operand((2, 3, 4), torch.float16, form, axes).tensor(torch.Generator().manual_seed(1))
        assert (x.shape, x.stride(), x.dtype) == ((2, 3, 4), stride, torch.float16), form


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + 1e-3,
        lambda x: torch.full_like(x, torch.inf),
        lambda x: torch.full_like(x, torch.nan),
        lambda x: x[1:],
    ],
)
def test_wrong_results_are_told(wrong: Callable[..., torch.Tensor]) -> None:
    case = Case("add", "a copy", (Operand((3, 4), torch.float32),), torch.clone, torch.clone, 1e-4)
    assert case.is_right(case.tensors("cpu"))
    assert not replace(case, ours=wrong).is_right(case.tensors("cpu"))


def test_shares_are_of_the_longer_cases() -> None:
    times = [(10.0, 20.0), (10.0, 7.0), (10.0, 4.0), (1.0, 4.0)]
    rows = [{"op": "add", "us": {"chosen": ours, "torch": theirs}, "is_right": True} for ours, theirs in times]
    rows += [
        {"op": "topk", "error": "out of memory"},
        {"op": "topk", "us": {"chosen": 1.0, "torch": 0.5}, "is_right": False},
    ]
    head, *lines = (line.split() for line in table(rows).splitlines())
    assert head == [
        "op",
        "cases",
        "wrong",
        "failed",
        "geomean",
        "least",
        "from",
        "5",
        "us",
        "below",
        "0.8",
        "below",
        "0.5",
    ]
    assert lines == [
        ["add", "4", "0", "0", "1.223", "0.40", "3", "66.7%", "33.3%"],
        ["topk", "2", "1", "1", "0.500", "0.50", "0", "-", "-"],
        ["together", "6", "1", "1", "1.023", "0.40", "3", "66.7%", "33.3%"],
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--seed", "1", "--seconds", "1"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
