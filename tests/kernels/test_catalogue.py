"""The catalogue of binaries: whatever dispatch can be asked for is in it, and its members give right results.

Here a sample of them runs in the interpreter; `tests/gpu` runs them all on the device.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewire.kernels.add.op import Problem as AddProblem
from tilewire.kernels.add.op import build as build_add
from tilewire.kernels.add.op import choose as choose_add
from tilewire.kernels.build.selftest import wrong
from tilewire.kernels.matmul.configs import OUT_DTYPES, Problem, precisions_of
from tilewire.kernels.matmul.members import MAX_ELEMENT_K, is_sensible, is_supported, members, specialization_of
from tilewire.kernels.matmul.plan import plan_of
from tilewire.kernels.matmul.select import select as choose
from tilewire.kernels.matmul.select import select_invariant as choose_invariant
from tilewire.kernels.matmul.selftest import case_of
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.op import SelfTest
from tilewire.kernels.registry import KERNEL_OPS, kernel_op
from tilewire.kernels.runtime.kinds import FLOATS, unit_of
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN
from tilewire.kernels.selection.catalogue import OPS, op_named, variants
from tilewire.kernels.softmax.across import count_side_by_side
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem
from tilewire.kernels.softmax.configs import members as softmax_members
from tilewire.kernels.softmax.configs import select as choose_softmax
from tilewire.kernels.softmax.op import KERNELS
from tilewire.kernels.softmax.op import build as build_softmax

TARGETS = {**KNOWN, "interpreter": INTERPRETER}
SAMPLE = 37

listed = functools.cache(lambda name: frozenset(variants(TARGETS[name])))
names = st.sampled_from(sorted(TARGETS))
lengths = st.one_of(
    st.integers(1, 300), st.sampled_from([512, 1024, 4096, 8192, 16384, 65536]), st.integers(1, 1 << 20)
)


@st.composite
def products(draw):
    dtype = draw(st.sampled_from(sorted(OUT_DTYPES)))
    a_major, b_major = draw(st.sampled_from(["k", "m", "any"])), draw(st.sampled_from(["n", "k", "any"]))
    is_copyable = draw(st.booleans())
    is_padded_a = is_copyable and a_major != "any" and draw(st.booleans())
    is_padded_b = is_copyable and b_major != "any" and draw(st.booleans())
    is_aligned_out = draw(st.booleans())
    return Problem(
        m=draw(lengths),
        n=draw(lengths),
        k=draw(st.one_of(st.just(0), lengths)),
        batch=draw(st.integers(1, 3)),
        dtype=dtype,
        out_dtype=draw(st.sampled_from(OUT_DTYPES[dtype])),
        a_major=a_major,
        b_major=b_major,
        precision=draw(st.sampled_from(precisions_of(dtype))),
        # Products of several batch dimensions are neither described nor copied, however they lie.
        is_aligned_in=(is_padded_a and is_padded_b if is_copyable else "any" not in (a_major, b_major))
        and draw(st.booleans()),
        is_aligned_out=is_aligned_out,
        is_padded_a=is_padded_a,
        is_padded_b=is_padded_b,
        is_copyable=is_copyable,
        is_boxed_out=is_aligned_out and draw(st.booleans()),
    )


def check_has_its_binary(problem, name, is_plain):
    target = TARGETS[name]
    if not is_supported(problem.dtype, target):
        return
    config = choose(problem, target, is_plain=is_plain)
    assert build(specialization_of(problem, config, is_plain=is_plain), config, target) in listed(name)


@pytest.mark.parametrize("name", KNOWN)
def test_a_softmax_that_reads_pieces_holds_one(name):
    """Others would be compiled and never launched, not even by the self-test."""
    aligned = [(problem, config) for problem, config in softmax_members(KNOWN[name]) if problem.is_aligned]
    assert aligned
    for problem, config in aligned:
        assert config.held_n % unit_of(problem.dtype, is_aligned=True) == 0


@settings(max_examples=200, deadline=None)
@given(products(), names, st.booleans())
def test_every_product_has_its_binary_in_the_catalogue(problem, name, is_plain):
    check_has_its_binary(problem, name, is_plain)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(products(), names, st.booleans())
def test_each_of_many_products_has_its_binary_in_the_catalogue(problem, name, is_plain):
    check_has_its_binary(problem, name, is_plain)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_self_test_of_each_matmul_binary_is_one_that_it_computes(name):
    target = KNOWN[name]
    for specialization, config in members(target):
        case = case_of(specialization, config, torch.device("cpu"))
        spec = case.epilogue.spec
        plan = plan_of(case.a, case.b, case.out, spec, specialization.precision, case.config)
        assert plan is not None
        _, problem, chosen = plan
        assert specialization_of(problem, chosen, is_plain=spec.is_plain) == specialization
        longest = MAX_ELEMENT_K if config.kernel == "element" else 8192
        assert is_sensible(replace(problem, k=longest), chosen, target)


def check_is_invariant(problem, name, m, batch):
    target = TARGETS[name]
    if not is_supported(problem.dtype, target):
        return
    config = choose_invariant(problem, target)
    other = replace(problem, m=m, batch=batch)
    assert choose_invariant(other, target) == config
    assert config.split_k == 1
    for one in (problem, other):
        assert build(specialization_of(one, config, is_plain=True), config, target) in listed(name)


@settings(deadline=None)
@given(products(), names, lengths, st.integers(1, 3))
def test_an_invariant_choice_ignores_rows_and_products_and_is_in_the_catalogue(problem, name, m, batch):
    check_is_invariant(problem, name, m, batch)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(products(), names, lengths, st.integers(1, 3))
def test_each_of_many_invariant_choices_is_in_the_catalogue(problem, name, m, batch):
    check_is_invariant(problem, name, m, batch)


@settings(deadline=None)
@given(
    lengths, lengths, st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.booleans(), st.sampled_from([1, 2, 8]), names
)
def test_every_softmax_has_its_binaries_in_the_catalogue(rows, n, dtype, out_dtype, is_aligned, inner, name):
    count = count_side_by_side(n, inner, [(n * inner, 1, inner)] * 2, dtype, out_dtype)
    for is_contiguous, side_by_side in ((True, 1), (False, 1), (False, count)):
        how = (is_contiguous, is_aligned and is_contiguous, n % 2 == 0, side_by_side)
        problem = SoftmaxProblem(rows, n, dtype, out_dtype, *how)
        config = choose_softmax(problem, TARGETS[name])
        for kernel in KERNELS[config.kernel]:
            assert build_softmax(kernel, problem, config, TARGETS[name]) in listed(name)


@settings(deadline=None)
@given(lengths, lengths, st.booleans(), names, st.data())
def test_every_addition_has_its_binary_in_the_catalogue(rows, n, is_aligned, name, data):
    target = TARGETS[name]
    inner = [data.draw(st.sampled_from(["unit", "repeat", "any"])) for _ in "ab"]
    dtype, out_dtype = (data.draw(st.sampled_from(["float16", "float32", "int64"])) for _ in "ab")
    out_inner, rank = data.draw(st.sampled_from(["unit", "any"])), data.draw(st.sampled_from([0, 1, 3]))
    problem = AddProblem(rows, n, dtype, out_dtype, is_aligned, (*inner, out_inner), rank)
    assert build_add(problem.specialization, choose_add(problem, target), target) in listed(name)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_catalogue_names_each_binary_once_and_by_its_op(name):
    found = variants(TARGETS[name])
    assert len(set(found)) == len(found)
    assert {op_named(variant.kernel.__name__) for variant in found} == set(OPS)
    assert len({variant.described() for variant in found}) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["matmul", "softmax", "add", "staging"])
def test_a_sample_of_the_members_gives_right_results(op):
    starts = itertools.islice(kernel_op(op).self_tests(INTERPRETER, torch.device("cpu")), 0, None, SAMPLE)
    tried = [start() for start in starts]
    assert op in {op_named(variant.kernel.__name__) for trial in tried for variant in trial.variants}
    assert {variant for trial in tried for variant in trial.variants} <= listed("interpreter")
    assert wrong(tried) == []


def test_a_wrong_result_is_named():
    first, second = variants(INTERPRETER)[:2]
    tried = [SelfTest((first,), torch.tensor(data=True)), SelfTest((second,), torch.tensor(data=False))]
    assert wrong(tried) == [second]


def test_a_kernel_counts_for_the_op_that_launches_it():
    target = TARGETS["nvidia_h100"]
    launched = {(op_named(variant.kernel.__name__), op.name) for op in KERNEL_OPS for variant in op.variants(target)}
    # Search selects with the kernels of top-k.
    assert launched == {(op, op) for op in OPS} | {("topk", "search")}
