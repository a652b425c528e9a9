"""softmax on a GPU, against the fp64 oracle."""

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.kernel_bounds import GPU_SOFTMAX_LENGTHS, poisoned, softmax_bound
from tilewire.kernels import softmax


def check(out, x, *, axis=-1, log=False):
    expected = (torch.log_softmax if log else torch.softmax)(x.double(), dim=axis)
    bound = softmax_bound(expected, out.dtype, log=log, num_summed=x.shape[axis])
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"{(error - bound).max()} over the bound"


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261121)


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("n", GPU_SOFTMAX_LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log", [False, True])
def test_lengths(rows, n, dtype, log, generator):
    x = (torch.randn((rows, n), generator=generator, device="cuda") * 4).to(dtype)
    out = poisoned((rows, n), dtype, "cuda")
    softmax(x, log=log, out=out)
    check(out, x, log=log)


@pytest.mark.parametrize("n", [100, 5000, 20000, 70000, 200000])
@pytest.mark.parametrize("rows", [7, 1000])
@pytest.mark.parametrize("log", [False, True])
def test_infinities_and_nan_as_torch(n, rows, log):
    x = torch.zeros(rows, n, device="cuda")
    x[0] = float("-inf")
    x[1, 5] = float("inf")
    x[2, -1] = float("nan")
    x[3, :-1] = float("-inf")
    x[4, 0] = float("-inf")
    x[5] = float("nan")
    x[6] = float("inf")
    expected = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
    torch.testing.assert_close(softmax(x, log=log), expected, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(60, 70, 80), (3, 2000, 5), (2000, 3, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_axes(axis, shape, dtype, generator):
    x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    check(softmax(x, axis=axis), x, axis=axis)


@pytest.mark.parametrize("shape", [(4096, 4096), (1, 1_000_000), (2, 300_000), (5, 40_000)], ids=str)
def test_bits_repeat(shape, generator):
    x = torch.randn(shape, generator=generator, device="cuda")
    first = softmax(x)
    for _ in range(5):
        assert torch.equal(softmax(x), first)


def test_a_row_does_not_depend_on_its_neighbours(generator):
    x = torch.randn((500, 3000), generator=generator, device="cuda")
    assert torch.equal(softmax(x)[7], softmax(x[7:8])[0])


def test_offsets_past_two_to_the_31(generator):
    x = torch.zeros((2**31 // 8192 + 200, 8192), dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn((3, 8192), generator=generator, device="cuda").bfloat16()
    check(softmax(x)[-3:], x[-3:])


# Each block of rows that are read side by side, and the copies that are made beyond them.
# Each block of rows that are held, of pieces and of pairs; then copies.
@pytest.mark.parametrize("n", [33, 64, 65, 128, 129, 200, 256, 257, 512, 513, 900, 1024, 1025, 2048, 2049])
@pytest.mark.parametrize("inner", [8, 24, 50, 52, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log", [False, True])
def test_rows_in_pieces_of_memory(n, inner, dtype, log, generator):
    x = (torch.randn((3, n, inner), generator=generator, device="cuda") * 4).to(dtype)
    out = poisoned(x.shape, dtype, "cuda")
    softmax(x, axis=1, log=log, out=out)
    check(out, x, axis=1, log=log)
    out = softmax(x, axis=1, log=log, batch_invariant=True)
    assert torch.equal(softmax(x[1:2].clone(), axis=1, log=log, batch_invariant=True), out[1:2])


def test_infinities_and_nan_in_pieces_of_memory_as_torch():
    for log, n in itertools.product((False, True), (33, 100, 400, 2000)):
        x = torch.zeros((n, 16), device="cuda")
        x[:, 0] = float("-inf")
        x[1, 1] = float("inf")
        x[-1, 2] = float("nan")
        x[:-1, 3] = float("-inf")
        x[:, 4] = float("inf")
        expected = torch.log_softmax(x, 0) if log else torch.softmax(x, 0)
        torch.testing.assert_close(softmax(x, axis=0, log=log), expected, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 11, 16, 17, 64, 65, 200, 256, 257, 1000, 1023, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log", [False, True])
def test_rows_across_memory_and_short_rows(n, dtype, log, generator):
    x = (torch.randn((7, n + 1, 701), generator=generator, device="cuda") * 4).to(dtype)[:, :n]
    for inner, out_dtype in itertools.product((701, 1, 13), (torch.float32, torch.bfloat16)):
        some = x[..., :inner]
        check(softmax(some, axis=1, log=log, out_dtype=out_dtype), some, axis=1, log=log)
        along = some.transpose(1, 2).contiguous()
        check(softmax(along, log=log, out_dtype=out_dtype), along, log=log)
        check(softmax(along[:, inner // 2 :], log=log, out_dtype=out_dtype), along[:, inner // 2 :], log=log)


@pytest.mark.parametrize("n", [2, 9, 50, 200, 800])
def test_a_row_across_memory_has_the_same_bits_alone_and_among_others(n, generator):
    x = torch.randn((5, n, 4001), generator=generator, device="cuda")
    whole = softmax(x, axis=1, batch_invariant=True)
    assert torch.equal(softmax(x[1:3, :, 7:9], axis=1, batch_invariant=True), whole[1:3, :, 7:9])
