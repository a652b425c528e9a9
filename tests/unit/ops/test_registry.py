"""The op table: what each op takes and gives, worked out from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BeyondLimit, InvalidRequest, UnknownName
from tilewire.service.ops.op import AnyOp, Limits, Plan, TensorType
from tilewire.service.ops.planning import parse_options, plan
from tilewire.service.ops.program.op import NoOptions
from tilewire.service.ops.registry import OPS, op_named
from tilewire.service.ops.softmax import Softmax

LIMITS = Limits()


def planned(
    op: str, operands: Mapping[str, TensorType], options: Mapping[str, object] | None = None, limits: Limits = LIMITS
) -> Plan:
    return plan(OPS[op], operands, parse_options(OPS[op], options or {}), limits)


def f32(*shape: int) -> TensorType:
    return TensorType("float32", shape)


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_add_broadcasts_as_numpy_does(a: list[int], b: list[int]) -> None:
    try:
        expected = np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        with pytest.raises(InvalidRequest, match="b: dimensions"):
            planned("add", {"a": f32(*a), "b": f32(*b)})
    else:
        assert planned("add", {"a": f32(*a), "b": f32(*b)}).outputs == (f32(*expected),)


@given(
    st.lists(st.integers(1, 3), max_size=3),
    st.lists(st.integers(1, 3), max_size=3),
    st.tuples(*[st.integers(0, 5)] * 3),
    st.booleans(),
    st.booleans(),
)
def test_matmul_shapes_are_numpys(
    batch_a: list[int], batch_b: list[int], mkn: tuple[int, int, int], transpose_a: bool, transpose_b: bool
) -> None:
    m, k, n = mkn
    a = f32(*batch_a, *((k, m) if transpose_a else (m, k)))
    b = f32(*batch_b, *((n, k) if transpose_b else (k, n)))
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    try:
        expected = np.matmul(np.zeros((*batch_a, m, k)), np.zeros((*batch_b, k, n))).shape
    except ValueError:
        with pytest.raises(InvalidRequest, match="b: batch dimensions"):
            planned("matmul", {"a": a, "b": b}, options)
        return
    result = planned("matmul", {"a": a, "b": b}, options)
    assert result.outputs == (f32(*expected),)
    assert result.flops == 2 * int(np.prod(expected)) * k
    assert result.moved_bytes == a.nbytes + b.nbytes + result.outputs[0].nbytes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_taken_and_given(op: str, dtype: str) -> None:
    operands = dict.fromkeys(OPS[op].warmup.inputs, TensorType(dtype, (4, 4)))
    options = OPS[op].warmup.options
    if dtype not in OPS[op].dtypes:
        with pytest.raises(InvalidRequest, match=f"does not take {dtype}"):
            planned(op, operands, options)
        return
    default = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}.get(dtype, dtype)
    given = {name: out.dtype for name, out in zip(OPS[op].outputs, planned(op, operands, options).outputs, strict=True)}
    own = {"values": "float32", "indices": "int64"} if op == "search" else {"indices": "int64"}
    assert given == {name: own.get(name, default) for name in OPS[op].outputs}


class Bare(Softmax):
    """An op without options."""

    name = "bare"
    options = NoOptions  # type: ignore[assignment]


def test_an_op_without_options_says_so() -> None:
    with pytest.raises(InvalidRequest, match="k: bare has no such option; it has none"):
        parse_options(Bare(), {"k": 1})


def test_limits() -> None:
    limits = Limits(max_rank=2, max_elements=100, max_result_bytes=200)
    assert planned("add", {"a": f32(50), "b": f32(50)}, limits=limits).outputs == (f32(50),)
    for operands in ({"a": f32(51), "b": f32(51)}, {"a": f32(1, 1, 1), "b": f32(1)}, {"a": f32(101), "b": f32(1)}):
        with pytest.raises(BeyondLimit):
            planned("add", operands, limits=limits)
    with pytest.raises(BeyondLimit, match="out:"):
        planned("matmul", {"a": f32(2**30, 1), "b": f32(1, 2**30)})
    with pytest.raises(BeyondLimit, match="a:"):
        planned("add", {"a": f32(2**62, 2**62, 0), "b": f32(1)})


@pytest.mark.parametrize(
    ("op", "operands", "raw", "named"),
    [
        ("softmax", {"x": f32(2, 2**30 + 1)}, {}, "x: 1073741825 elements"),
        ("softmax", {"x": f32(2, 2**30 + 1)}, {"axis": 0}, "x: 1073741825 rows"),
        ("normalize", {"x": f32(2**15, 2**15 + 1, 1)}, {"kind": "rms"}, "x: 1073774592 rows"),
        ("topk", {"x": f32(2**31)}, {"k": 1}, "x: 2147483648 elements"),
        ("reduce", {"x": f32(2**31)}, {"kind": "sum"}, "x: 2147483648 elements"),
        ("reduce", {"x": f32(2**20, 2**11)}, {"kind": "sum", "axis": "all"}, "x: 2147483648 elements"),
        ("reduce", {"x": f32(2**31, 0)}, {"kind": "sum"}, "x: 2147483648 rows"),
        ("matmul", {"a": f32(2**31, 0), "b": f32(0, 1)}, {}, "a: 2147483648 rows"),
        ("matmul", {"a": f32(2**31, 1), "b": f32(1, 1)}, {}, "a: 2147483648 rows"),
        ("matmul", {"a": f32(1, 2**31), "b": f32(2**31, 1)}, {}, "a: 2147483648 columns"),
        ("matmul", {"a": f32(1, 1), "b": f32(1, 2**31)}, {}, "b: 2147483648 columns"),
        ("matmul", {"a": f32(2**31, 1, 1), "b": f32(1, 1)}, {}, "a: 2147483648 matrices"),
        ("search", {"a": f32(1, 1), "b": f32(2**31, 1)}, {"k": 1}, "b: 2147483648 items"),
        ("search", {"a": f32(2**31, 1), "b": f32(1, 1)}, {"k": 1}, "a: 2147483648 queries"),
    ],
)
def test_kernels_count_in_32_bits(op: str, operands: dict[str, TensorType], raw: dict[str, object], named: str) -> None:
    wide = Limits(max_result_bytes=2**62)
    with pytest.raises(BeyondLimit, match=f"^{named}; the limit is {2**30}$"):
        planned(op, operands, raw, wide)
    # As many elements as a search over ten million items has.
    assert planned("reduce", {"x": f32(10_000_000, 768)}, {"kind": "sum"}, wide).outputs == (f32(10_000_000),)
    assert planned("add", {"a": f32(2**31), "b": f32(2**31)}, limits=wide).outputs == (f32(2**31),)


@pytest.mark.parametrize(
    ("op", "raw", "name"),
    [
        ("matmul", {"transpose_a": "2"}, "transpose_a"),
        ("matmul", {"activation": "swish"}, "activation"),
        ("softmax", {"axis": "1.5"}, "axis"),
        ("softmax", {"log": "perhaps"}, "log"),
        ("add", {"alpha": "much"}, "alpha"),
        ("add", {"beta": "1"}, "beta"),
    ],
)
def test_options_that_cannot_be_right_are_named(op: str, raw: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}:"):
        parse_options(OPS[op], raw)


@pytest.mark.parametrize(
    ("op", "raw", "detail"),
    [
        ("softmax", {"log": "yes"}, "log: expected true or false; got 'yes'"),
        ("topk", {"k": "three"}, "k: expected an integer; got 'three'"),
        ("topk", {"axis": None}, "axis: expected an integer; got null"),
        ("pointwise", {"scale": [True]}, "scale: expected a number; got [true]"),
        ("add", {"alpha": {"x": 1}}, 'alpha: expected a number; got {"x": 1}'),
        ("add", {"alpha": "1e999"}, "alpha: Number out of range; got '1e999'"),
        ("reduce", {"axis": "x"}, "axis: expected one of an integer, all; got 'x'"),
        ("search", {"metric": "l1"}, "metric: expected one of cosine, dot, l2; got 'l1'"),
    ],
)
def test_options_that_cannot_be_right_say_what_may_be(op: str, raw: dict[str, object], detail: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_options(OPS[op], raw)
    assert raised.value.detail == detail


@pytest.mark.parametrize("value", [True, "true", "True", "1"])
def test_truths_as_text_and_as_json(value: object) -> None:
    assert parse_options(OPS["softmax"], {"log": value}).log  # type: ignore[attr-defined]


def test_no_such_op_says_which_there_are() -> None:
    with pytest.raises(UnknownName, match="matmul, softmax, add"):
        op_named("conv")


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_table_is_whole(op: AnyOp) -> None:
    """What documents and checks are written from names what there is, and can be planned."""
    assert set(op.ranks) == {*op.required, *op.outputs}
    assert set(op.output_datatypes) <= set(op.outputs)
    assert set(op.example) - {"dtype"} <= set(op.inputs)
    types = {name: TensorType("float32", np.shape(rows)) for name, rows in op.warmup.inputs.items()}
    outputs = planned(op.name, types, op.warmup.options).outputs
    assert [one.shape for one in outputs] == [np.shape(rows) for rows in op.warmup.outputs]


@pytest.mark.parametrize("spellings", [("1", "1.0"), ("1.0", "1"), (2.0, 2), (2, 2.0)])
def test_an_alpha_with_a_point_is_no_integer_whichever_comes_first(spellings: tuple[object, ...]) -> None:
    for value in spellings:
        assert planned("add", {"a": f32(5), "b": f32(5)}, {"alpha": value}).outputs == (f32(5),)
    integers = {"a": TensorType("int32", (5,)), "b": TensorType("int32", (5,))}
    for value in spellings:
        if "." in str(value):
            with pytest.raises(InvalidRequest, match=r"alpha: .* must be an integer for int32"):
                planned("add", integers, {"alpha": value})
        else:
            assert planned("add", integers, {"alpha": value}).outputs == (integers["a"],)


@pytest.mark.parametrize("spellings", [("1e19", "10000000000000000000"), ("10000000000000000000", "1e19")])
def test_an_alpha_beyond_64_bits_needs_an_exponent_whichever_comes_first(spellings: tuple[str, str]) -> None:
    for value in spellings:
        if "e" in value:
            assert planned("add", {"a": f32(5), "b": f32(5)}, {"alpha": value}).outputs == (f32(5),)
        else:
            with pytest.raises(InvalidRequest, match=r"alpha: .*64 bits.*exponent"):
                planned("add", {"a": f32(5), "b": f32(5)}, {"alpha": value})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32"])
def test_fast_sums_are_for_float8_alone(dtype: str) -> None:
    operands = dict.fromkeys("ab", TensorType(dtype, (4, 4)))
    if dtype.startswith("float8"):
        assert planned("matmul", operands, {"precision": "fast"}).outputs[0].dtype == "bfloat16"
        return
    with pytest.raises(InvalidRequest, match=rf"^precision: fast is for float8 inputs; a is {dtype}"):
        planned("matmul", operands, {"precision": "fast"})
