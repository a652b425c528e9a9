"""The configurations of additions that are worth measuring on a device. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewire.kernels.add.configs import ITEM_BYTES, Config
from tilewire.kernels.add.shape import AddShape
from tilewire.kernels.add.variants import build
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target


def space(shape: AddShape, target: Target) -> Iterator[Config]:
    """See `KernelOp.space`: blocks of a flat addition, one to four 16-byte pieces a thread."""
    if shape.problem.family.outer_rank == 0:
        for num_warps, vectors in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            yield Config(1, target.warp_size * num_warps * vectors * 16 // ITEM_BYTES[shape.dtype], num_warps)


def binaries(shape: AddShape, config: Config, target: Target) -> tuple[Variant, ...]:
    """See `KernelOp.binaries`."""
    return (build(shape.problem.family, config, target),)
