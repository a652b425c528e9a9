"""normalize in the interpreter, against float64: kinds, lengths, axes, strides, weights, hostile rows."""

import itertools

import pytest
import torch

from tests.support.combinations import sampled, sampled_lengths
from tests.support.kernel_bounds import ROWS_IN_PIECES, ROWS_TOO_LONG
from tilewire.kernels.normalize.op import KINDS, normalize, normalize_reference, prepare_normalize
from tilewire.kernels.runtime.pipeline import Detour

# The interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
FLOATS = tuple(TOLERANCE)


def check(x, kind, *, axis=-1, out_dtype=None, **options):
    out = normalize(x, kind, axis=axis, out_dtype=out_dtype, **options)
    expected = normalize_reference(x, kind, options.pop("eps", KINDS[kind]), axis=axis, **options)
    assert out.dtype == (out_dtype or x.dtype)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261122)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 16, 33, 64, 100])
def test_lengths(kind, dtype, n, generator):
    check(torch.randn((3, n), generator=generator).to(dtype) + 1, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vector_dtype", [torch.bfloat16, torch.float32])
def test_weight_and_bias(kind, vector_dtype, generator):
    x = torch.randn((3, 24), generator=generator).bfloat16()
    weight, bias = (torch.randn(24, generator=generator).to(vector_dtype) for _ in "ab")
    check(x, kind, weight=weight, out_dtype=torch.float32)
    check(x, kind, bias=bias, out_dtype=torch.float32)
    check(x, kind, weight=weight, bias=bias.float())


def test_a_weight_off_its_16_bytes_is_read_by_another_binary(generator):
    x, weights = torch.randn((3, 16), generator=generator), torch.randn(20, generator=generator)
    out = torch.empty_like(x)
    found = {}
    for first in (4, 1):
        weight = weights[first : first + 16]
        prepared = prepare_normalize(x, out, kind="rms", weight=weight)
        prepared(x, weight, None, out)
        assert torch.allclose(
            out, normalize_reference(x, "rms", KINDS["rms"], weight=weight).float(), rtol=1e-5, atol=1e-6
        )
        (found[first],) = prepared.variants
    assert found[4] != found[1]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes_and_strides(axis, generator):
    x = torch.randn((6, 20, 18), generator=generator)
    check(x, "layer", axis=axis)
    check(x[::2, :, ::2], "rms", axis=axis)


def test_eps_bounds_the_scale():
    x = torch.full((2, 8), 1e-3)
    check(x, "rms", eps=1.0)
    check(x, "l2", eps=10.0)
    assert (normalize(torch.zeros(2, 8), "l2") == 0).all()


def test_a_far_mean_costs_no_accuracy(generator):
    x = torch.randn((2, 90), generator=generator) + 1000
    torch.testing.assert_close(
        normalize(x, "layer").double(), normalize_reference(x, "layer", 1e-5), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_rows(kind):
    x = torch.ones(4, 20)
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    out = normalize(x, kind)
    assert out[1].isnan().all()
    assert out[2, 5].isnan()
    assert out[[0, 3]].isfinite().all()


def test_empty():
    assert normalize(torch.empty(0, 5), "layer").shape == (0, 5)
    assert normalize(torch.empty(3, 0), "rms").shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "kind", "options", "named"),
    [
        (torch.tensor(1.0), "rms", {}, "dimension"),
        (torch.ones(3).double(), "rms", {}, "x"),
        (torch.ones(3), "batch", {}, "kind"),
        (torch.ones(3), "rms", {"axis": 1}, "axis"),
        (torch.ones(3), "rms", {"weight": torch.ones(4)}, "weight"),
        (torch.ones(3), "rms", {"bias": torch.ones(3).double()}, "bias"),
        (torch.ones(3), "rms", {"out_dtype": torch.int32}, "out_dtype"),
    ],
)
def test_refuses(x, kind, options, named):
    with pytest.raises(ValueError, match=named):
        normalize(x, kind, **options)


def test_prepared_refuses_an_output_that_does_not_fit():
    with pytest.raises(ValueError, match="out"):
        prepare_normalize(torch.ones(2, 3), torch.empty(3, 2), kind="rms")


def across(generator, dtype, n, inner=5, outer=3):
    """Rows of `n` that lie across memory, in two dimensions beside the axis; nothing is at an even distance."""
    whole = torch.randn((outer, n + 1, inner + 2), generator=generator) + 1
    return whole.to(dtype)[:, :n, 1:-1]


@pytest.mark.parametrize("n", sampled_lengths(70))
def test_each_length_across_memory_and_along_it(n, generator):
    weight, bias = (torch.randn(n, generator=generator).to(FLOATS[n // 9 % 3]) for _ in "ab")
    vectors: tuple[dict[str, torch.Tensor], ...]
    vectors = ({"weight": weight, "bias": bias.float()}, {}, {"bias": bias}, {"weight": weight})
    for turn in (n, n + 1):
        kind, dtype = tuple(KINDS)[turn % 3], FLOATS[turn // 3 % 3]
        x = across(generator, dtype, n)
        options = {"out_dtype": dtype if turn % 2 else torch.float32, **vectors[turn % 4]}
        check(x, kind, axis=1, **options)
        check(x.transpose(1, 2).contiguous()[:, 1:], kind, **options)


@pytest.mark.parametrize(("n", "inner"), [*itertools.product((2, 30, 33), (1, 3, 7, 9, 20)), (1024, 2)])
def test_rows_of_any_number_lie_side_by_side(n, inner, generator):
    check(across(generator, torch.float32, n, inner, 4), "layer", axis=1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("outer", "n", "inner"), ROWS_IN_PIECES)
def test_rows_in_pieces_of_memory(outer, n, inner, dtype, generator):
    x = (torch.randn((outer, n, inner), generator=generator) + 1).to(dtype)
    weight, bias = torch.randn(n, generator=generator).to(dtype), torch.randn(n, generator=generator)
    check(x, "layer", axis=1, weight=weight, bias=bias)
    check(x, "rms", axis=1, weight=weight)
    check(x, "l2", axis=1)
    prepared = prepare_normalize(x, torch.empty_like(x), kind="rms", weight=weight, axis=1)
    assert not isinstance(prepared, Detour)
    whole = 16 // x.element_size()
    assert [dict(variant.constants)["UNIT"] for variant in prepared.variants] == [whole if inner % whole == 0 else 2]


@pytest.mark.parametrize(("shape", "dtype", "kind"), sampled(ROWS_TOO_LONG, FLOATS, tuple(KINDS)))
def test_longer_rows_are_copied(shape, dtype, kind, generator):
    x = (torch.randn(shape, generator=generator) + 1).to(dtype)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    check(x, kind, axis=1, weight=weight)
    assert isinstance(prepare_normalize(x, torch.empty_like(x), kind=kind, weight=weight, axis=1), Detour)


@pytest.mark.parametrize("n", [3, 33, 300])
def test_rows_across_memory_are_not_copied(n, generator):
    x = across(generator, torch.float32, n)
    weight = torch.randn(n, generator=generator)
    prepared = prepare_normalize(x, torch.empty(x.shape), kind="rms", weight=weight, axis=1)
    assert [variant.kernel.__name__ for variant in prepared.variants] == ["normalize_across_kernel"]
    assert not isinstance(prepared, Detour)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 60, 260])
def test_a_row_across_memory_has_the_same_bits_alone_and_among_others(kind, n, generator):
    x = across(generator, torch.float32, n, 9)
    whole = normalize(x, kind, axis=1)
    assert torch.equal(normalize(x[1:2, :, 3:5], kind, axis=1), whole[1:2, :, 3:5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [20, 40])
def test_nan_and_infinity_across_memory_stay_in_their_rows(n, kind):
    x = torch.ones(n, 4)
    x[3, 1] = float("nan")
    x[5, 2] = float("inf")
    out = normalize(x, kind, axis=0)
    assert out[:, 1].isnan().all()
    assert out[5, 2].isnan()
    assert out[:, [0, 3]].isfinite().all()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 12345.678])
@pytest.mark.parametrize("n", [3, 24, 96])
def test_equal_elements_are_their_mean(n, value):
    x = torch.full((2, n, 3), value).bfloat16()
    for axis in (1, 2):
        assert not normalize(x, "layer", axis=axis).any()


def test_a_far_mean_across_memory_costs_no_accuracy(generator):
    x = torch.randn((90, 2), generator=generator) + 1000
    torch.testing.assert_close(
        normalize(x, "layer", axis=0).double(), normalize_reference(x, "layer", 1e-5, axis=0), rtol=1e-3, atol=1e-3
    )
