"""Templates of a gateway: one number for equal ones, and an end to how many are kept."""

from __future__ import annotations

from typing import Any

import pytest

from tilewire.service.gateway.engines.templates import KeptTemplates, Outputs, Templates
from tilewire.service.ipc.messages import InputSpec, OutputSpec, Template
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.program.op import ProgramOptions

A = TensorType("float32", (3, 4))
OUTPUTS = Outputs((OutputSpec(A),), 12, 144)
SAME: dict[str, Any] = {
    "op": "add",
    "inputs": (InputSpec("a", A), InputSpec("b", A, resident="w")),
    "options": AddOptions(),
    "destination": (None,),
    "plan": lambda: OUTPUTS,
}
OTHERS: list[dict[str, Any]] = [
    {"op": "subtract"},
    {"options": AddOptions(alpha=2)},
    # Equal numbers whose results differ: `alpha` of integers is whole, and a product with -0.0 has another sign.
    {"options": AddOptions(alpha=1.0)},
    {"options": AddOptions(alpha=0.0)},
    {"options": AddOptions(alpha=-0.0)},
    {"inputs": (InputSpec("a", A), InputSpec("b", A, resident="v"))},
    {"inputs": (InputSpec("a", A, fortran=True), InputSpec("b", A, resident="w"))},
    {"inputs": (InputSpec("a", TensorType("float32", (4, 3))), InputSpec("b", A, resident="w"))},
    {"inputs": (InputSpec("a", A, region="r"), InputSpec("b", A, resident="w"))},
    {"destination": ("r",)},
]


def never() -> Outputs:
    """Fails the test: a template that is kept is not planned again."""
    raise AssertionError("planned again")


def test_equal_templates_have_one_number_and_others_their_own() -> None:
    templates = Templates()
    first = templates.find(**SAME)
    assert first == Template(first.id, "add", SAME["inputs"], AddOptions(), *OUTPUTS)
    assert templates.find(**{**SAME, "plan": never}) is first
    numbers = [templates.find(**{**SAME, **other}).id for other in OTHERS]
    assert len({first.id, *numbers}) == 1 + len(OTHERS)
    assert [templates.find(**{**SAME, **other, "plan": never}).id for other in OTHERS] == numbers


def test_a_request_that_cannot_be_planned_is_planned_again_and_drops_no_other() -> None:
    templates = Templates(max_templates=1)
    kept = templates.find(**SAME)
    for _ in range(2):
        with pytest.raises(AssertionError, match="planned again"):
            templates.find(**{**SAME, "op": "subtract", "plan": never})
    assert templates.find(**{**SAME, "plan": never}) is kept


def test_the_one_that_was_used_longest_ago_is_dropped_and_its_number_is_not_given_again() -> None:
    templates = Templates(max_templates=2)
    made = [templates.find(**{**SAME, "options": AddOptions(alpha=number)}).id for number in (2, 3)]
    assert templates.find(**{**SAME, "options": AddOptions(alpha=2), "plan": never}).id == made[0]
    newest = templates.find(**SAME).id
    again = templates.find(**{**SAME, "options": AddOptions(alpha=3)}).id
    assert len({*made, newest, again}) == 4
    assert templates.find(**{**SAME, "plan": never}).id == newest


def test_few_long_texts_are_kept() -> None:
    kept: KeptTemplates[int] = KeptTemplates(max_bytes=10_000)
    short = Template(1, "add", SAME["inputs"], AddOptions(), *OUTPUTS)
    long = [Template(number, "program", (), ProgramOptions("x" * 4000), *OUTPUTS) for number in range(2, 6)]
    assert kept.add(1, short) == kept.add(2, long[0]) == kept.add(3, long[1]) == []
    assert kept.use(1) is short
    assert kept.add(4, long[2]) == [long[0]]
    assert kept.use(2) is None
    # One alone may exceed the bound: its request is under way.
    longest = Template(6, "program", (), ProgramOptions("x" * 20_000), *OUTPUTS)
    assert kept.add(6, longest) == [long[1], short, long[2]]
    assert kept.use(6) is longest
    kept.clear()
    assert len(kept) == 0
    assert kept.add(2, long[0]) == kept.add(3, long[1]) == []
