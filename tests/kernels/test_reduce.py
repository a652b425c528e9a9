"""reduce in the interpreter, against float64: kinds, axes, strides, shared rows, ties, NaN, infinities, nothing."""

import pytest
import torch

from tilewire.kernels.reduce.configs import KINDS, Config
from tilewire.kernels.reduce.op import prepare, prepare_reduce, reduce, reduce_reference
from tilewire.kernels.runtime.pipeline import Detour

INF, NAN = float("inf"), float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def check(x, kind, *, axis=-1, out=None, **options):
    got = reduce(x, kind, axis=axis, **options) if out is None else out
    expected = reduce_reference(x, kind, axis=axis, keepdims=options.get("keepdims", False))
    if KINDS[kind].is_index:
        assert torch.equal(got, expected)
        return
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261122)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 16, 31, 100])
def test_rows(kind, dtype, n, generator):
    check(torch.randn((3, n), generator=generator).to(dtype), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_axes(kind, axis, generator):
    check(torch.randn((5, 7, 9), generator=generator), kind, axis=axis)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_ties_nan_and_infinities(kind, axis):
    x = torch.zeros(6, 40)
    x[0, 20:] = -0.0
    x[1, 7] = NAN
    x[1, 9] = NAN
    x[2] = -INF
    x[3, 39] = INF
    x[4] = INF
    x[5, ::2] = -INF
    check(x, kind, axis=axis)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_programs_share_a_row(kind, axis, generator):
    x = torch.randint(-3, 4, (140, 140), generator=generator).float()
    out = torch.full((140,), -7, dtype=torch.int64 if KINDS[kind].is_index else torch.float32)
    prepared = prepare(x, out, kind=kind, axis=axis, config=Config(16, 16, 4, parts=3))
    prepared(x, out)
    check(x, kind, axis=axis, out=out)
    # The counters are as they were.
    out.fill_(-7)
    prepared(x, out)
    check(x, kind, axis=axis, out=out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_few_elements_of_many_rows(kind, n, generator):
    check(torch.randn((2, n, 700), generator=generator), kind, axis=1)
    check(torch.randn((300, n), generator=generator), kind, axis=1)
    check(torch.randn((300, n, 2), generator=generator)[:, :, 0], kind, axis=1)


def test_strides_and_dimensions_that_do_not_merge(generator):
    x = torch.randn((4, 6, 8, 10), generator=generator)
    check(x[::2, :, ::2, 1:], "sum")
    check(x[:, :, :, ::3], "argmax")
    check(x.permute(3, 0, 2, 1), "logsumexp", axis=2)
    check(x[:, ::2], "argmin", axis=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_all_elements_are_read_as_they_lie_unless_their_order_counts(kind, order, generator):
    x = torch.randint(-9, 10, (6, 7, 8), generator=generator).float().permute(order)
    out = torch.empty((), dtype=torch.int64 if KINDS[kind].is_index else torch.float32)
    prepared = prepare(x, out, kind=kind, axis=None)
    assert isinstance(prepared, Detour) == KINDS[kind].is_index
    prepared(x, out)
    check(x, kind, axis=None, out=out)


def test_keepdims_and_out_dtype(generator):
    x = torch.randn((4, 6), generator=generator).bfloat16()
    assert reduce(x, "sum", keepdims=True).shape == (4, 1)
    assert reduce(x, "max", axis=None, keepdims=True).shape == (1, 1)
    check(x, "mean", out_dtype=torch.float32)


@pytest.mark.parametrize(("kind", "expected"), [("sum", 0.0), ("mean", NAN), ("norm", 0.0), ("logsumexp", -INF)])
@pytest.mark.parametrize("axis", [1, None])
def test_nothing_to_reduce(kind, expected, axis):
    out = reduce(torch.empty(3, 0), kind, axis=axis)
    assert out.shape == (() if axis is None else (3,))
    torch.testing.assert_close(out, torch.full_like(out, expected), equal_nan=True)


def test_no_result():
    assert reduce(torch.empty(0, 4), "max").shape == (0,)


@pytest.mark.parametrize(
    ("x", "kind", "options", "named"),
    [
        (torch.tensor(1.0), "sum", {}, "dimension"),
        (torch.ones(3, dtype=torch.int32), "sum", {}, "dtype"),
        (torch.ones(3), "product", {}, "kind"),
        (torch.ones(3), "sum", {"axis": 1}, "axis"),
        (torch.ones(3, 0), "max", {}, "no element"),
        (torch.ones(3), "sum", {"out_dtype": torch.int64}, "out_dtype"),
        (torch.ones(3), "argmax", {"out_dtype": torch.float32}, "out_dtype"),
    ],
)
def test_refuses(x, kind, options, named):
    with pytest.raises(ValueError, match=named):
        reduce(x, kind, **options)


def test_prepared_refuses_an_output_that_does_not_fit():
    with pytest.raises(ValueError, match="out"):
        prepare_reduce(torch.ones(2, 3), torch.empty(3), kind="sum")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gap", [3, *(pytest.param(gap, marks=pytest.mark.slow) for gap in (1, 8))])
def test_nothing_around_a_row_is_used(kind, dtype, gap, generator):
    """Rows of every place in a piece of 16 bytes, with better elements and NaN before, between and behind them."""
    for first in range(9):
        whole = torch.full((first + 5 * (41 + gap) + 9,), NAN, dtype=dtype)
        whole[1::2] = INF
        rows = whole[first:].as_strided((5, 41), (41 + gap, 1))
        rows.copy_(torch.randn((5, 41), generator=generator))
        check(rows, kind)


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_an_index_counts_from_the_beginning_of_its_row(kind):
    x = torch.zeros((7, 45))
    best = torch.tensor([0, 1, 44, 16, 15, 31, 43])
    x[torch.arange(7), best] = 1.0 if kind == "argmax" else -1.0
    assert reduce(x, kind).tolist() == best.tolist()


@pytest.mark.parametrize("kind", ["sum", "mean", "norm", "logsumexp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(9, 33), (4, 150, 3), *(pytest.param(one, marks=pytest.mark.slow) for one in ((6, 515), (6, 1000), (3, 2, 301)))],
)
def test_a_row_has_the_same_bits_alone_and_among_others(kind, dtype, shape, generator):
    x = torch.randn(shape, generator=generator).to(dtype)
    whole = reduce(x, kind, axis=1, batch_invariant=True)
    for row in range(shape[0]):
        assert torch.equal(reduce(x[row : row + 1].clone(), kind, axis=1, batch_invariant=True)[0], whole[row])


def test_all_elements_are_shared_by_as_many_programs_with_and_without(generator):
    x = torch.randn((40, 50), generator=generator)
    assert torch.equal(reduce(x, "sum", axis=None, batch_invariant=True), reduce(x, "sum", axis=None))
