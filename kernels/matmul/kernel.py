"""The matmul kernels: jit bodies only. Which one runs, with which constants, is `configs.py`'s business.

All compute out = act((a @ b) * a_scale * b_scale + bias) over an (M, K) `a` and a (K, N) `b`, accumulating in fp32
(int32 for int8). 2·M·N·K flops, and (M·K + K·N)·input size + M·N·output size bytes at least.
"""

import triton
import triton.language as tl

from tilewire.kernels.matmul.epilogue import finish_as, store_any, store_typed
from tilewire.kernels.runtime.pdl import await_previous


@triton.jit
def tile_coordinates(tile, num_pid_m, num_pid_n, GROUP_M: tl.constexpr):
    """Row and column of the `tile`-th tile when GROUP_M rows of tiles are walked column by column.

    Programs that run at the same time then share rows of `a` and columns of `b` in L2.
    Source: the grouped ordering of Triton's matmul tutorial.
    """
    if GROUP_M == 1:
        pid_m = tile // num_pid_n
        pid_n = tile % num_pid_n
    else:
        num_in_group = GROUP_M * num_pid_n
        first = (tile // num_in_group) * GROUP_M
        rows = tl.minimum(num_pid_m - first, GROUP_M)
        pid_m = first + (tile % num_in_group) % rows
        pid_n = (tile % num_in_group) // rows
    return pid_m, pid_n


# Where tiles begin along a contiguous dimension: at lines of memory, 128 bytes of 16-bit elements.
LINE = tl.constexpr(64)


@triton.jit
def start_of(index, size, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """First row (or column) of tile number `index` of BLOCK along a side of `size`.

    The last tile would reach past the end. It begins earlier instead, at a multiple of UNIT, and is as full as the others:
    some rows are computed twice, with the same sums. Programs side by side then load as much in each step and keep pace.
    What they ask for at the same time L2 reads once. Beside a tile that was half empty they took up to twice as long.
    """
    return tl.minimum(index * BLOCK, tl.maximum(tl.cdiv(size - BLOCK, UNIT) * UNIT, 0))


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, IMPRECISE_K: tl.constexpr, UPCAST: tl.constexpr):
    """`acc` + a @ b, in int32 for int8, else in float32."""
    if UPCAST:
        # Triton's interpreter multiplies the bit patterns of bfloat16.
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif acc.dtype == tl.int32:
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE_K)
    return acc


@triton.jit
def load_part(first, within, part, splits):
    """The `part`-th of the `splits` partial tiles that lie from `first` on, as another program wrote it; else zeros."""
    SIZE: tl.constexpr = within.shape[0] * within.shape[1]
    is_there = within < (splits - part) * SIZE
    return tl.load(first + part * SIZE + within, mask=is_there, other=0, cache_modifier=".cg")


@triton.jit
def number(in_m, in_n):
    """Numbers of the elements of a tile, whose rows are `in_m` and columns `in_n`."""
    return in_m[:, None] * in_n.shape[0] + in_n[None, :]


@triton.jit
def locate_entry(a_ptr, b_ptr, entry, batch_inner, a_steps, b_steps):
    """Operands of batch entry `entry`, and its numbers (outer, inner). Steps are strides of (outer, inner) in elements."""
    outer = (entry // batch_inner).to(tl.int64)
    inner = (entry % batch_inner).to(tl.int64)
    return (
        a_ptr + (outer * a_steps[0] + inner * a_steps[1]),
        b_ptr + (outer * b_steps[0] + inner * b_steps[1]),
        outer,
        inner,
    )


@triton.jit
def steps_of_share(k, BLOCK_K: tl.constexpr):
    """Steps of K that a program of the grid's second axis adds up; the last ones may have fewer, or none."""
    return tl.cdiv(tl.cdiv(k, BLOCK_K), tl.num_programs(1))


@triton.jit
def share_of_k(k, BLOCK_K: tl.constexpr):
    """The part of K, from its first element to its end, that a program of the grid's second axis adds up."""
    steps = steps_of_share(k, BLOCK_K)
    first_k = tl.program_id(1) * steps * BLOCK_K
    return first_k, tl.minimum(k, first_k + steps * BLOCK_K)


@triton.jit
def count_arrived(count_ptr):
    """Tell other programs that all threads have written their part. Returns how many have told so before."""
    # Every thread's part must be visible before one thread announces the whole.
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def combine_splits(acc, within, partial_ptr, count_ptr, tile):
    """Sum the partial products of one output tile in the program that arrives last of the grid's second axis.

    `within` are the numbers of the tile's elements.

    Each program stores its `acc`, then counts itself. The one that counts all adds the parts up in the order of their
    numbers, so the result does not depend on who was last. It puts the counter back to 0 for the next launch. Returns
    (acc, whether this program is the last and must store the tile). The others skip the work by masks alone: nested
    branches around a tile are more than Triton's layout passes get right.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    splits = tl.num_programs(1)
    first = partial_ptr + tl.cast(tile, tl.int64) * splits * SIZE
    tl.store(first + tl.program_id(1) * SIZE + within, acc)
    is_last = count_arrived(count_ptr + tile) == splits - 1
    there = tl.where(is_last, splits, 0)
    acc = load_part(first, within, 0, there)
    # Several at a time, so that their loads are in flight together; of large tiles two, since registers are few.
    AT_ONCE: tl.constexpr = 2 if SIZE > 4096 else 5
    for other in tl.range(1, there, AT_ONCE, num_stages=1):
        for more in tl.static_range(AT_ONCE):
            acc += load_part(first, within, other + more, there)
    tl.store(count_ptr + tile, 0, mask=is_last)
    return acc, is_last


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    partial_ptr,
    count_ptr,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    batch_inner,
    stride_az,
    stride_ay,
    stride_bz,
    stride_by,
    stride_oz,
    stride_oy,
    out_kind,
    bias_kind,
    a_scale_step,
    b_scale_step,
    activation,
    A_MAJOR: tl.constexpr,
    B_MAJOR: tl.constexpr,
    IN_PIECES: tl.constexpr,
    M_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    IN_UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE_K: tl.constexpr,
    UPCAST: tl.constexpr,
    SUMS_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Pointer kernel: any strides, any alignment, any sizes, batched.

    Grid: (tiles × batch entries, splits of K). One program computes BLOCK_M × BLOCK_N of one entry over its share of K.
    Sizes come in units (M_UNIT…), strides in units of IN_UNIT elements. From the multiplication by a constant the
    compiler deduces that they divide by it, without a recompilation for each value. The epilogue is passed at run time;
    `store_any` describes it and IN_PIECES. A_MAJOR is "k", "m" or "any": the dimension of `a` with stride 1; B_MAJOR
    likewise "n", "k" or "any". Batch entries are numbered over two dimensions, (outer z, inner y), with one stride
    each.

    SUMS_BLOCKS adds up each step of K on its own first: long float32 sums then err as a tree's do.

    Rows of `a` and columns of `b` past the end are clamped, not masked: their products are never stored. Past K both
    operands are masked, since NaN times zero would be NaN.
    """
    await_previous(OVERLAP)
    m = m * M_UNIT
    n = n * N_UNIT
    k = k * K_UNIT
    num_pid_m = tl.cdiv(m, BLOCK_M)
    num_pid_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    num_tiles = num_pid_m * num_pid_n
    entry = pid // num_tiles
    pid_m, pid_n = tile_coordinates(pid % num_tiles, num_pid_m, num_pid_n, GROUP_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_steps = (stride_az * IN_UNIT, stride_ay * IN_UNIT)
    b_steps = (stride_bz * IN_UNIT, stride_by * IN_UNIT)
    a_ptr, b_ptr, outer, inner = locate_entry(a_ptr, b_ptr, entry, batch_inner, a_steps, b_steps)
    first_k, last_k = share_of_k(k, BLOCK_K)

    if A_MAJOR == "k":
        rows = tl.minimum(offs_m, m - 1).to(tl.int64) * (stride_am * IN_UNIT)
        a_ptrs = a_ptr + rows[:, None] + (first_k + offs_k)[None, :]
        step_a = BLOCK_K
        a_rows = tl.full((BLOCK_M, 1), True, tl.int1)
    elif A_MAJOR == "m":
        a_ptrs = a_ptr + offs_m[:, None] + (first_k + offs_k).to(tl.int64)[None, :] * (stride_ak * IN_UNIT)
        step_a = (stride_ak * IN_UNIT) * BLOCK_K
        a_rows = (offs_m < m)[:, None]
    else:
        rows = tl.minimum(offs_m, m - 1).to(tl.int64) * stride_am
        a_ptrs = a_ptr + rows[:, None] + (first_k + offs_k).to(tl.int64)[None, :] * stride_ak
        step_a = stride_ak * BLOCK_K
        a_rows = tl.full((BLOCK_M, 1), True, tl.int1)
    if B_MAJOR == "n":
        b_ptrs = b_ptr + (first_k + offs_k).to(tl.int64)[:, None] * (stride_bk * IN_UNIT) + offs_n[None, :]
        step_b = (stride_bk * IN_UNIT) * BLOCK_K
        b_columns = (offs_n < n)[None, :]
    elif B_MAJOR == "k":
        columns = tl.minimum(offs_n, n - 1).to(tl.int64) * (stride_bn * IN_UNIT)
        b_ptrs = b_ptr + (first_k + offs_k)[:, None] + columns[None, :]
        step_b = BLOCK_K
        b_columns = tl.full((1, BLOCK_N), True, tl.int1)
    else:
        columns = tl.minimum(offs_n, n - 1).to(tl.int64) * stride_bn
        b_ptrs = b_ptr + (first_k + offs_k).to(tl.int64)[:, None] * stride_bk + columns[None, :]
        step_b = stride_bk * BLOCK_K
        b_columns = tl.full((1, BLOCK_N), True, tl.int1)

    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ZERO: tl.constexpr = 0 if IS_INTEGER else 0.0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if IS_INTEGER else tl.float32)
    for start in range(first_k, last_k, BLOCK_K):
        in_k = offs_k < last_k - start
        a = tl.load(a_ptrs, mask=a_rows & in_k[None, :], other=ZERO)
        b = tl.load(b_ptrs, mask=b_columns & in_k[:, None], other=ZERO)
        if SUMS_BLOCKS:
            # Naming a limit of imprecision keeps the compiler from folding the addition into the product.
            acc += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = multiply(a, b, acc, PRECISION, IMPRECISE_K, UPCAST)
        a_ptrs += step_a
        b_ptrs += step_b

    is_last = tl.num_programs(1) == 1
    if not is_last:
        within = number(tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N))
        acc, is_last = combine_splits(acc, within, partial_ptr, count_ptr, pid)
    epilogue = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation)
    mine = tl.where(is_last, m, 0)
    first = outer * stride_oz + inner * stride_oy
    store_any(acc, offs_m, offs_n, mine, n, out_ptr, out_kind, epilogue, first, stride_om, stride_on, IN_PIECES, IN_PTX)


@triton.jit
def load_box(desc, entry, row, column, IS_TURNED: tl.constexpr):
    """The box at (`row`, `column`) of `entry`. IS_TURNED: the descriptor is (batch, columns, rows)."""
    if IS_TURNED:
        box = desc.load([entry, column, row])
        box = box.reshape(box.shape[1], box.shape[2]).T
    else:
        box = desc.load([entry, row, column])
        box = box.reshape(box.shape[1], box.shape[2])
    return box


@triton.jit
def store_box(desc, entry, row, column, box):
    """Store `box` where `load_box` would read it, not turned."""
    desc.store([entry, row, column], box.reshape(1, box.shape[0], box.shape[1]))


@triton.jit
def half_of(tile, HALF: tl.constexpr):
    """The first or second half of the columns of `tile`."""
    pairs = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1)
    first, second = tl.split(pairs)
    return first if HALF == 0 else second


@triton.jit
def matmul_tma_kernel(
    a_desc,
    b_desc,
    out_desc,
    out_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    partial_ptr,
    count_ptr,
    m,
    n,
    k,
    batch,
    step_a,
    step_b,
    stride_oz,
    stride_om,
    bias_kind,
    a_scale_step,
    b_scale_step,
    activation,
    A_MAJOR: tl.constexpr,
    B_MAJOR: tl.constexpr,
    STORE_BOXES: tl.constexpr,
    IN_PIECES: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE_K: tl.constexpr,
    UPCAST: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HALVES: tl.constexpr,
    SUM_STEPS: tl.constexpr,
    FLATTEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Descriptor kernel: operands whose rows start at multiples of 16 bytes, copied to shared memory by hardware.

    Grid: (programs, splits of K). Each program takes every `programs`-th tile of BLOCK_M × BLOCK_N over all batch
    entries. With as many programs as multiprocessors the loads of a program's next tile overlap the store of its
    last. Reads past the end give zero in both operands, so nothing is masked and padding is never summed.

    A_MAJOR and B_MAJOR name the contiguous dimension, as in `matmul_kernel`. IS_SWAPPED computes the tile's transpose,
    which lets BLOCK_M be 16 while the matrix unit still takes its 64 rows from `b`. STORE_BOXES stores OUT_TYPE through
    a descriptor, in HALVES parts of the tile. So the staging buffer leaves room for another stage of operands. K is
    then not split, and IS_PLAIN means that the product has no epilogue. Without boxes `store_typed` stores. The matrix unit
    cuts its sums off instead of rounding them, so with SUM_STEPS it adds up so many steps only.
    """
    await_previous(OVERLAP)
    num_pid_m = tl.cdiv(m, BLOCK_M)
    num_pid_n = tl.cdiv(n, BLOCK_N)
    tiles_of_entry = num_pid_m * num_pid_n
    if STORE_BOXES:
        first_step = 0
        last_step = tl.cdiv(k, BLOCK_K)
    else:
        steps = tl.cdiv(tl.cdiv(k, BLOCK_K), tl.num_programs(1))
        first_step = tl.program_id(1) * steps
        last_step = tl.minimum(first_step + steps, tl.cdiv(k, BLOCK_K))
    IS_INTEGER: tl.constexpr = a_desc.dtype == tl.int8
    ACC_TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    ROW_UNIT: tl.constexpr = LINE if A_MAJOR == "m" else 1
    epilogue = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation)
    for tile in tl.range(tl.program_id(0), tiles_of_entry * batch, tl.num_programs(0), flatten=FLATTEN):
        entry = tile // tiles_of_entry
        pid_m, pid_n = tile_coordinates(tile % tiles_of_entry, num_pid_m, num_pid_n, GROUP_M)
        row = start_of(pid_m, m, BLOCK_M, ROW_UNIT)
        # Without boxes, columns are stored in pieces that begin at multiples of the block.
        column = start_of(pid_n, n, BLOCK_N, LINE) if STORE_BOXES else pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M) if IS_SWAPPED else (BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
        whole = acc
        for step in range(first_step, last_step):
            at = step * BLOCK_K
            a = load_box(a_desc, entry * step_a, row, at, A_MAJOR == "m")
            b = load_box(b_desc, entry * step_b, at, column, B_MAJOR == "k")
            if IS_SWAPPED:
                acc = multiply(b.T, a.T, acc, PRECISION, IMPRECISE_K, UPCAST)
            else:
                acc = multiply(a, b, acc, PRECISION, IMPRECISE_K, UPCAST)
            if SUM_STEPS > 0:  # noqa: SIM102  (a constant)
                if (step - first_step) % SUM_STEPS == SUM_STEPS - 1:
                    whole += acc
                    acc = tl.zeros_like(acc)
        if SUM_STEPS > 0:
            acc += whole
        if IS_SWAPPED:
            acc = acc.T
        offs_m = row + tl.arange(0, BLOCK_M)
        if STORE_BOXES:
            for half in tl.static_range(HALVES):
                at_n = column + half * (BLOCK_N // HALVES)
                part = half_of(acc, half) if HALVES == 2 else acc
                if not IS_PLAIN:
                    offs_half = at_n + tl.arange(0, BLOCK_N // HALVES)
                    part = finish_as(part, offs_m, offs_half, m, n, epilogue, OUT_TYPE, IN_PTX)
                store_box(out_desc, entry, row, at_n, part.to(OUT_TYPE))
        else:
            is_last = tl.num_programs(1) == 1
            if not is_last:
                within = number(tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N))
                acc, is_last = combine_splits(acc, within, partial_ptr, count_ptr, tile)
            offs_n = column + tl.arange(0, BLOCK_N)
            out = finish_as(acc, offs_m, offs_n, m, n, epilogue, OUT_TYPE, IN_PTX)
            first = tl.cast(entry, tl.int64) * stride_oz
            mine = tl.where(is_last, m, 0)
            store_typed(out_ptr, out, offs_m, offs_n, mine, n, first, stride_om, 1, OUT_TYPE, IN_PIECES)


# ── few rows ──────────────────────────────────────────────────────────────────────────────────────

# With M ≤ 4 each element of `b` is used at most four times, so that reading `b` is all that counts. Threads then
# multiply the elements that they have read. They keep one sum for each element of a block of `b`, and add those up
# once, at the end.


@triton.jit
def load_row(a_ptr, row, m, stride_am, offs_k, last_k, ZERO: tl.constexpr, ACC: tl.constexpr):
    """Elements `offs_k` of row `row` of `a`, zero from `last_k` on; the last row where there are fewer."""
    a_ptr += tl.minimum(row, m - 1).to(tl.int64) * stride_am
    return tl.load(a_ptr + offs_k, mask=offs_k < last_k, other=ZERO).to(ACC)


@triton.jit
def matmul_vector_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    partial_ptr,
    count_ptr,
    m,
    n,
    k,
    stride_am,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    batch_inner,
    stride_az,
    stride_ay,
    stride_bz,
    stride_by,
    stride_oz,
    stride_oy,
    out_kind,
    bias_kind,
    a_scale_step,
    b_scale_step,
    activation,
    B_MAJOR: tl.constexpr,
    IN_PIECES: tl.constexpr,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    IN_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Up to BLOCK_M (1, 2 or 4) rows, whose elements follow one another. Grid: (column blocks × entries, splits of K).

    Arguments are those of `matmul_kernel`; sums are float32, int32 for int8. STAGES blocks of `b` are in flight.
    """
    await_previous(OVERLAP)
    n = n * N_UNIT
    k = k * K_UNIT
    num_tiles = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    entry = pid // num_tiles
    offs_n = (pid % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_steps = (stride_az * IN_UNIT, stride_ay * IN_UNIT)
    b_steps = (stride_bz * IN_UNIT, stride_by * IN_UNIT)
    a_ptr, b_ptr, outer, inner = locate_entry(a_ptr, b_ptr, entry, batch_inner, a_steps, b_steps)
    first_k, last_k = share_of_k(k, BLOCK_K)
    stride_am = stride_am * IN_UNIT

    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    ZERO: tl.constexpr = 0 if IS_INTEGER else 0.0
    IS_ROWS: tl.constexpr = B_MAJOR == "k"
    ALONG: tl.constexpr = 1 if IS_ROWS else 0
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_K) if IS_ROWS else (BLOCK_K, BLOCK_N)
    acc0 = tl.zeros(SHAPE, dtype=ACC)
    if BLOCK_M >= 2:
        acc1 = tl.zeros(SHAPE, dtype=ACC)
    if BLOCK_M == 4:
        acc2 = tl.zeros(SHAPE, dtype=ACC)
        acc3 = tl.zeros(SHAPE, dtype=ACC)
    for start in tl.range(first_k, last_k, BLOCK_K, num_stages=STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        if IS_ROWS:
            columns = tl.minimum(offs_n, n - 1).to(tl.int64) * (stride_bn * IN_UNIT)
            b_ptrs = b_ptr + columns[:, None] + offs_k[None, :]
            b = tl.load(b_ptrs, mask=(offs_k < last_k)[None, :], other=ZERO).to(ACC)
        else:
            b_ptrs = b_ptr + offs_k.to(tl.int64)[:, None] * (stride_bk * IN_UNIT) + offs_n[None, :]
            b = tl.load(b_ptrs, mask=(offs_k < last_k)[:, None] & (offs_n < n)[None, :], other=ZERO).to(ACC)
        acc0 += b * tl.expand_dims(load_row(a_ptr, 0, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)
        if BLOCK_M >= 2:
            acc1 += b * tl.expand_dims(load_row(a_ptr, 1, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)
        if BLOCK_M == 4:
            acc2 += b * tl.expand_dims(load_row(a_ptr, 2, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)
            acc3 += b * tl.expand_dims(load_row(a_ptr, 3, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)

    offs_m = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC) + tl.sum(acc0, axis=ALONG)[None, :]
    if BLOCK_M >= 2:
        acc = tl.where((offs_m == 1)[:, None], tl.sum(acc1, axis=ALONG)[None, :], acc)
    if BLOCK_M == 4:
        acc = tl.where((offs_m == 2)[:, None], tl.sum(acc2, axis=ALONG)[None, :], acc)
        acc = tl.where((offs_m == 3)[:, None], tl.sum(acc3, axis=ALONG)[None, :], acc)
    is_last = tl.num_programs(1) == 1
    if not is_last:
        within = number(tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N))
        acc, is_last = combine_splits(acc, within, partial_ptr, count_ptr, pid)
    epilogue = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation)
    mine = tl.where(is_last, m, 0)
    first = outer * stride_oz + inner * stride_oy
    store_any(acc, offs_m, offs_n, mine, n, out_ptr, out_kind, epilogue, first, stride_om, stride_on, IN_PIECES, IN_PTX)
