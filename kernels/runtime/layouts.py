"""Which memory layout an operand should have, and bringing a tensor into it.

Staging of requests and uploads of resident weights follow these layouts, so that products run in the descriptor
kernels. Rows start at multiples of 16 bytes, of a sector, or of a whole line. Some types the matrix unit only takes with
the summed dimension contiguous; for these `b` is stored as (N, K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Alignment of the start of a row, in bytes, for descriptors and 16-byte loads.
ROW_BYTES = 16
# Rows that start at whole lines of L2 are read up to a quarter faster. On an H200 a 5000³ bf16 product takes 476 µs at
# a pitch of 10,000 bytes, and 359 at a multiple of 128.
LINE_BYTES = 128
# Blocks in which operands of a product are copied, rows and bytes of each: fast for short and for long rows
# (docs/kernels.md). The second where columns are contiguous; both its sides are lines of L2 for elements of 32 bits.
COPY_BLOCK, TURNED_BLOCK = (8, 512), (32, 128)
# What a read from memory takes at least. Rows that start at such places are read up to 15 % faster than at others.
SECTOR_BYTES = 32
# From these lengths of a row on it is padded to lines, or sectors: an eighth more bytes at most.
_LONG_ROW_BYTES, _SHORT_ROW_BYTES = 1024, 128


@dataclass(frozen=True)
class Layout:
    """Memory layout of an operand.

    Attributes:
        is_k_major: for `b` of matmul: stored as (…, N, K), so that K is contiguous; else as its shape says.
    """

    is_k_major: bool = False


def preferred_layout(op: str, operand: str, dtype: str, precision: str = "ieee") -> Layout:
    """The layout that `op` wants for `operand`.

    Args:
        op: `matmul`, `softmax` or `add`.
        operand: `a`, `b`, `x` or `out`.
        dtype: name of its dtype, e.g. `bfloat16`.
        precision: of float32 products. A weight that serves several precisions should be laid out for `tf32`: `ieee`
            takes either.

    Returns:
        The layout. Others are right too, and slower.
    """
    return Layout(is_k_major=op == "matmul" and operand == "b" and is_summed_contiguous(dtype, precision))


def is_summed_contiguous(dtype: str, precision: str) -> bool:
    """Whether the matrix unit takes operands of `dtype` only with the summed dimension contiguous."""
    return dtype in ("int8", "float8_e4m3fn", "float8_e5m2") or (dtype == "float32" and precision != "ieee")


def row_step(length: int, item_bytes: int) -> int:
    """Elements from one row of `length` elements to the next.

    Rows of 1 KiB or more are padded to 128 bytes, of 128 bytes or more to 32, others to 16.
    """
    given = length * item_bytes
    unit = LINE_BYTES if given >= _LONG_ROW_BYTES else SECTOR_BYTES if given >= _SHORT_ROW_BYTES else ROW_BYTES
    return -(-given // unit) * unit // item_bytes


def zeros_laid_out(like: torch.Tensor, shape: Sequence[int], layout: Layout) -> torch.Tensor:
    """Zeros whose memory lies as `layout` says, rows padded.

    Args:
        like: Gives dtype and device.
        shape: (…, rows, columns).
        layout: from `preferred_layout`.
    """
    *outer, rows, columns = shape
    count, length = (columns, rows) if layout.is_k_major else (rows, columns)
    placed = like.new_zeros((*outer, count, row_step(length, like.element_size())))[..., :length]
    return placed.mT if layout.is_k_major else placed


def lay_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy of `tensor` (the same shape and values) whose memory lies as `layout` says.

    Args:
        tensor: (…, rows, columns), any strides.
        layout: from `preferred_layout`.
    """
    return zeros_laid_out(tensor, tensor.shape, layout).copy_(tensor)
