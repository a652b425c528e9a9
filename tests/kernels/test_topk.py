"""topk in the interpreter, against a stable sort: ties, NaN, infinities, axes, strides, long rows."""

import pytest
import torch

from tilewire.kernels.topk.configs import Block, Config
from tilewire.kernels.topk.op import prepare, prepare_topk, topk, topk_reference

INF, NAN = float("inf"), float("nan")
LONG = Config(groups=Block(32, 4), group=2, select=(Block(32, 4),), finish=Block(32, 4))


def check(x, k, *, axis=-1, largest=True):
    values, indices = topk(x, k, axis=axis, largest=largest)
    expected_values, expected_indices = topk_reference(x, k, axis=axis, largest=largest)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    assert values.dtype == x.dtype


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261122)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (1, 1),
        (10, 10),
        (32, 3),
        (33, 16),
        (64, 1),
        (65, 10),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((400, 16), (1000, 17))),
    ],
)
def test_lengths(dtype, largest, n, k, generator):
    check(torch.randn((3, n), generator=generator).to(dtype), k, largest=largest)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [2, 12])
@pytest.mark.parametrize("n", [30, 60, pytest.param(300, marks=pytest.mark.slow)])
def test_ties_nan_and_infinities(largest, n, k):
    x = torch.zeros(7, n)
    x[0, n // 2 :] = -0.0
    x[1, ::3] = INF
    x[2, ::2] = -INF
    x[3, 1::2] = NAN
    x[4] = NAN
    x[4, n - 1] = -INF
    x[5] = -INF
    x[5, 2] = -NAN
    x[6] = INF
    check(x, k, largest=largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(120, 120), (120, 110), (100, 97)])
def test_nan_is_kept_last_and_nothing_behind_the_row(n, k, dtype, generator):
    x = torch.randn((2, n), generator=generator).to(dtype)
    x[:, ::3] = NAN
    check(x, k, largest=False)


@pytest.mark.parametrize("width", [64, *(pytest.param(width, marks=pytest.mark.slow) for width in (256, 1024))])
def test_wide(width, generator):
    x = torch.randint(0, 50, (1, 5 * width + 3), generator=generator).float()
    check(x, width)
    check(x[:, : width + 1], width - 1, largest=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (33, 120, 301))])
def test_rows_that_begin_anywhere(dtype, n, generator):
    # Whatever lies around a row is better than all that it holds.
    around = torch.full((9, 2 * n + 9), INF).to(dtype)
    for first in range(9) if n < 300 else (0, 3, 7):
        x = around[:3, first : first + n]
        x.copy_(torch.randint(0, 20, x.shape, generator=generator))
        check(x, min(n, 12))
        x.copy_(torch.randn(x.shape, generator=generator))
        check(x, min(n, 12))
        around.fill_(INF)


@pytest.mark.slow
def test_long_rows_merge_several_times(generator):
    x = torch.randint(0, 400, (2, 1003), generator=generator).float()
    values, indices = torch.full((2, 9), NAN), torch.full((2, 9), -7)
    prepared = prepare(x, values, indices, axis=1, largest=True, config=LONG)
    assert len(prepared.variants) > 4
    prepared(x, values, indices)
    expected = topk_reference(x, 9)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_axes(axis, generator):
    check(torch.randn((6, 20, 18), generator=generator), 5, axis=axis)


@pytest.mark.parametrize("n", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_many_rows_are_cut(n, generator):
    x = torch.randn((7, n + 3), generator=generator)[:, :n]
    values, indices = torch.full((7, 5), NAN), torch.full((7, 5), -1)
    prepared = prepare(x, values, indices, axis=1, largest=True, max_kept=300)
    assert len(prepared.variants) > len(prepare(x, values, indices, axis=1, largest=True).variants)
    prepared(x, values, indices)
    expected, order = topk_reference(x, 5)
    assert torch.equal(indices, order)
    assert torch.equal(values, expected)


def test_strides(generator):
    x = torch.randn((9, 4, 70), generator=generator)
    check(x[::2, 1], 4)
    check(x[:, ::2, ::3], 4)
    check(x[0, 0], 2)


def test_empty():
    values, indices = topk(torch.empty(0, 5), 2)
    assert values.shape == indices.shape == (0, 2)


@pytest.mark.parametrize(
    ("x", "k", "axis", "named"),
    [
        (torch.tensor(1.0), 1, -1, "dimension"),
        (torch.ones(3, dtype=torch.int32), 1, -1, "dtype"),
        (torch.ones(3), 1, 1, "axis"),
        (torch.ones(3), 4, 0, "k"),
        (torch.ones(3), 0, 0, "k"),
        (torch.ones(2000), 1025, 0, "k"),
    ],
)
def test_refuses(x, k, axis, named):
    with pytest.raises(ValueError, match=named):
        topk(x, k, axis=axis)


def test_prepared_refuses_outputs_that_do_not_fit():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="values"):
        prepare_topk(x, torch.empty(3, 2), torch.empty((3, 2), dtype=torch.int64))
    with pytest.raises(ValueError, match="indices"):
        prepare_topk(x, torch.empty(2, 2), torch.empty(2, 2))
