"""The ops that there are, and their public functions. Everything that handles all ops alike iterates over this list."""

from __future__ import annotations

from tilewire.kernels.add import ADD
from tilewire.kernels.add.op import add, prepare_add
from tilewire.kernels.copy import COPY
from tilewire.kernels.matmul import MATMUL
from tilewire.kernels.matmul.grouped.op import grouped_matmul
from tilewire.kernels.matmul.op import matmul, prepare_matmul
from tilewire.kernels.normalize import NORMALIZE
from tilewire.kernels.normalize.op import normalize, prepare_normalize
from tilewire.kernels.op import KernelOp
from tilewire.kernels.pointwise import POINTWISE
from tilewire.kernels.pointwise.op import pointwise, prepare_pointwise
from tilewire.kernels.reduce import REDUCE
from tilewire.kernels.reduce.op import prepare_reduce, reduce
from tilewire.kernels.search import SEARCH
from tilewire.kernels.search.op import item_norms, prepare_search, search
from tilewire.kernels.softmax import SOFTMAX
from tilewire.kernels.softmax.op import prepare_softmax, softmax
from tilewire.kernels.topk import TOPK
from tilewire.kernels.topk.configs import MAX_K as MAX_TOPK
from tilewire.kernels.topk.op import prepare_topk, topk

KERNEL_OPS: tuple[KernelOp, ...] = (MATMUL, SOFTMAX, ADD, SEARCH, TOPK, REDUCE, NORMALIZE, POINTWISE, COPY)
_BY_NAME = {op.name: op for op in KERNEL_OPS}
# What `tilewire.kernels` exports.
__all__ = [
    "KERNEL_OPS",
    "MAX_TOPK",
    "add",
    "grouped_matmul",
    "item_norms",
    "matmul",
    "normalize",
    "pointwise",
    "prepare_add",
    "prepare_matmul",
    "prepare_normalize",
    "prepare_pointwise",
    "prepare_reduce",
    "prepare_search",
    "prepare_softmax",
    "prepare_topk",
    "reduce",
    "search",
    "softmax",
    "topk",
]


def kernel_op(name: str) -> KernelOp:
    """The op called `name`.

    Raises:
        KeyError: There is none.
    """
    return _BY_NAME[name]


def measured_ops() -> tuple[KernelOp, ...]:
    """The ops that benchmarks measure."""
    return tuple(op for op in KERNEL_OPS if op.shape is not None)


def tuned_ops() -> tuple[KernelOp, ...]:
    """Those of them whose choice of configurations is measured and fitted."""
    return tuple(op for op in measured_ops() if op.tuning is not None)
