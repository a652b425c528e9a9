# mypy: ignore-errors
"""Boxes of operands of the matmul kernel for Hopper: their places in shared memory, and their loads. Jit functions only."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewire.kernels.matmul.configs import CONSUMER_ROWS
from tilewire.kernels.matmul.hopper.clusters import load_for_all, load_for_one

# Rows of the left operand that a consumer multiplies: those of one matrix instruction.
ROWS = gl.constexpr(CONSUMER_ROWS)


@gluon.jit
def allocate_boxes(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a descriptor."""
    SHAPE: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005 - the language has no unpacking
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def allocate_right(desc, FORM: gl.constexpr):
    """Shared memory for the right operand's boxes of all steps. Where they have fewer rows than a place, places overlap."""
    if FORM.pitch == FORM.main:
        ring = allocate_boxes(desc, FORM.stages)
    else:
        # The last box, too, must have its place.
        UNITS: gl.constexpr = (FORM.pitch * (FORM.stages - 1) + FORM.main) // 8
        SHAPE: gl.constexpr = [UNITS, 1, 8, FORM.block_k] if FORM.is_batched else [UNITS, 8, FORM.block_k]
        ring = gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)
    return ring


@gluon.jit
def right_box(ring, slot, FORM: gl.constexpr):
    """The place of the right operand's box of a slot. What follows its rows is the next one's."""
    if FORM.pitch == FORM.main:
        box = ring.index(slot)
    else:
        first = ring.index(slot * (FORM.pitch // 8))
        SHAPE: gl.constexpr = [1, FORM.main, FORM.block_k] if FORM.is_batched else [FORM.main, FORM.block_k]
        box = first._reinterpret(first.dtype, SHAPE, first.layout)
    return box


@gluon.jit
def matrix_of(box):
    """A box as (rows, columns), with or without a batch dimension."""
    if len(box.shape) == 3:
        box = box.reshape([box.shape[1], box.shape[2]])
    return box


@gluon.jit
def load_box(desc, place, entry, row, at, bar, IS_K: gl.constexpr):
    """Start loading the box of `entry`, of rows from `row` and of K from `at` into `place`. IS_K: rows lie along K."""
    first, second = row, at
    if not IS_K:
        first, second = at, row
    if len(desc.block_type.shape) == 3:
        tma.async_copy_global_to_shared(desc, [entry, first, second], bar, place)
    else:
        tma.async_copy_global_to_shared(desc, [first, second], bar, place)


@gluon.jit
def is_loader(slot, FORM: gl.constexpr):
    """Whether this program loads what is shared of a slot: programs of a cluster do in turns."""
    return slot % FORM.sharers == gl.program_id(0) % FORM.sharers


@gluon.jit
def load_left(desc, ring, entry, row, at, slot, bar, FORM: gl.constexpr):
    """Start loading the left operand's boxes of a step, one for each consumer."""
    CONSUMERS: gl.constexpr = FORM.consumers
    for part in gl.static_range(CONSUMERS):
        load_box(desc, ring.index(slot * CONSUMERS + part), entry, row + part * ROWS, at, bar, FORM.left_is_k)


@gluon.jit
def load_right(descs, rings, entry, row, at, slot, bar, FORM: gl.constexpr):
    """Start loading the right operand's boxes of a step: one, and that of the tail."""
    load_box(descs[1], right_box(rings[1], slot, FORM), entry, row, at, bar, FORM.right_is_k)
    if FORM.tail:
        load_box(descs[2], rings[2].index(slot), entry, row + FORM.main, at, bar, FORM.right_is_k)


@gluon.jit
def load_step(descs, rings, entries, rows, at, slot, bar, FORM: gl.constexpr):
    """Start loading the step of K from `at` into `slot`. `entries` and `rows` are those of the left and the right operand."""
    if FORM.sharers == 1:
        load_left(descs[0], rings[0], entries[0], rows[0], at, slot, bar, FORM)
        load_right(descs, rings, entries[1], rows[1], at, slot, bar, FORM)
    else:
        if FORM.shares_left:
            load_right(descs, rings, entries[1], rows[1], at, slot, bar, FORM)
        else:
            load_left(descs[0], rings[0], entries[0], rows[0], at, slot, bar, FORM)
        if is_loader(slot, FORM):
            load_for_all()
            if FORM.shares_left:
                load_left(descs[0], rings[0], entries[0], rows[0], at, slot, bar, FORM)
            else:
                load_right(descs, rings, entries[1], rows[1], at, slot, bar, FORM)
            load_for_one()


@gluon.jit
def left_of(ring, slot, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """A consumer's rows of the left operand of a slot."""
    tile = matrix_of(ring.index(slot * FORM.consumers + CONSUMER))
    if not FORM.left_is_k:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def right_of(box, FORM: gl.constexpr):
    """A box of the right operand, K first."""
    tile = matrix_of(box)
    if FORM.right_is_k:
        tile = tile.permute((1, 0))
    return tile
