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


# Each block of rows that are held, of pieces and of pairs; then copies.
@pytest.mark.parametrize("n", [33, 64, 65, 128, 129, 200, 256, 257, 512, 513, 900, 1024, 1025, 2048, 2049])
@pytest.mark.parametrize("inner", [8, 24, 50, 52, 3000])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_pieces_of_memory(n, inner, dtype, kind, generator):
    x = torch.randint(-9, 10, (3, n, inner), generator=generator, device="cuda").to(dtype)
    weight, bias = torch.randn((2, n), generator=generator, device="cuda")
    for vectors in ({}, {"weight": weight.to(dtype)}, {"weight": weight, "bias": bias}):
        out = normalize(x, kind, axis=1, **vectors)
        expected = normalize_reference(x, kind, KINDS[kind], axis=1, **vectors)
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(normalize(x[1:2].clone(), kind, axis=1, **vectors), out[1:2])


# Each block of rows that are read side by side, and the copies that are made beyond them.
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 11, 16, 17, 64, 65, 200, 256, 257, 1000, 1023, 1024])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_across_memory_and_short_rows(n, dtype, kind, generator):
    # Whole numbers: near ones of few would lose their digits by the difference from their mean.
    x = torch.randint(-9, 10, (7, n + 1, 301), generator=generator, device="cuda").to(dtype)[:, :n]
    weight, bias = torch.randn((2, n), generator=generator, device="cuda")
    for inner, vectors in ((301, {}), (1, {"weight": weight.to(dtype)}), (13, {"weight": weight, "bias": bias})):
        some = x[..., :inner]
        along = some.transpose(1, 2).contiguous()
        for out_dtype, tolerance in TOLERANCE.items():
            for rows, axis in ((some, 1), (along, 2), (along[:, inner // 2 :], 2)):
                out = normalize(rows, kind, axis=axis, out_dtype=out_dtype, **vectors)
                expected = normalize_reference(rows, kind, KINDS[kind], axis=axis, **vectors)
                torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [2, 9, 50, 200, 800])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_across_memory_has_the_same_bits_alone_and_among_others(n, kind, generator):
    x = torch.randn((5, n, 4001), generator=generator, device="cuda")
    assert torch.equal(normalize(x[1:3, :, 7:9], kind, axis=1), normalize(x, kind, axis=1)[1:3, :, 7:9])
