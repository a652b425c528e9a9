"""Tuning on pretended devices: what it writes is a table that dispatch can use, whatever happens on the way."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tuning_fakes import FEW, FITS, FakeBench, FakeCompiler, run, with_table
from tilewire.kernels.add.configs import members as add_members
from tilewire.kernels.autotune.alternatives import chosen
from tilewire.kernels.autotune.compiling import Facts, Recipe
from tilewire.kernels.autotune.defaults import defaults
from tilewire.kernels.autotune.relearning import choice_by_table
from tilewire.kernels.autotune.run import TuneError
from tilewire.kernels.autotune.selection import keep_few, relative
from tilewire.kernels.autotune.workloads import Product, Rows
from tilewire.kernels.matmul.choice import choose, choose_invariant
from tilewire.kernels.matmul.configs import OUT_DTYPES, Config, Problem
from tilewire.kernels.matmul.members import family_of, is_supported
from tilewire.kernels.matmul.members import members as matmul_members
from tilewire.kernels.matmul.table import config_of
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection import tables
from tilewire.kernels.selection.catalogue import variants
from tilewire.kernels.selection.tables import table_for
from tilewire.kernels.softmax.configs import members as softmax_members

H100 = KNOWN["nvidia_h100"]
IEEE = tuple(Product(m, 1024, 1024, dtype="float32") for m in (8, 48, 1024))


def test_the_table_says_where_it_comes_from_and_dispatch_reads_it(tmp_path):
    tuned, table = run(tmp_path, command="tilewire tune --budget-s 3600")
    assert table["device"] == "A card"
    assert {"date", "driver", "torch", "triton", "how", "gains"} <= set(table["measured"])
    assert "tilewire tune --budget-s 3600" in table["measured"]["how"]
    assert table["measured"]["driver"] == "1.2.3"
    assert {summary.op for summary in tuned.summaries} == {"matmul", "softmax", "add"}
    assert all(summary.geomean > 1.0 for summary in tuned.summaries)
    target = with_table("nvidia_h100", table)
    bench = FakeBench()
    before = sum(bench.us(each, chosen(each, H100)) for each in FEW)
    assert sum(bench.us(each, chosen(each, target)) for each in FEW) < before
    assert not list(tmp_path.glob("*.journal.jsonl"))


def test_the_catalogue_stays_about_as_large(tmp_path):
    tuned, _ = run(tmp_path, workloads=defaults()[:60])
    before, after = tuned.num_variants
    assert before == len(variants(H100))
    assert after < 1.3 * before


def test_what_was_best_everywhere_is_chosen(tmp_path):
    """One configuration beats all for few rows, another for rows of 1024: the table names both."""

    def favoured(workload, config):
        if isinstance(workload, Product) and workload.m <= 16:
            return (config.block_n, config.num_stages, config.is_swapped) == (128, 3, True)
        return isinstance(workload, Rows) and workload.n == 1024 and (config.block_rows, config.num_warps) == (4, 8)

    _, table = run(tmp_path, bench=FakeBench(favoured))
    rules = [entry for entry in table["matmul"]["few_rows"]["half"] if entry["max_m"] == 16]
    assert [(each["block_n"], each["num_stages"], each["is_swapped"]) for each in rules] == [(128, 3, True)]
    rows = {entry["block_n"]: entry for entry in table["softmax"]["rows"]["4"]}
    assert rows[1024] == {"block_n": 1024, "block_rows": 4, "num_warps": 8}
    assert set(rows) == {256, 512, 1024, 2048, 4096, 8192, 16384, 32768}


def test_what_cannot_be_bettered_stays(tmp_path):
    bench = FakeBench(lambda workload, config: config in (chosen(workload, H100), choice_by_table(workload, H100)))
    tuned, table = run(tmp_path, bench=bench)
    old = table_for(H100)
    for key in ("softmax", "add"):
        assert table[key] == old[key]
    assert table["matmul"] == old["matmul"]
    assert [(each.num_changed, each.geomean) for each in tuned.summaries] == [(0, 1.0)] * 3
    assert tuned.num_variants[0] == tuned.num_variants[1]


def test_what_does_not_compile_fit_or_hold_its_registers_is_discarded(tmp_path):
    def objection(recipe):
        config = recipe.config
        if config.num_warps == 8:
            return "the process ended with status -6"
        if config.num_warps == 16:
            return dataclasses.replace(FITS, shared_bytes=H100.shared_bytes + 1)
        return dataclasses.replace(FITS, spilled_bytes=8) if config.num_warps == 32 else None

    tuned, table = run(tmp_path, compiler=FakeCompiler(objection))
    reasons = {reason for _, reason in tuned.discarded}
    assert "the process ended with status -6" in reasons
    assert any("shared memory" in reason for reason in reasons)
    assert any("spilled" in reason for reason in reasons)
    target = with_table("nvidia_h100", table)
    before = {(family, config) for family, config in members_of(H100)}
    fresh = {config for family, config in members_of(target) if (family, config) not in before}
    assert fresh
    assert {config.num_warps for config in fresh} <= {1, 2, 4}


def members_of(target):
    return [*matmul_members(target), *softmax_members(target), *add_members(target)]


def test_an_entry_for_every_layout_compiles_in_every_layout(tmp_path):
    """What fails only where no workload looks is found by the check, and another is taken."""

    def objection(recipe):
        is_new = recipe.config.kernel == "tma" and recipe.config.block_k == 128
        return "too many registers" if is_new and recipe.family.store == "elements" else None

    products = [each for each in FEW if isinstance(each, Product)]
    _, table = run(tmp_path, workloads=products, compiler=FakeCompiler(adapt(objection)))
    target = with_table("nvidia_h100", table)
    before = set(members_of(H100))
    fresh = [
        Recipe(family, config, H100) for family, config in matmul_members(target) if (family, config) not in before
    ]
    assert fresh
    assert not [recipe for recipe in fresh if objection(recipe)]


def adapt(objection):
    return lambda recipe: objection(recipe) if hasattr(recipe.family, "store") else None


def test_an_op_that_never_compiles_keeps_what_it_had(tmp_path):
    known = set(members_of(H100))

    def objection(recipe):
        is_fresh = (recipe.family, recipe.config) not in known
        return "no" if is_fresh and getattr(recipe.family, "out_dtype", "") == "float16" else None

    _, table = run(
        tmp_path, workloads=[each for each in FEW if isinstance(each, Rows)], compiler=FakeCompiler(objection)
    )
    assert table["softmax"] == table_for(H100)["softmax"]


class Interrupted(FakeBench):
    """Somebody presses Ctrl-C in the tenth race; each calls twice."""

    def once_us(self, workload, configs):
        if len(self.timed) == 18:
            raise KeyboardInterrupt
        return super().once_us(workload, configs)


def test_an_interrupted_tuning_goes_on(tmp_path):
    first = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, bench=first)
    assert list(tmp_path.iterdir()) == [tmp_path / "nvidia_h100.journal.jsonl"]
    second, compiler = FakeBench(), FakeCompiler()
    _, resumed = run(tmp_path, bench=second, compiler=compiler)
    assert not set(first.timed) & set(second.timed)
    assert len(first.timed) == 18
    (tmp_path / "again").mkdir()
    whole_bench, whole_compiler = FakeBench(), FakeCompiler()
    _, whole = run(tmp_path / "again", bench=whole_bench, compiler=whole_compiler)
    assert len(second.timed) == len(whole_bench.timed) - 18
    assert len(compiler.compiled) < len(whole_compiler.compiled)
    assert resumed == whole


def test_a_shape_that_breaks_the_device_is_left_out_the_next_time(tmp_path, caplog):
    broken = FEW[0]

    class Broken(FakeBench):
        def once_us(self, workload, configs):
            if workload == broken:
                raise RuntimeError("an illegal memory access was encountered")
            return super().once_us(workload, configs)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(tmp_path, bench=Broken())
    with caplog.at_level(logging.WARNING):
        tuned, _ = run(tmp_path, bench=Broken())
    assert "the device failed at it" in caplog.text
    assert {each.op for each in tuned.summaries} == {"matmul", "softmax", "add"}


def test_restart_forgets(tmp_path):
    first, second = Interrupted(), FakeBench()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, bench=first)
    run(tmp_path, bench=second, restart=True)
    assert set(first.timed) < set(second.timed)


def test_a_budget_that_is_spent_before_anything_writes_nothing(tmp_path):
    with pytest.raises(TuneError, match="budget"):
        run(tmp_path, budget_s=0.0)
    assert not (tmp_path / "nvidia_h100.json").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TuneError, match="--out"):
        run(tmp_path / "missing")


def test_no_shape_of_the_ops_is_an_error(tmp_path):
    with pytest.raises(TuneError, match="none of the shapes"):
        run(tmp_path, workloads=(Rows(1, 2),), ops=("add",))


@pytest.mark.parametrize("name", ["nvidia_a100", "amd_mi300x"])
def test_a_device_without_descriptors_gets_rules_for_any_rows(tmp_path, name):
    tuned, table = run(tmp_path, name, (*FEW, *IEEE), bench=FakeBench(num_sms=KNOWN[name].num_sms))
    assert {"half", "ieee"} <= set(table["matmul"]["few_rows"])
    assert table["matmul"]["tiles"] == {}
    target = with_table(name, table)
    rules = [config_of(entry) for entry in table["matmul"]["few_rows"]["half"]]
    taken = chosen(Product(5000, 5000, 5000), target)
    assert isinstance(taken, Config)
    assert dataclasses.replace(taken, split_k=1) in rules
    assert tuned.num_variants[1] < 1.5 * tuned.num_variants[0]


@pytest.fixture(scope="module")
def tuned_targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    found = {}
    for name in ("nvidia_h100", "nvidia_a100", "nvidia_b200"):
        _, table = run(folder, name, (*FEW, *IEEE))
        found[name] = with_table(name, table)
    return found, {name: frozenset(variants(target)) for name, target in found.items()}


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from(["nvidia_h100", "nvidia_a100", "nvidia_b200"]),
    st.sampled_from(["bfloat16", "float32", "int8", "float8_e5m2"]),
    st.booleans(),
)
def test_every_choice_from_a_written_table_is_in_the_catalogue(tuned_targets, data, name, dtype, is_plain):
    targets, listed = tuned_targets
    target = targets[name]
    if not is_supported(dtype, target):
        return
    sizes = st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096, 16384]), st.integers(1, 1 << 20))
    is_padded, is_out_aligned = data.draw(st.booleans()), data.draw(st.booleans())
    problem = Problem(
        m=data.draw(sizes),
        n=data.draw(sizes),
        k=data.draw(sizes),
        batch=data.draw(st.sampled_from([1, 3])),
        dtype=dtype,
        out_dtype=data.draw(st.sampled_from(OUT_DTYPES[dtype])),
        a_major=data.draw(st.sampled_from("km")),
        b_major=data.draw(st.sampled_from("nk")),
        is_aligned_in=is_padded and data.draw(st.booleans()),
        is_aligned_out=is_out_aligned,
        is_padded_in=is_padded,
        is_boxed_out=is_out_aligned and data.draw(st.booleans()),
    )
    for config in (choose(problem, target, is_plain=is_plain), choose_invariant(problem, target)):
        assert build(family_of(problem, config, is_plain=is_plain), config, target) in listed[name]


def test_a_table_cannot_be_installed_after_it_was_read():
    with pytest.raises(RuntimeError, match="before anything is chosen"):
        tables.install("nvidia_h100", {})


def test_few_are_kept_with_the_least_loss():
    wanted = {1: 5.0, 2: 3.0, 3: 1.0, 4: 0.0}
    assert set(keep_few(list(wanted), lambda kept: 10.0 - sum(wanted[each] for each in kept), 2)) == {1, 2}
    assert set(keep_few([1, 2, 3], lambda kept: 1.0, 3)) == {1}
    assert keep_few([3, 4], lambda kept: 10.0 - sum(wanted[each] for each in kept), 2, start=(1,)) == (1, 3)


def test_an_unlucky_first_is_exchanged():
    """2 is best alone, 1 and 3 are best together."""
    losses = {(1,): 5.0, (2,): 4.0, (3,): 5.0, (1, 2): 3.9, (2, 3): 3.9, (1, 3): 1.0}
    assert set(keep_few([1, 2, 3], lambda kept: losses[tuple(sorted(kept))], 2)) == {1, 3}


def test_what_was_not_measured_counts_as_slow():
    assert relative({"a": 2.0, "b": 8.0}, "a") == 1.0
    assert relative({"a": 2.0, "b": 8.0}, "c") == 4.0


def test_programs_that_fit_a_multiprocessor():
    assert Facts(100_000, 128, 0, 256).programs_per_sm(H100) == 2
    assert Facts(1000, 255, 0, 128).programs_per_sm(H100) == 2
    assert Facts(230_000, 32, 0, 128).programs_per_sm(H100) == 1
    assert Facts(0, 0, 0, 1024).programs_per_sm(H100) == 2


def test_candidates_are_compiled_in_processes_of_their_own():
    """Really, for sm_90: one fits, one wants too much shared memory, one spills."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    probe = Path(__file__).with_name("tuning_probe.py")
    environment["PYTHONPATH"] = str(probe.parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(probe)], capture_output=True, text=True, env=environment, check=True
    )
    (fits, facts), (too_deep, _), (spills, _) = json.loads(done.stdout)
    assert fits == ""
    assert facts["num_threads"] == 128
    assert 32 <= facts["registers"] <= 255
    assert 3 * (64 + 64) * 64 * 2 <= facts["shared_bytes"] <= H100.shared_bytes
    assert too_deep.endswith("of shared memory")
    assert spills.endswith("of registers spilled")


def test_costs_are_learned_of_random_workloads_and_a_second_run_goes_on_from_the_first(tmp_path):
    options = {"workloads": (Rows(4096, 1024),), "ops": ("softmax",), "num_learned": 400}
    # The first run is interrupted while random workloads are raced.
    ending, bench = iter(range(10**9)), FakeBench(spread=0.6)

    class Ending(FakeBench):
        def once_us(self, workload, configs):
            # Two calls for each race.
            if next(ending) == 500:
                raise KeyboardInterrupt
            return super().once_us(workload, configs)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, bench=Ending(spread=0.6), **options)
    _, table = run(tmp_path, bench=bench, **options)
    assert 100 < len(set(bench.timed)) < 200
    assert {key for key, costs in table["costs"].items() if costs != table_for(H100)["costs"].get(key)} >= {
        "softmax 2 elements"
    }
    assert table["learned"]["workloads"] >= 400
    target = with_table("nvidia_h100", table)
    judged = [Rows(rows, n, "bfloat16") for rows in (40, 500, 3000) for n in (131, 777, 5001)]
    without = with_table("nvidia_h100", {key: value for key, value in table.items() if key != "costs"})
    ours, theirs = (sum(bench.us(each, chosen(each, of)) for each in judged) for of in (target, without))
    assert ours < theirs


def test_costs_of_what_has_changed_are_forgotten(tmp_path):
    _, table = run(tmp_path, workloads=tuple(each for each in FEW if isinstance(each, Product)))
    old = table_for(H100)
    assert table["matmul"]["tiles"]["half"] != old["matmul"]["tiles"]["half"]
    assert "matmul half" not in table["costs"]
    assert table["costs"]["softmax 4 elements"] == old["costs"]["softmax 4 elements"]
