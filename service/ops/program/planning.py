"""Plans a program for operands of known types: the type of every value, the cost of every step, and the memory in between.

Also decides at the time of the upload whether a program can work at all, as far as sizes are known there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tilewire.service.errors import BeyondLimit, InvalidRequest, TilewireError
from tilewire.service.ops.op import MAX_DIM, Limits, Plan, TensorType
from tilewire.service.ops.planning import plan
from tilewire.service.ops.program.definition import ANY, RESIDENT, Program, Step

# Intermediate values begin at multiples of this many bytes, as allocations of a device do.
ALIGN_BYTES = 256
# Most assignments of sizes to the -1s of a step's operands that are tried; beyond, those of equal sizes and a sample of others.
MAX_ASSIGNMENTS = 512
# Most steps that are planned for one upload: a step takes some 10 µs.
MAX_PLANS = 2**14


class PlannedStep(msgspec.Struct, frozen=True):
    """One step for operands of known types.

    Attributes:
        inputs: Dtype and shape of each operand, by input of the op.
        plan: Results and cost.
    """

    step: Step
    inputs: Mapping[str, TensorType]
    plan: Plan


class PlannedProgram(msgspec.Struct, frozen=True):
    """A program for operands of known types.

    Attributes:
        values: Dtype and shape of every value, program inputs and `@` residents included.
        offsets: Byte offset of each intermediate value in the workspace.
        workspace_bytes: Size of the workspace.
    """

    steps: tuple[PlannedStep, ...]
    values: Mapping[str, TensorType]
    offsets: Mapping[str, int]
    workspace_bytes: int

    @property
    def flops(self) -> int:
        """Operations of all steps."""
        return sum(one.plan.flops for one in self.steps)


def plan_program(program: Program, types: Mapping[str, TensorType], limits: Limits) -> PlannedProgram:
    """Plans a program for the types of its inputs by name, and of its residents by `@` and their name.

    Raises:
        InvalidRequest: An input of another dtype or shape, or a step that cannot work; the detail names it.
        BeyondLimit: A value, or the memory between the steps, over the limits.
    """
    values = dict(types)
    for name, wanted in program.inputs.items():
        _check_type(name, types[name], wanted.dtype, wanted.shape)
    steps = []
    for number, step in enumerate(program.steps, 1):
        steps.append(_plan_step(number, step, values, limits))
        values |= zip(step.outputs, steps[-1].plan.outputs, strict=True)
    offsets, workspace_bytes = place_values(program, values)
    if workspace_bytes > limits.max_result_bytes:
        raise BeyondLimit(
            f"program: its values between the steps take {workspace_bytes} bytes, "
            f"over {limits.max_result_bytes}, --max-result-bytes"
        )
    return PlannedProgram(tuple(steps), values, offsets, workspace_bytes)


def _plan_step(number: int, step: Step, values: Mapping[str, TensorType], limits: Limits) -> PlannedStep:
    inputs = {field: values[source] for field, source in step.inputs.items()}
    try:
        return PlannedStep(step, inputs, plan(step.op, inputs, step.options, limits))
    except TilewireError as error:
        raise type(error)(f"step {number}: {error}") from None


def _check_type(name: str, got: TensorType, dtype: str, shape: Sequence[int]) -> None:
    fits = len(got.shape) == len(shape) and all(
        want in (ANY, have) for want, have in zip(shape, got.shape, strict=True)
    )
    if got.dtype != dtype or not fits:
        raise InvalidRequest(f"{name}: the program takes {dtype}[{', '.join(map(str, shape))}]; got {got}")


def place_values(program: Program, values: Mapping[str, TensorType]) -> tuple[dict[str, int], int]:
    """Assigns memory to the intermediate values; a value's bytes are used again after its last reader.

    Outputs of the program have memory of their own elsewhere.

    Returns:
        The byte offset of each intermediate value, and the size of the workspace.
    """
    last = {source: number for number, step in enumerate(program.steps) for source in step.inputs.values()}
    answered, live, offsets, size = set(program.outputs), dict[str, tuple[int, int]](), dict[str, int](), 0
    for number, step in enumerate(program.steps):
        for name in step.outputs:
            if name in answered:
                continue
            nbytes = max(-(-values[name].nbytes // ALIGN_BYTES) * ALIGN_BYTES, ALIGN_BYTES)
            begin = _first_gap(live.values(), nbytes)
            offsets[name], live[name] = begin, (begin, begin + nbytes)
            size = max(size, begin + nbytes)
        # A step may not write what it reads: its inputs end behind it.
        for name in [one for one in live if last.get(one, number) <= number]:
            del live[name]
    return offsets, size


def _first_gap(taken: Iterable[tuple[int, int]], nbytes: int) -> int:
    begin = 0
    for low, high in sorted(taken):
        if low - begin >= nbytes:
            break
        begin = max(begin, high)
    return begin


def check_possible(program: Program, residents: Mapping[str, TensorType], limits: Limits) -> Mapping[str, TensorType]:
    """Refuses a program that no operands could make work, as far as sizes are known.

    Residents are those that exist, by name without `@`.

    Every -1 is tried with each size that the program and its residents name, step by step. Steps behind a resident that is
    not there yet are left for the run, and so are sizes of which there are too many to try.

    Returns:
        Dtype and shape of the values, for some sizes that work; of inputs and residents alone where none were found.

    Raises:
        InvalidRequest: A step that cannot work; the detail has its number.
        BeyondLimit: A value over the limits whatever the sizes.
    """
    return _SizeSearch(program, limits, _sizes_of(program, residents)).run(residents)


def infer_types(program: Program, residents: Mapping[str, TensorType], limits: Limits) -> Mapping[str, TensorType]:
    """Returns dtype and shape of the values of a program that can work, with -1 for each size that may vary.

    A size counts as known that comes out the same whether small sizes are tried first or large ones, one larger than all
    that are named among them. Limits do not keep the large ones small. Where not every assignment can be tried, none counts.

    Raises:
        InvalidRequest: Raised by `check_possible`.
        BeyondLimit: Likewise.
    """
    sizes = _sizes_of(program, residents)
    sizes.append(2 * sizes[-1] + 1)
    unlimited = Limits(limits.max_rank, max_elements=MAX_DIM, max_result_bytes=MAX_DIM)
    searches = [_SizeSearch(program, limits, sizes), _SizeSearch(program, unlimited, sizes[::-1])]
    small, large = (search.run(residents) for search in searches)
    is_thorough = all(search.is_thorough for search in searches)

    def merged(name: str, one: TensorType) -> TensorType:
        other = large[name].shape if is_thorough and name in large else (ANY,) * len(one.shape)
        return TensorType(one.dtype, tuple(a if a == b else ANY for a, b in zip(one.shape, other, strict=True)))

    return {name: merged(name, one) for name, one in small.items()}


def _sizes_of(program: Program, residents: Mapping[str, TensorType]) -> list[int]:
    """Returns the sizes that are tried for each -1, in order."""
    known = {dim for one in program.inputs.values() for dim in one.shape if dim != ANY}
    known |= {dim for one in residents.values() for dim in one.shape}
    # An option such as `k` is the size of a result.
    known |= {
        value
        for step in program.steps
        for value in msgspec.structs.astuple(step.options)
        if type(value) is int and value > 0
    }
    # One row; a size that nothing names; more than any k.
    return sorted(known | {1, 3, 2048})


class _Failures(msgspec.Struct):
    """Failures of one step, each with other sizes.

    Attributes:
        text: Reason of the first.
        values: Types of the values in the first.
        is_uniform: Whether all have that reason.
        unvaried: Names of the values that had the same type in all of them.
    """

    text: str
    values: Mapping[str, TensorType]
    is_uniform: bool
    unvaried: set[str]

    def add(self, text: str, values: Mapping[str, TensorType]) -> None:
        """Adds a failure with these values."""
        self.is_uniform &= text == self.text
        self.unvaried = {name for name in self.unvaried if values[name] == self.values[name]}


class _Conflict(msgspec.Struct, frozen=True):
    """A step that works with none of the sizes that were tried.

    Attributes:
        error: Reason, with that number.
        inputs: Program inputs whose sizes could change that.
    """

    number: int
    error: TilewireError
    inputs: frozenset[str]


class _SizeSearch:
    """Depth-first search for sizes of the -1s. A step that fails sends it back to the last that sized one of its operands.

    Attributes:
        is_thorough: Whether every assignment of the sizes would have been tried.
    """

    def __init__(self, program: Program, limits: Limits, sizes: Sequence[int]) -> None:
        self._program = program
        self._limits = limits
        self._sizes = sizes
        self._plans_left = MAX_PLANS
        self.is_thorough = True
        # Program inputs of which not every size was tried.
        self._sampled: set[str] = set()
        self._failures: dict[int, _Failures] = {}

    def run(self, residents: Mapping[str, TensorType]) -> Mapping[str, TensorType]:
        """Returns the values with sizes that work, as far as they are known.

        Raises:
            InvalidRequest: There are no such sizes.
            BeyondLimit: Likewise.
        """
        inputs = {name: TensorType(one.dtype, tuple(one.shape)) for name, one in self._program.inputs.items()}
        values = inputs | {RESIDENT + name: one for name, one in residents.items()}
        origins = {name: frozenset({name} if ANY in one.shape else ()) for name, one in values.items()}
        found = self._extend(0, values, origins)
        if not isinstance(found, _Conflict):
            return found
        # A failure that reads the same for several sizes of each of its inputs is not about them.
        sampled, failures = self._sampled & found.inputs, self._failures[found.number]
        if not sampled or (failures.is_uniform and sampled.isdisjoint(failures.unvaried)):
            raise found.error
        return values

    def _extend(
        self, index: int, values: Mapping[str, TensorType], origins: Mapping[str, frozenset[str]]
    ) -> Mapping[str, TensorType] | _Conflict:
        """Plans the steps from `index` on; `origins` are the inputs of unknown size that each value depends on."""
        steps = self._program.steps
        while index < len(steps) and any(source not in values for source in steps[index].inputs.values()):
            index += 1
        if index == len(steps):
            return values
        step = steps[index]
        operands = {source: values[source] for source in step.inputs.values()}
        unsized = frozenset(name for name, one in operands.items() if ANY in one.shape)
        self.is_thorough &= self._can_try_all(operands)
        origin = frozenset[str]().union(*(origins[source] for source in operands))
        worst, blamed = None, origin
        for sized in self._sized(operands):
            found = self._plan(index, {**values, **sized})
            if not isinstance(found, _Conflict):
                found = self._extend(index + 1, found, {**origins, **dict.fromkeys(step.outputs, origin)})
                if not isinstance(found, _Conflict) or found.inputs.isdisjoint(unsized):
                    return found
                blamed |= found.inputs
            worst = found if worst is None or found.number >= worst.number else worst
            if self._plans_left <= 0:
                self.is_thorough = False
                break
        if self._plans_left <= 0 or not self._can_try_all(operands):
            self._sampled |= unsized
        assert worst is not None, "This is a bug."
        return msgspec.structs.replace(worst, inputs=blamed)

    def _sized(self, operands: Mapping[str, TensorType]) -> Iterable[dict[str, TensorType]]:
        """Operands with every assignment of sizes to their -1s; beyond `MAX_ASSIGNMENTS`, with some of them."""
        count = _num_unsized(operands)
        assignments: Iterable[tuple[int, ...]] = (
            itertools.product(self._sizes, repeat=count) if self._can_try_all(operands) else self._sample(count)
        )
        for chosen in assignments:
            left = iter(chosen)
            yield {
                name: TensorType(one.dtype, tuple(next(left) if dim == ANY else dim for dim in one.shape))
                for name, one in operands.items()
            }

    def _sample(self, count: int) -> Iterable[tuple[int, ...]]:
        yield from ((size,) * count for size in self._sizes)
        # The same for each upload: a program is taken or not whatever came before.
        generator = random.Random(count)  # noqa: S311  (no secret)
        yield from (tuple(generator.choices(self._sizes, k=count)) for _ in range(MAX_ASSIGNMENTS))

    def _can_try_all(self, operands: Mapping[str, TensorType]) -> bool:
        count: int = len(self._sizes) ** _num_unsized(operands)
        return count <= MAX_ASSIGNMENTS

    def _plan(self, index: int, values: Mapping[str, TensorType]) -> Mapping[str, TensorType] | _Conflict:
        """Returns the values with those of one step."""
        self._plans_left -= 1
        number, step = index + 1, self._program.steps[index]
        try:
            planned = _plan_step(number, step, values, self._limits).plan
        except TilewireError as error:
            if number not in self._failures:
                self._failures[number] = _Failures(str(error), values, True, set(values))
            self._failures[number].add(str(error), values)
            return _Conflict(number, error, frozenset())
        return {**values, **dict(zip(step.outputs, planned.outputs, strict=True))}


def _num_unsized(operands: Mapping[str, TensorType]) -> int:
    return sum(one.shape.count(ANY) for one in operands.values())
