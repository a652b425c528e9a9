"""Copies of memory: many ranges, or the operands of a product, in one launch."""

import itertools

from tilewire.kernels.copy import operands
from tilewire.kernels.copy.op import WORDS, self_test, variant
from tilewire.kernels.op import Family, KernelOp

COPY = KernelOp(
    name="staging",
    families=(
        Family(
            lambda _target: itertools.product(WORDS, (False, True)),
            lambda word, has_rows, _target: variant(word, has_rows),
            self_test,
        ),
        Family(lambda _target: operands.kinds(), operands.variant, operands.self_test),
    ),
)
