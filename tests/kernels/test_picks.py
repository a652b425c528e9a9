"""Picks: measured at start among what is compiled anyway, kept on disk, and never trusted further than that."""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tuning_fakes import FakeBench
from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.starting import tune_at_start, warmup_buckets
from tilewire.kernels.autotune.workloads import Product, Rows, geomean
from tilewire.kernels.matmul.choice import bucket_of, choose
from tilewire.kernels.matmul.configs import Problem
from tilewire.kernels.matmul.members import family_of
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection.catalogue import variants
from tilewire.kernels.selection.picks import path_of, read_picks, write_picks
from tilewire.kernels.selection.tables import install_picks
from tilewire.kernels.softmax.choice import choose as choose_softmax
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem

A100, H20 = KNOWN["nvidia_a100"], dataclasses.replace(KNOWN["nvidia_h100"], name="nvidia_h20", num_sms=78)
IDENTITY = {"device": "A card", "driver": "1.2.3", "triton": "3.7", "kernels": "abc"}
numbers = itertools.count()


def silent(done, total):
    pass


@functools.cache
def found_for(target):
    return tune_at_start(target, math.inf, silent, bench=FakeBench(spread=0.8, num_sms=target.num_sms))


def with_picks(target, picks):
    """A device of its own that has `picks`."""
    other = dataclasses.replace(target, name=f"{target.name} {next(numbers)}")
    install_picks(other, picks)
    return other


@pytest.mark.parametrize("target", [A100, H20], ids=lambda target: target.name)
def test_dispatch_takes_what_was_found(target):
    picks = found_for(target)
    assert set(picks) == set(warmup_buckets(target))
    better = {bucket for bucket, entry in picks.items() if entry is not None}
    assert {bucket.split()[0] for bucket in better} == {"matmul", "softmax"}
    other = with_picks(target, picks)
    bench = FakeBench(spread=0.8, num_sms=target.num_sms)
    for bucket, workloads in warmup_buckets(target).items():
        before, after = (geomean([bench.us(each, chosen(each, of)) for each in workloads]) for of in (target, other))
        assert (after < before) == (bucket in better)


def test_sizes_of_a_bucket_share_its_pick_and_others_do_not():
    squares = Product(4096, 4096, 4096)
    entry = dataclasses.asdict(next(each for each in alternatives(squares, A100) if each != chosen(squares, A100)))
    other = with_picks(A100, {bucket_of(squares.problem): entry})
    inside = [Product(m, 4000, 2104) for m in (2049, 3000, 4096)]
    outside = [Product(2048, 4000, 2104), Product(4097, 4000, 2104), Product(3000, 4000, 2104, b_major="k")]
    for workload in inside:
        assert dataclasses.asdict(chosen(workload, other)) == entry
    for workload in (*outside, Product(3000, 4000, 2100)):
        assert chosen(workload, other) == chosen(workload, A100)


def test_the_catalogue_does_not_change():
    for target in (A100, H20):
        assert set(variants(with_picks(target, found_for(target)))) == set(variants(target))


@functools.cache
def picked(name):
    target = with_picks(*{"a100": (A100, found_for(A100)), "h20": (H20, found_for(H20))}[name])
    return target, frozenset(variants(target))


sizes = st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096, 5000, 16384]), st.integers(1, 1 << 20))


@settings(max_examples=200)
@given(sizes, sizes, sizes, st.sampled_from([1, 3]), st.sampled_from(["a100", "h20"]), st.data())
def test_every_choice_stays_in_the_catalogue(m, n, k, batch, name, data):
    target, listed = picked(name)
    is_padded, is_out_aligned, is_plain = (data.draw(st.booleans()) for _ in range(3))
    problem = Problem(
        *(m, n, k, batch, data.draw(st.sampled_from(["bfloat16", "int8", "float32"])), "float32"),
        b_major=data.draw(st.sampled_from("nk")),
        is_aligned_in=is_padded and data.draw(st.booleans()),
        is_aligned_out=is_out_aligned,
        is_padded_in=is_padded,
        is_boxed_out=is_out_aligned and data.draw(st.booleans()),
    )
    config = choose(problem, target, is_plain=is_plain)
    assert build(family_of(problem, config, is_plain=is_plain), config, target) in listed
    assert config.split_k == 1 or (config.split_k - 1) * config.block_k < problem.k


@given(sizes, st.integers(1, 1 << 21), st.sampled_from(["float32", "bfloat16"]))
def test_every_split_of_a_row_has_work(rows, n, dtype):
    config = choose_softmax(SoftmaxProblem(rows, n, dtype, dtype), picked("a100")[0])
    assert config.splits == 1 or (config.splits - 1) * config.block_n < n


def test_buckets_hold_what_stands_for_them():
    for bucket, workloads in warmup_buckets(A100).items():
        for workload in workloads:
            if isinstance(workload, Product):
                assert bucket_of(workload.problem) == bucket
            else:
                assert isinstance(workload, Rows)
                assert bucket.startswith(f"softmax {4 if workload.dtype == 'float32' else 2} ")


def test_a_budget_ends_it_and_the_next_start_goes_on():
    ticks = itertools.count()
    seen: list[tuple[int, int]] = []
    total = len(warmup_buckets(A100))
    first = tune_at_start(
        A100, 5.0, lambda *step: seen.append(step), bench=FakeBench(spread=0.8), clock=lambda: float(next(ticks))
    )
    assert 0 < len(first) < total
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    bench = FakeBench(spread=0.8)
    rest = tune_at_start(A100, math.inf, silent, known=first, bench=bench)
    assert len(rest) == total
    known = [workload for bucket, pair in warmup_buckets(A100).items() if bucket in first for workload in pair]
    assert not set(bench.timed) & set(known)


def test_what_is_no_better_is_not_picked():
    picks = tune_at_start(A100, math.inf, silent, bench=FakeBench(lambda workload, config: True))
    assert set(picks) == set(warmup_buckets(A100))
    assert any(entry is None for entry in picks.values())
    own = FakeBench(lambda workload, config: config == chosen(workload, A100))
    assert set(tune_at_start(A100, math.inf, silent, bench=own).values()) == {None}


def test_picks_are_kept(tmp_path):
    picks = found_for(A100)
    write_picks(picks, A100, tmp_path / "new", IDENTITY)
    assert read_picks(A100, tmp_path / "new", IDENTITY) == picks
    assert [path.name for path in (tmp_path / "new").iterdir()] == [path_of(A100, tmp_path).name]
    assert read_picks(A100, tmp_path / "none", IDENTITY) == {}


@pytest.mark.parametrize("name", sorted(IDENTITY))
def test_foreign_picks_are_ignored_with_a_warning(tmp_path, caplog, name):
    write_picks(found_for(A100), A100, tmp_path, IDENTITY)
    with caplog.at_level(logging.WARNING):
        assert read_picks(A100, tmp_path, IDENTITY | {name: "another"}) == {}
    assert "made by another" in caplog.text


Entry = dict[str, object]
GOOD: Entry = {"kernel": "pointer", "block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4}


WRONG: list[object] = [
    None,
    [],
    {"matmul half kn 4 4 4": 7},
    {"matmul half kn 4 4 4": {}},
    {"matmul half kn 4 4 4": {**GOOD, "block_m": 48}},
    {"matmul half kn 4 4 4": {**GOOD, "split_k": 5}},
    {"matmul half kn 4 4 4": {**GOOD, "block_m": [16]}},
    {"softmax 4 0 20": {"splits": "2"}},
    {"softmax 4 0 20": {"splits": 100000}},
    {"softmax 4 0 20": {}},
]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"identity": 1}',
        *(json.dumps({"identity": IDENTITY, "picks": picks}).encode() for picks in WRONG),
    ],
)
def test_broken_picks_are_ignored_with_a_warning(tmp_path, caplog, text):
    path_of(A100, tmp_path).write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert read_picks(A100, tmp_path, IDENTITY) == {}
    assert "is ignored" in caplog.text


def test_a_folder_that_cannot_be_written_to_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        write_picks(found_for(A100), A100, tmp_path / "file", IDENTITY)
    assert "not kept" in caplog.text
    assert read_picks(A100, tmp_path / "file", IDENTITY) == {}


def test_the_second_start_reads_what_the_first_measured(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    probe = Path(__file__).with_name("picks_probe.py")
    environment["PYTHONPATH"] = str(probe.parents[2])
    done = subprocess.run(
        [sys.executable, str(probe), str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    (timed, found, first), (timed_again, found_again, second), of_a_tuned_device, num_files = json.loads(done.stdout)
    assert timed > found > 20
    assert (timed_again, found_again) == (0, found)
    assert first == second
    assert (of_a_tuned_device, num_files) == (0, 1)
