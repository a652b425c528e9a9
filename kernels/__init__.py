"""Triton kernels for matmul, softmax and add: tensors in, tensors out. Knows neither HTTP nor the service.

Without Triton (a machine that only runs the service's CPU backend) the package still imports, so that its pure parts
(`kernels.*.configs`, `kernels.targets`) can be read; the three ops and the list of binaries are then absent.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from kernels.add.op import add, prepare_add
    from kernels.catalogue import variants
    from kernels.grouped.op import grouped_matmul
    from kernels.matmul.op import matmul, prepare_matmul
    from kernels.softmax.op import prepare_softmax, softmax

    __all__ = [
        "add",
        "grouped_matmul",
        "matmul",
        "prepare_add",
        "prepare_matmul",
        "prepare_softmax",
        "softmax",
        "variants",
    ]
