"""Planning of programs: types of every value, memory that is used again, and what can never work."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.errors import BeyondLimit, InvalidRequest
from tilewire.service.ops.op import JoinStrategy, Limits, TensorType
from tilewire.service.ops.program.definition import Program, check_program
from tilewire.service.ops.program.op import ProgramOp, ProgramOptions
from tilewire.service.ops.program.planning import ALIGN_BYTES, check_possible, infer_types, place_values, plan_program
from tilewire.service.ops.registry import OPS

LIMITS = Limits()


def f32(*shape: int) -> TensorType:
    return TensorType("float32", shape)


def program(steps: list[dict[str, Any]], *outputs: str, shape: tuple[int, ...] = (-1, 8), **inputs: Any) -> Program:
    declared = {"x": {"dtype": "float32", "shape": list(shape)}, **inputs}
    return check_program({"inputs": declared, "steps": steps, "outputs": list(outputs)}, OPS)


def softmax(source: str, name: str, **options: object) -> dict[str, Any]:
    return {"op": "softmax", "inputs": {"x": source}, "options": options, "as": name}


def matmul(a: str, b: str, name: str) -> dict[str, Any]:
    return {"op": "matmul", "inputs": {"a": a, "b": b}, "as": name}


MLP = program([matmul("x", "@w1", "h"), matmul("h", "@w2", "y"), softmax("y", "p")], "p")
ANY_MATRIX = {"dtype": "float32", "shape": [-1, -1]}
# More sizes to choose than can be tried at once.
FREE = program(
    [matmul("x", "@u", "p"), matmul("y", "@v", "q"), matmul("z", "@w", "r")],
    *("p", "q", "r"),
    shape=(-1, -1),
    y=ANY_MATRIX,
    z=ANY_MATRIX,
)
# One of its sizes has to be 33, and the sum needs others that differ from that.
ADD_MANY = {"op": "add", "inputs": {"a": "x", "b": "y"}, "as": "s"}
ANY_CUBE = {"dtype": "float32", "shape": [-1, -1, -1]}
WIDE = program([ADD_MANY, matmul("x", "@w", "h")], "s", "h", shape=(3, -1), y=ANY_CUBE)
# Its columns have to be 7 and its rows 9, and all its sizes are tried as equal ones.
ADD_BIAS = {"op": "add", "inputs": {"a": "p", "b": "y"}, "as": "s"}
LAST = {**matmul("s", "@w", "z"), "options": {"transpose_a": True}}
UNEQUAL = program([matmul("x", "@u", "p"), ADD_BIAS, LAST], "z", shape=(-1,) * 4, y={"dtype": "float32", "shape": [-1]})
WEIGHTS = {"@w1": f32(8, 16), "@w2": f32(16, 4)}


def test_every_value_has_a_type_and_every_step_a_cost() -> None:
    planned = plan_program(MLP, {"x": f32(3, 8), **WEIGHTS}, LIMITS)
    assert planned.values["h"] == f32(3, 16)
    assert planned.values["p"] == f32(3, 4)
    assert planned.flops == 2 * 3 * 8 * 16 + 2 * 3 * 16 * 4 + 5 * 12
    assert set(planned.offsets) == {"h", "y"}


@pytest.mark.parametrize(
    ("x", "said"), [(f32(3, 9), "x: the program takes"), (f32(8), "x: "), (TensorType("int8", (3, 8)), "x: ")]
)
def test_inputs_of_another_type_are_refused(x: TensorType, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plan_program(MLP, {"x": x, **WEIGHTS}, LIMITS)


def test_a_step_that_does_not_fit_is_refused_with_its_number() -> None:
    with pytest.raises(InvalidRequest, match=r"^step 2: b: "):
        plan_program(MLP, {"x": f32(3, 8), "@w1": f32(8, 16), "@w2": f32(15, 4)}, LIMITS)


def test_memory_between_the_steps_has_a_limit() -> None:
    with pytest.raises(BeyondLimit, match="between the steps"):
        plan_program(MLP, {"x": f32(8, 8), **WEIGHTS}, Limits(max_result_bytes=600))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 2000)), min_size=1, max_size=12), st.data())
def test_values_that_live_together_never_share_memory(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    names = ["x"]
    written = []
    for number, (back, _size) in enumerate(steps):
        written.append(softmax(names[-1 - back % len(names)], f"v{number}"))
        names.append(f"v{number}")
    outputs = data.draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    whole = program(written, *outputs, shape=(-1,))
    values = {"x": f32(5)} | {f"v{number}": f32(size) for number, (_, size) in enumerate(steps)}
    offsets, size = place_values(whole, values)
    assert offsets.keys() == set(names[1:]) - set(outputs)
    last = {source: number for number, one in enumerate(whole.steps) for source in one.inputs.values()}
    lives = {
        name: (number, last.get(name, number))
        for number, one in enumerate(whole.steps)
        for name in one.outputs
        if name in offsets
    }
    for name, (begin, end) in lives.items():
        assert offsets[name] % ALIGN_BYTES == 0
        assert offsets[name] + values[name].nbytes <= size
        for other, (other_begin, other_end) in lives.items():
            if other == name or begin > other_end or other_begin > end:
                continue
            low, high = sorted([name, other], key=offsets.__getitem__)
            assert offsets[low] + values[low].nbytes <= offsets[high], (name, other)


def test_memory_is_used_again_after_its_last_reader() -> None:
    chain = program([softmax("x" if not n else f"v{n - 1}", f"v{n}") for n in range(8)], "v7")
    _, size = place_values(chain, {"x": f32(64, 8)} | {f"v{n}": f32(64, 8) for n in range(8)})
    assert size == 2 * 64 * 8 * 4


TOP = {"op": "topk", "inputs": {"x": "x"}, "options": {"k": 5}, "as": ["v", "i"]}
ADD_TOP = {"op": "add", "inputs": {"a": "x", "b": "v"}, "as": "y"}
UNFIT = {"u": f32(7, 5), "v": f32(6, 4)}


@pytest.mark.parametrize(
    ("whole", "residents", "said"),
    [
        (MLP, {"w1": f32(9, 16), "w2": f32(16, 4)}, r"step 1: b: "),
        (MLP, {"w1": f32(8, 16), "w2": f32(15, 4)}, r"step 2: b: "),
        (MLP, {"w1": TensorType("int8", (8, 16))}, r"step 1: b: "),
        (program([softmax("x", "p", axis=2)], "p"), {}, r"step 1: axis: "),
        (program([matmul("x", "x", "y")], "y", shape=(4, 8)), {}, r"step 1: b: "),
        (program([matmul("x", "@u", "y"), matmul("y", "@v", "z")], "z", shape=(-1, -1)), UNFIT, r"step 2: b: "),
        # Whatever the sizes, of which there are too many to try.
        (WIDE, {"w": TensorType("int8", (33, 33)), "r1": f32(5), "r2": f32(6)}, r"step 2: b: dtype"),
    ],
)
def test_what_can_never_work_is_refused_at_the_upload(
    whole: Program, residents: dict[str, TensorType], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_possible(whole, residents, LIMITS)


@pytest.mark.parametrize(
    ("whole", "residents"),
    [
        (MLP, {"w1": f32(8, 16), "w2": f32(16, 4)}),
        (MLP, {}),
        (MLP, {"w2": f32(3, 3)}),
        (program([matmul("x", "@w", "y")], "y", shape=(-1, -1)), {"w": f32(77, 5)}),
        (program([matmul("x", "x", "y")], "y", shape=(-1, -1)), {}),
        (program([TOP, ADD_TOP], "y", shape=(-1, -1)), {}),
        (FREE, {"u": f32(7, 5), "v": f32(6, 4), "w": f32(9, 2)}),
        (WIDE, {"w": f32(33, 33), "r1": f32(5), "r2": f32(6)}),
        # No elements along the axis, as a resident has it.
        (program([matmul("x", "@w", "y")], "y", shape=(-1, -1)), {"w": f32(0, 5)}),
        (program([matmul("x", "y", "z")], "z", shape=(-1, 0), y=ANY_MATRIX), {}),
        # Too many sizes to try: of those that are, only one gets as far as the second step.
        (UNEQUAL, {"u": f32(7, 5), "w": f32(9, 11)}),
    ],
)
def test_what_some_sizes_make_work_is_taken(whole: Program, residents: dict[str, TensorType]) -> None:
    check_possible(whole, residents, LIMITS)


SUM = {"op": "add", "inputs": {"a": "x", "b": "y"}, "as": "s"}
DEEP = {"op": "topk", "inputs": {"x": "x"}, "options": {"k": 11}, "as": ["v", "i"]}
FIRST = {"op": "topk", "inputs": {"x": "x"}, "options": {"k": 5000}, "as": ["v", "i"]}


@pytest.mark.parametrize(
    ("whole", "residents", "shapes"),
    [
        (MLP, {"w1": f32(8, 16), "w2": f32(16, 4)}, {"x": (-1, 8), "h": (-1, 16), "p": (-1, 4)}),
        (program([softmax("x", "p")], "p", shape=(3, 8)), {}, {"p": (3, 8)}),
        # The sum decides the columns of both.
        (program([TOP, ADD_TOP], "y", shape=(-1, -1)), {}, {"v": (-1, 5), "y": (-1, 5)}),
        # Five thousand is the least, not the only size.
        (program([FIRST, softmax("x", "p")], "v", "p", shape=(2, -1)), {}, {"v": (2, 5000), "p": (2, -1)}),
        (program([{**SUM, "inputs": {"a": "x", "b": "@c"}}], "s", shape=(-1,)), {"c": f32(768)}, {"s": (768,)}),
        # Either may be broadcast, or both have any number of rows.
        (program([SUM], "s", y={"dtype": "float32", "shape": [-1, 8]}), {}, {"s": (-1, 8)}),
        (FREE, {"u": f32(7, 5), "v": f32(6, 4), "w": f32(9, 2)}, {"p": (-1, 5), "q": (-1, 4), "r": (-1, 2)}),
        (WIDE, {"w": f32(33, 33)}, {"x": (-1, -1)}),
        (MLP, {"w1": f32(8, 16)}, {"h": (-1, 16)}),
        # Large sizes are beyond the limits: those that are not do not count as known.
        (program([DEEP, softmax("x", "p")], "v", "p", shape=(-1, -1, -1)), {}, {"v": (-1, -1, 11), "p": (-1, -1, -1)}),
        # Too many to try all, but some of them work.
        (UNEQUAL, {"u": f32(7, 5), "w": f32(9, 11)}, {"p": (-1,) * 4, "z": (-1,) * 4}),
    ],
)
def test_sizes_that_are_known_and_others(
    whole: Program, residents: dict[str, TensorType], shapes: dict[str, tuple[int, ...]]
) -> None:
    found = infer_types(whole, residents, Limits(max_result_bytes=2**28))
    assert {name: one.shape for name, one in found.items() if name in shapes} == shapes


def joint(whole: Program, types: dict[str, TensorType]) -> JoinStrategy | None:
    op = ProgramOp(whole, LIMITS)
    options = ProgramOptions(whole.text)
    residents = frozenset(name for name in types if name.startswith("@"))
    batching = op.batching(types, residents, options, op.infer(types, options)[0])
    return None if batching is None else batching.strategy


ADD = {"op": "add", "inputs": {"a": "x", "b": "@bias"}, "as": "y"}
OUTER = {"op": "add", "inputs": {"a": "x", "b": "@rows"}, "as": "y"}
SUMS = {"op": "reduce", "inputs": {"x": "x"}, "options": {"kind": "sum"}, "as": "s"}
HALVES = {"op": "pointwise", "inputs": {"x": "s"}, "options": {"fn": "neg", "scale": 0.5}, "as": "q"}


@pytest.mark.parametrize(
    ("steps", "output", "types", "is_joint"),
    [
        ([matmul("x", "@w1", "h"), softmax("h", "p")], "p", {"@w1": f32(8, 16)}, True),
        ([ADD, softmax("y", "p")], "p", {"@bias": f32(8)}, True),
        ([OUTER], "y", {"@rows": f32(3, 1)}, False),
        ([softmax("x", "p", axis=0)], "p", {}, False),
        ([matmul("@w1", "x", "h")], "h", {"@w1": f32(4, 3)}, False),
        ([matmul("x", "@w1", "h"), matmul("h", "h", "y")], "y", {"@w1": f32(8, 3)}, False),
        ([SUMS, HALVES], "q", {}, True),
        # One number a row: along its only axis, rows would mix.
        ([SUMS, softmax("s", "p")], "p", {}, False),
        ([SUMS, {"op": "topk", "inputs": {"x": "s"}, "options": {"k": 3}, "as": ["v", "i"]}], "v", {}, False),
        ([SUMS, {"op": "reduce", "inputs": {"x": "s"}, "options": {"kind": "sum"}, "as": "t"}, HALVES], "q", {}, False),
    ],
)
def test_programs_join_rows_only_when_every_step_treats_them_alone(
    steps: list[dict[str, Any]], output: str, types: dict[str, TensorType], is_joint: bool
) -> None:
    whole = program(steps, output)
    found = joint(whole, {"x": f32(3, 8), **types})
    assert found is (JoinStrategy.ROWS if is_joint else None)


@pytest.mark.parametrize("shape", [(3, 8), (3, -1), (-1, 0)])
def test_programs_of_a_fixed_number_of_rows_and_of_no_elements_run_alone(shape: tuple[int, int]) -> None:
    whole = program(
        [softmax("x", "p")] if shape[1] else [HALVES | {"inputs": {"x": "x"}}], "p" if shape[1] else "q", shape=shape
    )
    assert joint(whole, {"x": f32(3, 8 if shape[1] else 0)}) is None


def test_the_largest_program_is_checked_quickly() -> None:
    names = [f"v{n}" for n in range(32)]
    whole = program([softmax(a, b) for a, b in itertools.pairwise(["x", *names])], names[-1], shape=(-1,) * 8)
    check_possible(whole, {}, LIMITS)
