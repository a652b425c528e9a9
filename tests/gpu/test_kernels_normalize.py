"""normalize of rows that several programs share, against float64; a row has the same bits alone and among others."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels.normalize.op import KINDS, normalize, normalize_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261125)


# Held by some programs, by all that can hold one row, and read again; so many rows that each group has several.
@pytest.mark.parametrize(
    ("rows", "n"),
    [(1, 16_392), (300, 16_392), (335, 46_033), (70, 131_073), (9, 2_000_000), (5, 300_001), (3, 2_500_000)],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_long_rows(rows, n, dtype, kind, generator):
    x = (torch.randn((rows, n), generator=generator, device="cuda") + 3).to(dtype)
    weight, bias = torch.randn((2, n), generator=generator, device="cuda")
    for vectors in ({}, {"weight": weight.to(dtype)}, {"weight": weight, "bias": bias}):
        out = normalize(x, kind, **vectors)
        for some in (slice(0, 1), slice(rows // 2, rows // 2 + 2), slice(rows - 1, rows)):
            expected = normalize_reference(x[some], kind, KINDS[kind], **vectors)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(out[some].double(), expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(normalize(x[some].clone(), kind, **vectors), out[some])


def test_a_nan_stays_in_its_row(generator):
    x = torch.randn((40, 50_000), generator=generator, device="cuda")
    x[17, 30_000] = float("nan")
    out = normalize(x, "layer")
    assert out[17].isnan().all()
    assert out[:17].isfinite().all()
    assert out[18:].isfinite().all()
