"""Every tile of the kernel for scalar units on a GPU, over whole and ragged sizes, against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.kernel_bounds import matmul_bound
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels.build.operands import random_operand
from tilewire.kernels.matmul.configs import Problem
from tilewire.kernels.matmul.members import can_split, has_fma, is_possible, tiles_for, whole_of
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.runtime.targets import current

TARGET = current(0)
SHOWN = Problem(512, 512, 512, 1, "float32", "float32")
if not has_fma(SHOWN, TARGET):
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

# Fewer rows than a tile has, fewer steps of K than stages, ends inside 16 bytes, and many steps.
SIZES = ((1, 8, 16), (17, 33, 3), (65, 200, 45), (130, 261, 530), (257, 1001, 144), (700, 1024, 1023))
TILES = [tile for tile in tiles_for(SHOWN, TARGET) if tile.config.kernel == "fma"]


def padded(rows, columns, generator):
    """An operand whose rows start at multiples of 16 bytes, with NaN between them."""
    whole = torch.full((rows, -(-columns // 4) * 4), float("nan"), device="cuda")
    whole[:, :columns] = random_operand((rows, columns), torch.float32, generator)
    return whole[:, :columns]


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261123)


CASES = [
    pytest.param(tile, layout, id=f"{layout} {tile.store} {tile.config}")
    for tile in TILES
    for layout in ("kk", "kn", "mn", "mk")
    # Tiles that are not for all layouts are built for the `a` that the service has.
    if tile.all_layouts or layout[0] == "k"
]


@pytest.mark.parametrize(("tile", "layout"), CASES)
def test_every_tile_is_right(tile, layout, generator):
    assert whole_of(tile.config) == tile.config
    launched = 0
    for m, n, k in SIZES:
        a = padded(m, k, generator) if layout[0] == "k" else padded(k, m, generator).mT
        b = padded(k, n, generator) if layout[1] == "n" else padded(n, k, generator).mT
        bias = torch.randn(n, device="cuda", generator=generator)
        a_scale = torch.rand(m, device="cuda", generator=generator) + 0.5
        is_aligned = tile.store != "scalar"
        whole = torch.full((m, -(-n // 4) * 4 + (not is_aligned)), -7.0, device="cuda")
        out = whole[:, :n]
        problem = replace(SHOWN, m=m, n=n, k=k, a_major=layout[0], b_major=layout[1], is_aligned_out=is_aligned)
        for split_k in (1, 2, 3) if can_split(tile.config) else (1,):
            config = replace(tile.config, split_k=split_k)
            if not is_possible(problem, config, TARGET, is_plain=False):
                continue
            for epilogue in (Epilogue(), Epilogue(bias, a_scale, None, "gelu")):
                launch = prepare(a, b, out, epilogue, "ieee", config)
                launch(a, b, out, epilogue.bias, epilogue.a_scale, None)
                first = out.clone()
                launch(a, b, out, epilogue.bias, epilogue.a_scale, None)
                named = {"bias": epilogue.bias, "a_scale": epilogue.a_scale}
                expected = matmul_reference(a, b, **named, activation=epilogue.activation)
                scales = 1.0 if epilogue.a_scale is None else 1.5
                bound = matmul_bound(a.double() * scales, b.double(), expected, torch.float32, "float32")
                if epilogue.bias is not None:
                    # gelu is at most 1.13 times as steep as its argument.
                    bound = 1.2 * bound + (bias.double().abs() + expected.abs()) * 2.0**-18
                error = (out.double() - expected).abs()
                assert (error <= bound).all(), f"{m}x{n}x{k} {config}: {(error - bound).max()} over"
                assert torch.equal(out, first)
                assert (whole[:, n:] == -7).all()
                launched += 1
    assert launched >= len(SIZES)
