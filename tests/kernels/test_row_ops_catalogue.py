"""The catalogue of the ops that are not tuned: each choice is in it, and a sample gives right results."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewire.kernels.normalize import op as normalize_op
from tilewire.kernels.normalize.op import variant as normalize_variant
from tilewire.kernels.pointwise import op as pointwise_op
from tilewire.kernels.pointwise.op import build as build_pointwise
from tilewire.kernels.reduce import configs as reduce_configs
from tilewire.kernels.reduce.op import build as build_reduce
from tilewire.kernels.registry import KERNEL_OPS, kernel_op
from tilewire.kernels.runtime.kinds import FLOATS
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN
from tilewire.kernels.search import configs as search_configs
from tilewire.kernels.search.variants import binaries, finish_variant
from tilewire.kernels.softmax.across import count_side_by_side
from tilewire.kernels.topk import configs as topk_configs
from tilewire.kernels.topk.op import built, select_variant

TARGETS = {**KNOWN, "interpreter": INTERPRETER}
# Those of the others are in `test_catalogue.py`.
OPS = [op.name for op in KERNEL_OPS if op.name not in ("matmul", "softmax", "add", "staging")]
# Start, end and step in the self-tests of each op: some forty. Those of hundreds of results take minutes each in the
# interpreter: `test_search` and `test_topk` have a few.
SAMPLES = {
    "search": (38, 246, 68),
    "topk": (0, 50, 9),
}
names = st.sampled_from(sorted(TARGETS))
dtypes = st.sampled_from(FLOATS)
lengths = st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096, 8192, 16384, 65536]), st.integers(1, 1 << 24))


@functools.cache
def listed(op, name):
    return frozenset(kernel_op(op).variants(TARGETS[name]))


@settings(deadline=None)
@given(lengths, lengths, st.integers(1, 1024), dtypes, st.booleans(), names)
def test_every_topk(rows, n, k, dtype, is_aligned, name):
    problem = topk_configs.Problem(rows, n, min(k, n), dtype, is_aligned)
    config = topk_configs.choose(problem, TARGETS[name])
    found = built(dtype, config, TARGETS[name]).values()
    selects = [select_variant(block, of_keys, TARGETS[name]) for block in config.select for of_keys in (True, False)]
    assert {*found, *selects} <= listed("topk", name)


@pytest.mark.slow
@settings(deadline=None)
@given(lengths, lengths, lengths, st.integers(1, 1024), st.sampled_from(search_configs.DTYPES), st.data(), names)
def test_every_search(m, n, k, best, dtype, data, name):
    precisions = search_configs.PRECISIONS if dtype == "float32" and name != "interpreter" else ("ieee",)
    precision = data.draw(st.sampled_from(precisions))
    is_aligned, is_plain, is_distance = (data.draw(st.booleans()) for _ in "abc")
    is_plain &= not is_distance
    target = TARGETS[name]
    problem = search_configs.Problem(m, n, k, best, dtype, precision, is_aligned, is_plain, is_distance)
    for each in (problem, search_configs.invariant(problem)):
        config = search_configs.choose(each, target)
        # Rows that lie otherwise are copied.
        problem = replace(problem, is_aligned=problem.is_aligned or config.kernel == "tma")
        found = set(binaries(problem, config, target))
        assert found <= listed("search", name)
        # A product's are those of `matmul`.
        is_product = config == search_configs.PRODUCT
        assert is_product == (not found)
        num_keys = (-(-n // config.group) if config.is_whole_scored else best) * config.group
        block = search_configs.finish_for(num_keys, best, is_scores=is_product)
        assert finish_variant(block, is_product, target) in listed("search", name)
        assert block.block_n >= num_keys
    blocks = topk_configs.select_blocks(best, target)
    assert min(block.block_n for block in blocks) >= best
    selects = {select_variant(block, of_keys, target) for block in blocks for of_keys in (True, False)}
    assert selects <= listed("search", name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_search_of_few_items_takes_small_tiles_and_scores_few_again(dtype):
    few, many = (
        search_configs.choose(search_configs.Problem(65, n, 1232, 20, dtype), KNOWN["nvidia_h200"])
        for n in (8200, 10_000_000)
    )
    assert few.block_m < many.block_m
    assert few.group < many.group


@pytest.mark.parametrize(("outer", "n", "inner"), [(54_722, 8, 8), (4072, 16, 104), (12_344, 208, 5), (8, 438_352, 2)])
def test_a_column_reduction_reads_few_elements_that_are_none(outer, n, inner):
    problem = reduce_configs.Problem(outer * inner, inner, n, "float32", 0, is_row=False)
    config = reduce_configs.choose(problem, KNOWN["nvidia_h200"])
    rows = -(-problem.rows // config.block_rows) * config.block_rows
    assert rows * -(-n // config.block_n) * config.block_n < 1.3 * problem.rows * n


@settings(deadline=None)
@given(
    lengths, lengths, lengths, dtypes, st.sampled_from(reduce_configs.STATES), st.booleans(), st.integers(0, 2), names
)
def test_every_reduction(outer, inner, n, dtype, state, is_row, lying, name):
    is_cut = lying > 0 and is_row and n > reduce_configs.SHORT
    how = (is_row, lying == 0 or is_cut, is_row or lying < 2, is_cut)
    problem = reduce_configs.Problem(outer * inner, inner, n, dtype, state, *how)
    config = reduce_configs.choose(problem, TARGETS[name])
    assert config.parts <= reduce_configs.MAX_PARTS
    assert (config.parts - 1) * config.block_n < max(1, n)
    assert build_reduce(problem, config, TARGETS[name]) in listed("reduce", name)


@settings(deadline=None)
@given(lengths, lengths, dtypes, dtypes, st.booleans(), st.booleans(), st.sampled_from([1, 2, 3, 8, 80]), names)
def test_every_normalisation(rows, n, dtype, out_dtype, is_typed, is_aligned, inner, name):
    vector_dtype = dtype if is_typed and dtype == out_dtype else "float32"
    problem = normalize_op.Problem(rows, n, dtype, out_dtype, vector_dtype, is_aligned)
    n_apart = n % 1024 or 1
    count = count_side_by_side(n_apart, inner, [(n_apart * inner, 1, inner)] * 2, dtype, out_dtype)
    apart = replace(problem, n=n_apart, is_aligned=False, is_contiguous=False, side_by_side=count)
    for each in (problem, apart):
        config = normalize_op.choose(each, TARGETS[name])
        assert config.is_across == (each == apart or (n <= 16 and not is_aligned))
        assert normalize_variant(each, config, TARGETS[name]) in listed("normalize", name)


@pytest.mark.slow
@settings(deadline=None)
@given(lengths, lengths, dtypes, dtypes, st.booleans(), st.booleans(), st.data(), names)
def test_every_pointwise_function(rows, n, dtype, out_dtype, is_binary, is_aligned, data, name):
    ways = st.sampled_from(["unit", "repeat", "any"])
    x_inner, y_inner = data.draw(ways), data.draw(ways)
    inner = (x_inner, y_inner if is_binary else x_inner, data.draw(st.sampled_from(["unit", "any"])))
    problem = pointwise_op.Problem(rows, n, dtype, out_dtype, is_aligned, inner, is_binary=is_binary)
    config = pointwise_op.choose(problem, TARGETS[name])
    assert build_pointwise(problem.specialization, config, TARGETS[name]) in listed("pointwise", name)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_sample_of_the_self_test_is_right(op):
    self_tests = itertools.islice(
        kernel_op(op).self_tests(INTERPRETER, torch.device("cpu")), *SAMPLES.get(op, (0, None, 9))
    )
    for start in self_tests:
        trial = start()
        assert bool(trial.is_right), [variant.described() for variant in trial.variants]


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPS if op != "search"])
def test_a_sample_of_the_self_test_of_a_device_launches_its_blocks_and_is_right(op):
    for family in kernel_op(op).families:
        for member in list(dict.fromkeys(family.members(KNOWN["nvidia_h200"])))[::9]:
            trial, expected = (
                family.self_test(*member, torch.device("cpu")),
                family.build(*member, KNOWN["nvidia_h200"]),
            )
            assert bool(trial.is_right), member
            variants = {expected} if isinstance(expected, Variant) else set(expected)
            assert {blocks(variant) for variant in variants} <= {blocks(variant) for variant in trial.variants}, member


def blocks(variant):
    """All constants but whether the launch overlaps the one before it, which the interpreter does not."""
    return variant.kernel.__name__, frozenset(constant for constant in variant.constants if constant[0] != "OVERLAP")
