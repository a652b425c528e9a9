"""Every tile of the kernel for Hopper on a GPU, over sizes that fill it and sizes that do not, against the fp64 oracle."""

import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.kernel_bounds import matmul_bound, poisoned
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels.build.operands import random_operand
from tilewire.kernels.matmul.configs import OUT_DTYPES, Problem
from tilewire.kernels.matmul.members import CLUSTERS, has_wgmma, is_possible, shares_k, tiles_for, whole_of
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.runtime.targets import current

TARGET = current(0)
SHOWN = [
    Problem(512, 512, 512, 1, dtype, OUT_DTYPES[dtype][0], b_major="k", precision=precision)
    for dtype, precision in (
        ("float16", "ieee"),
        ("bfloat16", "ieee"),
        ("float8_e4m3fn", "ieee"),
        ("float8_e5m2", "ieee"),
        ("float8_e4m3fn", "fast"),
    )
]
if not has_wgmma(SHOWN[0], TARGET):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

# Fewer rows than a tile has, several turns of each program, one step of K, fewer steps than stages, and many.
SIZES = (
    (1, 8, 16),
    (65, 200, 48),
    (130, 264, 528),
    (257, 1000, 144),
    (300, 3000, 64),
    (100, 200, 1040),
    (1500, 6008, 400),
    (40, 72, 4112),
)
# How many programs share a tile: seventeen steps of the sixth size are not shared evenly.
SPLITS = (1, *CLUSTERS)
TILES, ELEMENTWISE = (
    [
        (problem, tile.config)
        for problem in SHOWN
        for tile in tiles_for(problem, TARGET)
        if tile.config.kernel == "wgmma" and (tile.store == "scalar") == is_scalar
    ]
    for is_scalar in (False, True)
)
BATCHED = [
    (shown, config) for shown, config in TILES if is_possible(replace(shown, batch=2), config, TARGET, is_plain=True)
]


def named(tiles):
    return [pytest.param(*tile, id=f"{tile[0].dtype} {tile[0].precision} {tile[1]}") for tile in tiles]


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261123)


def check(a, b, out, epilogue, precision, config):
    """Multiplies by `config`, and compares with float64."""
    launch = prepare(a, b, out, epilogue, precision, config)
    assert launch.is_bound
    launch(a, b, out, epilogue.bias, epilogue.a_scale, epilogue.b_scale)
    named = {"bias": epilogue.bias, "a_scale": epilogue.a_scale, "b_scale": epilogue.b_scale}
    expected = matmul_reference(a, b, **named, activation=epilogue.activation)
    scales = 1.0 if epilogue.a_scale is None else 2.25
    # Fast sums keep some 13 bits: no better than products of tf32.
    arithmetic = "tf32" if precision == "fast" else str(a.dtype).removeprefix("torch.")
    bound = matmul_bound(a.double() * scales, b.double(), expected, out.dtype, arithmetic)
    if epilogue.bias is not None:
        # gelu is at most 1.13 times as steep as its argument, silu 1.1 times, and both round in float32.
        bound = 1.2 * bound + (epilogue.bias.double().abs() + expected.abs()) * 2.0**-18
    error = (out.double() - expected).abs()
    where = f"{tuple(a.shape)} {a.stride()} by {tuple(b.shape)} {b.stride()}, {config}"
    assert (error <= bound).all(), f"{where}: {(error - bound).max()} over"


@pytest.mark.parametrize(("shown", "config"), named(TILES))
def test_every_tile_is_right(shown, config, generator):
    assert whole_of(config) == config
    dtype, out_dtype = getattr(torch, shown.dtype), getattr(torch, shown.out_dtype)
    launched = set()
    for m, n, k in SIZES:
        for a_major, b_major in (("k", "k"), ("k", "n"), ("m", "n"), ("m", "k")):
            problem = replace(shown, m=m, n=n, k=k, a_major=a_major, b_major=b_major)
            if (a_major == "m" and m % 8) or not is_possible(problem, config, TARGET, is_plain=False):
                continue
            a = random_operand((m, k) if a_major == "k" else (k, m), dtype, generator)
            b = random_operand((k, n) if b_major == "n" else (n, k), dtype, generator)
            a, b = a if a_major == "k" else a.mT, b if b_major == "n" else b.mT
            bias = torch.randn(n, device="cuda", generator=generator)
            a_scale = torch.rand(m, device="cuda", generator=generator) + 0.5
            b_scale = torch.rand(1, device="cuda", generator=generator) + 0.5
            for split_k, epilogue in itertools.product(
                SPLITS if shares_k(problem, config) else (1,), (Epilogue(), Epilogue(bias, a_scale, b_scale, "gelu"))
            ):
                shared = replace(config, split_k=split_k)
                if not is_possible(problem, shared, TARGET, is_plain=False):
                    continue
                out, again = (poisoned((m, n), out_dtype, "cuda") for _ in range(2))
                check(a, b, out, epilogue, shown.precision, shared)
                check(a, b, again, epilogue, shown.precision, shared)
                assert torch.equal(out, again)
                launched.add(split_k)
    assert launched == set(SPLITS if shares_k(shown, config) else (1,))


@pytest.mark.parametrize(("shown", "config"), named(BATCHED))
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_batches_are_right(shown, config, shared, generator):
    dtype, out_dtype = getattr(torch, shown.dtype), getattr(torch, shown.out_dtype)
    for batch, m, n, k in ((2, 8, 16, 48), (3, 130, 264, 528), (40, 257, 136, 144)):
        for a_major, b_major in (("k", "k"), ("k", "n"), ("m", "n"), ("m", "k")):
            problem = replace(shown, batch=batch, m=m, n=n, k=k, a_major=a_major, b_major=b_major)
            if (a_major == "m" and m % 8) or not is_possible(problem, config, TARGET, is_plain=False):
                continue
            a = random_operand((batch, m, k) if a_major == "k" else (batch, k, m), dtype, generator)
            b = random_operand((batch, k, n) if b_major == "n" else (batch, n, k), dtype, generator)
            a, b = a if a_major == "k" else a.mT, b if b_major == "n" else b.mT
            # One matrix for all products; where `b` is, rows of all products would make one.
            a = a[:1].expand(batch, -1, -1) if shared == "a" else a
            b = b[:1].expand(batch, -1, -1) if shared == "b" else b
            bias = torch.randn(n, device="cuda", generator=generator)
            for epilogue in (Epilogue(), Epilogue(bias, activation="silu")):
                out = poisoned((batch, m, n), out_dtype, "cuda")
                check(a, b, out, epilogue, shown.precision, config)


def amid_nans(rows, columns, step, dtype, generator):
    """An operand with NaN between its rows and right behind its last element."""
    memory = torch.full((rows * step + 256,), float("nan"), dtype=dtype, device="cuda")
    placed = memory.as_strided((rows, columns), (step, 1))
    return placed.copy_(random_operand((rows, columns), dtype, generator))


@pytest.mark.parametrize(("shown", "config"), named([tile for tile in TILES if tile[0].dtype == "bfloat16"]))
def test_what_lies_around_operands_is_no_part_of_them(shown, config, generator):
    launched = 0
    # Rows that end within a box, a few rows only, one that would reach out at once, and whole lines.
    for m, n, k in ((136, 40, 264), (72, 200, 72), (1000, 8, 16), (8, 1000, 8), (264, 72, 1), (64, 128, 80)):
        for a_major, b_major, gap in itertools.product("km", "nk", (0, 24)):
            problem = replace(shown, m=m, n=n, k=k, a_major=a_major, b_major=b_major)
            if k == 1 and (a_major, b_major) != ("m", "n"):
                continue
            if not is_possible(problem, config, TARGET, is_plain=True):
                continue
            a_rows, b_rows = (m, k) if a_major == "k" else (k, m), (k, n) if b_major == "n" else (n, k)
            kept = []
            # The second time by the same launch, with operands elsewhere.
            for _ in range(2):
                a, b = (amid_nans(*rows, rows[1] + gap, torch.bfloat16, generator) for rows in (a_rows, b_rows))
                out = poisoned((m, n), torch.bfloat16, "cuda")
                check(a if a_major == "k" else a.mT, b if b_major == "n" else b.mT, out, Epilogue(), "ieee", config)
                kept += [a, b, out]
            launched += 1
    assert launched >= 8


def padded(rows, columns, dtype, generator):
    """Rows that begin at multiples of 16 bytes, of any length."""
    return random_operand((rows, -(-columns // 16) * 16), dtype, generator)[:, :columns]


@pytest.mark.parametrize(("shown", "config"), named(ELEMENTWISE))
def test_rows_that_are_no_boxes_are_stored_by_elements(shown, config, generator):
    dtype, out_dtype = getattr(torch, shown.dtype), getattr(torch, shown.out_dtype)
    launched = set()
    for m, n, k in SIZES:
        n += 5
        for a_major, b_major in (("k", "k"), ("k", "n"), ("m", "n"), ("m", "k")):
            a = padded(m, k, dtype, generator) if a_major == "k" else padded(k, m, dtype, generator).mT
            b = padded(k, n, dtype, generator) if b_major == "n" else padded(n, k, dtype, generator).mT
            bias = torch.randn(n, device="cuda", generator=generator)
            # Contiguous, with rows that begin at multiples of 16 bytes, and every second element.
            for whole, step in ((n, 1), (-(-n // 8) * 8 + 8, 1), (2 * n, 2)):
                problem = replace(shown, m=m, n=n, k=k, a_major=a_major, b_major=b_major, is_boxed_out=False)
                problem = replace(problem, is_aligned_out=whole % 8 == 0)
                for split_k, epilogue in itertools.product(SPLITS, (Epilogue(), Epilogue(bias, activation="silu"))):
                    shared = replace(config, split_k=split_k)
                    if not is_possible(problem, shared, TARGET, is_plain=False):
                        continue
                    memory = poisoned((m, whole), out_dtype, "cuda")
                    before = memory.clone()
                    out = memory[:, : n * step : step]
                    check(a, b, out, epilogue, shown.precision, shared)
                    before[:, : n * step : step] = out
                    assert torch.equal(memory.view(torch.int16), before.view(torch.int16)), "what is not the output's"
                    launched.add(split_k)
    assert launched == set(SPLITS if shares_k(shown, config) else (1,))
