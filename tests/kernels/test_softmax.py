"""softmax in the interpreter, against the fp64 oracle: lengths, axes, strides, every kernel, infinities."""

import pytest
import torch

from tests.support.combinations import sampled, sampled_lengths
from tests.support.kernel_bounds import ROWS_IN_PIECES, ROWS_TOO_LONG, SOFTMAX_LENGTHS, poisoned, softmax_bound
from tilewire.kernels import softmax
from tilewire.kernels.runtime.pipeline import Detour
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.softmax.across import COPIED_N
from tilewire.kernels.softmax.configs import Config, Problem, explain, select
from tilewire.kernels.softmax.op import prepare

H200 = KNOWN["nvidia_h200"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = [
    Config("row", 2, 128, 4),
    Config("row", 2, 64, 4, tail_n=64),
    Config("cooperative", 1, 128, 4),
    Config("loop", 1, 32, 4),
    Config("split", 1, 32, 4, 3),
]


def check(out, x, *, axis=-1, log=False):
    expected = (torch.log_softmax if log else torch.softmax)(x.double(), dim=axis)
    bound = softmax_bound(expected, out.dtype, log=log, num_summed=x.shape[axis])
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"{(error - bound).max()} over the bound"


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261121)


@pytest.mark.parametrize("n", SOFTMAX_LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("log", [False, True])
def test_lengths(n, dtype, log, generator):
    x = (torch.randn((5, n), generator=generator) * 4).to(dtype)
    out = poisoned((5, n), dtype)
    assert softmax(x, log=log, out=out) is out
    check(out, x, log=log)


@pytest.mark.parametrize("config", KERNELS, ids=lambda config: config.kernel)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [96, 100])
def test_every_kernel(config, log, n, generator):
    x = torch.randn((3, n), generator=generator) * 30
    out = poisoned((3, n), torch.float32)
    prepare(x, out, log=log, config=config)(x, out)
    check(out, x, log=log)


@pytest.mark.parametrize("config", KERNELS, ids=lambda config: config.kernel)
@pytest.mark.parametrize("log", [False, True])
def test_infinities_and_nan_as_torch(config, log):
    x = torch.zeros(7, 100)
    x[0] = float("-inf")
    x[1, 5] = float("inf")
    x[2, 99] = float("nan")
    x[3, :99] = float("-inf")
    x[4, 0] = float("-inf")
    x[5] = float("nan")
    x[6] = float("inf")
    out = poisoned((7, 100), torch.float32)
    prepare(x, out, log=log, config=config)(x, out)
    expected = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_axes(axis, generator):
    x = torch.randn((6, 20, 18), generator=generator)
    check(softmax(x, axis=axis), x, axis=axis)


@pytest.mark.parametrize(("n", "log"), sampled((COPIED_N - 1, COPIED_N, COPIED_N + 5), (False, True)))
def test_long_rows_across_memory(n, log, generator):
    x = torch.randn((n, 3), generator=generator) * 4
    out = poisoned((n, 3), torch.float32)
    assert softmax(x, axis=0, log=log, out=out) is out
    check(out, x, axis=0, log=log)
    alone = softmax(x[:, 1:2], axis=0, log=log, batch_invariant=True)
    assert torch.equal(softmax(x, axis=0, log=log, batch_invariant=True)[:, 1:2], alone)


def test_the_reason_names_the_copies():
    lines = [explain(Problem(8, n, "bfloat16", "bfloat16", is_contiguous=False), H200) for n in (64, 4096)]
    assert lines[0].endswith("across 16x16, 2 warps, 1 programs a row, for rows that lie across memory")
    assert "8x4096 by table" in lines[1]
    assert lines[1].endswith("; rows lie across memory and are copied first")


def test_axis_of_many_dimensions(generator):
    x = torch.randn((2, 3, 2, 5, 2), generator=generator).permute(4, 1, 3, 0, 2)
    check(softmax(x, axis=2), x, axis=2)


def test_any_strides(generator):
    x = torch.randn((9, 4, 70), generator=generator)[::2, 1, ::3]
    whole = poisoned((5, 48), torch.float32)
    out = whole[:, ::2]
    softmax(x, out=out)
    check(out, x)
    assert whole[:, 1::2].isnan().all()


def test_rank_one_and_out_dtype(generator):
    x = torch.randn(40, generator=generator)
    out = softmax(x, out_dtype=torch.float16)
    assert out.dtype == torch.float16
    check(out, x)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)])
def test_empty(shape):
    assert softmax(torch.empty(shape)).shape == shape


def test_large_values_do_not_overflow():
    x = torch.tensor([[1e30, 1e30, -1e30]])
    assert torch.equal(softmax(x), torch.tensor([[0.5, 0.5, 0.0]]))


@pytest.mark.parametrize(
    ("x", "options", "named"),
    [
        (torch.tensor(1.0), {}, "dimension"),
        (torch.ones(3, dtype=torch.int32), {}, "dtype"),
        (torch.ones(3), {"axis": 1}, "axis"),
        (torch.ones(3), {"out_dtype": torch.int32}, "out_dtype"),
        (torch.ones(3), {"out": torch.ones(4)}, "out"),
    ],
)
def test_refuses(x, options, named):
    with pytest.raises(ValueError, match=named):
        softmax(x, **options)


@pytest.mark.parametrize("n", [50, 200])
def test_a_row_has_the_same_bits_alone_and_among_others(n):
    x = torch.randn((9, n), generator=torch.Generator().manual_seed(5))
    whole = softmax(x, batch_invariant=True)
    assert torch.equal(softmax(x[4:5], batch_invariant=True), whole[4:5])


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("log", [False, True])
def test_narrow_rows(n, log, generator):
    x = torch.randn((7, n), generator=generator) * 5
    out = poisoned((7, n), torch.float32)
    check(softmax(x, log=log, out=out), x, log=log)


def across(generator, dtype, n, inner=5, outer=3):
    """Rows of `n` that lie across memory, in two dimensions beside the axis; nothing is at an even distance."""
    whole = torch.randn((outer, n + 1, inner + 2), generator=generator) * 4
    return whole.to(dtype)[:, :n, 1:-1]


@pytest.mark.parametrize("n", sampled_lengths(70))
def test_each_length_across_memory_and_along_it(n, generator):
    for turn in (n, n + 1):
        dtype, out_dtype, log = FLOATS[turn % 3], FLOATS[turn // 3 % 3], turn % 2 == 0
        x = across(generator, dtype, n)
        check(softmax(x, axis=1, log=log, out_dtype=out_dtype), x, axis=1, log=log)
        along = x.transpose(1, 2).contiguous()[:, 1:]
        check(softmax(along, log=log, out_dtype=out_dtype), along, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("outer", "n", "inner"), ROWS_IN_PIECES)
def test_rows_in_pieces_of_memory(outer, n, inner, dtype, log, generator):
    x = (torch.randn((outer, n, inner), generator=generator) * 4).to(dtype)
    check(softmax(x, axis=1, log=log), x, axis=1, log=log)
    prepared = prepare(x.movedim(1, -1), torch.empty_like(x).movedim(1, -1), log=log)
    assert not isinstance(prepared, Detour)
    whole = 16 // x.element_size()
    assert [dict(variant.constants)["UNIT"] for variant in prepared.variants] == [whole if inner % whole == 0 else 2]


@pytest.mark.parametrize(("shape", "dtype", "log"), sampled(ROWS_TOO_LONG, FLOATS, (False, True)))
def test_longer_rows_are_copied(shape, dtype, log, generator):
    x = (torch.randn(shape, generator=generator) * 4).to(dtype)
    check(softmax(x, axis=1, log=log), x, axis=1, log=log)
    assert isinstance(prepare(x.movedim(1, -1), torch.empty_like(x).movedim(1, -1), log=log), Detour)


def test_rows_begin_at_pieces_or_are_read_one_by_one(generator):
    wide = torch.randn((2, 40, 26), generator=generator)
    for x in (wide[..., 1:25], wide[..., ::2], wide[..., :24], wide[:, ::3, :8].repeat(1, 3, 1)):
        check(softmax(x, axis=1), x, axis=1)


@pytest.mark.parametrize("inner", [1, 2, 3, 7, 8, 9, 20])
@pytest.mark.parametrize("n", [2, 13, 300])
def test_rows_of_any_number_lie_side_by_side(inner, n, generator):
    x = across(generator, torch.float32, n, inner, 4)
    out = poisoned((4, n, inner), torch.float32)
    check(softmax(x, axis=1, out=out), x, axis=1)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("n", "columns"), [(3, 7), (15, 7), (64, 7), (200, 7), (64, 8), (200, 10)])
def test_infinities_and_nan_across_memory_as_torch(n, columns, log):
    x = torch.zeros(n, columns)
    x[:, 0] = float("-inf")
    x[1, 1] = float("inf")
    x[-1, 2] = float("nan")
    x[:-1, 3] = float("-inf")
    x[0, 4] = float("-inf")
    x[:, 5] = float("nan")
    x[:, 6] = float("inf")
    expected = torch.log_softmax(x, 0) if log else torch.softmax(x, 0)
    torch.testing.assert_close(softmax(x, axis=0, log=log), expected, equal_nan=True)


@pytest.mark.parametrize("n", [2, 4, 9, 64, 500])
def test_a_row_across_memory_has_the_same_bits_alone_and_among_others(n, generator):
    x = across(generator, torch.float32, n, 9)
    whole = softmax(x, axis=1, batch_invariant=True)
    assert torch.equal(softmax(x[1:2, :, 3:5], axis=1, batch_invariant=True), whole[1:2, :, 3:5])
    short = x.transpose(1, 2).contiguous()[..., :3]
    assert torch.equal(softmax(short[2:, 7:8], batch_invariant=True), softmax(short, batch_invariant=True)[2:, 7:8])


def test_the_reason_names_the_block_of_short_rows():
    line = explain(Problem(1 << 20, 2, "float32", "float32", is_aligned=False), H200)
    assert line.endswith("across 256x1, 8 warps, 1 programs a row, for short rows that are read one by one")


@pytest.mark.parametrize("rows", [8, 1 << 20])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "elements"), [(1, 1), (32, 1), (33, 4), (1023, 4)])
def test_threads_share_rows_across_memory_where_they_are_few(n, elements, out_dtype, rows):
    config = select(Problem(rows, n, "bfloat16", out_dtype, is_contiguous=False, is_aligned=False), H200)
    assert config.kernel == "across"
    assert config.block_n == (16 if elements > 1 and rows == 8 else elements)


@pytest.mark.parametrize("config", [Config("across", 8, 1, 4), Config("across", 8, 4, 4), Config("across", 8, 16, 4)])
@pytest.mark.parametrize("log", [False, True])
def test_each_block_across_memory(config, log, generator):
    x = across(generator, torch.float32, 35, 6)
    out = poisoned(x.shape, torch.float32)
    prepare(x.movedim(1, -1), out.movedim(1, -1), log=log, config=config)(x.movedim(1, -1), out.movedim(1, -1))
    check(out, x, axis=1, log=log)
