"""The client's side of each op: the dtypes and outputs of the service, a method of both clients, and a recorded call."""

from __future__ import annotations

from typing import Any

import pytest

import tilewire
from tilewire._arrays.dtypes import DTYPES, OUTPUTS
from tilewire._programs.trace import record
from tilewire.service.ops.registry import OPS


@pytest.mark.parametrize("name", OPS)
def test_dtypes_and_outputs_are_those_of_the_service(name: str) -> None:
    assert DTYPES.get(name) == OPS[name].dtypes, "DTYPES of tilewire/_arrays/dtypes.py"
    assert tuple(OUTPUTS.get(name, ("out",))) == OPS[name].outputs, "OUTPUTS of tilewire/_arrays/dtypes.py"


def test_the_client_has_no_further_ops() -> None:
    assert OUTPUTS.keys() <= DTYPES.keys() <= OPS.keys()


@pytest.mark.parametrize("client", [tilewire.Client, tilewire.AsyncClient])
@pytest.mark.parametrize("name", OPS)
def test_every_op_is_a_method(name: str, client: type) -> None:
    assert callable(getattr(client, name, None)), "its method in tilewire/_clients"


@pytest.mark.parametrize("name", OPS)
def test_a_recorded_call_has_the_outputs_of_its_op(name: str) -> None:
    op = OPS[name]

    def net(x: Any) -> Any:
        result = getattr(x, name)(*(x for _ in op.required[1:]), **op.example_options)
        return result if len(op.outputs) > 1 else {"out": result}

    (step,) = record(net, {"x": ("float32", (8, 8))}, "net").program.steps
    assert (step.op, step.outputs) == (name, op.outputs)
