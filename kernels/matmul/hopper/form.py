"""What is constant in a binary of the matmul kernel for Hopper."""

from dataclasses import astuple, dataclass

import triton.language as tl


@dataclass(frozen=True)
class Form:
    """Constants of one binary.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Length of K in one step.
        group_m: Rows of tiles walked together.
        consumers: Groups of four warps that multiply: 1, 2 or 3.
        stages: Steps of operands in shared memory.
        halves: Parts in which a consumer stores its sums: 1 or 2.
        main: Rows of the right operand that its first box has room for, and columns of a consumer's sums.
        tail: The same of its second box; 0 for none.
        pitch: Rows from one step's first box to the next one's in shared memory.
        columns: Rows in the first box, and columns of sums that count.
        tail_columns: The same for the second box.
        registers: Registers of a thread of each consumer but the first, which has what is left.
        out_type: Type of the output.
        stores_boxes: Whether descriptors store the output. Else its rows begin anywhere.
        is_swapped: Whether `b` is the left operand.
        left_is_k: Whether rows of the left operand are contiguous along K.
        right_is_k: The same for the right operand.
        is_batched: Whether descriptors have a batch dimension.
        splits: Programs that share the K of a tile, in a cluster along the grid's second axis; 1 for none.
        is_plain: Whether nothing follows the product.
        sharers: Programs of a cluster along the grid's first axis that load one operand's boxes in turns, for all; 1 for none.
        shares_left: Whether that operand is the left one.
        promotes: Steps that are multiplied at a time, where the sums of each are added up in float32 outside the matrix unit,
            which keeps fewer bits: 1 or 2; else 0.
        changes: Mark of the changes of the program's text; see `stages.py`.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    consumers: int
    stages: int
    halves: int
    main: int
    tail: int
    pitch: int
    columns: int
    tail_columns: int
    registers: int
    out_type: tl.dtype
    stores_boxes: bool
    is_swapped: bool
    left_is_k: bool
    right_is_k: bool
    is_batched: bool
    splits: int
    is_plain: bool
    sharers: int
    shares_left: bool
    promotes: int
    changes: str

    @property
    def sharing_rows(self) -> int:
        """Tiles below each other whose programs share `b`."""
        return self.sharers if self.shares_left == self.is_swapped else 1

    @property
    def sharing_columns(self) -> int:
        """Tiles beside each other whose programs share `a`."""
        return self.sharers if self.shares_left != self.is_swapped else 1

    def mangle(self) -> str:
        """Part of the names of functions that have it as a constant."""
        return "_".join(str(value) for value in astuple(self))
