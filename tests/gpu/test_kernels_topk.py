"""topk on a GPU, against a stable sort of float64: all blocks, few and many elements, ties, NaN, any start of a row."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels.topk.op import topk, topk_reference


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261130)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "n", [1, 2, 8, 16, 17, 31, 32, 33, 64, 65, 128, 200, 256, 300, 512, 1000, 1024, 2047, 4000, 8192, 9000]
)
@pytest.mark.parametrize("largest", [True, False])
def test_lengths(dtype, n, largest, generator):
    for rows in (1, 7, 1003):
        # Many are equal, and some are no numbers.
        x = torch.randint(-40, 41, (rows, n), generator=generator, device="cuda").to(dtype)
        x[x == 13] = float("nan")
        x[x == 12] = float("inf")
        x[x == -12] = -0.0
        for k in {min(k, n, 1024) for k in (1, 2, 4, 5, 6, 8, 9, 16, 17, 32, 33, 100, 1024)}:
            values, indices = topk(x, k, largest=largest)
            expected, order = topk_reference(x, k, largest=largest)
            assert torch.equal(indices, order), (rows, k)
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [5, 31, 60, 250, 1001, 3999])
def test_rows_that_begin_anywhere(dtype, n, generator):
    whole = torch.randn((301, n + 5), generator=generator, device="cuda").to(dtype)
    for first in range(4):
        x = whole[:, first : first + n]
        for k in (1, 3, 5):
            values, indices = topk(x, k)
            expected, order = topk_reference(x, k)
            assert torch.equal(indices, order), (first, k)
            assert torch.equal(values, expected), (first, k)
