"""How add and pointwise place elements: short rows, any strides, operands that lie across, and counts past 32 bits."""

import math
import random

import pytest
import torch

from tests.support.combinations import sampled
from tilewire.kernels.add.kernel import divided
from tilewire.kernels.add.op import DTYPES, add
from tilewire.kernels.add.op import Problem as AddProblem
from tilewire.kernels.add.op import build as build_add
from tilewire.kernels.add.op import choose as choose_add
from tilewire.kernels.pointwise.copying import contiguous, copy_into
from tilewire.kernels.pointwise.op import Problem as PointwiseProblem
from tilewire.kernels.pointwise.op import pointwise
from tilewire.kernels.runtime.elementwise import ALL_ACROSS, ALL_EACH, ALL_UNIT
from tilewire.kernels.runtime.launch import Launch
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN
from tilewire.kernels.runtime.walks import LINE, LONG_ROW, Walk, divisor_of, programs_of, walk_of

ALL = [getattr(torch, name) for name in DTYPES]
FORMS = ("plain", "transposed", "stepped", "narrowed", "repeated")
NUMBERS = (0, 1, 2, 3, 511, 512, 1023, 1024, 65_535, 65_536, 2**24 + 1, 2**30, 2**31 - 2, 2**31 - 1)


def laid(shape, dtype, form, rng):
    """Whole numbers of `shape` that lie as `form` says."""
    order = list(range(len(shape)))
    own = list(shape)
    if form == "transposed":
        rng.shuffle(order)
        own = [shape[dim] for dim in order]
    elif form == "stepped":
        own[-1] *= 2
    elif form == "narrowed":
        own[-1] += 3
    elif form == "repeated":
        own[rng.randrange(len(own))] = 1
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    values = torch.randint(-50, 50, own, generator=generator).to(dtype)
    if form == "stepped":
        return values[..., ::2]
    if form == "narrowed":
        return values[..., 1:-2]
    return (
        values.expand(shape) if form == "repeated" else values.permute([order.index(dim) for dim in range(len(shape))])
    )


def drawn(rng, rank):
    """Extents from 1 to 20 of some thousand elements at the most, and those of an operand that broadcasts to them."""
    while True:
        shape = [rng.randint(1, 20) for _ in range(rank)]
        if math.prod(shape) <= 1500:
            return shape, [1 if rng.random() < 0.3 else extent for extent in shape][rng.choice((0, 0, rank - 1)) :]


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ALL)
def test_any_extents_and_strides(dtype, rank):
    rng = random.Random(100 * rank + DTYPES.index(str(dtype)[6:]))
    for _ in range(8):
        shape, other = drawn(rng, rank)
        a, b = laid(shape, dtype, rng.choice(FORMS), rng), laid(other, dtype, rng.choice(FORMS), rng)
        out = laid(shape, rng.choice(ALL), rng.choice(FORMS[:4]), rng)
        add(a, b, alpha=2, out=out, out_dtype=out.dtype)
        assert torch.equal(out, (a + 2 * b).to(out.dtype)), (shape, a.stride(), b.stride(), out.stride())
        if dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert torch.equal(pointwise(a, "sub", y=b), a - b), (shape, a.stride(), b.stride())
            assert torch.equal(pointwise(a, "abs"), a.abs()), (shape, a.stride())


@pytest.mark.parametrize(
    ("shape_and_axes", "dtype"),
    sampled(
        (
            ((20, 130), (1, 0)),
            ((16, 257), (1, 0)),
            ((3, 17, 129), (2, 0, 1)),
            ((17, 3, 129), (1, 2, 0)),
            ((2, 19, 3, 128), (0, 2, 3, 1)),
            ((19, 2, 3, 130), (3, 1, 2, 0)),
            # Neighbours of the operand are every other element of memory.
            ((20, 2, 129), (2, 0, 1)),
        ),
        (torch.float16, torch.bfloat16, torch.float32, torch.int64),
    ),
    ids=str,
)
def test_operands_that_lie_across(shape_and_axes, dtype):
    shape, axes = shape_and_axes
    generator = torch.Generator().manual_seed(len(shape))
    stored = torch.randint(-99, 99, [shape[axis] for axis in axes], generator=generator).to(dtype)
    a = stored.permute([axes.index(axis) for axis in range(len(shape))])
    straight = torch.randint(-99, 99, shape, generator=generator).to(dtype)
    walk = walk_of(a, straight, torch.empty(shape))
    assert walk is not None
    assert walk.across is not None
    # The other operand lies straight, likewise across, repeats, or is one element.
    for b in (straight, a, straight[..., :1], straight[:1], straight.flatten()[:1]):
        for first, second in ((a, b), (b, a)):
            assert torch.equal(add(first, second), first + second)
            if dtype.is_floating_point:
                assert torch.equal(pointwise(first, "maximum", y=second), torch.maximum(first, second))
    if dtype.is_floating_point:
        assert torch.equal(pointwise(a, "neg"), -a)
        assert torch.equal(contiguous(a), a)
        into = torch.empty_like(a)
        copy_into(into, straight)
        assert torch.equal(into, straight)


def test_copies_keep_every_element():
    x = torch.tensor([[0.0, -1.0, math.inf], [-math.inf, math.nan, 1e-40]]).T
    found = contiguous(x)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.int32), x.contiguous().view(torch.int32))
    whole = torch.arange(6).view(2, 3).T
    assert torch.equal(contiguous(whole), whole)
    assert contiguous(found) is found


@pytest.mark.parametrize("first", [1, 256, 512, 768])
def test_divisions_by_multiplication_are_exact(first):
    numbers = torch.tensor(NUMBERS, dtype=torch.int64)
    for divisor in (*range(max(2, first), first + 256), 2**16 + first, 2**30 - first, 2**31 - first):
        # What lies around multiples is where a quotient that is too small or too large shows.
        near = torch.arange(1, 9) * divisor
        tried = torch.cat((numbers, near - 1, near, near + 1))
        tried = tried[tried < 2**31]
        packed = divisor_of(divisor)
        factor, shift = packed >> 5, packed & 31
        assert factor < 2**32
        assert all(int(number) * factor >> 32 + shift == int(number) // divisor for number in tried), divisor


def test_kernels_divide_so():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(number_ptr, out_ptr, divisor, extent, SIZE: tl.constexpr):
        offs = tl.arange(0, SIZE)
        quotient, rest = divided(tl.load(number_ptr + offs), divisor, extent)
        tl.store(out_ptr + offs, quotient)
        tl.store(out_ptr + SIZE + offs, rest)

    number = torch.tensor((*NUMBERS, 5, 6), dtype=torch.int32)
    for extent in (2, 3, 4, 5, 17, 512, 1000, 2**30, 2**31 - 1):
        out = torch.empty((2, 16), dtype=torch.int32)
        kernel[(1,)](number, out, divisor_of(extent), extent, 16)
        assert torch.equal(out[0], number // extent)
        assert torch.equal(out[1], number % extent)


@pytest.mark.parametrize(
    "shape",
    [
        *(
            (700, 2),
            (3, 5, 7, 2),
            (2, 90, 3),
            (1, 300),
            (4, 1, 65, 5),
            (3, 2, 70),
            (63, 5),
            (64, 3),
            (65, 3),
            (2, 40, 30),
        ),
        *((20, 130), (16, 2, 300), (17, 3, 2, 140)),
    ],
)
@pytest.mark.parametrize("across", [False, True], ids=["along", "across"])
def test_counts_in_64_bits_find_the_same_places(shape, across):
    """Walks of few elements, launched as those of more than 2^31 are."""
    a = laid(shape, torch.float32, "stepped", random.Random(7))
    if across:
        a = torch.randn(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    b, out = torch.randn((*shape[:-2], 1, shape[-1])), torch.empty(shape)
    walk = walk_of(a, b, out)
    assert walk is not None
    assert (walk.across is not None) == (across and shape[-1] >= LONG_ROW and shape[0] >= LINE)
    problem = walk.problem(AddProblem, a, b, out)
    specialization, config = problem.specialization, choose_add(problem, INTERPRETER)
    values = walk.sizes("abo", specialization.unit) | {"alpha": 1.0, "out_kind": 3}
    assert values["is_narrow"] == 1
    programs = programs_of(problem, specialization, config)
    for is_narrow in (0, 1):
        out.fill_(math.nan)
        values["is_narrow"] = is_narrow
        Launch(build_add(specialization, config, INTERPRETER), (programs,), values, a.device)(a, b, out)
        assert torch.equal(out, a + b)


@pytest.mark.parametrize(
    ("extents", "steps", "is_narrow"),
    [
        ((1, 1, 2**28, 4), (0, 0, 4, 1), True),
        ((1, 1, 2**29, 4), (0, 0, 4, 1), False),
        ((1, 1, 2**20, 4), (0, 0, 2**12, 1), False),
        ((1, 1, 2**40, 4), (0, 0, 0, 1), False),
    ],
)
def test_32_bits_count_what_they_hold(extents, steps, is_narrow):
    assert Walk(extents, ((0, 0, 0, 0), steps, (0, 0, 0, 1))).is_narrow == is_narrow


@pytest.mark.parametrize(
    ("a", "b", "inner"),
    [
        (torch.empty(1000, 4), torch.empty(4), ALL_EACH),
        (torch.empty(1000, 400), torch.empty(400, 1000).T, ALL_ACROSS),
        # The lines that a warp reads of short rows stay at hand for the next ones.
        (torch.empty(1000, 7), torch.empty(7, 1000).T, ALL_EACH),
        # Lines of five elements fill no rows of a tile.
        (torch.empty(5, 1000), torch.empty(1000, 5).T, ALL_EACH),
        (torch.empty(1000, 400), torch.empty(1000, 800)[:, ::2], ALL_EACH),
        (torch.empty(1000, 400), torch.empty(400), ALL_UNIT),
        # A column has no pieces of 16 bytes to begin with.
        (torch.empty(1000, 400), torch.empty(1000, 1), ("unit", "repeat", "unit")),
        (torch.empty(1000, 401), torch.empty(1000, 1), ALL_EACH),
    ],
)
def test_forms_by_strides(a, b, inner):
    out = torch.empty(a.shape)
    walk = walk_of(a, b, out)
    assert walk is not None
    assert walk.problem(AddProblem, a, b, out).specialization.inner == inner
    assert walk.problem(PointwiseProblem, a, b, out).specialization.inner == inner


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 17, 33, 63, 100])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_many_short_rows_leave_few_lanes_empty(n, is_aligned):
    problem = AddProblem(1 << 20, n, "float32", "float32", is_aligned and n % 4 == 0, outer_rank=3)
    config = choose_add(problem, KNOWN["nvidia_h200"])
    if problem.specialization.inner != ALL_EACH:
        assert -(-n // config.block_n) * config.block_n < 1.4 * n


def test_rows_of_a_tile_go_along_what_lies_across():
    x = torch.empty(130, 5, 7, 20).permute(3, 1, 2, 0)
    out = torch.empty(x.shape)
    walk = walk_of(x, x, out)
    assert walk is not None
    assert walk.across == 2
    assert walk.extents[2] == 20
    assert walk.strides[0][2] == 1


def test_an_output_that_lies_like_its_operands_is_one_row():
    x = torch.empty(6, 5, 4).permute(2, 0, 1)
    walk = walk_of(x, x, torch.empty_like(x))
    assert walk is not None
    assert walk.extents == (1, 1, 1, 120)


def test_alignment_is_told_apart_by_operand():
    """Only the repeated operand is unaligned, then the other, which is read in pieces if it is aligned."""
    whole, column = torch.randn(65), torch.randn(5)
    for first, second in ((0, 1), (1, 0), (1, 1), (0, 0)):
        a, b = whole[first : first + 64], column[second : second + 1]
        assert torch.equal(add(a, b), a + b)
