"""The choice of configurations: pure, finite, and within what each device offers."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewire.kernels.add.op import Problem as AddProblem
from tilewire.kernels.add.op import choose as choose_add
from tilewire.kernels.matmul.configs import (
    CONSUMER_ROWS,
    OUT_DTYPES,
    SHARES,
    Config,
    Problem,
    as_read,
    boxes_of,
    is_narrow,
    place_of,
    programs_on,
    resolve_precision,
    stages_beside,
)
from tilewire.kernels.matmul.members import (
    MODEL,
    SPLITS,
    fits_boxes,
    is_possible,
    is_sensible,
    is_supported,
    shares_k,
    tiles_of,
)
from tilewire.kernels.matmul.select import amounts_of, described
from tilewire.kernels.matmul.select import select as choose
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.matmul.space import space
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.softmax.configs import MAX_SPLITS
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem
from tilewire.kernels.softmax.configs import select as choose_softmax

targets = st.sampled_from(sorted(KNOWN)).map(KNOWN.__getitem__)
sizes = st.integers(1, 1 << 17)
problems = st.builds(
    Problem,
    m=sizes,
    n=sizes,
    k=st.integers(0, 1 << 17),
    batch=st.integers(1, 64),
    dtype=st.sampled_from(sorted(OUT_DTYPES)),
    out_dtype=st.sampled_from(["float32", "bfloat16"]),
    a_major=st.sampled_from(["k", "m", "any"]),
    b_major=st.sampled_from(["n", "k", "any"]),
    is_aligned_in=st.booleans(),
    is_aligned_out=st.booleans(),
)


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


@given(problems, targets)
def test_matmul_blocks_fit_the_device(problem, target):
    assume(is_supported(problem.dtype, target))
    config = choose(problem, target)
    blocks = [config.block_m, config.block_n, config.block_k, config.num_warps]
    if config.kernel == "wgmma":
        # One group of four warps for each 64 of what they split; Triton's blocks are the places of the boxes.
        assert blocks.pop(1 if config.is_swapped else 0) == CONSUMER_ROWS * blocks.pop() // 4
        assert not is_narrow(config) or as_read(problem, config).a_major == "k"
        blocks += [place_of(rows) for rows in boxes_of(blocks.pop(0)) if rows]
    assert all(map(is_power_of_two, blocks))
    held = config.num_stages if target.backend == "cuda" else config.num_stages - 1
    stage = (config.block_m + config.block_n) * config.block_k * ITEM_BYTES[problem.dtype]
    assert held * stage <= target.shared_bytes
    if config.kernel == "element":
        assert config.block_n * config.lanes == 32 * config.num_warps
        assert config.block_k % config.lanes == 0
        return
    assert config.kernel == "vector" or config.block_m >= 16
    assert config.kernel == "vector" or config.block_n >= 16
    assert config.block_k >= 32 // ITEM_BYTES[problem.dtype]


def test_tiles_of_the_kernel_for_hopper_are_made_of_boxes():
    configs = {tile.config for tiles in tiles_of(KNOWN["nvidia_h200"]).values() for tile in tiles}
    hopper = [config for config in configs if config.kernel == "wgmma"]
    assert {is_narrow(config) for config in hopper} == {False, True}
    for config in hopper:
        length = config.block_m if config.is_swapped else config.block_n
        boxes = boxes_of(length)
        assert sum(boxes) == length
        # Those of matrix instructions, and of what the hardware loads at a time.
        assert all(rows % 8 == 0 and rows <= 256 for rows in boxes)
        assert all(is_power_of_two(place_of(rows)) and rows <= place_of(rows) < 2 * rows for rows in boxes if rows)
        # Columns of rows cannot be left out of a box.
        assert config.is_swapped or not is_narrow(config)


@pytest.mark.parametrize(
    ("length", "boxes", "places"),
    [
        (16, (16, 0), (16, 0)),
        (24, (24, 0), (32, 0)),
        (96, (96, 0), (128, 0)),
        (128, (128, 0), (128, 0)),
        (136, (128, 8), (128, 8)),
        (176, (128, 48), (128, 64)),
        (216, (128, 88), (128, 128)),
        (256, (256, 0), (256, 0)),
    ],
)
def test_boxes_of_the_right_operand(length, boxes, places):
    assert boxes_of(length) == boxes
    assert tuple(map(place_of, boxes)) == places
    config = Config("wgmma", length, 128, 64, num_warps=8, is_swapped=True)
    assert is_narrow(config) == (boxes != places)
    assert not is_narrow(replace(config, kernel="tma"))


PAIRED = Config("wgmma", 64, 128, 64, num_warps=8, num_stages=8, is_persistent=True, is_swapped=True)


@pytest.mark.parametrize(("shares", "tiles"), [("", 3 * 5), ("b", 4 * 5), ("a", 3 * 6), ("a4", 3 * 8)])
def test_each_program_of_a_cluster_has_a_tile(shares, tiles):
    problem = Problem(130, 600, 512, 1, "bfloat16", "bfloat16")
    assert replace(PAIRED, shares=shares).tiles(problem) == tiles


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(
    ("block_m", "layout", "is_able"), [(64, "mn", True), (72, "kn", True), (72, "mn", False), (192, "kn", True)]
)
def test_boxes_of_any_rows_are_shared(shares, block_m, layout, is_able):
    config = replace(PAIRED, shares=shares, block_m=block_m)
    problem = Problem(512, 512, 512, 1, "bfloat16", "bfloat16", *layout)
    assert fits_boxes(problem, config) == is_able
    assert not fits_boxes(replace(problem, batch=2), config)
    assert not shares_k(problem, config)


@pytest.mark.parametrize(
    ("shares", "tiles", "is_able"),
    [
        ("a", 132, True),
        ("b", 132, True),
        ("a4", 116, True),
        ("a4", 120, False),
        ("a4", 132, False),
        ("a4", 232, True),
        ("a4", 236, False),
    ],
)
def test_programs_share_an_operand_where_they_take_no_more_turns_so(shares, tiles, is_able):
    target = KNOWN["nvidia_h200"]
    problem = Problem(
        128 if shares == "b" else 64, 128 * tiles // (2 if shares == "b" else 1), 8192, 1, "bfloat16", "bfloat16"
    )
    config = replace(PAIRED, shares=shares)
    assert config.tiles(problem) == tiles
    assert is_sensible(problem, config, target) == is_able
    assert is_sensible(problem, replace(config, shares=""), target)


def test_programs_share_no_operand_where_a_tile_that_is_there_twice_takes_one_more_turn():
    target = KNOWN["nvidia_h200"]
    problem = Problem(192, 5120, 8192, 1, "bfloat16", "bfloat16", b_major="k")
    config = replace(PAIRED, shares="b")
    alone = replace(config, shares="")
    assert (config.tiles(problem), alone.tiles(problem)) == (160, 120)
    assert not is_sensible(problem, config, target)
    assert is_sensible(problem, alone, target)
    assert is_sensible(replace(problem, m=128), config, target)


def test_tuning_tries_clusters_where_programs_have_few_tiles():
    target = KNOWN["nvidia_h200"]

    def shared_by(shape):
        found = {config.shares: config for config in space(shape, target)}
        assert all(config.kernel == "wgmma" for shares, config in found.items() if shares)
        return set(found)

    assert shared_by(MatmulShape(3800, 240, 2104)) == {"", *SHARES}
    assert shared_by(MatmulShape(3800, 240, 2104, a_major="m")) == {"", *SHARES}
    assert shared_by(MatmulShape(380, 240, 2104, batch=8)) == {""}
    assert shared_by(MatmulShape(3800, 240, 2104, dtype="float8_e4m3fn", b_major="k")) == {"", *SHARES}
    assert shared_by(MatmulShape(8192, 8192, 4096)) == {""}


@pytest.mark.parametrize(("shares", "loaded"), [("b", 64 + 128 / 2), ("a", 64 / 2 + 128), ("a4", 64 / 4 + 128)])
def test_what_programs_load_for_all_is_counted_once(shares, loaded):
    problem = Problem(8192, 512, 4096, 1, "bfloat16", "bfloat16")
    names = [term.name for term in MODEL.terms]
    alone, shared = (
        dict(zip(names, amounts_of(problem, config, 1, KNOWN["nvidia_h200"], is_plain=True), strict=True))
        for config in (PAIRED, replace(PAIRED, shares=shares))
    )
    assert shared["load"] * (64 + 128) == pytest.approx(alone["load"] * loaded)
    assert shared["contention"] < alone["contention"]
    assert {name for name in names if shared[name] != alone[name]} == {"load", "pair", "contention"}
    assert described(replace(PAIRED, shares=shares)).endswith(f"swapped {4 if shares == 'a4' else 2} share {shares[0]}")


SHARED = Config("wgmma", 64, 64, 64, num_stages=8, is_persistent=True)


@pytest.mark.parametrize(("splits", "tiles"), [(2, 66), (3, 38)])
def test_programs_share_k_where_all_their_clusters_have_room_at_once(splits, tiles):
    target = KNOWN["nvidia_h200"]
    config = replace(SHARED, split_k=splits)
    problem = Problem(64, 64 * tiles, 8192, 1, "bfloat16", "bfloat16")
    assert is_sensible(problem, config, target)
    assert not is_sensible(replace(problem, n=64 * tiles + 8), config, target)
    assert is_possible(problem, config, target, is_plain=False)


def test_programs_share_k_in_twos_and_threes_and_where_sums_of_a_tile_are_few():
    target = KNOWN["nvidia_h200"]
    problem = Problem(64, 512, 8192, 1, "bfloat16", "bfloat16")
    able = [split for split in SPLITS if is_sensible(problem, replace(SHARED, split_k=split), target)]
    assert able == [1, 2, 3]
    assert shares_k(problem, SHARED)
    assert not shares_k(replace(problem, batch=2), SHARED)
    assert shares_k(replace(problem, dtype="float8_e4m3fn", b_major="k"), SHARED)
    # 128 × 64 sums, and twice as many.
    assert shares_k(problem, replace(SHARED, block_m=128, num_warps=8))
    assert not shares_k(problem, replace(SHARED, block_m=128, block_n=128, num_warps=8))


def test_stages_make_room_for_the_sums_that_a_program_gets():
    # 64 × 64 operands of 16 bits take 16 KiB a stage, and sums of 64 × 64 in float32 as much; so does an output twice.
    given = {splits: stages_beside(SHARED, 2, 2, splits, 227 << 10) for splits in (1, 2, 3, 9)}
    assert given == {1: 8, 2: 8, 3: 8, 9: 5}
    # Sums of 72 columns have a place for 128. So has the last of the boxes of 72 rows; the others overlap.
    narrow = replace(SHARED, block_m=72, num_stages=16, is_swapped=True)
    kept = 2048 + 64 * 128 * (4 + 2) + (128 - 72) * 128
    assert stages_beside(narrow, 2, 2, 2, 227 << 10) == (227 * 1024 - kept) // ((64 + 72) * 128) == 10
    # Those of 256 bytes are two lines in shared memory, and lie in their places.
    long = replace(narrow, block_k=128)
    assert stages_beside(long, 2, 2, 2, 227 << 10) == (227 * 1024 - 2048 - 64 * 128 * (4 + 2)) // ((64 + 128) * 256)


def test_programs_run_beside_each_other_where_shared_memory_has_room_for_them():
    shared_bytes = 227 << 10
    # 64 × 64 operands of 16 bits take 16 KiB a stage, the output 8 KiB.
    given = {count: programs_on(replace(SHARED, num_stages=count), 2, 2, shared_bytes) for count in (3, 4, 6, 7, 8)}
    assert given == {3: 3, 4: 3, 6: 2, 7: 1, 8: 1}
    # More consumers leave each thread too few registers.
    double = replace(SHARED, block_m=128, num_warps=8, num_stages=3, halves=2)
    assert programs_on(double, 2, 2, shared_bytes) == 2
    assert programs_on(replace(double, num_stages=1), 2, 2, shared_bytes) == 2
    assert programs_on(replace(double, block_m=192, num_warps=12, num_stages=1), 2, 2, shared_bytes) == 1
    # A tail needs room, too.
    tail = replace(SHARED, block_n=144, num_stages=2)
    assert programs_on(tail, 2, 2, shared_bytes) == 3
    assert programs_on(replace(tail, num_stages=4), 2, 2, shared_bytes) == 1


def test_clusters_find_room_on_every_place_of_a_multiprocessor():
    target = KNOWN["nvidia_h200"]
    problem = Problem(64, 64 * 132, 8192, 1, "bfloat16", "bfloat16")
    assert is_sensible(problem, replace(SHARED, num_stages=6, split_k=2), target)
    assert not is_sensible(problem, replace(SHARED, num_stages=7, split_k=2), target)
    assert not is_sensible(replace(problem, n=64 * 133), replace(SHARED, num_stages=6, split_k=2), target)


def test_what_programs_of_a_cluster_share_passes_no_memory():
    target = KNOWN["nvidia_h200"]
    problem = Problem(64, 1024, 8192, 1, "bfloat16", "bfloat16")
    names = [term.name for term in MODEL.terms]
    cluster, programs = (
        dict(zip(names, amounts_of(problem, config, 1, target, is_plain=True), strict=True))
        for config in (replace(SHARED, split_k=2), Config("tma", 64, 64, 64, split_k=2))
    )
    assert (cluster["split"], programs["split"]) == (1.0, 1.0)
    assert cluster["exchange"] == 0.0 < programs["exchange"]
    assert cluster["step"] == programs["step"] == 64.0


@given(problems, targets)
def test_every_split_has_work(problem, target):
    assume(is_supported(problem.dtype, target))
    config = choose(problem, target)
    assert config.split_k == 1 or (config.split_k - 1) * config.block_k < problem.k


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 21), st.sampled_from(["float32", "bfloat16"]), targets)
def test_softmax_blocks_hold_a_row_or_loop(rows, n, dtype, target):
    config = choose_softmax(SoftmaxProblem(rows, n, dtype, dtype), target)
    assert is_power_of_two(config.block_n)
    assert is_power_of_two(config.block_rows)
    assert config.tail_n == 0 or is_power_of_two(config.tail_n)
    assert config.kernel != "row" or config.held_n >= n
    assert 1 <= config.splits <= MAX_SPLITS


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 30), targets)
def test_add_blocks_are_powers_of_two(rows, n, target):
    config = choose_add(AddProblem(rows, n, "float32", "float32"), target)
    assert is_power_of_two(config.block_rows)
    assert is_power_of_two(config.block_n)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_precision_is_never_coarser_than_asked(name):
    order = ["tf32", "tf32x3", "ieee"]
    for asked in order:
        assert order.index(resolve_precision(asked, KNOWN[name])) >= order.index(asked)


def test_without_triton_the_package_imports_and_has_no_ops():
    code = """
import sys, importlib.util as u
class Refuse:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("torch", "triton"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
find = u.find_spec
u.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import tilewire.kernels, tilewire.kernels.runtime.targets, tilewire.kernels.runtime.layouts
assert not hasattr(tilewire.kernels, "matmul")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_program_of_few_short_rows_that_are_not_aligned_has_less_to_do():
    target = KNOWN["nvidia_h100"]
    few_sums, many_sums = (
        choose_add(AddProblem(rows, 41, "float16", "float16", is_aligned=False, outer_rank=3), target)
        for rows in (160, 1 << 17)
    )
    assert few_sums.block_rows * few_sums.block_n < many_sums.block_rows * many_sums.block_n


def test_a_long_sum_of_a_small_product_is_divided_among_programs():
    problem = Problem(1171, 116, 8015, 1, "float32", "float32", b_major="k", is_aligned_in=False, is_aligned_out=False)
    config = choose(problem, KNOWN["nvidia_h100"])
    assert config.split_k > 1
