"""Triton kernels: tensors in, tensors out, no HTTP. `kernels.op.KernelOp` says how an op is added.

Without Triton (a machine that only runs the service's CPU backend) the package still imports; the ops are then absent.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from tilewire.kernels.add.op import add, prepare_add
    from tilewire.kernels.matmul.grouped.op import grouped_matmul
    from tilewire.kernels.matmul.op import matmul, prepare_matmul
    from tilewire.kernels.normalize.op import normalize, prepare_normalize
    from tilewire.kernels.pointwise.op import pointwise, prepare_pointwise
    from tilewire.kernels.reduce.op import prepare_reduce, reduce
    from tilewire.kernels.registry import KERNEL_OPS
    from tilewire.kernels.search.op import item_norms, prepare_search, search
    from tilewire.kernels.selection.catalogue import variants
    from tilewire.kernels.softmax.op import prepare_softmax, softmax
    from tilewire.kernels.topk.configs import MAX_K as MAX_TOPK
    from tilewire.kernels.topk.op import prepare_topk, topk

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
        "variants",
    ]
