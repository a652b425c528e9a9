"""Lays the operands of a product, or their limbs, into rows that bulk copies can read, both in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from tilewire.kernels.copy.kernel import copy_operands_kernel
from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.launch import Launch, Variant, device_number
from tilewire.kernels.runtime.layouts import COPY_BLOCK, TURNED_BLOCK
from tilewire.kernels.runtime.targets import Target, current

# By bytes of an element: the word that stands for it.
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
# Up to here the kernel that follows is brought up while blocks are copied.
FEW_BLOCKS = 1024
_PIECE_BYTES = 16


@dataclass(frozen=True)
class Copied:
    """One operand that is copied: (entries, rows, columns) in any strides.

    Attributes:
        entries: Entries of the batch.
        rows: Rows of an entry.
        columns: Elements of a row.
        strides: Elements from one entry, row and column to the next.
        pitch: Elements from row to row in the copy, of all limbs; a multiple of 16 bytes.
    """

    entries: int
    rows: int
    columns: int
    strides: tuple[int, int, int]
    pitch: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the copy, its rows with their padding."""
        return self.entries, self.rows, self.pitch

    @property
    def is_turned(self) -> bool:
        """Whether columns are contiguous where the operand lies."""
        return self.strides[1] == 1


_NOTHING = Copied(0, 0, 0, (0, 0, 0), 0)


def kinds() -> list[tuple[int, bool]]:
    """Returns the arguments of `variant` for every binary: elements as they are, and limbs of float32."""
    return [*((size, False) for size in WORDS), (4, True)]


def variant(item_bytes: int, has_limbs: bool, target: Target) -> Variant:
    """The binary for elements of `item_bytes` bytes, or their limbs."""
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "a_rows_ptr", "b_rows_ptr"), "*i8")
    constants = {
        "WORD": tl.float32 if has_limbs else WORDS[item_bytes],
        "HAS_LIMBS": has_limbs,
        "UNIT": _PIECE_BYTES // item_bytes,
        "BLOCK_R": COPY_BLOCK[0],
        "BLOCK_C": COPY_BLOCK[1] // item_bytes,
        "TURNED_R": TURNED_BLOCK[0],
        "TURNED_C": TURNED_BLOCK[1] // item_bytes,
        "FEW": FEW_BLOCKS,
    }
    return binary(copy_operands_kernel, pointers, constants, 4, target, aligned=("a_rows_ptr", "b_rows_ptr"))


def launch_of(
    a: Copied | None, b: Copied | None, item_bytes: int, device: torch.device, *, has_limbs: bool = False
) -> Launch:
    """Binds one launch that copies the operands that are given; it takes both operands, then both copies.

    Args:
        a: The first operand; None where it is not copied.
        b: The second operand, likewise.
        item_bytes: Bytes of an element.
        device: The device.
        has_limbs: Whether limbs of float32 are written: rows have the low limb first in the copy of `a`, second in that of `b`.
    """
    a, b = a or _NOTHING, b or _NOTHING
    values: dict[str, int] = {}
    unit = _PIECE_BYTES // item_bytes
    blocks = []
    for name, operand in (("a", a), ("b", b)):
        values |= {
            f"entries_{name}": operand.entries,
            f"rows_{name}": operand.rows,
            f"columns_{name}": operand.columns,
            f"pitch_{name}": operand.pitch // unit,
        }
        values |= {f"stride_{name}{axis}": step for axis, step in zip("zrc", operand.strides, strict=True)}
        rows, row_bytes = TURNED_BLOCK if operand.is_turned else COPY_BLOCK
        blocks.append(-(-operand.rows // rows) * -(-operand.columns * item_bytes // row_bytes))
    # Along one axis: CUDA has few programs along others.
    programs = sum(blocks) * max(a.entries, b.entries)
    target = current(device_number(device))
    values |= {"blocks_a": blocks[0], "blocks": sum(blocks)}
    return Launch(variant(item_bytes, has_limbs, target), (programs,), values, device)


def self_test(item_bytes: int, has_limbs: bool, device: torch.device) -> SelfTest:
    """Copies two operands, of which one lies the other way round."""
    dtype = torch.float32 if has_limbs else {1: torch.int8, 2: torch.int16, 4: torch.int32}[item_bytes]
    rows, columns, pitch = 40, 150, 480 if has_limbs else 160
    a = (torch.arange(rows * columns, device=device) % 100).to(dtype).view(rows, columns)
    # The second operand lies the other way round: its rows are columns of what is in memory.
    b = a.mT.contiguous().mT
    copies = [torch.full((rows, pitch), -1, dtype=dtype, device=device) for _ in range(2)]
    first, second = (Copied(1, rows, columns, (0, operand.stride(0), operand.stride(1)), pitch) for operand in (a, b))
    launch = launch_of(first, second, item_bytes, device, has_limbs=has_limbs)
    launch(a, b, *copies)
    if has_limbs:
        # So few digits have no low limb.
        limbs = [copy[:, : 3 * 152].view(rows, 3, 152)[..., :columns] for copy in copies]
        are_right = [
            (limbs[0] == torch.stack((a * 0, a, a), 1)).all(),
            (limbs[1] == torch.stack((a, a * 0, a), 1)).all(),
        ]
    else:
        are_right = [(copy[:, :columns] == a).all() for copy in copies]
    return SelfTest((launch.variant,), are_right[0] & are_right[1])
