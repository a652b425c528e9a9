"""The ops that are served, those that an engine computes, and those that have kernels are the same."""

from __future__ import annotations

import pytest

from tilewire.service.engine.backends.contract import CannotStart
from tilewire.service.engine.ops.registry import ENGINE_OPS, check_registries, computed
from tilewire.service.ops.merge import MERGE
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS
from tilewire.service.ops.softmax import Softmax


class Sparsemax(Softmax):
    """An op without a module among the engine's."""

    name = "sparsemax"


class Sharper(Softmax):
    """An op whose module has no class for it."""


def test_what_is_served_is_computed() -> None:
    check_registries()
    check_registries({*OPS, "staging"})
    assert list(ENGINE_OPS) == [*OPS, PROGRAM, MERGE]


def test_an_op_that_nothing_computes_is_named() -> None:
    assert list(computed([OPS["add"], Sparsemax(), Sharper()])) == ["add"]
    with pytest.raises(
        CannotStart, match=r"no EngineReduce in service/engine/ops/reduce\.py, no EngineTopk in .*/topk\.py"
    ):
        check_registries(steps=OPS.keys() - {"topk", "reduce"})


def test_an_op_without_a_kernel_is_named() -> None:
    with pytest.raises(CannotStart, match=r"no softmax in KERNEL_OPS of kernels/registry\.py"):
        check_registries(OPS.keys() - {"softmax"})
