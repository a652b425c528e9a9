"""Tuning softmax on pretended devices: rows read in 16-byte pieces and rows read by elements have entries of their own."""

from dataclasses import replace

from tests.kernels.tuning_fakes import FEW, FakeBench, run, with_table
from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.relearning import choice_by_table
from tilewire.kernels.autotune.workloads import Rows
from tilewire.kernels.build.report import tuned as tuned_entries
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection.tables import table_for
from tilewire.kernels.softmax.choice import choose
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig

H100 = KNOWN["nvidia_h100"]


def test_rows_read_by_elements_have_blocks_and_teams_of_their_own(tmp_path):
    """One block is best for odd rows of up to 256, another team for long odd ones; rows in pieces keep theirs."""

    def favoured(workload, config):
        if not isinstance(workload, Rows) or workload.problem.is_aligned:
            return config in (chosen(workload, H100), choice_by_table(workload, H100))
        if config.kernel == "team":
            return (config.block_n, config.num_warps, config.programs_per_sm) == (4096, 8, 4)
        return (config.block_rows * config.block_n, config.num_warps) == (256, 2)

    odd = [Rows(rows, n, dtype) for dtype in ("float32", "bfloat16") for rows, n in ((500, 201), (64, 50257))]
    _, table = run(
        tmp_path, bench=FakeBench(favoured), workloads=[*odd, *(each for each in FEW if each.op == "softmax")]
    )
    old = table_for(H100)["softmax"]
    for item_bytes in ("2", "4"):
        assert table["softmax"]["rows"][item_bytes] == old["rows"][item_bytes]
        assert table["softmax"]["team"][item_bytes] == old["team"][item_bytes]
        first = table["softmax"]["rows"][f"{item_bytes} elements"][0]
        assert first == {"block_n": 256, "block_rows": 1, "num_warps": 2}
        team = {"block_n": 4096, "num_warps": 8, "programs_per_sm": 4}
        assert table["softmax"]["team"][f"{item_bytes} elements"] == team
    target = with_table("nvidia_h100", {key: part for key, part in table.items() if key != "costs"})
    assert chosen(Rows(500, 201), target) == SoftmaxConfig("row", 1, 256, 2)
    assert chosen(Rows(500, 200), target) == choice_by_table(Rows(500, 200), H100)
    assert chosen(Rows(64, 50257, "bfloat16"), target) == SoftmaxConfig("team", 1, 4096, 8, 13, 4)
    assert all(each.problem.is_aligned or chosen(each, target) in alternatives(each, target) for each in odd)
    shown = {each.key: each.config for each in tuned_entries(target)}
    assert shown["2 bytes by elements, longer rows"].startswith("4096 elements a program, 8 warps")


def test_a_table_may_say_that_no_team_is_better_than_reading_twice():
    table = table_for(H100)
    softmax = table["softmax"] | {"team": table["softmax"]["team"] | {"4 elements": None}}
    target = with_table("nvidia_h100", {**table, "softmax": softmax, "costs": {}})
    assert choose(Rows(4096, 50257).problem, target).kernel == "loop"
    assert choose(Rows(4096, 50256).problem, target).kernel == "team"
    assert not [each for each in tuned_entries(target) if "4 bytes by elements, longer rows" in each.key]


def test_a_length_has_second_blocks_where_rows_are_many_or_few(tmp_path):
    """Few rows are best one at a time, many four at a time: the table has both, and costs may choose the second."""

    odd = [Rows(rows, 201, "bfloat16") for rows in (64, 500, 8192)]

    def favoured(workload, config):
        if workload not in odd or config.kernel != "row":
            return config in (chosen(workload, H100), choice_by_table(workload, H100))
        rows, num_warps = (4, 2) if workload.rows > 1000 else (1, 1)
        return (config.block_rows * config.block_n, config.num_warps) == (rows * 256, num_warps)

    _, table = run(tmp_path, bench=FakeBench(favoured), workloads=odd)
    rows = table["softmax"]["rows"]
    first, *_, second = rows["2 elements"]
    assert first == {"block_n": 256, "block_rows": 1, "num_warps": 1}
    assert second == {"block_n": 256, "block_rows": 4, "num_warps": 2, "is_more": True}
    assert not any("is_more" in entry for entry in rows["2"])
    target = with_table("nvidia_h100", {key: part for key, part in table.items() if key != "costs"})
    same, mixed = (replace(Rows(9, 201, "bfloat16"), out_dtype=out) for out in ("bfloat16", "float32"))
    assert chosen(same, target) == chosen(mixed, target) == SoftmaxConfig("row", 1, 256, 1)
    blocks = SoftmaxConfig("row", 4, 256, 2)
    assert blocks in alternatives(same, target)
    assert blocks not in alternatives(mixed, target)
    # Shorter rows: as many elements.
    assert SoftmaxConfig("row", 16, 64, 2) in alternatives(Rows(9, 63, "bfloat16"), target)
