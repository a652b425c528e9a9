"""search in the interpreter, against float64: metrics, bias, ties, NaN, sizes, strides, cuts."""

from dataclasses import replace

import pytest
import torch

from tilewire.kernels.runtime.targets import INTERPRETER
from tilewire.kernels.search.configs import DIRECT, PRODUCT, Config, Score, tile_for
from tilewire.kernels.search.op import item_norms, prepare, prepare_search, search
from tilewire.kernels.search.reference import scores_reference, search_reference

INF, NAN = float("inf"), float("nan")
# A search takes seconds in the interpreter.
SLOW_DTYPES = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float16)]


def whole(shape, dtype, generator, most=4):
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def check_whole(a, b, k, **options):
    """Whole numbers have exact scores: values and indices must be those of float64."""
    values, indices = search(a, b, k, **options)
    expected, order = search_reference(a, b, k, metric=options.get("metric", "dot"), bias=options.get("bias"))
    assert torch.equal(indices, order)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261122)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, *SLOW_DTYPES])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 70, 16), (2, 45, 33)])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_whole_numbers(dtype, m, n, k, metric, generator):
    check_whole(whole((m, k), dtype, generator), whole((n, k), dtype, generator), min(n, 7), metric=metric)


@pytest.mark.parametrize("metric", ["dot", "l2", "cosine"])
@pytest.mark.parametrize(("m", "n", "best"), [(13, 20, 1), (13, 20, 7), (9, 60, 3), (5, 60, 9), (3, 130, 40)])
def test_programs_of_several_queries(m, n, best, metric, generator):
    a, b = whole((m, 6), torch.float32, generator), whole((n, 6), torch.float32, generator)
    if metric != "cosine":
        check_whole(a, b, best, metric=metric)
        return
    values, indices = search(a, b, best, metric=metric)
    scores = scores_reference(a, b, metric=metric)
    torch.testing.assert_close(values.double(), scores.gather(1, indices), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(values.double(), scores.topk(best).values, rtol=1e-6, atol=1e-6)


def test_several_blocks_of_queries(generator):
    check_whole(whole((17, 40), torch.bfloat16, generator), whole((33, 40), torch.bfloat16, generator), 3)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_a_bias_moves_and_excludes(metric, generator):
    a, b = whole((3, 16), torch.bfloat16, generator), whole((50, 16), torch.bfloat16, generator)
    bias = whole((50,), torch.float16, generator)
    bias[::2] = INF if metric == "l2" else -INF
    check_whole(a, b, 10, metric=metric, bias=bias)
    # More than are left: the excluded follow, the smaller index first.
    check_whole(a, b, 40, metric=metric, bias=bias)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, *SLOW_DTYPES])
@pytest.mark.parametrize("has_bias", [True, False])
def test_cosine(dtype, has_bias, generator):
    a, b = whole((4, 24), dtype, generator), whole((60, 24), dtype, generator)
    a[1] = 0
    b[7] = 0
    bias = whole((60,), torch.float32, generator) if has_bias else None
    values, indices = search(a, b, 60, metric="cosine", bias=bias)
    scores = scores_reference(a, b, metric="cosine", bias=bias)
    torch.testing.assert_close(values.double(), scores.gather(1, indices), rtol=1e-6, atol=1e-6)
    assert (values[:, 1:] <= values[:, :-1]).all()
    if not has_bias:
        assert (values[1] == 0).all()
        assert torch.equal(indices[1], torch.arange(60))


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_nan_comes_after_every_number(metric, generator):
    a, b = whole((2, 8), torch.float32, generator), whole((40, 8), torch.float32, generator)
    b[3, 1] = NAN
    b[30] = NAN
    a[1, 0] = NAN
    values, indices = search(a, b, 40, metric=metric)
    assert not values[0, :38].isnan().any()
    assert values[0, 38:].isnan().all()
    assert indices[0, 38:].tolist() == [3, 30]
    assert values[1].isnan().all()
    assert torch.equal(indices[1], torch.arange(40))


def test_distances_are_never_negative_and_zero_for_the_item_itself(generator):
    b = torch.randn((60, 32), generator=generator) * 100
    values, indices = search(b[:5], b, 2, metric="l2")
    assert (values[:, 0] == 0).all()
    assert torch.equal(indices[:, 0], torch.arange(5))
    assert (values >= 0).all()


@pytest.mark.parametrize(
    ("kernel", "is_swapped"),
    [
        ("tma", True),
        ("pointer", False),
        pytest.param("tma", False, marks=pytest.mark.slow),
        pytest.param("pointer", True, marks=pytest.mark.slow),
    ],
)
def test_points_far_from_zero_find_the_nearest(kernel, is_swapped, generator):
    b = torch.randn((300, 4), generator=generator) + 1e5
    b[0] = 0
    a = b[50:70] + 0.01 * torch.randn((20, 4), generator=generator)
    values, indices = torch.full((20, 4), NAN), torch.full((20, 4), -1)
    config = Config(kernel, 16, 32, 32, 4, 1, is_swapped=is_swapped, group=8)
    norms = item_norms(b, "l2")
    assert norms.shape == (304,)
    prepare(a, b, 4, metric="l2", bias=None, config=config)(a, b, norms, None, values, indices)
    expected, order = search_reference(a, b, 4, metric="l2")
    assert torch.equal(indices, order)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_nearest_are_found_where_items_lie_far_from_each_other(kernel, has_bias, generator):
    """Wherever the centre is, most of the digits of some norms are lost in it."""
    b = torch.randn((300, 4), generator=generator)
    b[::3] += 1e4
    b[1::3] -= 1e6
    b[5], b[6] = 3e30, NAN
    a = b[50:70] + 0.01 * torch.randn((20, 4), generator=generator)
    a[7], a[8, 1] = NAN, INF
    bias = torch.randn(300, generator=generator) if has_bias else None
    values, indices = torch.full((20, 4), NAN), torch.full((20, 4), -1)
    config = Config(kernel, 16, 32, 32, 4, 1, group=8)
    prepare(a, b, 4, metric="l2", bias=bias, config=config)(a, b, item_norms(b, "l2"), bias, values, indices)
    expected, order = search_reference(a, b, 4, metric="l2", bias=bias)
    # An infinite distance is one in float64, too.
    assert torch.equal(indices, order)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kernel", ["tma", "pointer"])
def test_the_nearest_of_16_bits_are_found_where_norms_are_large(kernel, generator):
    """From 1,024 to 2,048 whole numbers are float16's; squares and products of 33 of them are more than float32 holds."""
    b = (1500 + torch.randint(-3, 4, (300, 33), generator=generator)).half()
    a = b[:17] + 1
    values, indices = torch.full((17, 9), NAN), torch.full((17, 9), -1)
    config = Config(kernel, 16, 32, 32, 4, 1, group=8)
    prepare(a, b, 9, metric="l2", bias=None, config=config)(a, b, item_norms(b, "l2"), None, values, indices)
    expected, order = search_reference(a, b, 9, metric="l2")
    assert torch.equal(indices, order)
    assert torch.equal(values.double(), expected)


def test_items_that_are_not_finite_leave_a_finite_centre(generator):
    b = torch.randn((40, 8), generator=generator) + 1e4
    b[3], b[4, 0], b[5, 1] = NAN, INF, 3e38
    indices = search(b[10:12], b, 3, metric="l2")[1]
    assert torch.equal(indices[:, 0], torch.tensor([10, 11]))
    assert torch.equal(indices, search_reference(b[10:12], b, 3, metric="l2")[1])


@pytest.mark.parametrize("best", [17, *(pytest.param(best, marks=pytest.mark.slow) for best in (65, 257))])
def test_many_results(best, generator):
    check_whole(whole((2, 16), torch.float32, generator), whole((300, 16), torch.float32, generator), best)


def test_batches_strides_and_known_norms(generator):
    a = whole((2, 3, 32), torch.bfloat16, generator)[:, :, ::2]
    b = whole((40, 48), torch.bfloat16, generator)[:, 8:24]
    values, indices = search(a, b, 5, metric="l2", norms=item_norms(b, "l2"))
    expected, order = search_reference(a, b, 5, metric="l2")
    assert values.shape == indices.shape == (2, 3, 5)
    assert torch.equal(indices, order)
    assert torch.equal(values.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, *SLOW_DTYPES])
@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_what_lies_behind_rows_is_not_used(dtype, kernel, metric, generator):
    a, b = (torch.full((rows, 40), NAN, dtype=dtype) for rows in (3, 50))
    a, b = a[:, :33], b[:, :33]
    a[:], b[:] = whole(a.shape, dtype, generator), whole(b.shape, dtype, generator)
    values, indices = torch.full((3, 5), NAN), torch.full((3, 5), -1)
    config = Config(kernel, 16, 32, 32, 4, 1, is_swapped=True, group=8)
    prepared = prepare(a, b, 5, metric=metric, bias=None, config=config)
    prepared(a, b, item_norms(b, "l2") if metric == "l2" else None, None, values, indices)
    expected, order = search_reference(a, b, 5, metric=metric)
    assert torch.equal(indices, order)
    assert torch.equal(values.double(), expected)


def test_no_element_scores_zero_or_the_bias():
    values, indices = search(torch.empty(2, 0), torch.empty(9, 0), 3)
    assert (values == 0).all()
    assert torch.equal(indices, torch.arange(3).expand(2, 3))
    assert search(torch.empty(0, 4), torch.ones(9, 4), 3)[0].shape == (0, 3)


@pytest.mark.slow
def test_queries_beyond_the_scratch_memory_are_cut(generator):
    a, b = whole((40, 16), torch.float32, generator), whole((200, 16), torch.float32, generator)
    values, indices = torch.full((40, 4), NAN), torch.full((40, 4), -1)
    prepared = prepare(a, b, 4, metric="dot", bias=None, max_orders=128)
    assert len(prepared.variants) == 3 * 4
    prepared(a, b, None, None, values, indices)
    expected, order = search_reference(a, b, 4)
    assert torch.equal(indices, order)
    assert torch.equal(values.double(), expected)


def test_queries_whose_scores_are_beyond_the_scratch_memory_are_cut(generator):
    a, b = whole((5, 16), torch.float32, generator), whole((21, 16), torch.float32, generator)
    values, indices = torch.full((5, 4), NAN), torch.full((5, 4), -1)
    # Three groups of eight items each: scores of two queries at a time.
    prepared = prepare(a, b, 4, metric="dot", bias=None, config=DIRECT, max_orders=48)
    assert len(prepared.variants) == 3 * 2
    prepared(a, b, None, None, values, indices)
    assert torch.equal(indices, search_reference(a, b, 4)[1])


@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("is_swapped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_form_of_the_product(kernel, is_swapped, generator):
    a, b = whole((18, 40), torch.float32, generator), whole((70, 40), torch.float32, generator)
    config = Config(kernel, 16, 32, 32, 4, 1, is_swapped=is_swapped, group=8)
    values, indices = torch.full((18, 4), NAN), torch.full((18, 4), -1)
    prepare(a, b, 4, metric="dot", bias=None, config=config)(a, b, None, None, values, indices)
    assert torch.equal(indices, search_reference(a, b, 4)[1])


@pytest.mark.slow
def test_a_query_has_the_same_bits_alone_and_among_others(generator):
    a, b = torch.randn((20, 64), generator=generator), torch.randn((50, 64), generator=generator)
    values, indices = search(a, b, 6, batch_invariant=True)
    alone = search(a[7:8], b, 6, batch_invariant=True)
    assert torch.equal(alone[0], values[7:8])
    assert torch.equal(alone[1], indices[7:8])


@pytest.mark.parametrize(
    ("a", "b", "options", "named"),
    [
        (torch.ones(2, 3), torch.ones(4, 3).double(), {}, "a and b"),
        (torch.ones(2, 3).double(), torch.ones(4, 3).double(), {}, "a"),
        (torch.ones(3), torch.ones(4, 3), {}, "a, b"),
        (torch.ones(2, 3), torch.ones(4, 2), {}, "K differs"),
        (torch.ones(2, 3), torch.ones(4, 3), {"k": 5}, "k"),
        (torch.ones(2, 3), torch.ones(4, 3), {"k": 0}, "k"),
        (torch.ones(2, 3), torch.ones(4, 3), {"metric": "l1"}, "metric"),
        (torch.ones(2, 3), torch.ones(4, 3), {"precision": "fast"}, "precision"),
        (torch.ones(2, 3), torch.ones(4, 3), {"bias": torch.ones(3)}, "bias"),
    ],
)
def test_refuses(a, b, options, named):
    with pytest.raises(ValueError, match=named):
        search(a, b, **{"k": 1, **options})


def test_prepared_refuses_outputs_that_do_not_fit():
    a, b = torch.ones(2, 8), torch.ones(5, 8)
    with pytest.raises(ValueError, match="indices"):
        prepare_search(a, b, torch.empty(2, 2), torch.empty(2, 2))


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("k", [250, 240])
def test_items_of_nan_are_kept_last(k, metric, generator):
    a, b = whole((2, 8), torch.float32, generator), whole((250, 8), torch.float32, generator)
    b[::3] = NAN
    norms = None if metric == "dot" else item_norms(b, metric)
    values, indices = torch.zeros((2, k)), torch.zeros((2, k), dtype=torch.int64)
    prepare(a, b, k, metric=metric, bias=None, config=DIRECT)(a, b, norms, None, values, indices)
    expected, order = search_reference(a, b, k, metric=metric)
    assert torch.equal(indices, order)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, *SLOW_DTYPES])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_scores_of_all_items_at_once_are_those_of_selected_groups(dtype, metric, generator):
    a, b = whole((3, 33), dtype, generator), whole((75, 33), dtype, generator)
    bias = torch.randn((75,), generator=generator)
    norms = None if metric == "dot" else item_norms(b, metric)
    results = []
    groups = Config("pointer", 16, 32, 32, 4, 1, is_swapped=True, group=8)
    at_once = tile_for(INTERPRETER) if metric == "l2" else PRODUCT
    for config in (DIRECT, at_once, groups, replace(groups, score=Score(4, 32, 1))):
        values, indices = torch.zeros((3, 9)), torch.zeros((3, 9), dtype=torch.int64)
        prepare(a, b, 9, metric=metric, bias=bias, config=config)(a, b, norms, bias, values, indices)
        results.append((values, indices))
    for values, indices in results[1:]:
        assert torch.equal(values, results[0][0])
        assert torch.equal(indices, results[0][1])
