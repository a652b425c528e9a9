"""The ops that are served, those that an engine computes, and those that have kernels are the same."""

from __future__ import annotations

import pytest

from tilewire.service.engine.ops.registry import ENGINE_OPS, RegistryMismatch, check_registries
from tilewire.service.ops.merge import MERGE
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS


def test_what_is_served_is_computed() -> None:
    check_registries()
    check_registries({*OPS, "staging"})
    assert list(ENGINE_OPS) == [*OPS, PROGRAM, MERGE]


def test_an_op_without_a_kernel_is_named() -> None:
    with pytest.raises(RegistryMismatch, match="softmax have no kernel"):
        check_registries(OPS.keys() - {"softmax"})
