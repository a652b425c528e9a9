"""Triton kernels for matmul, softmax and add: tensors in, tensors out. Knows neither HTTP nor the service.

Without Triton (a machine that only runs the service's CPU backend) the package still imports, so that its pure parts
(`kernels.*.configs`, `kernels.runtime.targets`) can be read; the three ops and the list of binaries are then absent.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from tilewire.kernels.add.op import add, prepare_add
    from tilewire.kernels.matmul.grouped.op import grouped_matmul
    from tilewire.kernels.matmul.op import matmul, prepare_matmul
    from tilewire.kernels.selection.catalogue import variants
    from tilewire.kernels.softmax.op import prepare_softmax, softmax

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
