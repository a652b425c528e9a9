"""Which costs a tuned table gets: those learned in the tuning, those it had before, or none."""

import itertools
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.kernels.tuning_fakes import FakeBench, FakeCompiler
from tilewire.kernels.autotune.alternatives import chosen
from tilewire.kernels.autotune.drawing import draw
from tilewire.kernels.autotune.journal import Journal
from tilewire.kernels.autotune.learning import key_of
from tilewire.kernels.autotune.relearning import choice_by_table, in_turn, newly_learned, relearn
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection.tables import install, table_for

H100 = KNOWN["nvidia_h100"]
SOFTMAX = ("softmax 2 elements", "softmax 4 elements")
numbers = itertools.count()


def target_with(table):
    target = replace(H100, name=f"card {next(numbers)} of relearning")
    install(target.name, table)
    return target


def session_of(target, bench, folder):
    journal = Journal(folder / f"{next(numbers)}.jsonl", {"device": "A card"})
    return Session(target, bench, FakeCompiler(), journal, time.monotonic, lambda step: None)


@pytest.fixture
def relearned(tmp_path):
    """Relearns softmax, for a device that had the table `before`, until it says `is_over`; the new table."""

    def run(bench, num_workloads, *, before=None, changed=None, seconds=3600.0):
        before = before or table_for(H100)
        table = before | (changed or {})
        session = session_of(target_with(before), bench, tmp_path)
        session.begin("costs", time.monotonic() + seconds)
        found, target = relearn(session, table, target_with(table), ("softmax",), num_workloads)
        assert table_for(target) == found
        return found

    return run


def with_other_blocks(table):
    """What a tuning makes of the blocks of softmax: other than the costs were learned beside."""
    rows = {size: [{**entry, "num_warps": 4} for entry in found] for size, found in table["softmax"]["rows"].items()}
    return {"softmax": table["softmax"] | {"rows": rows}}


def test_every_key_reaches_one_goal_before_the_next_and_the_most_valuable_is_first():
    drawn = list(itertools.islice((each for each in draw(random.Random(1), H100) if key_of(each)), 800))
    ordered = in_turn(drawn, (5, 20))
    assert Counter(ordered) == Counter(drawn)
    keys = [key_of(each) for each in ordered]
    all_keys = sorted(set(keys))
    assert keys[:10] == ["matmul half"] * 5 + ["matmul ieee"] * 5
    assert Counter(keys[: 5 * len(all_keys)]) == dict.fromkeys(all_keys, 5)
    second = keys[5 * len(all_keys) :]
    assert second[:30] == ["matmul half"] * 15 + ["matmul ieee"] * 15
    # Past the last goal none runs away either.
    past = [place for place, key in enumerate(keys) if key == "matmul half"][40]
    assert all(Counter(keys[:past])[key] >= min(40, count) for key, count in Counter(keys).items())
    assert [each for each in ordered if key_of(each) == "matmul half"] == [
        each for each in drawn if key_of(each) == "matmul half"
    ]


def test_costs_that_choose_better_than_a_changed_table_stay_until_enough_is_raced(relearned):
    bench = FakeBench(spread=0.6)
    learned = relearned(bench, 200)
    assert set(newly_learned(learned, table_for(H100))) >= {SOFTMAX[0]}
    changed = with_other_blocks(learned)
    few = relearned(bench, 60, before=learned, changed=changed)
    kept = few["costs"][SOFTMAX[0]]
    assert kept["entries"] == learned["costs"][SOFTMAX[0]]["entries"]
    assert kept["judged"]["of"] == table_for(H100)["device"]
    assert 12 <= kept["judged"]["workloads"] < 40
    assert kept["judged"]["geomean"] < kept["judged"]["by_table"]
    assert newly_learned(few, learned) == {}


def test_costs_that_nobody_could_judge_go_with_what_they_were_learned_beside(relearned):
    bench = FakeBench()
    before = table_for(H100)
    changed = with_other_blocks(before)
    assert not set(SOFTMAX) & set(relearned(bench, 400, changed=changed, seconds=0.0)["costs"])
    unchanged = relearned(bench, 400, seconds=0.0)["costs"]
    assert {key: unchanged[key] for key in SOFTMAX} == {key: before["costs"][key] for key in SOFTMAX}


def test_a_relatives_costs_are_taken_only_when_the_device_shows_that_they_choose_well(relearned, tmp_path):
    stranger = replace(H100, name="nvidia_h20", num_sms=78)
    table = table_for(stranger)
    assert table["costs"]
    session = session_of(stranger, FakeBench(), tmp_path)
    session.begin("costs", time.monotonic())
    found, _ = relearn(session, table, target_with(table), ("softmax",), 400)
    assert "costs" not in found


def test_costs_that_choose_worse_than_the_table_go(relearned):
    best = FakeBench(lambda workload, config: config == choice_by_table(workload, H100))
    table = relearned(best, 60)
    assert not set(SOFTMAX) & set(table["costs"])
    assert "matmul half" in table["costs"]
    target = target_with(table)
    judged = [each for each in itertools.islice(draw(random.Random(5), H100), 200) if key_of(each) in SOFTMAX]
    assert judged
    assert all(chosen(each, target) == choice_by_table(each, H100) for each in judged)
