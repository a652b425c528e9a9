"""matmul on a GPU, against the fp64 oracle and against the vendor library's own error."""

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.kernel_bounds import GPU_MATMUL_SHAPES, matmul_bound, poisoned
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels import matmul
from tilewire.kernels.build.operands import random_operand
from tilewire.kernels.matmul.configs import ACTIVATIONS, OUT_DTYPES

DTYPES = [getattr(torch, name) for name in OUT_DTYPES]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def check(out, a, b, *, arithmetic=None, **epilogue):
    expected = matmul_reference(a, b, **epilogue)
    scale_a, scale_b, bias = (epilogue.get(key) for key in ("a_scale", "b_scale", "bias"))
    scaled_a = a.double() if scale_a is None else a.double() * scale_a.reshape(-1, 1)
    scaled_b = b.double() if scale_b is None else b.double() * scale_b.reshape(1, -1)
    bound = matmul_bound(scaled_a, scaled_b, expected, out.dtype, arithmetic or name_of(a.dtype))
    if bias is not None:
        bound = bound + bias.double().abs() * 2.0**-20
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"{(error - bound).max()} over the bound"
    return error


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261121)


def shape_id(shape):
    return f"{shape.m}x{shape.n}x{shape.k}"


@pytest.mark.parametrize("shape", GPU_MATMUL_SHAPES, ids=shape_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_shapes(shape, dtype, layout, generator):
    a = random_operand((shape.k, shape.m) if layout[0] == "t" else (shape.m, shape.k), dtype, generator)
    b = random_operand((shape.n, shape.k) if layout[1] == "t" else (shape.k, shape.n), dtype, generator)
    out = poisoned(
        (shape.m, shape.n),
        {torch.int8: torch.int32}.get(dtype, torch.bfloat16 if dtype.itemsize == 1 else dtype),
        "cuda",
    )
    matmul(a, b, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", out=out)
    check(out, a.mT if layout[0] == "t" else a, b.mT if layout[1] == "t" else b)


@pytest.mark.parametrize("shape", GPU_MATMUL_SHAPES[-8:], ids=shape_id)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=name_of)
def test_error_is_at_most_twice_the_vendor_library(shape, dtype, generator):
    a = random_operand((shape.m, shape.k), dtype, generator)
    b = random_operand((shape.k, shape.n), dtype, generator)
    expected = matmul_reference(a, b)
    ours = (matmul(a, b).double() - expected).norm()
    theirs = (torch.matmul(a, b).double() - expected).norm()
    assert ours <= 2 * theirs


@pytest.mark.parametrize("size", [1024, 4096])
def test_tf32x3_is_nearly_as_accurate_as_float32(size, generator):
    a = random_operand((size, size), torch.float32, generator)
    b = random_operand((size, size), torch.float32, generator)
    expected = matmul_reference(a, b)
    split = (matmul(a, b, precision="tf32x3").double() - expected).norm()
    plain = (torch.matmul(a, b).double() - expected).norm()
    assert split <= 4 * plain, f"{(split / plain).item():.2f} times the error of float32"


@pytest.mark.parametrize("shape", GPU_MATMUL_SHAPES[12:20], ids=shape_id)
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_precisions(shape, precision, generator):
    a = random_operand((shape.m, shape.k), torch.float32, generator)
    b = random_operand((shape.k, shape.n), torch.float32, generator)
    out = matmul(a, b, precision=precision)
    check(out, a, b, arithmetic="float32" if precision == "ieee" else precision)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(300, 264, 512), (16, 4096, 4096), (37, 29, 65), (1024, 1024, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=name_of)
def test_epilogues(activation, shape, dtype, generator):
    m, n, k = shape
    a, b = random_operand((m, k), dtype, generator), random_operand((k, n), dtype, generator)
    extras = {
        "bias": random_operand((n,), torch.bfloat16, generator),
        "a_scale": torch.rand(m, generator=generator, device="cuda"),
        "b_scale": torch.rand(1, generator=generator, device="cuda"),
        "activation": activation,
    }
    check(matmul(a, b, **extras), a, b, **extras)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(300, 264, 512), (16, 4096, 4096), (37, 29, 65), (2, 256, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_activations_of_extreme_numbers(activation, shape, dtype):
    m, n, k = shape
    a, b = torch.zeros((m, k), dtype=dtype, device="cuda"), torch.zeros((k, n), dtype=dtype, device="cuda")
    extremes = torch.tensor(
        [0.0, -0.0, 1e-30, 1e-3, 0.249, 0.251, 1.0, 9.0, 80.0, 100.0, 1e20, 3e38, math.inf, math.nan]
    )
    bias = torch.cat((extremes, -extremes)).repeat(n)[:n].cuda()
    out = matmul(a, b, bias=bias, activation=activation)
    expected = matmul_reference(a, b, bias=bias, activation=activation)
    # Exponents of 100 have an error of a few units of their last bit. Sigmoids below the least normal number become zero; the
    # reference's gelu is a difference, which loses all digits sooner.
    rtol, atol = 2**-8 if dtype == torch.bfloat16 else 2e-5, 1e-14 if activation == "gelu" else 1e-34
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=name_of)
@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((5,), (5,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 3)), ((2, 1, 2), (1, 3, 1))], ids=str
)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 72, 100), (128, 256, 512)], ids=str)
def test_batches(dtype, batch_a, batch_b, shape, generator):
    m, n, k = shape
    a, b = random_operand((*batch_a, m, k), dtype, generator), random_operand((*batch_b, k, n), dtype, generator)
    check(matmul(a, b), a, b)


@pytest.mark.parametrize("shape", [(64, 4096, 4096), (128, 128, 16384), (1, 4096, 14336), (2048, 2048, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_bits_repeat(shape, dtype, generator):
    m, n, k = shape
    a, b = random_operand((m, k), dtype, generator), random_operand((k, n), dtype, generator)
    first = matmul(a, b)
    for _ in range(5):
        assert torch.equal(matmul(a, b), first)


def test_padding_is_neither_read_into_the_sum_nor_written(generator):
    whole_a, whole_b = (
        random_operand((200, 72), torch.bfloat16, generator),
        random_operand((72, 136), torch.bfloat16, generator),
    )
    whole_a[:, 65:] = float("nan")
    whole_b[:, 131:] = float("nan")
    whole_b[65:] = float("nan")
    whole_out = poisoned((200, 136), torch.bfloat16, "cuda")
    a, b, out = whole_a[:, :65], whole_b[:65, :131], whole_out[:, :131]
    matmul(a, b, out=out)
    check(out, a, b)
    assert whole_out[:, 131:].isnan().all()


def test_offsets_past_two_to_the_31(generator):
    rows = 2**31 // 4096 + 300
    a = torch.zeros((rows, 4096), dtype=torch.bfloat16, device="cuda")
    a[-5:] = random_operand((5, 4096), torch.bfloat16, generator)
    b = random_operand((4096, 64), torch.bfloat16, generator)
    check(matmul(a, b)[-5:], a[-5:], b)
    wide = random_operand((64, 64), torch.bfloat16, generator)
    out = torch.empty((rows * 64, 64), dtype=torch.bfloat16, device="cuda")
    matmul(a.view(rows * 64, 64), wide, out=out)
    check(out[-5 * 64 :], a[-5:].view(-1, 64), wide)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 3), (4, 0, 3), (5, 7, 0)])
def test_zero_sizes(m, n, k):
    out = matmul(torch.ones(m, k, device="cuda"), torch.ones(k, n, device="cuda"), bias=torch.ones(n, device="cuda"))
    assert torch.equal(out, torch.ones(m, n, device="cuda"))


def test_streams_do_not_share_scratch(generator):
    a, b = (
        random_operand((16, 8192), torch.bfloat16, generator),
        random_operand((8192, 4096), torch.bfloat16, generator),
    )
    expected = matmul(a, b)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)
