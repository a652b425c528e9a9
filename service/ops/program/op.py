"""The op `program`: a request of it carries a program's text as its options, and runs every step.

Everything that handles ops handles programs alike. Operands are the program's inputs and its residents.
Results are its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from tilewire.service.dtypes import DTYPES
from tilewire.service.ops.op import (
    AnyOp,
    Batching,
    JoinStrategy,
    Limits,
    Op,
    OpOptions,
    TensorType,
    Types,
    Work,
)
from tilewire.service.ops.program.definition import ANY, RESIDENT, Program, parse_program
from tilewire.service.ops.program.planning import PlannedProgram, PlannedStep, plan_program

PROGRAM = "program"
# Largest number of programs that stay parsed.
MAX_PARSED = 256
# The gateway has checked the sizes; the engine plans again with none.
NO_LIMITS = Limits(max_rank=2**31, max_elements=2**63, max_result_bytes=2**63)


class ProgramOptions(OpOptions, frozen=True, tag=PROGRAM):
    """Options of a request that runs a program.

    Attributes:
        text: Canonical JSON of the program.
    """

    text: str


class NoOptions(OpOptions, frozen=True):
    """Options of a run: none."""


class ProgramOp(Op[ProgramOptions]):
    """One program, as an op. The limits are bounds on every value; `model` is empty for a program that is not kept."""

    name = PROGRAM
    summary = "Several ops in one request."
    dtypes = tuple(DTYPES)
    options = NoOptions  # type: ignore[assignment]

    # The program as it is kept: a job names it, so that it runs only while it is the newest.
    optional = (PROGRAM,)

    def __init__(self, program: Program, limits: Limits, model: str = "") -> None:
        self.program = program
        self._model = model
        self.required = (*program.inputs, *(RESIDENT + name for name in program.residents))  # type: ignore[misc]
        self.outputs = program.outputs  # type: ignore[misc]
        self._limits = limits

    @property
    def model(self) -> str:
        return self._model

    @property
    def sole_input(self) -> tuple[str, TensorType] | None:
        found = [(name, TensorType(one.dtype, tuple(one.shape))) for name, one in self.program.inputs.items()]
        return found[0] if len(found) == 1 else None

    @property
    def own_residents(self) -> Mapping[str, str]:
        return {RESIDENT + name: name for name in self.program.residents}

    def place_of(self, field: str) -> str:
        """Returns the first step that reads a resident, and its input; see `Op.place_of`."""
        uses = (
            f"step {number}: {name}"
            for number, step in enumerate(self.program.steps, 1)
            for name, source in step.inputs.items()
            if source == field and field.startswith(RESIDENT)
        )
        return next(uses, field)

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(self.program.inputs)

    def complete(self, options: OpOptions) -> ProgramOptions:
        return ProgramOptions(self.program.text)

    def plan(self, types: Types) -> PlannedProgram:
        """Plans every step; see `plan_program`."""
        return plan_program(self.program, types, self._limits)

    def infer(self, types: Types, options: ProgramOptions) -> tuple[tuple[TensorType, ...], int]:
        planned = self.plan(types)
        return tuple(planned.values[name] for name in self.outputs), planned.flops

    def batching(
        self, types: Types, residents: frozenset[str], options: ProgramOptions, outputs: Sequence[TensorType]
    ) -> Batching[ProgramOptions] | None:
        """Joins rows when every step treats the rows of the inputs alone, and the program takes any number of them."""
        own = [types[name] for name in self.program.inputs if name not in residents]
        if not own or len(own) != len(self.program.inputs) or not all(one.num_elements for one in own):
            return None
        if any(one.shape[:1] != (ANY,) for one in self.program.inputs.values()):
            return None
        if not _have_equal_rows(own) or not _have_equal_rows(outputs, own[0]):
            return None
        if not all(_keeps_rows(step) for step in self.plan(types).steps):
            return None
        key = (options.text, tuple((one.dtype, one.shape[1:]) for one in own), tuple(one.shape[1:] for one in outputs))
        return Batching(JoinStrategy.ROWS, key, options)

    def work(
        self, types: Types, residents: frozenset[str], options: ProgramOptions, flops: int, moved_bytes: int
    ) -> tuple[Work, ...]:
        """Returns the work of every step, under the step's own op; see `Op.work`."""
        found: list[Work] = []
        for one in self.plan(types).steps:
            kept = frozenset(field for field, source in one.step.inputs.items() if source.startswith(RESIDENT))
            planned = one.plan
            found += one.step.op.work(one.inputs, kept, one.step.options, planned.flops, planned.moved_bytes)
        return tuple(found)


def _have_equal_rows(types: Sequence[TensorType], like: TensorType | None = None) -> bool:
    """Whether all have the same number of rows, more than none; inputs, which `like` is absent for, are matrices."""
    first = like or types[0]
    return all(
        bool(one.shape) and one.shape[0] == first.shape[0] > 0 and (like is not None or len(one.shape) == 2)
        for one in types
    )


def _keeps_rows(planned: PlannedStep) -> bool:
    """Whether each row of the step's results depends on the same row of its operands only."""
    step, types = planned.step, planned.inputs
    residents = frozenset(field for field, source in step.inputs.items() if source.startswith(RESIDENT))
    rows = [one for field, one in types.items() if field not in residents]
    if not rows:
        return False
    if step.op.is_elementwise:
        out = planned.plan.outputs[0]
        wide = all(one.shape == out.shape for one in rows)
        return wide and all(len(types[field].shape) < len(out.shape) for field in residents)
    # The only axis of a value that has one is that of the rows.
    if any(len(one.shape) < 2 for one in rows):
        return False
    batching = step.op.batching(types, residents, step.options, planned.plan.outputs)
    return batching is not None and batching.strategy is JoinStrategy.ROWS


class ProgramFamily(Op[ProgramOptions]):
    """The op `program` before its text is known; `bound` gives the op of one program."""

    name = PROGRAM
    summary = ProgramOp.summary
    required = ()
    options = ProgramOptions

    def __init__(self, ops: Mapping[str, AnyOp]) -> None:
        # Parsed once for all jobs of a program; programs are few, and at most 64 KiB each.
        self._parse = lru_cache(maxsize=MAX_PARSED)(lambda text: parse_program(text, ops))

    def bound(self, options: ProgramOptions) -> ProgramOp:
        """Returns the op that runs the program of these options.

        Raises:
            InvalidRequest: The text is no program.
        """
        return ProgramOp(self._parse(options.text), NO_LIMITS)

    def infer(self, types: Types, options: ProgramOptions) -> tuple[tuple[TensorType, ...], int]:
        return self.bound(options).infer(types, options)
