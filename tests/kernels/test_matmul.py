"""matmul in the interpreter, against the fp64 oracle: shapes, dtypes, strides, batches, epilogues, edge values."""

from dataclasses import replace

import pytest
import torch

from tests.support.kernel_bounds import MATMUL_SHAPES, Shape, matmul_bound, poisoned
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels import matmul
from tilewire.kernels.build.operands import random_operand
from tilewire.kernels.copy.kernel import copy_operands_kernel
from tilewire.kernels.copy.operands import Copied, launch_of
from tilewire.kernels.matmul.configs import ACTIVATIONS, MAX_INT8_K, OUT_DTYPES, Config, copied_operands
from tilewire.kernels.matmul.members import INTERPRETED, INTERPRETED_TMA
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.matmul.view import problem_of, view_of
from tilewire.kernels.runtime.strides import Extent

DTYPES = [getattr(torch, name) for name in OUT_DTYPES]
# One for each kernel and each kind of sum; a product with copies takes half a second in the interpreter.
QUICK_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
COPIED_DTYPES = [pytest.param(one, marks=[] if one in QUICK_DTYPES else [pytest.mark.slow]) for one in DTYPES]


def check(out, a, b, *, arithmetic=None, **epilogue):
    expected = matmul_reference(a, b, **epilogue)
    scale_a, scale_b = epilogue.get("a_scale"), epilogue.get("b_scale")
    scaled_a = a.double() if scale_a is None else a.double() * scale_a.reshape(-1, 1)
    scaled_b = b.double() if scale_b is None else b.double() * scale_b.reshape(1, -1)
    bias = epilogue.get("bias")
    if bias is not None:
        # The bias is one more product in the sum.
        scaled_a = torch.cat([scaled_a, torch.ones_like(scaled_a[..., :1])], dim=-1)
        column = bias.double().expand(*scaled_b.shape[:-2], 1, -1)
        scaled_b = torch.cat([scaled_b, column], dim=-2)
    bound = matmul_bound(scaled_a, scaled_b, expected, out.dtype, arithmetic or str(a.dtype).removeprefix("torch."))
    assert out.shape == expected.shape
    error = (out.double() - expected).abs()
    assert not torch.isnan(error).any()
    assert (error <= bound).all(), f"{(error - bound).max()} over the bound"


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261121)


@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=lambda shape: f"{shape.m}x{shape.n}x{shape.k}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_shapes(shape: Shape, dtype, generator):
    a = random_operand((shape.m, shape.k), dtype, generator)
    b = random_operand((shape.k, shape.n), dtype, generator)
    out_dtype = torch.int32 if dtype == torch.int8 else dtype
    out = poisoned((shape.m, shape.n), out_dtype)
    assert matmul(a, b, out=out) is out
    check(out, a, b)


# Beyond whole tiles by a row and by all but one; fewer rows than a tile has; stored through boxes from 65 rows on.
@pytest.mark.parametrize("m", [9, 33, 63, 65, 95, 97])
@pytest.mark.parametrize("n", [72, 136, 200])
@pytest.mark.parametrize(("a_major", "block_n"), [("k", 64), ("m", 128)])
def test_last_tiles_begin_earlier_and_give_the_same(m, n, a_major, block_n, generator):
    # Whole numbers: the interpreter's sums of others depend on the processor and on the row's place in its tile.
    a = torch.randint(-8, 9, (m, 48) if a_major == "k" else (48, m), generator=generator).half()
    if a_major == "m":
        # Its rows start at multiples of 16 bytes.
        a = torch.nn.functional.pad(a, (0, -m % 8)).T[:m]
    b = torch.randint(-8, 9, (48, n), generator=generator).half()
    bias, a_scale = torch.randn(n, generator=generator), torch.rand(m, generator=generator)
    config = replace(INTERPRETED_TMA, block_m=32, block_n=block_n)
    for epilogue in (Epilogue(), Epilogue(bias, a_scale)):
        out = poisoned((m, n), torch.float16)
        prepare(a, b, out, epilogue, "ieee", config)(a, b, out, epilogue.bias, epilogue.a_scale, None)
        check(out, a, b, bias=epilogue.bias, a_scale=epilogue.a_scale)
        # No row's sums depend on the tile that it is in.
        alone = poisoned((1, n), torch.float16)
        row, scale = a[m - 1 :].contiguous(), None if epilogue.a_scale is None else a_scale[m - 1 :]
        prepare(row, b, alone, Epilogue(epilogue.bias, scale), "ieee", config)(
            row, b, alone, epilogue.bias, scale, None
        )
        assert torch.equal(alone[0], out[m - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_layouts(dtype, layout, generator):
    m, n, k = 32, 48, 64
    a = random_operand((k, m) if layout[0] == "t" else (m, k), dtype, generator)
    b = random_operand((n, k) if layout[1] == "t" else (k, n), dtype, generator)
    out = matmul(a, b, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t")
    check(out, a.mT if layout[0] == "t" else a, b.mT if layout[1] == "t" else b)


@pytest.mark.parametrize(("dtype", "out_dtype"), [(d, o) for d, outs in OUT_DTYPES.items() for o in outs])
def test_out_dtypes(dtype, out_dtype, generator):
    a = random_operand((20, 40), getattr(torch, dtype), generator)
    b = random_operand((40, 24), getattr(torch, dtype), generator)
    scale = torch.tensor([2.0**-6])
    a_scale = None if out_dtype == "int32" else scale
    out = matmul(a, b, out_dtype=getattr(torch, out_dtype), a_scale=a_scale)
    assert out.dtype == getattr(torch, out_dtype)
    check(out, a, b, **({} if a_scale is None else {"a_scale": a_scale}))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_epilogue(activation, dtype, generator):
    a, b = random_operand((24, 48), dtype, generator), random_operand((48, 40), dtype, generator)
    bias = random_operand((40,), torch.float16, generator)
    a_scale = torch.rand(24, generator=generator)
    b_scale = torch.rand(40, generator=generator)
    extras = {"bias": bias, "a_scale": a_scale, "b_scale": b_scale, "activation": activation}
    check(matmul(a, b, **extras), a, b, **extras)


def test_integer_bias_and_relu(generator):
    a, b = random_operand((16, 32), torch.int8, generator), random_operand((32, 16), torch.int8, generator)
    bias = torch.arange(-8, 8, dtype=torch.int32) * 1000
    out = matmul(a, b, bias=bias, activation="relu")
    assert torch.equal(out, (a.int() @ b.int() + bias).clamp_min(0))


@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [((3,), ()), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((2, 1, 2), (1, 3, 1)), ((2, 3, 1, 2), (3, 1, 1))],
)
def test_batches_broadcast(batch_a, batch_b, generator):
    a = random_operand((*batch_a, 10, 24), torch.float32, generator)
    b = random_operand((*batch_b, 24, 16), torch.float32, generator)
    check(matmul(a, b), a, b)


def test_batched_row_scales(generator):
    a = random_operand((3, 10, 24), torch.float32, generator)
    b = random_operand((24, 16), torch.float32, generator)
    a_scale = torch.rand(10, generator=generator)
    check(matmul(a, b, a_scale=a_scale), a, b, a_scale=a_scale)


def test_a_batch_of_one_has_any_stride(generator):
    # Descriptors have a batch dimension, whose stride the hardware checks although nothing walks it.
    a = random_operand((80, 24), torch.float16, generator).as_strided((1, 80, 24), (7, 24, 1))
    b = random_operand((24, 32), torch.float16, generator).as_strided((1, 24, 32), (3, 32, 1))
    out = torch.empty(80 * 32, dtype=torch.float16).as_strided((1, 80, 32), (5, 32, 1))
    matmul(a, b, out=out)
    check(out, a, b)
    matmul(a[0], b[0], out=out[0])
    check(out[0], a[0], b[0])


def test_any_strides(generator):
    wide_a = random_operand((40, 3, 66), torch.float32, generator)
    wide_b = random_operand((66, 90), torch.float32, generator)
    a, b = wide_a[::2, 1, 1:65:2], wide_b[1:65:2, ::3]
    whole = poisoned((60, 40), torch.float32)
    out = whole[:, ::2].T[:, ::2]
    assert out.shape == (20, 30)
    matmul(a, b, out=out)
    check(out, a, b)
    assert whole[1::2].isnan().all(), "wrote between the elements of out"


def test_padded_rows_are_left_alone(generator):
    whole_a, whole_b = (random_operand(s, torch.float16, generator) for s in ((20, 48), (40, 32)))
    whole_a[:, 40:] = float("nan")
    whole_b[:, 30:] = float("nan")
    whole_out = poisoned((20, 32), torch.float16)
    a, b, out = whole_a[:, :40], whole_b[:, :30], whole_out[:, :30]
    matmul(a, b, out=out)
    check(out, a, b)
    assert whole_out[:, 30:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (0, 0, 0)])
def test_empty_results(shape):
    m, n, k = shape
    assert matmul(torch.ones(m, k), torch.ones(k, n)).shape == (m, n)


def test_empty_sum_is_bias_and_activation():
    bias = torch.linspace(-2, 2, 24)
    out = matmul(torch.empty(5, 0), torch.empty(0, 24), bias=bias, activation="sigmoid")
    torch.testing.assert_close(out, torch.sigmoid(bias).expand(5, 24))


def test_nan_stays_in_its_row_and_column(generator):
    a, b = random_operand((20, 40), torch.float32, generator), random_operand((40, 24), torch.float32, generator)
    a[3, 39], b[0, 7] = float("nan"), float("inf")
    out = matmul(a, b)
    assert out[3].isnan().all()
    assert not torch.isfinite(out[:, 7]).any()
    rest = torch.ones(20, 24, dtype=torch.bool)
    rest[3], rest[:, 7] = False, False
    assert torch.isfinite(out[rest]).all()


@pytest.mark.parametrize("split_k", [1, 2, 3, 5])
def test_splits_agree_and_repeat(split_k, generator):
    a, b = random_operand((20, 200), torch.float32, generator), random_operand((200, 24), torch.float32, generator)
    results = []
    for _ in range(2):
        out = poisoned((20, 24), torch.float32)
        prepare(a, b, out, Epilogue(), "ieee", Config("pointer", 16, 16, 32, group_m=2, split_k=split_k))(a, b, out)
        results.append(out)
    check(results[0], a, b)
    assert torch.equal(*results)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_of_hostile_numbers(activation):
    sizes = torch.tensor([0.0, 1e-4, 0.3, 5, 30, 100, 3e38, float("inf"), float("nan")])
    a, b = torch.cat((sizes, -sizes))[:, None], torch.ones(1, 2)
    out = matmul(a, b, activation=activation)
    expected = matmul_reference(a, b, activation=activation).float()
    # -inf times a sigmoid of 0 is NaN here, as in PyTorch.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.ones(3), torch.ones(3, 3)), "two dimensions"),
        ((torch.ones(2, 3), torch.ones(4, 5)), "K = 3"),
        ((torch.ones(2, 3), torch.ones(3, 5).half()), "one dtype"),
        ((torch.ones(2, 3).double(), torch.ones(3, 5).double()), "dtype"),
        ((torch.ones(2, 2, 3), torch.ones(3, 3, 5)), "broadcast"),
    ],
)
def test_refuses_operands(arguments, named):
    with pytest.raises(ValueError, match=named):
        matmul(*arguments)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bias": torch.ones(4)}, "bias"),
        ({"activation": "swish"}, "activation"),
        ({"precision": "fp16"}, "precision"),
        ({"out_dtype": torch.int32}, "out_dtype"),
        ({"a_scale": torch.ones(3)}, "a_scale"),
        ({"b_scale": torch.ones(5).half()}, "b_scale"),
        ({"out": torch.ones(5, 2)}, "out"),
    ],
)
def test_refuses_options(options, named):
    with pytest.raises(ValueError, match=named):
        matmul(torch.ones(2, 3), torch.ones(3, 5), **options)


def test_refuses_int8_sums_that_could_overflow():
    k = MAX_INT8_K + 1
    with pytest.raises(ValueError, match="int8"):
        matmul(torch.ones(1, k, dtype=torch.int8), torch.ones(k, 1, dtype=torch.int8))


@pytest.mark.parametrize("options", [{"a_scale": torch.ones(1)}, {"activation": "gelu"}, {"bias": torch.ones(16)}])
def test_refuses_real_epilogues_of_integers(options):
    ones = torch.ones(16, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=next(iter(options))):
        matmul(ones, ones, **options)


@pytest.mark.parametrize("dtype", COPIED_DTYPES)
@pytest.mark.parametrize("layout", ["nn", "tt", *(pytest.param(one, marks=pytest.mark.slow) for one in ("nt", "tn"))])
@pytest.mark.parametrize("split_k", [1, 2])
def test_operands_that_the_kernel_cannot_read_are_copied_first(dtype, layout, split_k, generator):
    # Odd lengths: no row starts at a multiple of 16 bytes; three products, the second operand shared or not.
    m, n, k = 33, 37, 45
    for entries in (3, 1):
        a = random_operand((3, k, m) if layout[0] == "t" else (3, m, k), dtype, generator)
        b = random_operand((entries, n, k) if layout[1] == "t" else (entries, k, n), dtype, generator)
        a, b = a.mT if layout[0] == "t" else a, b.mT if layout[1] == "t" else b
        out_dtype = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16, torch.float8_e5m2: torch.bfloat16}
        out = poisoned((3, m, n), out_dtype.get(dtype, dtype))
        kernel = INTERPRETED if dtype == torch.float32 else INTERPRETED_TMA
        prepare(a, b, out, Epilogue(), "ieee", replace(kernel, is_copied=True, split_k=split_k))(a, b, out)
        check(out, a, b)


@pytest.mark.parametrize("is_turned", [False, True])
def test_copies_of_several_blocks_are_whole_and_their_ends_zero(is_turned, generator):
    # More rows and columns than a block has, either way round.
    (rows, columns), pitch = (70, 301), 304
    given = torch.randint(-9, 9, (2, columns, rows) if is_turned else (2, rows, columns), generator=generator)
    a = given.to(torch.int16).mT if is_turned else given.to(torch.int16)
    out = torch.full((2, rows, pitch), -1, dtype=torch.int16)
    entry, row, column = a.stride()
    launch_of(None, Copied(2, rows, columns, (entry, row, column), pitch), 2, a.device)(a, a, out, out)
    assert torch.equal(out[..., :columns], a)
    assert not out[..., columns:].any()


def test_only_the_operand_that_needs_it_is_copied(generator):
    a = random_operand((48, 45), torch.float16, generator)
    b = random_operand((45, 64), torch.float16, generator)
    out = poisoned((48, 64), torch.float16)
    config = replace(INTERPRETED_TMA, is_copied=True)
    prepared = prepare(a, b, out, Epilogue(), "ieee", config)
    extents = [Extent(tuple(tensor.shape), tensor.stride()) for tensor in (a, b, out)]
    view = view_of(*extents, is_row_scaled=False)
    assert view is not None
    problem = problem_of(view, "float16", "float16", "ieee", are_in_aligned=(True, True), is_out_aligned=True)
    assert copied_operands(problem, "tma") == (True, False)
    copy, _ = prepared.variants
    assert copy.kernel is copy_operands_kernel
    prepared(a, b, out)
    check(out, a, b)
