"""The tuned tables: found by the chip, every entry a configuration, a choice made by hand wins over every prediction."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.kernels.autotune.fitting import read
from tilewire.kernels.matmul import MATMUL
from tilewire.kernels.matmul.configs import Config, Problem, copied_operands, programs_on
from tilewire.kernels.matmul.members import ELEMENTS, MODEL, SPLITS, is_possible, specialization_of, tiles_of
from tilewire.kernels.matmul.select import among_rows, amounts_of, explain, select, select_invariant
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.matmul.view import problem_of, view_of
from tilewire.kernels.op import geomean
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.runtime.targets import KNOWN, Target
from tilewire.kernels.selection.tables import install, is_tuned, table_for, table_name

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "kernels/selection/tuned").glob("*.json"))
# What was measured with the kernel for Hopper as it is. Its times of before say nothing of the newest tiles.
MEASURED = sorted((ROOT / "benchmarks/results").glob("measured-2112*.jsonl.gz"))
H100, H200 = KNOWN["nvidia_h100"], KNOWN["nvidia_h200"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_are_named_by_chip_and_say_where_they_come_from(path):
    table = json.loads(path.read_text())
    assert table["device"]
    assert path.stem in {target.chip for target in KNOWN.values()}
    if "measured" in table:
        assert {"date", "driver", "torch", "triton", "how"} <= set(table["measured"])


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", "ieee"), ("float8_e4m3fn", "ieee"), ("float8_e4m3fn", "fast")]
)
def test_the_choice_loses_little_of_what_was_measured(dtype, precision):
    _, measured = read(MEASURED, held_out=0)
    losses, long_losses = [], []
    for each in measured:
        assert isinstance(each.shape, MatmulShape)
        choice = each.shape.chosen(each.target)
        if (each.shape.dtype, each.shape.precision) == (dtype, precision) and choice in each.us:
            losses.append(each.us[choice] / each.best_us)
            long_losses += losses[-1:] if each.best_us >= 20 else []
    assert len(losses) > 100
    assert len(long_losses) > 30
    assert geomean(losses) < 1.015
    assert max(long_losses) < 1.25


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_entry_is_a_configuration_with_costs_of_known_terms(name):
    names = {term.name for term in MODEL.terms}
    for section in table_for(KNOWN[name])["matmul"].values():
        for entry in (section, *section["tiles"]):
            assert set(entry.get("costs", {})) <= names
    for tiles in tiles_of(KNOWN[name]).values():
        assert tiles
        assert all(len(tile.costs) == len(MODEL.terms) for tile in tiles)


def test_the_table_has_as_many_programs_of_the_kernel_for_hopper_on_a_multiprocessor_as_are_launched():
    for key, tiles in tiles_of(H200).items():
        item_bytes = 1 if key.startswith("float8") else 2
        for tile in tiles:
            if tile.config.kernel == "wgmma":
                assert tile.occupancy == programs_on(tile.config, item_bytes, 2, H200.shared_bytes), tile.config


@pytest.mark.parametrize(
    ("backend", "arch", "num_sms", "name"),
    [
        ("cuda", 90, 132, "cuda_90_132"),
        ("cuda", 90, 78, "cuda_90_132"),
        ("cuda", 100, 148, "cuda_90_132"),
        ("cuda", 120, 170, "cuda_90_132"),
        ("cuda", 89, 142, "cuda_80_108"),
        ("cuda", 75, 40, "cuda_80_108"),
        ("hip", "gfx90a", 104, "hip_gfx942_304"),
        ("hip", "gfx1201", 64, "hip_gfx942_304"),
    ],
)
def test_no_card_starts_from_nothing(backend, arch, num_sms, name):
    stranger = Target(backend, arch, 32, num_sms, 101376, "a stranger")
    assert table_name(stranger) == name
    assert table_for(stranger)["matmul"]
    assert is_tuned(stranger) == (stranger.chip == "cuda_90_132")


def test_cards_of_one_chip_share_a_table_and_its_binaries():
    assert table_for(H100) == table_for(H200)
    assert MATMUL.variants(H100) == MATMUL.variants(H200)


sizes = st.integers(1, 20000)


@given(sizes, sizes, sizes, st.integers(1, 40), st.sampled_from(["bfloat16", "int8", "float8_e4m3fn"]))
def test_choices_are_tiles_of_the_table(m, n, k, batch, dtype):
    out_dtype = {"int8": "int32"}.get(dtype, "bfloat16")
    config = select(Problem(m, n, k, batch, dtype, out_dtype, "k", "k", is_aligned_in=False), H200)
    named = {tile.config for tiles in (*tiles_of(H200).values(), ELEMENTS) for tile in tiles}
    assert config.split_k in SPLITS
    assert replace(config, split_k=1) in named
    if config.kernel != "element":
        assert (config.block_m + config.block_n) * config.block_k * ITEM_BYTES[dtype] <= H200.shared_bytes


def with_overrides(chip_sms, *overrides):
    """A Hopper card whose table has these choices made by hand."""
    target = replace(H200, num_sms=chip_sms)
    install(target.chip, table_for(H200) | {"overrides": list(overrides)})
    return target


def test_a_choice_made_by_hand_wins_and_its_binary_is_built():
    """A tile that no table has, for some sizes; other sizes keep their prediction."""
    entry = {"kernel": "tma", "block_m": 64, "block_n": 256, "block_k": 32, "num_stages": 3, "num_warps": 8}
    by_hand = Config("tma", 64, 256, 32, num_stages=3, num_warps=8)
    override = {"op": "matmul", "key": "half", "sizes": "65-512 x 4096 x *", "config": entry}
    target = with_overrides(61, override)
    assert by_hand not in {tile.config for tile in tiles_of(H200)["half"]}
    listed = set(MATMUL.variants(target))
    for m, n, k in ((65, 4096, 64), (512, 4096, 4096), (300, 4096, 1 << 15)):
        problem = Problem(m, n, k, 1, "bfloat16", "bfloat16")
        assert select(problem, target) == by_hand
        assert build(specialization_of(problem, by_hand, is_plain=True), by_hand, target) in listed
        assert "override" in explain(problem, target)
    for m, n in ((64, 4096), (513, 4096), (300, 4097)):
        problem = Problem(m, n, 4096, 1, "bfloat16", "bfloat16")
        assert "override" not in explain(problem, target)


def test_a_choice_made_by_hand_may_split_and_must_be_possible():
    split = {"kernel": "tma", "block_m": 64, "block_n": 64, "block_k": 64, "split_k": 4}
    target = with_overrides(62, {"op": "matmul", "key": "half", "sizes": "1-64 x * x *", "config": split})
    assert select(Problem(64, 512, 8192, 1, "float16", "float16"), target).split_k == 4
    # Too short to be split, or no rows that descriptors can read: predicted as ever.
    short = Problem(64, 512, 64, 1, "float16", "float16")
    odd = Problem(
        64,
        511,
        8191,
        1,
        "float16",
        "float16",
        is_aligned_in=False,
        is_padded_a=False,
        is_padded_b=False,
        is_aligned_out=False,
    )
    for problem in (short, odd):
        assert select(problem, target) == select(problem, replace(H200, num_sms=62, name="the same"))
        assert "override" not in explain(problem, target)


def test_sizes_of_an_override_are_checked():
    target = with_overrides(63, {"op": "matmul", "key": "half", "sizes": "1 x 2", "config": {"kernel": "tma"}})
    with pytest.raises((ValueError, KeyError, TypeError)):
        select(Problem(1, 1, 1, 1, "float16", "float16"), target)


def test_one_line_says_why():
    line = explain(Problem(504, 1832, 4832, 1, "bfloat16", "bfloat16"), H200)
    assert "\n" not in line
    for part in ("bfloat16 504x1832x4832", "cuda_90_132", "µs = ", "matrix", "memory", "next "):
        assert part in line


def test_time_follows_waves_bytes_and_clock():
    def us(m, target=H200):
        problem = Problem(m, 4096, 4096, 1, "bfloat16", "bfloat16", b_major="k")
        found = explain(problem, target)
        return float(found.split(" µs")[0].rsplit(" ", 1)[1])

    assert us(8192) > 1.7 * us(4096) > 2.4 * us(2048)
    assert us(16, replace(H200, bandwidth_gbs=2400)) > 1.3 * us(16)
    assert us(4096, replace(H200, clock_ghz=0.99)) > 1.5 * us(4096)


def test_operands_that_bulk_loads_cannot_read_are_copied_first_where_that_pays():
    odd = MatmulShape(4096, 4096, 1025, is_padded=False).problem
    config = select(odd, H200)
    assert config.is_copied
    assert config.kernel in {"tma", "wgmma"}
    line = explain(odd, H200)
    assert " copied" in line
    assert "copy " in line
    assert not select(MatmulShape(4096, 4096, 1024).problem, H200).is_copied


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_output_rows_that_are_no_boxes_are_stored_by_elements_on_hopper(dtype, is_padded):
    shape = MatmulShape(1000, 601, 1040, dtype=dtype, b_major="k", is_padded=is_padded)
    problem = shape.problem
    assert (problem.is_aligned_out, problem.is_boxed_out) == (is_padded, False)
    config = select(problem, H200)
    assert config.kernel == "wgmma"
    found = specialization_of(problem, config, is_plain=True)
    # One binary, with and without an epilogue.
    assert (found.store, found.is_plain) == ("scalar", False)
    assert found == specialization_of(problem, config, is_plain=False)
    assert specialization_of(replace(shape, n=600).problem, config, is_plain=True).store == "tma"
    # A batch has descriptors, which store whole boxes.
    assert select(replace(shape, batch=3).problem, H200).kernel == "tma"
    assert select(problem, KNOWN["nvidia_b200"]).kernel == "tma"


@pytest.mark.parametrize(("kernel", "wanted"), [("tma", 1.0), ("pointer", 1.0), ("wgmma", 0.0)])
def test_the_rest_of_a_row_costs_what_stores_pieces_of_16_bytes(kernel, wanted):
    place = [term.name for term in MODEL.terms].index("rest")
    config = Config(kernel, 64, 64, 64)
    for n, is_padded, rest in ((1000, True, 0.0), (1001, True, wanted), (1001, False, 0.0)):
        problem = MatmulShape(1000, n, 1024, b_major="k", is_padded=is_padded).problem
        assert amounts_of(problem, config, 1, H200, is_plain=True)[place] == rest


@pytest.mark.parametrize("majors", ["kk", "kn", "mk", "mn"])
def test_scalar_units_read_float32_in_every_layout(majors):
    shape = MatmulShape(1536, 1600, 894, dtype="float32", a_major=majors[0], b_major=majors[1])
    for is_aligned in (True, False):
        problem = replace(shape.problem, is_aligned_out=is_aligned)
        assert select(problem, H200).kernel == "fma"
        # What lies along K may be turned once, by a copy, instead of by each tile. That pays where there is much to do.
        few = select(replace(problem, m=128, n=128, k=512), H200)
        assert (few.kernel, few.is_copied) == ("fma", False)
        much = select(replace(problem, m=4096, n=4096, k=4096), H200)
        assert (much.kernel, much.is_copied) == ("fma", majors != "mn")
        if much.is_copied:
            assert copied_operands(problem, "fma") == (majors[0] == "k", majors[1] == "k")
    odd = replace(shape, m=1535, n=1601, k=893, is_padded=False)
    assert select(odd.problem, H200).is_copied
    # Several batch dimensions: neither described nor copied.
    several = replace(odd.problem, is_copyable=False, is_padded_a=False, is_padded_b=False)
    assert select(several, H200).kernel == "pointer"
    assert select(replace(several, m=1536, n=1600, k=896, is_aligned_in=True), H200).kernel == "fma"


@pytest.mark.parametrize("target", KNOWN.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(64, 65), (65, 64), (333, 777), (1000, 4096)])
def test_the_invariant_choice_is_one_for_a_lone_row_and_for_rows_of_any_pitch(target, dtype, n, k):
    """A lone row has no pitch, so that it is aligned at any length."""
    found = set()
    for m, batch, pitch, out_pitch in itertools.product(
        (1, 2, 16, 600), (1, 3), (k, -(-k // 32) * 32), (n, -(-n // 32) * 32)
    ):
        a, out = ((batch, m, size) for size in (k, n))
        view = view_of(
            Extent(a, (m * pitch, pitch, 1)),
            Extent((batch, k, n), (-(-k * n // 32) * 32, n, 1)),
            Extent(out, (m * out_pitch, out_pitch, 1)),
            is_row_scaled=False,
        )
        assert view is not None
        problem = problem_of(view, dtype, dtype, "ieee", are_in_aligned=(True, True), is_out_aligned=True)
        problem = among_rows(problem)
        config = select_invariant(problem, target)
        assert is_possible(problem, config, target, is_plain=False)
        # Copied or not, a tile adds up in the same order.
        found.add(replace(config, is_copied=False))
    assert len(found) == 1, found


@pytest.mark.parametrize("choose", [select, select_invariant])
def test_a_dtype_that_the_device_does_not_multiply_is_named(choose):
    problem = Problem(64, 64, 64, 1, "float8_e4m3fn", "bfloat16", b_major="k")
    with pytest.raises(ValueError, match="float8_e4m3fn is not multiplied by nvidia_a100"):
        choose(problem, KNOWN["nvidia_a100"])


def test_scratch_memory_bounds_what_is_copied():
    # 3 GiB of operands.
    assert not select(MatmulShape(32768, 16384, 32769, is_padded=False).problem, H200).is_copied
