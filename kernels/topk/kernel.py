"""The top-k kernels: jit bodies only.

A float becomes an int32 of the same order, and with its index an int64 key. The greater key is the better element,
equal elements rank by the smaller index, and a NaN stands where the order puts it. NONE is below every key.

A bound that k or little more elements of a row reach is found by dividing its range, and where too many equal elements
reach it, another for their indices. Those elements are sorted last: in short runs each counts the keys above its own,
and sorted runs are merged in pairs, where each finds its place in the other by halving.

Rows are read in whole pieces of 16 bytes, wherever they begin: the bytes around a row are never used. A piece that
holds an element lies in that element's memory.

Long rows are read once. Groups of neighbours leave their best order, the k best groups are selected, and only those are
read again. A group that holds one of the k best elements is among the k best groups. For groups are contiguous, and
equal groups rank by the smaller index. At least rows·N·input size bytes.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.pdl import await_previous
from tilewire.kernels.topk import configs

NONE = tl.constexpr(-(1 << 63))
LOWEST = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Two counts of a block in one sum.
TWO_BITS = tl.constexpr(16)
TWO_MASK = tl.constexpr(65535)
TWO_COUNTS = tl.constexpr(65537)
SHORT = tl.constexpr(configs.SHORT)
# Elements of a thread that leave their best for a first bound.
GROUP = tl.constexpr(8)
# Keys that each key is compared with at a time.
OTHERS = tl.constexpr(16)
# Keys of a thread that are merged at a time: their loads wait for one another only step by step.
MERGED = tl.constexpr(4)


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
def load_orders(x_ptr, offs, mask, flip):
    """Orders of the elements at `offs`: floats are converted, int32 are orders already, int64 are keys."""
    if x_ptr.dtype.element_ty == tl.int64:
        order = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + 2 * offs + 1, mask=mask, other=LOWEST)
    elif x_ptr.dtype.element_ty == tl.int32:
        order = tl.load(x_ptr + offs, mask=mask, other=LOWEST)
    else:
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        order = tl.where(mask, to_order(x, flip, MAGNITUDE), LOWEST)
    return order


@triton.jit
def load_row(x_ptr, from_row, offs, n, flip, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Orders of the elements of rows that begin at `from_row`, (rows, 1), at places `offs`, and where a row begins there.

    The first place is the first of the 16 bytes that the row begins in. Orders outside of a row are LOWEST. One row is a
    scalar. WIDE: pieces are read whole, so that a thread has neighbours.
    """
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    PIECE: tl.constexpr = 16 // SIZE
    start = x_ptr.to(tl.int64) + from_row * SIZE
    begin = ((start & 15) // SIZE).to(tl.int32)
    piece_ptr = (start & -16).to(tl.pointer_type(x_ptr.dtype.element_ty))
    if WIDE:
        piece_ptr = tl.multiple_of(piece_ptr, 16 if ROWS == 1 else (16, 16))
    x = tl.load(piece_ptr + offs, mask=offs // PIECE * PIECE < n + begin, other=0.0).to(tl.float32)
    return tl.where((offs >= begin) & (offs < n + begin), to_order(x, flip, MAGNITUDE), LOWEST), begin


@triton.jit
def narrow(order, low, high, k, most):
    """An int32, (rows,), in `low` to `high` that `k` to `most` of `order`, (rows, elements), reach.

    `low` is one that at least `k` reach. Where equal elements leave no such number it is the greatest that they reach.
    """
    while tl.max((low != high).to(tl.int32), axis=0) != 0:
        # Counts of two bounds in one sum: a third of the range is left.
        third = ((high - low).to(tl.uint32, bitcast=True) // 3).to(tl.int32)
        first = low + third + 1
        second = first + third
        reached = tl.where(order >= first[:, None], tl.where(order >= second[:, None], TWO_COUNTS, 1), 0)
        counts = tl.sum(reached, axis=1)
        reach_second = counts >> TWO_BITS
        reach_first = counts & TWO_MASK
        bound = tl.where(reach_second >= k, second, first)
        num = tl.where(reach_second >= k, reach_second, reach_first)
        high = tl.where(num < k, first - 1, tl.where(num <= most, bound, tl.where(reach_second >= k, high, second - 1)))
        low = tl.where(num < k, low, bound)
    return low


@triton.jit
def bound_of_best(order, k, most, THREADS: tl.constexpr, UNIT: tl.constexpr):
    """An int32, (rows,), that `k` to `most` of `order`, (rows, elements), reach; k ≤ elements. See `narrow`.

    What `k` of the groups' best reach is a bound that few more than `k` elements do.
    """
    low = tl.min(order, axis=1)
    high = tl.max(order, axis=1)
    ROWS: tl.constexpr = order.shape[0]
    REPS: tl.constexpr = order.shape[1] // (THREADS * UNIT)
    # Neighbours, and what lies a whole tile apart, are in one thread.
    APART: tl.constexpr = max(1, min(REPS, GROUP // UNIT))
    GROUPS: tl.constexpr = order.shape[1] // (APART * UNIT)
    if 2 * k <= GROUPS:
        tops = tl.max(tl.reshape(order, (ROWS, APART, GROUPS, UNIT)), axis=3)
        tops = tl.max(tops, axis=1)
        low = narrow(tops, low, high, k, k)
        count = tl.sum((order >= low[:, None]).to(tl.int32), axis=1)
        high = tl.where(count <= most, low, high)
    return narrow(order, low, high, k, most)


@triton.jit
def places_of_best(order, index, k, most, shift, THREADS: tl.constexpr, UNIT: tl.constexpr):
    """Which elements of a row `order`, (1, elements), hold the `k` best, their places, and how many they are, (1,).

    They are `k` to `most`, of equal elements those with the least `index`, int32; what is no element comes last, with a
    negative index or one behind the row, and is not among them while there are `k` others. Places come in any order. The
    lowest `shift` bits of orders, see `SHIFTS`, tell none apart. A thread holds UNIT neighbours at a time.
    """
    N: tl.constexpr = order.shape[1]
    order >>= shift
    least = bound_of_best(order, k, most, THREADS, UNIT)
    is_best = order >= least[:, None]
    count = tl.sum(is_best.to(tl.int32), axis=1)
    # Where NaN is last its order is that of what is no element.
    if (tl.max(count, axis=0) > most) | (tl.min(least << shift, axis=0) == LOWEST):
        is_above = order > least[:, None]
        num_equal = k - tl.sum(is_above.to(tl.int32), axis=1)
        is_equal = is_best & (order == least[:, None])
        rank = ~tl.where(index < 0, MAGNITUDE - tl.arange(0, N)[None, :], index)
        low = tl.min(tl.where(is_equal, rank, MAGNITUDE), axis=1)
        rank = tl.where(is_equal, rank, LOWEST)
        last = narrow(rank, low, tl.max(rank, axis=1), num_equal, num_equal)
        is_best = is_above | (rank >= last[:, None])
        count = tl.sum(is_best.to(tl.int32), axis=1)
    # Those of a thread follow one another: sums of all elements between threads would cost more.
    ones = tl.reshape(is_best.to(tl.int32), (N // (THREADS * UNIT), THREADS, UNIT))
    with_neighbours = tl.cumsum(ones, axis=2)
    of_units = tl.sum(ones, axis=2)
    before_unit = tl.cumsum(of_units, axis=0) - of_units
    of_threads = tl.sum(of_units, axis=0)
    before_thread = tl.cumsum(of_threads, axis=0) - of_threads
    place = (before_unit + before_thread[None, :])[:, :, None] + with_neighbours - 1
    return is_best, tl.reshape(place, (1, N)), count


@triton.jit
def store_kept(to_ptr, place, what, is_best, count):
    """Store `what` of the elements that `places_of_best` found at their places; how many. `count` is (1,)."""
    tl.store(to_ptr + place, what, mask=is_best)
    return tl.sum(tl.reshape(count, (1,)), axis=0)


@triton.jit
def take_best(keys):
    """The `keys`, (rows, keys), without the best of each row, in whose place is NONE, and these, (rows, 1)."""
    best = tl.max(keys, axis=1, keep_dims=True)
    # No two keys are equal but those that are none.
    return tl.where(keys == best, NONE, keys), best


@triton.jit
def num_above(others, mine):
    """How many keys of `others`, (keys, rows), are above each of `mine`, (rows, keys).

    Others come first: so a thread has all others of its own, and no sum leaves it.
    """
    return tl.sum((others[:, :, None] > mine[None, :, :]).to(tl.int32), axis=0)


@triton.jit
def sort_runs(from_ptr, to_ptr, first, count, SORT: tl.constexpr):
    """Sort SORT keys from `first` on in runs of neighbours, each as long as its row of this tile."""
    RUN: tl.constexpr = min(SORT, SHORT)
    run = first + tl.arange(0, SORT // RUN) * RUN
    place = run[:, None] + tl.arange(0, RUN)[None, :]
    key = tl.load(from_ptr + place, mask=place < count, other=NONE)
    above = tl.zeros((SORT // RUN, RUN), tl.int32)
    for start in range(0, RUN, OTHERS):
        next_to = run[None, :] + start + tl.arange(0, OTHERS)[:, None]
        above += num_above(tl.load(from_ptr + next_to, mask=next_to < count, other=NONE), key)
    tl.store(to_ptr + run[:, None] + above, key, mask=place < count)


@triton.jit
def merge_runs(from_ptr, to_ptr, first, count, run, NUM: tl.constexpr):
    """Put NUM keys from `first` on where they belong once sorted runs of `run` neighbours, a power of two, are merged."""
    place = first + tl.arange(0, NUM)
    key = tl.load(from_ptr + place, mask=place < count, other=NONE)
    from_other = (place ^ run) & -run
    above = tl.zeros((NUM,), tl.int32)
    step = run
    while step > 0:
        last = from_other + above + step - 1
        is_there = (above + step <= run) & (last < count)
        above += tl.where(tl.load(from_ptr + last, mask=is_there, other=NONE) > key, step, 0)
        step >>= 1
    tl.store(to_ptr + (place & -(2 * run)) + (place & (run - 1)) + above, key, mask=place < count)


@triton.jit
def sort_keys(keys_ptr, count, most, SORT: tl.constexpr):
    """Sort the `count` keys that this program left at `keys_ptr`, (2, most), best first; a pointer to them."""
    run = min(SORT, SHORT)
    from_ptr = keys_ptr
    to_ptr = keys_ptr + most
    tl.debug_barrier()
    for first in range(0, count, SORT):
        sort_runs(from_ptr, to_ptr, first, count, SORT)
    while run < count:
        from_ptr, to_ptr = to_ptr, from_ptr
        tl.debug_barrier()
        for first in range(0, count, MERGED * SORT):
            merge_runs(from_ptr, to_ptr, first, count, run, MERGED * SORT)
        run *= 2
    tl.debug_barrier()
    return to_ptr


@triton.jit
def store_element(x_ptr, from_row, values_ptr, indices_ptr, place, key, mask):
    """Store the element of `key`, whose row starts at `from_row`, and its index."""
    index = index_of(key)
    tl.store(values_ptr + place, tl.load(x_ptr + from_row + index, mask=mask), mask=mask)
    tl.store(indices_ptr + place, index, mask=mask)


@triton.jit
def store_best(x_ptr, from_row, n, keys_ptr, values_ptr, indices_ptr, row, count, k, most, flip, SORT: tl.constexpr):
    """Store elements and indices of the `k` best of the `count` elements whose indices this program left, best first.

    The row of `n` elements starts at `from_row`. `keys_ptr` is (2, most); the indices, int32, are in its second half.
    """
    kept_ptr = (keys_ptr + most).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    for first in range(0, count, MERGED * SORT):
        place = first + tl.arange(0, MERGED * SORT)
        index = tl.load(kept_ptr + place, mask=place < count, other=-1)
        mask = (index >= 0) & (index < n)
        order = load_orders(x_ptr, from_row + index, mask, flip)
        tl.store(keys_ptr + place, tl.where(mask, to_key(order, index), NONE), mask=place < count)
    best_ptr = sort_keys(keys_ptr, count, most, SORT)
    for first in range(0, k, SORT):
        place = first + tl.arange(0, SORT)
        key = tl.load(best_ptr + place, mask=place < k, other=NONE)
        store_element(x_ptr, from_row, values_ptr, indices_ptr, row * k + place, key, place < k)


@triton.jit
def topk_row_kernel(
    x_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,
    rows,
    n,
    k,
    most,
    stride_row,
    flip,
    shift,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SORT: tl.constexpr,
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows whole in registers, several of them where they are SHORT or not sorted. Grid: (ceil(rows / BLOCK_ROWS),).

    Without SORT the best are taken out one after the other. `keys_ptr` is (rows, 2, most) words of scratch memory.
    """
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    if BLOCK_ROWS > 1:
        row = tl.minimum(row + tl.arange(0, BLOCK_ROWS)[:, None], rows - 1)
    from_row = row * stride_row
    offs = tl.arange(0, BLOCK_N)[None, :]
    order, begin = load_row(x_ptr, from_row, offs, n, flip, BLOCK_ROWS, BLOCK_ROWS == 1 or SORT == 0)
    index = offs - begin
    if SORT == 0:
        keys = tl.where((index >= 0) & (index < n), to_key(order, index), NONE)
        for place in range(k):
            keys, best = take_best(keys)
            store_element(x_ptr, from_row, values_ptr, indices_ptr, row * k + place, best, index_of(best) < n)
    elif BLOCK_N <= SHORT:
        mask = (index >= 0) & (index < n)
        key = tl.where(mask, to_key(order, index), NONE)
        rank = num_above(tl.trans(key), key)
        place = row * k + rank
        store_element(x_ptr, from_row, values_ptr, indices_ptr, place, key, mask & (rank < k))
    else:
        is_best, place, count = places_of_best(order, index, k, most, shift, THREADS, UNIT)
        keys_ptr += row * 2 * most
        count = store_kept((keys_ptr + most).to(tl.pointer_type(tl.int32)), place, index, is_best, count)
        store_best(x_ptr, from_row, n, keys_ptr, values_ptr, indices_ptr, row, count, k, most, flip, SORT)


@triton.jit
def topk_groups_kernel(
    x_ptr,
    orders_ptr,
    n,
    groups,
    stride_row,
    flip,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best order of each group of GROUP neighbours into `orders_ptr`, (rows, groups). Grid: (rows × blocks,).

    The first group begins with the 16 bytes that the row begins in.
    """
    await_previous(OVERLAP)
    NUM: tl.constexpr = BLOCK_N // GROUP
    blocks = tl.cdiv(groups, NUM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    offs = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    order, _ = load_row(x_ptr, row * stride_row, offs, n, flip, 1, True)
    tops = tl.max(tl.reshape(order, (NUM, GROUP)), axis=1)
    number = block * NUM + tl.arange(0, NUM)
    tl.store(orders_ptr + row * groups + number, tops, mask=number < groups)


@triton.jit
def topk_select_kernel(
    orders_ptr,
    keys_ptr,
    rows,
    n,
    k,
    chunks,
    shift,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keys of the `k` best of each chunk of BLOCK_N orders, or keys, in any order.

    `orders_ptr` is (rows, n), orders or keys; `keys_ptr` (rows, chunks, k), NONE where a chunk has fewer.
    Grid: (rows × chunks,), or (ceil(rows / BLOCK_ROWS),) of several rows of one chunk.
    """
    await_previous(OVERLAP)
    if BLOCK_ROWS > 1:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        rank_rows(orders_ptr, keys_ptr, row, rows, n, k, BLOCK_N)
    else:
        select_chunk(orders_ptr, keys_ptr, n, k, chunks, shift, BLOCK_N, THREADS, UNIT)


@triton.jit
def rank_rows(orders_ptr, keys_ptr, row, rows, n, k, BLOCK_N: tl.constexpr):
    """Store keys of the `k` best, at most BLOCK_N, of whole rows, (rows, 1), best first; NONE where a row has fewer."""
    offs = tl.arange(0, BLOCK_N)[None, :]
    mask = (row < rows) & (offs < n)
    key = tl.load(orders_ptr + row * n + offs, mask=mask, other=0)
    if orders_ptr.dtype.element_ty == tl.int32:
        key = to_key(key, offs)
    key = tl.where(mask, key, NONE)
    # Those that are none differ, below all others: each has a place.
    distinct = tl.where(key == NONE, NONE + (BLOCK_N - offs).to(tl.int64), key)
    rank = num_above(tl.trans(distinct), distinct)
    tl.store(keys_ptr + row * k + rank, key, mask=(row < rows) & (rank < k))


@triton.jit
def select_chunk(
    orders_ptr, keys_ptr, n, k, chunks, shift, BLOCK_N: tl.constexpr, THREADS: tl.constexpr, UNIT: tl.constexpr
):
    """Store keys of the `k` best of this program's chunk; see `topk_select_kernel`."""
    x_ptr = orders_ptr + (tl.program_id(0) // chunks).to(tl.int64) * n
    offs = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    order = load_orders(x_ptr, offs, offs < n, 0)
    index = offs
    if orders_ptr.dtype.element_ty == tl.int64:
        words_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        index = ~tl.load(words_ptr + 2 * offs, mask=offs < n, other=0)
    is_best, place, _ = places_of_best(order, index, k, k, shift, THREADS, UNIT)
    # Read again: kept, they would not fit the registers.
    key = tl.load(x_ptr + offs, mask=is_best & (offs < n), other=0)
    if orders_ptr.dtype.element_ty == tl.int32:
        key = to_key(key, offs)
    key = tl.where(offs < n, key, NONE)
    tl.store(keys_ptr + tl.program_id(0).to(tl.int64) * k + place, key, mask=is_best)


@triton.jit
def topk_finish_kernel(
    x_ptr,
    groups_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,
    n,
    k,
    most,
    stride_row,
    flip,
    shift,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    SORT: tl.constexpr,
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The `k` best elements of the groups whose keys are in `groups_ptr`, (rows, k), k · GROUP ≤ BLOCK_N. Grid: (rows,)."""
    await_previous(OVERLAP)
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    row = tl.program_id(0).to(tl.int64)
    from_row = row * stride_row
    begin = (((x_ptr.to(tl.int64) + from_row * SIZE) & 15) // SIZE).to(tl.int32)
    place = tl.arange(0, BLOCK_N)[None, :]
    group = tl.load(groups_ptr + row * k + place // GROUP, mask=place < k * GROUP, other=NONE)
    index = (index_of(group) * GROUP + place % GROUP - begin).to(tl.int32)
    mask = (group != NONE) & (index >= 0) & (index < n)
    order = load_orders(x_ptr, from_row + index, mask, flip)
    index = tl.where(mask, index, -1)
    is_best, place, count = places_of_best(order, index, k, most, shift, THREADS, UNIT)
    keys_ptr += row * 2 * most
    count = store_kept((keys_ptr + most).to(tl.pointer_type(tl.int32)), place, index, is_best, count)
    store_best(x_ptr, from_row, n, keys_ptr, values_ptr, indices_ptr, row, count, k, most, flip, SORT)
