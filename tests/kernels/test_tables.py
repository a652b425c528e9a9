"""The tuned tables: every entry is a configuration, and dispatch gives nothing that they and the rules do not name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.kernels.matmul.choice import choose, predicted_us
from tilewire.kernels.matmul.configs import ITEM_BYTES, OUT_DTYPES, Problem
from tilewire.kernels.matmul.members import SPLITS
from tilewire.kernels.matmul.table import config_of
from tilewire.kernels.runtime.targets import KNOWN, Target
from tilewire.kernels.selection.tables import is_tuned, table_for

TABLES = sorted((Path(__file__).parents[2] / "kernels/selection/tuned").glob("*.json"))
H100 = KNOWN["nvidia_h100"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_say_where_they_come_from(path):
    table = json.loads(path.read_text())
    assert table["device"]
    assert {"date", "driver", "torch", "triton", "how"} <= set(table["measured"])
    assert path.stem in KNOWN


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_entry_is_a_configuration(path):
    matmul = json.loads(path.read_text())["matmul"]
    for entries in (*matmul["tiles"].values(), *matmul["few_rows"].values()):
        assert all(config_of(entry).block_m >= 16 for entry in entries)
    for entries in matmul["tiles"].values():
        assert all(min(*entry["tile_us"], *entry["step_us"]) > 0 for entry in entries)


def test_a_stranger_with_descriptors_borrows_a_table():
    stranger = Target("cuda", 90, 32, 78, H100.shared_bytes, "nvidia_h20")
    assert not is_tuned(stranger)
    assert table_for(stranger) == table_for(H100)
    assert table_for(KNOWN["nvidia_a100"]) == {}
    assert table_for(KNOWN["amd_mi300x"]) == {}


@given(
    st.integers(1, 20000),
    st.integers(1, 20000),
    st.integers(1, 20000),
    st.integers(1, 40),
    st.sampled_from(sorted(OUT_DTYPES)),
)
def test_measured_choices_are_members_of_the_table(m, n, k, batch, dtype):
    out_dtype = {"int8": "int32"}.get(dtype, "bfloat16")
    problem = Problem(m, n, k, batch, dtype, out_dtype, "k", "k", is_aligned_in=False)
    config = choose(problem, H100)
    if config.kernel == "tma":
        matmul = table_for(H100)["matmul"]
        named = [config_of(entry) for group in matmul.values() for entries in group.values() for entry in entries]
        assert config.split_k in SPLITS
        assert replace(config, split_k=1) in named
        assert (config.block_m + config.block_n) * config.block_k * ITEM_BYTES[dtype] <= H100.shared_bytes


def test_the_model_prefers_full_waves():
    from tilewire.kernels.matmul.table import candidates_of

    candidate = next(c for c in candidates_of(H100)["half"] if c.config.is_persistent)
    block = candidate.config
    one_wave = Problem(block.block_m * 12, block.block_n * 11, 4096, 1, "bfloat16", "bfloat16")
    one_more = replace(one_wave, m=one_wave.m + 1)
    assert predicted_us(one_more, candidate, 1, H100) > 1.5 * predicted_us(one_wave, candidate, 1, H100)
