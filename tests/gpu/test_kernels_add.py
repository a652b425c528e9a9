"""add on a GPU, against exact arithmetic and torch."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.kernel_bounds import poisoned
from tilewire.kernels import add
from tilewire.kernels.add.op import DTYPES
from tilewire.kernels.pointwise.copying import contiguous, copy_into

ALL = [getattr(torch, name) for name in DTYPES]


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261121)


def operand(shape, dtype, generator):
    return (torch.randn(shape, generator=generator, device="cuda") * 50).to(dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("n", [1, 511, 4096, 4097, 1_000_003, 1 << 22])
@pytest.mark.parametrize("alpha", [1, -3])
def test_equals_torch(dtype, n, alpha, generator):
    a, b = operand(n, dtype, generator), operand(n, dtype, generator)
    out = poisoned((n,), dtype, "cuda")
    add(a, b, alpha=alpha, out=out)
    torch.testing.assert_close(
        out,
        torch.add(a, b, alpha=alpha),
        rtol=0 if not dtype.is_floating_point else None,
        atol=None if dtype.is_floating_point else 0,
    )


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((4096, 1024), (1024,)),
        ((1024, 1000), (1024, 1)),
        ((7, 1), (1, 400)),
        ((), (5,)),
        ((3, 1, 500), (2, 3, 40, 1)),
        ((20, 3, 20, 3, 20, 3), (3, 1, 3, 1, 3)),
        ((1_000_003, 3), (3,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_broadcasting(shape_a, shape_b, dtype, generator):
    a, b = operand(shape_a, dtype, generator), operand(shape_b, dtype, generator)
    torch.testing.assert_close(add(a, b), a + b)
    torch.testing.assert_close(add(b, a), a + b)


def test_strided_and_transposed(generator):
    a = operand((1000, 2000), torch.float32, generator)
    out = poisoned((2000, 1000), torch.float32, "cuda")
    add(a[:, ::2], a.T[:1000].T, out=out[::2])
    torch.testing.assert_close(out[::2], a[:, ::2] + a.T[:1000].T)
    assert out[1::2].isnan().all()


@pytest.mark.parametrize("n", [2**31 + 1001])
def test_offsets_past_two_to_the_31(n):
    a = torch.ones(n, dtype=torch.bfloat16, device="cuda")
    out = add(a, a, alpha=2)
    assert (out[-2000:] == 3).all()
    assert (out[:2000] == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((300, 2000), (1, 0)), ((70_000, 17), (1, 0)), ((9, 130, 7, 257), (3, 1, 2, 0)), ((40, 50), (0, 1))],
)
def test_copies_have_the_same_bits(shape, axes, dtype, generator):
    stored = operand([shape[axis] for axis in axes], dtype, generator)
    stored[stored < -20] = 0
    stored[stored > 20] = -stored[stored > 20] * 0
    x = stored.permute([axes.index(axis) for axis in range(len(shape))])
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    assert torch.equal(contiguous(x).view(bits), x.contiguous().view(bits))
    into = torch.empty_like(stored).permute([axes.index(axis) for axis in range(len(shape))])
    copy_into(into, x.contiguous())
    assert torch.equal(into.contiguous().view(bits), x.contiguous().view(bits))
