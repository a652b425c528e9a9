"""Every binary that any op can launch on a target: what is compiled ahead, loaded before serving, and counted.

Dispatch only returns members of this list; `tests/kernels/test_catalogue.py` holds it to that.
"""

from __future__ import annotations

import functools

from tilewire.kernels.copy import COPY
from tilewire.kernels.registry import KERNEL_OPS
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target

OPS = tuple(op.name for op in KERNEL_OPS)


@functools.cache
def variants(target: Target) -> tuple[Variant, ...]:
    """Every (kernel, signature, constants, options) that dispatch can choose on `target`, without repeats."""
    return tuple(dict.fromkeys(variant for op in KERNEL_OPS for variant in op.variants(target)))


def op_named(kernel: str) -> str:
    """One of `OPS`: the op whose name the kernel's begins with; other kernels count as copies."""
    name = kernel.partition("_")[0]
    return name if name in OPS else COPY.name
