"""search on a GPU, against float64: few and many items and queries, all metrics and dtypes."""

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels.search.op import search
from tilewire.kernels.search.reference import scores_reference, search_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8]


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261129)


def whole(shape, dtype, generator):
    """Whole numbers, whose scores are exact and often equal."""
    return torch.randint(-4, 5, shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("k", [4, 35, 64])
@pytest.mark.parametrize("n", [3, 16, 64, 100, 513, 5000])
def test_whole_numbers(dtype, metric, k, n, generator):
    b = whole((n, k), dtype, generator)
    for m in (1, 7, 1003):
        a = whole((m, k), dtype, generator)
        for best in {min(best, n) for best in (1, 3, 8, 10, 40, 300)}:
            values, indices = search(a, b, best, metric=metric)
            expected, order = search_reference(a, b, best, metric=metric)
            assert torch.equal(indices, order), (m, best)
            assert torch.equal(values.double(), expected), (m, best)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [16, 100, 3000])
def test_cosine_and_bias(dtype, n, generator):
    a, b = whole((501, 24), dtype, generator), whole((n, 24), dtype, generator)
    bias = whole((n,), torch.float32, generator)
    for given in (None, bias):
        values, indices = search(a, b, 5, metric="cosine", bias=given)
        scores = scores_reference(a, b, metric="cosine", bias=given)
        torch.testing.assert_close(values.double(), scores.gather(1, indices), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values.double(), scores.topk(5).values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("far", [0, 100, 1000, 10_000])
@pytest.mark.parametrize("k", [4, 64])
def test_the_nearest_are_found_in_two_clusters(dtype, far, k, generator):
    b = torch.randn((50_000, k), generator=generator, device="cuda")
    b[::2] += far
    b[1::2] -= far
    b = b.to(dtype)
    a = (b[:16] + 0.01 * torch.randn((16, k), generator=generator, device="cuda")).to(dtype)
    values, indices = search(a, b, 10, metric="l2")
    expected, order = search_reference(a, b, 10, metric="l2")
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=0)
    assert (indices == order).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [7, 24, 200, 777])
@pytest.mark.parametrize("n", [4, 50, 500, 1000])
def test_equal_items_rank_by_their_index(dtype, k, n, generator):
    """Each item is there twice, in columns of a product far apart; sums are rounded."""
    values = torch.randn((n, k), generator=generator, device="cuda") * 20
    b = values.to(dtype).repeat(2, 1)
    for m, is_invariant in itertools.product((1, 7, 300, 5000), (False, True)):
        a = (torch.randn((m, k), generator=generator, device="cuda") * 20).to(dtype)
        scores, indices = search(a, b, 8, batch_invariant=is_invariant)
        assert torch.equal(scores[:, ::2], scores[:, 1::2])
        # Others may have the same score.
        assert ((scores[:, 1:] < scores[:, :-1]) | (indices[:, 1:] > indices[:, :-1])).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize(("n", "k"), [(6, 520), (32, 159), (64, 7), (222, 384), (1024, 64), (1500, 33)])
def test_the_same_bits_alone_and_among_others(dtype, metric, n, k, generator):
    b = (torch.randn((n, k), generator=generator, device="cuda") * 20).to(dtype)
    a = (torch.randn((3001, k), generator=generator, device="cuda") * 20).to(dtype)
    values, indices = search(a, b, 5, metric=metric, batch_invariant=True)
    scores = scores_reference(a, b, metric=metric)
    scale = scores.abs().amax()
    torch.testing.assert_close(values.double(), scores.gather(1, indices), rtol=1e-5, atol=float(scale) * 1e-6)
    torch.testing.assert_close(values.double(), scores.topk(5).values, rtol=1e-5, atol=float(scale) * 1e-6)
    for rows in (slice(0, 1), slice(1234, 1251), slice(2990, 3001)):
        alone = search(a[rows].clone(), b, 5, metric=metric, batch_invariant=True)
        assert torch.equal(alone[0], values[rows])
        assert torch.equal(alone[1], indices[rows])


def test_many_queries_are_those_alone(generator):
    a, b = torch.randn((100_003, 16), generator=generator, device="cuda"), whole((200, 16), torch.float32, generator)
    values, indices = search(a, b, 4, metric="l2", batch_invariant=True)
    for first in (0, 4_321, 100_000):
        alone = search(a[first : first + 3], b, 4, metric="l2", batch_invariant=True)
        assert torch.equal(values[first : first + 3], alone[0])
        assert torch.equal(indices[first : first + 3], alone[1])
