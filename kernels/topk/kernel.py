"""The top-k kernels: jit bodies only.

A float becomes an int32 of the same order, and with its index an int64 key. The greater key is the better element,
equal elements rank by the smaller index, and a NaN stands where the order puts it. NONE is below every key.

Long rows are read once. Groups of neighbours leave their best order, the k best groups are selected, and only those are
read again. A group that holds one of the k best elements is among the k best groups. For groups are contiguous, and
equal groups rank by the smaller index. At least rows·N·input size bytes.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.elements import BFLOAT16, load_floats
from tilewire.kernels.runtime.pdl import await_previous

NONE = tl.constexpr(-(1 << 63))
LOWEST = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Up to here the best keys are taken one after the other.
FEW = tl.constexpr(64)


@triton.jit
def to_order(x, flip, nan_order):
    """Int32 that orders as the float32 `x`, NaN as `nan_order`; `flip` = -1 reverses the order, 0 keeps it."""
    # Both zeros are one: -0 + 0 is 0.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & MAGNITUDE)
    return tl.where(x != x, nan_order, order) ^ flip


@triton.jit
def from_order(order, flip):
    """The float32 whose `to_order` is `order`."""
    order = order ^ flip
    return (order ^ ((order >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def to_key(order, index):
    """Int64 key of an element: by `order`, then by the smaller `index` (below 2^32 - 1)."""
    return (order.to(tl.int64) << 32) | (index.to(tl.int64) ^ 0xFFFFFFFF)


@triton.jit
def index_of(key):
    """The index in `key`, int64."""
    return (key & 0xFFFFFFFF) ^ 0xFFFFFFFF


@triton.jit
def load_orders(x_ptr, offs, mask, flip, kind, BY_KIND: tl.constexpr):
    """Orders of the elements at `offs`: float elements are converted, int32 ones are orders already.

    With BY_KIND the elements are of the type numbered `kind`, whatever type the pointer has.
    """
    if BY_KIND:
        x = load_floats(x_ptr, kind, offs, mask)
        order = tl.where(mask, to_order(x, flip, MAGNITUDE), LOWEST)
    elif x_ptr.dtype.element_ty == tl.int32:
        order = tl.load(x_ptr + offs, mask=mask, other=LOWEST)
    else:
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        order = tl.where(mask, to_order(x, flip, MAGNITUDE), LOWEST)
    return order


@triton.jit
def best_of(keys, k, WIDTH: tl.constexpr):
    """The `k` ≤ WIDTH best of `keys`, (rows, keys), sorted; NONE in the places behind them, at least for few.

    A few are taken one after the other, which is a reduction each; many are sorted.
    """
    if WIDTH <= FEW:
        place = tl.arange(0, WIDTH)[None, :]
        best = tl.full((keys.shape[0], WIDTH), NONE, tl.int64)
        for number in range(k):
            top = tl.max(keys, axis=1, keep_dims=True)
            best = tl.where(place == number, top, best)
            keys = tl.where(keys == top, NONE, keys)
    else:
        best = tl.topk(keys, WIDTH)
    return best


@triton.jit
def best_of_groups(elements, groups, n, k, BY_KIND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """The `k` best keys of the elements in the groups that the keys `groups`, (rows, WIDTH), name.

    `elements` is (pointer, offsets of the rows, flip, kind); see `load_orders`.
    """
    x_ptr, from_row, flip, kind = elements
    ROWS: tl.constexpr = groups.shape[0]
    offs = index_of(groups)[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    mask = (groups != NONE)[:, :, None] & (offs < n)
    offs = tl.reshape(offs, (ROWS, WIDTH * GROUP))
    mask = tl.reshape(mask, (ROWS, WIDTH * GROUP))
    order = load_orders(x_ptr, from_row[:, None] + offs, mask, flip, kind, BY_KIND)
    return best_of(tl.where(mask, to_key(order, offs), NONE), k, WIDTH)


@triton.jit
def best_of_row(
    elements, in_rows, n, k, BY_KIND: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr
):
    """The `k` best keys of each row of `n` ≤ BLOCK_N elements, sorted; indices count from the row's start.

    With a GROUP above 1 the best groups are found first and read again, which sorts WIDTH · GROUP elements instead of
    BLOCK_N.
    """
    x_ptr, from_row, flip, kind = elements
    ROWS: tl.constexpr = in_rows.shape[0]
    offs = tl.arange(0, BLOCK_N)[None, :]
    mask = in_rows[:, None] & (offs < n)
    order = load_orders(x_ptr, from_row[:, None] + offs, mask, flip, kind, BY_KIND)
    if GROUP == 1:
        best = best_of(tl.where(mask, to_key(order, offs), NONE), k, WIDTH)
    else:
        NUM: tl.constexpr = BLOCK_N // GROUP
        tops = tl.max(tl.reshape(order, (ROWS, NUM, GROUP)), axis=2)
        number = tl.arange(0, NUM)[None, :]
        held = in_rows[:, None] & (number * GROUP < n)
        groups = best_of(tl.where(held, to_key(tops, number), NONE), k, WIDTH)
        best = best_of_groups(elements, groups, n, k, BY_KIND, GROUP, WIDTH)
    return best


@triton.jit
def store_elements(
    elements, values_ptr, indices_ptr, best, row, in_rows, k, BY_KIND: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the first `k` of the keys `best`: the elements themselves, and their indices. Outputs are (rows, k)."""
    x_ptr, from_row, _, kind = elements
    place = tl.arange(0, WIDTH)[None, :]
    mask = in_rows[:, None] & (place < k)
    index = index_of(best)
    to_out = row.to(tl.int64)[:, None] * k + place
    from_x = from_row[:, None] + index
    there = mask & (best != NONE)
    if not BY_KIND:
        tl.store(values_ptr + to_out, tl.load(x_ptr + from_x, mask=there, other=0.0), mask=mask)
    elif kind <= BFLOAT16:
        short = tl.load(x_ptr.to(tl.pointer_type(tl.int16)) + from_x, mask=there, other=0)
        tl.store(values_ptr.to(tl.pointer_type(tl.int16)) + to_out, short, mask=mask)
    else:
        word = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + from_x, mask=there, other=0)
        tl.store(values_ptr.to(tl.pointer_type(tl.int32)) + to_out, word, mask=mask)
    tl.store(indices_ptr + to_out, index, mask=mask)


@triton.jit
def topk_row_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    rows,
    n,
    k,
    stride_row,
    flip,
    kind,
    UNIT: tl.constexpr,
    BY_KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows whole in registers. Grid: (ceil(rows / BLOCK_ROWS),)."""
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    elements = (x_ptr, row.to(tl.int64) * (stride_row * UNIT), flip, kind)
    best = best_of_row(elements, in_rows, n, k, BY_KIND, BLOCK_N, GROUP, WIDTH)
    store_elements(elements, values_ptr, indices_ptr, best, row, in_rows, k, BY_KIND, WIDTH)


@triton.jit
def topk_groups_kernel(
    x_ptr,
    orders_ptr,
    n,
    groups,
    stride_row,
    flip,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best order of each group of GROUP neighbours into `orders_ptr`, (rows, groups). Grid: (rows × blocks,)."""
    await_previous(OVERLAP)
    n = n * UNIT
    NUM: tl.constexpr = BLOCK_N // GROUP
    blocks = tl.cdiv(n, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    offs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    order = load_orders(x_ptr + row * (stride_row * UNIT), offs, offs < n, flip, 0, False)
    tops = tl.max(tl.reshape(order, (NUM, GROUP)), axis=1)
    number = block * NUM + tl.arange(0, NUM)
    tl.store(orders_ptr + row * groups + number, tops, mask=number < groups)


@triton.jit
def topk_select_kernel(
    orders_ptr,
    keys_ptr,
    n,
    k,
    chunks,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The `k` best keys of each chunk of BLOCK_N orders into `keys_ptr`, (rows, chunks, WIDTH). Grid: (rows × chunks,).

    `orders_ptr` is (rows, n).
    """
    await_previous(OVERLAP)
    n = n * UNIT
    one = tl.arange(0, 1)
    row = tl.program_id(0) // chunks + one
    first = tl.program_id(0) % chunks * BLOCK_N
    from_row = row.to(tl.int64) * n + first
    best = best_of_row(
        (orders_ptr, from_row, 0, 0), one == 0, tl.minimum(n - first, BLOCK_N), k, False, BLOCK_N, GROUP, WIDTH
    )
    # The index sits inverted in the low half: counting it from the row's start is a subtraction.
    best = tl.where(best == NONE, NONE, best - first)
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(keys_ptr + place, best)


@triton.jit
def topk_merge_kernel(
    keys_ptr, merged_ptr, n, k, chunks, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):
    """The `k` best of each chunk of BLOCK_N of the keys (rows, n) into (rows, chunks, WIDTH). Grid: (rows × chunks,)."""
    await_previous(OVERLAP)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    offs = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    keys = tl.load(keys_ptr + row * n + offs, mask=offs < n, other=NONE)
    best = best_of(keys, k, WIDTH)
    tl.store(merged_ptr + tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :], best)


@triton.jit
def topk_finish_kernel(
    x_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,
    n,
    num_keys,
    k,
    stride_row,
    flip,
    kind,
    BY_KIND: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best groups from `keys_ptr`, (rows, num_keys ≤ BLOCK_KEYS), their elements, the k best of them. Grid: (rows,)."""
    await_previous(OVERLAP)
    row = tl.program_id(0) + tl.arange(0, 1)
    from_row = row.to(tl.int64) * stride_row
    offs = tl.arange(0, BLOCK_KEYS)[None, :]
    keys = tl.load(keys_ptr + row.to(tl.int64)[:, None] * num_keys + offs, mask=offs < num_keys, other=NONE)
    elements = (x_ptr, from_row, flip, kind)
    best = best_of_groups(elements, best_of(keys, k, WIDTH), n, k, BY_KIND, GROUP, WIDTH)
    store_elements(elements, values_ptr, indices_ptr, best, row, row >= 0, k, BY_KIND, WIDTH)
