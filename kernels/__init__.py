"""Triton kernels for matmul, softmax and add: tensors in, tensors out. Knows neither HTTP nor the service.

Without Triton (a machine that only runs the service's CPU backend) the package still imports, so that its pure parts
(`kernels.*.configs`, `kernels.targets`) can be read; the three ops are then absent.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from kernels.add.op import add
    from kernels.matmul.op import matmul
    from kernels.softmax.op import softmax

    __all__ = ["add", "matmul", "softmax"]
