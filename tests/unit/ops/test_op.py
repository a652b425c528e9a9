"""Values that describe ops: keys of options."""

from __future__ import annotations

import itertools

import pytest

from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import MAX_KEY_CHARACTERS, OpOptions
from tilewire.service.ops.pointwise import PointwiseOptions
from tilewire.service.ops.program.op import ProgramOptions

OPTIONS: list[OpOptions] = [
    AddOptions(alpha=1),
    AddOptions(alpha=1.0),
    AddOptions(alpha=0.0),
    AddOptions(alpha=-0.0),
    PointwiseOptions(fn="exp"),
    PointwiseOptions(fn="exp", shift=float("nan")),
    PointwiseOptions(fn="exp", shift=float("inf")),
    ProgramOptions("a" * 65_536),
    ProgramOptions("a" * 65_535 + "b"),
]


def test_options_of_other_results_have_other_keys() -> None:
    assert not [(one, other) for one, other in itertools.combinations(OPTIONS, 2) if one.key == other.key]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{options!r:.60}")
def test_a_key_is_short_and_the_same_each_time(options: OpOptions) -> None:
    again = type(options)(*(getattr(options, name) for name in options.__struct_fields__))
    assert options.key == again.key
    assert len(options.key) <= MAX_KEY_CHARACTERS
