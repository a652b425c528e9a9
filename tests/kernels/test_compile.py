"""Every kind of kernel, cross-compiled for GPUs that are not here: matrix units used, wide loads, nothing spilled."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import path_with
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem
from tilewire.kernels.softmax.configs import select as choose_softmax

# Some sixty kernels for each target, which take a busy machine several minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROBE = Path(__file__).parent / "compile_probe.py"
MATRIX_INSTRUCTIONS = {"cuda:80": ("mma",), "cuda:90": ("wgmma", "mma"), "cuda:100": ("tcgen05", "mma")}
TARGETS = sorted(KNOWN)
OLDEST_TRITON = "3.6.0"
# Products are tuned on an H200 alone: what these devices get is an estimate, and some of it spills.
SPILLING = {
    "nvidia_a100": "the product of 4096³ in tf32",
    "nvidia_b200": "unaligned 16-bit products, the cooperative kernel of softmax, search with a bias",
}


# Registers that may spill, in bytes: with twice the warps nothing does, and sorting takes 1.3 to 1.4 times as long (H200).
SPILLED_BYTES = {"search finish 4096 128 unaligned": 32, "search finish 2048 64 unaligned": 32}
# Scalars that may be moved by kernels of one warp that sort, or compare each key with all others.
MOVED_SCALARS = dict.fromkeys((f"search finish {keys} unaligned" for keys in ("64 32", "256 64", "1024 64")), 72)


@functools.cache
def probe(name, triton=None):
    """What compiles for a target, by the installed Triton or by the one in the folder `triton`."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*([str(triton)] if triton else []), path_with(PROBE.parents[2])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), name], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def oldest_triton(tmp_path_factory):
    """A folder with the oldest Triton that is supported; others forget other things of what divides a number."""
    folder = tmp_path_factory.mktemp("triton")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, f"triton=={OLDEST_TRITON}"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Triton {OLDEST_TRITON} cannot be installed: {done.stderr[-500:]}")
    return folder


def instructions(target):
    return MATRIX_INSTRUCTIONS.get(f"{target.backend}:{target.arch}", ("mfma",))


@pytest.mark.parametrize("name", TARGETS)
def test_products_use_the_matrix_unit(name):
    target = KNOWN[name]
    for kernel in probe(name):
        if not kernel["name"].startswith("matmul"):
            continue
        is_scalar = target.backend == "cuda" and kernel["name"].endswith("float32 kn ieee")
        expected = ("fma",) if is_scalar else instructions(target)
        assert any(kernel[instruction] for instruction in expected), kernel


@pytest.mark.parametrize("name", TARGETS)
def test_aligned_loads_are_wide(name):
    for kernel in probe(name):
        if "unaligned" not in kernel["name"]:
            assert kernel["wide_load"] > 0, kernel


def check_exchanges(kernels):
    """Threads exchange what lies across, so that those of a warp write neighbours, of one row."""
    across = [one for one in kernels if one["name"].startswith(("add", "pointwise")) and " across " in one["name"]]
    assert across
    assert {one["name"]: one["rows_stored"] for one in across if one["rows_stored"] != [1] or one["shared"] == 0} == {}


@pytest.mark.parametrize("name", TARGETS)
def test_what_lies_across_is_exchanged(name):
    check_exchanges(probe(name))


def test_aligned_loads_are_wide_by_the_oldest_triton(oldest_triton):
    check_exchanges(probe("nvidia_h100", oldest_triton))
    for kernel in probe("nvidia_h100", oldest_triton):
        assert kernel["shared"] <= KNOWN["nvidia_h100"].shared_bytes, kernel
        if "unaligned" not in kernel["name"]:
            assert kernel["wide_load"] > 0, kernel


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=SPILLING[name])) if name in SPILLING else name
        for name in TARGETS
    ],
)
def test_nothing_spills(name):
    spilled = {
        kernel["name"]: kernel["spilled_bytes"]
        for kernel in probe(name)
        if kernel["spilled_bytes"] > SPILLED_BYTES.get(kernel["name"], 0)
    }
    assert not spilled


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_moved_one_by_one_and_shared_memory_fits(name):
    for kernel in probe(name):
        assert kernel["scratch"] == 0, kernel
        assert kernel["moved_scalars"] <= MOVED_SCALARS.get(kernel["name"], 32), kernel
        assert kernel["shared"] <= KNOWN[name].shared_bytes, kernel


def test_hopper_multiplies_large_products_asynchronously():
    for kernel in probe("nvidia_h100"):
        if kernel["name"].startswith("matmul 4096") and not kernel["name"].endswith("float32 kn ieee"):
            assert kernel["wgmma"] > 0, kernel


def check_products(kernels):
    """Each tile of the kernel for Hopper has matrix instructions of exactly its columns, and all of them stay in flight."""
    hopper = [kernel for kernel in kernels if kernel["wanted_columns"]]
    assert len({column for kernel in hopper for column in kernel["wanted_columns"]}) > 10
    for kernel in hopper:
        assert kernel["columns"] == kernel["wanted_columns"], kernel
        assert not kernel["waits"], kernel


def test_matrix_instructions_have_the_tiles_columns_and_stay_in_flight():
    check_products(probe("nvidia_h100"))


def test_matrix_instructions_have_the_tiles_columns_and_stay_in_flight_by_the_oldest_triton(oldest_triton):
    check_products(probe("nvidia_h100", oldest_triton))


def test_programs_fit_beside_those_that_share_their_multiprocessor():
    hopper = [kernel for kernel in probe("nvidia_h100") if kernel["wanted_columns"]]
    assert {kernel["programs_on"] for kernel in hopper} == {1, 2}
    for kernel in hopper:
        assert kernel["programs_on"] <= kernel["room"], kernel
        # Registers of all of them are dealt out at the start.
        if kernel["programs_on"] > 1:
            assert kernel["registers"] <= 128, kernel


def check_clusters(kernels):
    """Consumers of programs that load for each other tell the one that loads next that a place is empty.

    Of programs that share K, each consumer's sums are sent once, and one program tells the others that it has got them.
    """
    hopper = [kernel for kernel in kernels if kernel["wanted_columns"]]
    assert {(kernel["sharers"], kernel["splits"]) for kernel in hopper} == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 3)}
    for kernel in hopper:
        sent, told, consumers, splits = (kernel[name] for name in ("sent", "told", "consumers", "splits"))
        assert kernel["sides"] == ([True, False] if kernel["clusters"] else []), kernel
        if kernel["sharers"] > 1:
            assert kernel["clusters"] == [f"{kernel['sharers']}, 1, 1"], kernel
            assert kernel["loads_for_all"] > 0, kernel
            assert kernel["own_arrivals"] >= told > 0, kernel
            assert sent == 0, kernel
        else:
            assert kernel["clusters"] == ([f"1, {splits}, 1"] if splits > 1 else []), kernel
            assert kernel["loads_for_all"] == 0, kernel
            assert kernel["own_arrivals"] > 0, kernel
            assert sent == (consumers if splits > 1 else 0), kernel
            # Two for what is sent and where it counts, and one for each program that is told.
            assert told == (consumers * (2 + splits - 1) if splits > 1 else 0), kernel


def test_programs_of_a_cluster_do_for_each_other_what_they_should():
    check_clusters(probe("nvidia_h100"))


def test_programs_of_a_cluster_do_for_each_other_what_they_should_by_the_oldest_triton(oldest_triton):
    check_clusters(probe("nvidia_h100", oldest_triton))


def test_softmax_holds_a_row_once():
    """Held twice, as it is and its exponentials, it leaves a multiprocessor half of its programs, and takes twice as long."""
    target = KNOWN["nvidia_h100"]
    rows = [kernel for kernel in probe("nvidia_h100") if re.match(r"softmax (8192|16000) ", kernel["name"])]
    assert len(rows) == 4
    for kernel in rows:
        assert kernel["name"].endswith("softmax_row_kernel")
        _, n, dtype, _ = kernel["name"].split()
        config = choose_softmax(SoftmaxProblem(4096, int(n), dtype, dtype), target)
        # As many for addresses and the rest as for the row itself, and at least 32.
        held = config.held_n // (32 * config.num_warps)
        assert kernel["registers"] <= held + max(held, 32), kernel
