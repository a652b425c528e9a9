"""`tf32x3` by limbs: how float32 is divided, that products are right, and which kernel computes them."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.kernel_bounds import matmul_bound
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels import matmul
from tilewire.kernels.copy.operands import Copied, launch_of
from tilewire.kernels.matmul.configs import EpilogueSpec, Problem, as_read, has_limbs
from tilewire.kernels.matmul.members import MAX_COPIED_BYTES
from tilewire.kernels.matmul.plan import plan_of
from tilewire.kernels.matmul.select import explain, ranked, select
from tilewire.kernels.runtime.targets import KNOWN

H200 = KNOWN["nvidia_h200"]
LARGEST, LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261130)


def limbs_of(x):
    """The limbs of the rows of `x` as those of the first operand, and as those of the second."""
    rows, columns = x.shape
    span = -(-columns // 4) * 4
    copies = [torch.full((rows, 3 * span), -7.0) for _ in range(2)]
    operand = Copied(1, rows, columns, (0, *x.stride()), 3 * span)
    launch_of(operand, operand, 4, x.device, has_limbs=True)(x, x, *copies)
    return [copy.view(rows, 3, span) for copy in copies]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("columns", [1, 7, 8, 150])
def test_limbs_add_up_to_22_bits(columns, is_turned, generator):
    x = torch.randn((33, columns), generator=generator) * 10.0 ** torch.randint(-30, 30, (33, 1), generator=generator)
    x = x.mT.contiguous().mT if is_turned else x
    first, second = limbs_of(x)
    low, high = first[:, 0, :columns], first[:, 1, :columns]
    assert torch.equal(first[:, 2, :columns], high)
    assert torch.equal(second[:, 0], first[:, 1])
    assert torch.equal(second[:, 1], first[:, 0])
    assert torch.equal(second[:, 2], first[:, 2])
    # tf32 has the upper 19 bits.
    assert not (first.reshape(-1).view(torch.int32) & 0x1FFF).any()
    assert ((x.double() - high.double() - low.double()).abs() <= x.double().abs() * 2.0**-22).all()
    # Up to whole pieces of 16 bytes.
    assert not first[:, :, columns:].any()


def test_limbs_of_edges():
    given = [LARGEST, -LARGEST, math.inf, -math.inf, math.nan, 0.0, -0.0, LEAST, 1.0]
    low, high, last = limbs_of(torch.tensor([given]))[0][0, :, : len(given)]
    assert torch.isfinite(low).all()
    assert torch.isfinite(high).all()
    torch.testing.assert_close(last, torch.tensor(given), rtol=2.0**-10, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [((), 70, 33, 45), ((), 65, 64, 64), ((), 1, 5, 200), ((3,), 17, 20, 9), ((2, 2), 5, 9, 3)],
)
def test_products(batch, m, n, k, generator):
    a, b = (torch.randn((*batch, *shape), generator=generator) for shape in ((m, k), (n, k)))
    b = b.mT
    out = matmul(a, b, precision="tf32x3")
    expected = matmul_reference(a, b)
    assert (
        (out.double() - expected).abs() <= matmul_bound(a.double(), b.double(), expected, out.dtype, "tf32x3")
    ).all()


def test_what_is_not_finite_stays_as_with_float32():
    a, b = torch.ones(80, 16), torch.full((16, 16), 2.0)
    a[0, 3], a[1, 4], a[2, 5], a[3, 6] = math.inf, -math.inf, math.nan, math.inf
    # Infinity times zero.
    b[3, 0], b[6, 1], b[7, 2] = 0.0, -2.0, math.inf
    torch.testing.assert_close(matmul(a, b, precision="tf32x3"), a @ b, equal_nan=True)


def test_operands_are_copied_three_times_as_long():
    a, b, out = torch.ones(128, 30), torch.ones(30, 128), torch.empty(128, 128)
    plan = plan_of(a, b, out, EpilogueSpec(), "tf32x3")
    assert plan is not None
    _, problem, config = plan
    assert has_limbs(problem, config)
    read = as_read(problem, config)
    assert (read.k, read.a_major, read.b_major) == (3 * 32, "k", "k")


@pytest.mark.parametrize("majors", ["kn", "kk", "mn", "mk"])
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 4096, 4096), (300, 77, 500), (1024, 1024, 1024), (4095, 4097, 4099)])
def test_it_is_predicted_no_slower_than_ieee(m, n, k, is_aligned, majors):
    aligned = {"is_aligned_in": is_aligned, "is_aligned_out": is_aligned, "is_boxed_out": is_aligned}
    padded = {"is_padded_a": is_aligned, "is_padded_b": is_aligned}
    problem = replace(Problem(m, n, k, 1, "float32", "float32", *majors), **aligned, **padded)
    times = {one: ranked(replace(problem, precision=one), H200)[0] for one in ("tf32x3", "ieee")}
    assert times["tf32x3"][0] <= times["ieee"][0]
    if min(m, n, k) >= 1024:
        assert times["tf32x3"][1].kernel == "tma"
        assert times["tf32x3"][0] < 0.6 * times["ieee"][0]


def test_few_rows_are_multiplied_as_they_are():
    assert select(Problem(4, 4096, 4096, 1, "float32", "float32", precision="tf32x3"), H200).kernel in ("vector", "fma")


def test_operands_too_large_to_copy_are_multiplied_as_they_are():
    size = math.isqrt(MAX_COPIED_BYTES // (2 * 3 * 4))
    for side, kernel in ((size // 64 * 64, "tma"), (size // 64 * 64 + 64, "fma")):
        assert select(Problem(side, side, side, 1, "float32", "float32", precision="tf32x3"), H200).kernel == kernel


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_device_has_a_kernel(name):
    line = explain(Problem(512, 512, 512, 1, "float32", "float32", precision="tf32x3"), KNOWN[name])
    assert "512x512x512" in line
