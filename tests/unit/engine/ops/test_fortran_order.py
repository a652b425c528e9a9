"""Operands in Fortran order on the CPU backend: the bits are those of C order, which requests of a batch are joined in."""

from __future__ import annotations

import pytest
import torch

from tilewire.service.engine.ops.op import Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.ops.planning import parse_options
from tilewire.service.ops.registry import OPS


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        *(("reduce", kind) for kind in ("sum", "mean", "logsumexp", "norm")),
        *(("normalize", kind) for kind in ("layer", "rms", "l2")),
    ],
)
@pytest.mark.parametrize("axis", [-1, 0])
def test_the_bits_are_those_of_c_order(op: str, kind: str, axis: int) -> None:
    x = torch.randn((300, 200), generator=torch.Generator().manual_seed(1))
    options = parse_options(OPS[op], {"kind": kind, "axis": axis})
    (expected,), (result,) = (
        ENGINE_OPS[op].cpu(Operands({"x": given}, {}), options, [torch.float32]) for given in (x, x.T.contiguous().T)
    )
    assert torch.equal(result, expected)
