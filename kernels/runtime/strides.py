"""Merges and broadcasts dimensions, on shapes and strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """Shape and strides of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def step(self, dim: int) -> int:
        """The stride of `dim`; 0 where it is never walked, so that a stray value does not look unaligned."""
        return 0 if self.shape[dim] == 1 else self.strides[dim]


def broadcast_shapes(first: Sequence[int], second: Sequence[int]) -> Dims:
    """The shape that both broadcast to by NumPy's rules.

    Raises:
        ValueError: two extents differ and neither is 1.
    """
    rank = max(len(first), len(second))
    left = (1,) * (rank - len(first)) + tuple(first)
    right = (1,) * (rank - len(second)) + tuple(second)
    for extent, other in zip(left, right, strict=True):
        if extent != other and 1 not in (extent, other):
            raise ValueError(f"shapes {tuple(first)} and {tuple(second)} do not broadcast")
    return tuple(other if extent == 1 else extent for extent, other in zip(left, right, strict=True))


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> Dims:
    """Strides that address `target` through a tensor of `shape`: 0 where it repeats."""
    missing = len(target) - len(shape)
    own = (0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True))
    return (0,) * missing + tuple(own)


def collapse(shape: Sequence[int], *operands: Sequence[int], rank: int = 0) -> tuple[Dims, tuple[Dims, ...]]:
    """Merge adjacent dimensions that every operand walks with one stride, and drop those of extent 1.

    Args:
        shape: extents, outermost first.
        *operands: for each operand its strides, as many as extents.
        rank: as many extents at least: those that are missing are 1, outermost, with strides of 0.

    Returns:
        The fewest extents that describe the same elements in the same order (possibly none), and each operand's
        strides over them.
    """
    extents: list[int] = []
    strides: list[list[int]] = [[] for _ in operands]
    for dim, extent in enumerate(shape):
        if extent == 1:
            continue
        mine = [operand[dim] for operand in operands]
        if extents and all(kept[-1] == extent * stride for kept, stride in zip(strides, mine, strict=True)):
            extents[-1] *= extent
            for kept, stride in zip(strides, mine, strict=True):
                kept[-1] = stride
            continue
        extents.append(extent)
        for kept, stride in zip(strides, mine, strict=True):
            kept.append(stride)
    missing = max(0, rank - len(extents))
    return (*(1,) * missing, *extents), tuple((*(0,) * missing, *kept) for kept in strides)
