"""Triton kernels: tensors in, tensors out, no HTTP. `kernels.op.KernelOp` says how an op is added.

Without Triton (a machine that only runs the service's CPU backend) the package still imports; the ops are then absent.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from tilewire.kernels import registry
    from tilewire.kernels.registry import *  # noqa: F403  (its `__all__`)
    from tilewire.kernels.selection.catalogue import variants

    __all__ = ["variants"]
    __all__ += registry.__all__
