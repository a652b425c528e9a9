"""The ops that there are. Everything that handles all ops alike iterates over this list."""

from __future__ import annotations

from tilewire.kernels.add import ADD
from tilewire.kernels.copy import COPY
from tilewire.kernels.matmul import MATMUL
from tilewire.kernels.normalize import NORMALIZE
from tilewire.kernels.op import KernelOp
from tilewire.kernels.pointwise import POINTWISE
from tilewire.kernels.reduce import REDUCE
from tilewire.kernels.search import SEARCH
from tilewire.kernels.softmax import SOFTMAX
from tilewire.kernels.topk import TOPK

KERNEL_OPS: tuple[KernelOp, ...] = (MATMUL, SOFTMAX, ADD, SEARCH, TOPK, REDUCE, NORMALIZE, POINTWISE, COPY)
_BY_NAME = {op.name: op for op in KERNEL_OPS}


def kernel_op(name: str) -> KernelOp:
    """The op called `name`.

    Raises:
        KeyError: There is none.
    """
    return _BY_NAME[name]


def measured_ops() -> tuple[KernelOp, ...]:
    """The ops that benchmarks and tuning measure."""
    return tuple(op for op in KERNEL_OPS if op.shape is not None)
