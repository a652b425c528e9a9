"""Triton kernels: tensors in, tensors out, no HTTP. `kernels.op.KernelOp` says how an op is added.

Without Triton (a machine that only runs the service's CPU backend) the package still imports; the ops are then absent.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from tilewire.kernels.add.op import add, prepare_add
    from tilewire.kernels.matmul.grouped.op import grouped_matmul
    from tilewire.kernels.matmul.op import matmul, prepare_matmul
    from tilewire.kernels.registry import KERNEL_OPS
    from tilewire.kernels.selection.catalogue import variants
    from tilewire.kernels.softmax.op import prepare_softmax, softmax

    __all__ = [
        "KERNEL_OPS",
        "add",
        "grouped_matmul",
        "matmul",
        "prepare_add",
        "prepare_matmul",
        "prepare_softmax",
        "softmax",
        "variants",
    ]
