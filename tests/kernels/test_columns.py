"""Products of one column, which are computed as one row."""

import pytest
import torch

from tests.support.matmul_reference import matmul_reference
from tilewire.kernels import matmul
from tilewire.kernels.matmul.configs import EpilogueSpec
from tilewire.kernels.matmul.plan import plan_of


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261130)


def whole(shape, dtype, generator):
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_every_row_is_right(dtype, batch, is_turned, generator):
    for m, k in ((5, 16), (33, 7), (40, 64)):
        a = whole((*batch, k, m), dtype, generator).mT if is_turned else whole((*batch, m, k), dtype, generator)
        for b in (whole((*batch, k, 1), dtype, generator), whole((k, 5), dtype, generator)[:, 2:3]):
            out = matmul(a, b)
            assert out.shape == (*batch, m, 1)
            assert torch.equal(out.double(), matmul_reference(a, b))


def test_scales_and_activations_stay_with_their_rows_and_columns(generator):
    a, b = whole((9, 8), torch.float32, generator), whole((8, 1), torch.float32, generator)
    a_scale, b_scale = torch.arange(1.0, 10.0), torch.tensor([2.0])
    for bias in (None, torch.tensor([5.0])):
        out = matmul(a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, activation="relu")
        expected = matmul_reference(a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, activation="relu")
        assert torch.equal(out.double(), expected)


def test_it_is_planned_as_one_row():
    a, b, out = torch.empty(50, 16), torch.empty(16, 1), torch.empty(50, 1)
    plan = plan_of(a, b, out, EpilogueSpec(), "ieee")
    assert plan is not None
    view, problem, _ = plan
    assert view.is_turned
    assert (problem.m, problem.n, problem.k) == (1, 50, 16)
    assert (problem.a_major, problem.b_major) == ("k", "k")
    assert problem.is_aligned_in


@pytest.mark.parametrize("spec", [EpilogueSpec("float32"), EpilogueSpec("float32", activation="relu")])
def test_columns_with_a_bias_stay(spec):
    plan = plan_of(torch.empty(50, 16), torch.empty(16, 1), torch.empty(50, 1), spec, "ieee")
    assert plan is not None
    view, problem, _ = plan
    assert not view.is_turned
    assert (problem.m, problem.n) == (50, 1)


def test_bits_of_a_row_stay_those_of_any_number_of_rows(generator):
    a, b = torch.randn((70, 40), generator=generator), torch.randn((40, 1), generator=generator)
    whole = matmul(a, b, batch_invariant=True)
    assert torch.equal(matmul(a[:3], b, batch_invariant=True), whole[:3])


@pytest.mark.parametrize("spec", [EpilogueSpec(), EpilogueSpec("float32")])
def test_a_vector_that_follows_itself_is_aligned_where_it_begins(spec):
    plan = plan_of(torch.empty(50, 16), torch.empty(16, 1), torch.empty(50, 1), spec, "ieee")
    assert plan is not None
    view, problem, _ = plan
    assert (problem.a_major if view.is_turned else problem.b_major) == "k"
    assert (problem.is_padded_a, problem.is_padded_b) == (True, True)


def test_a_vector_in_padded_rows_is_right(generator):
    a, rows = whole((9, 16), torch.float16, generator), whole((16, 8), torch.float16, generator)
    bias = torch.tensor([5.0])
    for given in (None, bias):
        out = matmul(a, rows[:, :1], bias=given)
        assert torch.equal(out.double(), matmul_reference(a, rows[:, :1], bias=given))
