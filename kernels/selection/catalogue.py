"""Every binary that any op can launch on a target: what is compiled ahead, loaded before serving, and counted.

Dispatch only returns members of this list; `tests/kernels/test_catalogue.py` holds it to that.
"""

from __future__ import annotations

import functools

from tilewire.kernels.add.variants import variants as add_variants
from tilewire.kernels.copy.op import variants as staging_variants
from tilewire.kernels.matmul.grouped.op import variants as grouped_variants
from tilewire.kernels.matmul.variants import variants as matmul_variants
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.variants import variants as softmax_variants

OPS = ("matmul", "softmax", "add", "staging")


@functools.cache
def variants(target: Target) -> tuple[Variant, ...]:
    """Every (kernel, signature, constants, options) that dispatch can choose on `target`, without repeats."""
    listed = (
        *matmul_variants(target),
        *grouped_variants(target),
        *softmax_variants(target),
        *add_variants(target),
        *staging_variants(),
    )
    return tuple(dict.fromkeys(listed))


def op_of(variant: Variant) -> str:
    """One of `OPS`: the op that launches `variant`."""
    return op_named(variant.kernel.__name__)


def op_named(kernel: str) -> str:
    """One of `OPS`: the op that launches the kernel of this name; what is not ours counts as staging."""
    return next((op for op in OPS if kernel.startswith(op)), "staging")
