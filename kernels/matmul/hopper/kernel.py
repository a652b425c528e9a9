# mypy: ignore-errors
"""The matmul kernel for Hopper: one warp loads, groups of four warps multiply. Jit functions only.

Written in Gluon, Triton's lower level, whose matrix instructions (wgmma) run while their warps go on.
`matmul_tma_kernel` computes the same for all devices with descriptors, and leaves to the compiler what overlaps. Here
loads of the next tile, the product of this one and the stores of the last run at a time.

The operand whose rows are split among consumers is called left, the other right. Left is `a`, or `b` where
`is_swapped`: then the tile is computed transposed, and its columns, not its rows, are 64, 128 or 192. The right side of a
tile may be any multiple of 8. Shapes of the compiler are powers of two. So 144 has a tail, a box and sums of its own: 128
and 16. 112 has a box of 112 rows in a place for 128, and matrix instructions of 112 columns (`use_columns`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewire.kernels.matmul.epilogue import activate
from tilewire.kernels.matmul.hopper import stages  # noqa: F401  (changes the text of programs)
from tilewire.kernels.matmul.hopper.boxes import (
    ROWS,
    allocate_boxes,
    allocate_right,
    is_loader,
    left_of,
    load_step,
    matrix_of,
    right_box,
    right_of,
)
from tilewire.kernels.matmul.hopper.clusters import arrive_at_both, begin_cluster, send, tell_others
from tilewire.kernels.matmul.hopper.narrowing import use_columns
from tilewire.kernels.matmul.kernel import LINE, start_of, steps_of_share, tile_coordinates
from tilewire.kernels.runtime.elements import floats_of_bits, load_bits
from tilewire.kernels.runtime.pdl import bring_up_next, wait_for_previous

# Registers of a thread of the warps that load.
LOADER_REGISTERS = gl.constexpr(32)


@gluon.jit
def next_slot(slot, phase, FORM: gl.constexpr):
    """The slot of the ring that follows `slot`, and the phase of its barriers."""
    slot += 1
    is_round = slot == FORM.stages
    return gl.where(is_round, 0, slot), gl.where(is_round, phase ^ 1, phase)


@gluon.jit
def count_groups(m, n, FORM: gl.constexpr):
    """Rows and columns of tiles; of groups of tiles where programs share an operand."""
    rows = gl.cdiv(gl.cdiv(m, FORM.block_m), FORM.sharing_rows)
    columns = gl.cdiv(gl.cdiv(n, FORM.block_n), FORM.sharing_columns)
    return rows, columns


@gluon.jit
def count_tiles(sizes, FORM: gl.constexpr):
    """Tiles of all products. `sizes` are (m, n, k, number of products)."""
    m, n, _, batch = sizes
    rows, columns = count_groups(m, n, FORM)
    return rows * columns * batch * FORM.sharers


@gluon.jit
def find_tile(tile, sizes, FORM: gl.constexpr):
    """Product that tile number `tile` is of, and its first row of the left and of the right operand."""
    m, n, _, _ = sizes
    num_pid_m, num_pid_n = count_groups(m, n, FORM)
    entry = 0
    if FORM.sharers > 1:
        own = tile % FORM.sharers
        tile = tile // FORM.sharers
    if FORM.is_batched:
        entry = tile // (num_pid_m * num_pid_n)
        tile = tile % (num_pid_m * num_pid_n)
    pid_m, pid_n = tile_coordinates(tile, num_pid_m, num_pid_n, FORM.group_m)
    # The last tile of a side may be there more than once, with the same sums.
    if FORM.sharing_rows > 1:
        pid_m = gl.minimum(pid_m * FORM.sharers + own, gl.cdiv(m, FORM.block_m) - 1)
    if FORM.sharing_columns > 1:
        pid_n = gl.minimum(pid_n * FORM.sharers + own, gl.cdiv(n, FORM.block_n) - 1)
    A_IS_K: gl.constexpr = FORM.right_is_k if FORM.is_swapped else FORM.left_is_k
    left = start_of(pid_m, m, FORM.block_m, 1 if A_IS_K else LINE)
    right = start_of(pid_n, n, FORM.block_n, LINE)
    if FORM.is_swapped:
        left, right = right, left
    return entry, left, right


@gluon.jit
def steps_of(k, FORM: gl.constexpr):
    """The steps of K that this program multiplies: the first, and the one behind the last."""
    first = 0
    end = gl.cdiv(k, FORM.block_k)
    if FORM.splits > 1:
        length = steps_of_share(k, FORM.block_k)
        first = gl.program_id(1) * length
        end = gl.minimum(end, first + length)
    return first, end


@gluon.jit
def load(descs, whole_descs, whole_k, rings, barriers, sizes, steps, FORM: gl.constexpr, OVERLAP: gl.constexpr):
    """The loading warp: fills slot after slot of the ring, each as soon as every consumer has emptied it.

    At the end it lets the next kernel be brought up. `steps` are 1, or 0 where all products have the same left or right
    operand. Steps of K up to `whole_k` are loaded through `whole_descs`.
    """
    left_desc, right_desc, tail_desc = descs
    filled, emptied, _ = barriers
    LEFT_BYTES: gl.constexpr = FORM.consumers * left_desc.block_type.nbytes
    RIGHT_BYTES: gl.constexpr = right_desc.block_type.nbytes // FORM.main * FORM.columns
    TAIL_BYTES: gl.constexpr = tail_desc.block_type.nbytes // FORM.tail * FORM.tail_columns if FORM.tail else 0
    NUM_BYTES: gl.constexpr = LEFT_BYTES + RIGHT_BYTES + TAIL_BYTES
    slot = 0
    phase = 1
    first_step, end_step = steps_of(sizes[2], FORM)
    for tile in range(gl.program_id(0), count_tiles(sizes, FORM), gl.num_programs(0)):
        entry, left, right = find_tile(tile, sizes, FORM)
        entries = (entry * steps[0], entry * steps[1])
        for step in range(first_step, end_step):
            at = step * FORM.block_k
            mbarrier.wait(emptied.index(slot), phase)
            bar = filled.index(slot)
            mbarrier.expect(bar, NUM_BYTES)
            if FORM.left_is_k and FORM.right_is_k:
                load_step(descs, rings, entries, (left, right), at, slot, bar, FORM)
            elif at + FORM.block_k <= whole_k:
                load_step(whole_descs, rings, entries, (left, right), at, slot, bar, FORM)
            else:
                load_step(descs, rings, entries, (left, right), at, slot, bar, FORM)
            slot, phase = next_slot(slot, phase, FORM)
    if FORM.sharers > 1:
        # The others say here that they have read what this one loaded.
        for _ in range(FORM.stages):
            mbarrier.wait(emptied.index(slot), phase)
            slot, phase = next_slot(slot, phase, FORM)
    # The next kernel finds no room before, and was up to 6 % slower where it was brought up earlier.
    bring_up_next(OVERLAP)


@gluon.jit
def empty_slot(emptied, slot, is_read, FORM: gl.constexpr):
    """Say that a consumer has read a slot, if it has: to this program, and to the one that loads what is shared of it."""
    if FORM.sharers > 1:
        loader = gl.where(is_loader(slot, FORM), -1, slot % FORM.sharers)
        arrive_at_both(emptied.index(slot), loader, is_read)
    else:
        mbarrier.arrive(emptied.index(slot), pred=is_read)


@gluon.jit
def narrow_products(COLUMNS: gl.constexpr, FORM: gl.constexpr):
    """Have products from here on compute COLUMNS columns. Nothing where all products of the tile compute all of theirs."""
    if FORM.columns + FORM.tail_columns < FORM.main + FORM.tail:
        use_columns(COLUMNS)


@gluon.jit
def split_columns(acc):
    """The left and the right half of a consumer's sums."""
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def fetch_vectors(row, column, sizes, epilogue, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Start loading what follows the product of HEIGHT rows from `row` and WIDTH columns from `column`; see `finish`.

    In this layout each element is loaded once. As the sums lie, all threads of a column would load the same.
    """
    m, n, _, _ = sizes
    bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, _ = epilogue
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs_m = row + gl.arange(0, HEIGHT, LAYOUT)
    offs_n = column + gl.arange(0, WIDTH, LAYOUT)
    a_scale = gl.load(a_scale_ptr + offs_m * a_scale_step, mask=(offs_m < m) & (a_scale_step >= 0), other=0.0)
    b_scale = gl.load(b_scale_ptr + offs_n * b_scale_step, mask=(offs_n < n) & (b_scale_step >= 0), other=0.0)
    bias = load_bits(bias_ptr, bias_kind, offs_n, (offs_n < n) & (bias_kind > 0))
    return a_scale, b_scale, bias


@gluon.jit
def finish(part, vectors, epilogue):
    """The same as `apply_epilogue`, which loads its vectors where it uses them. These `fetch_vectors` has loaded before."""
    _, _, _, bias_kind, a_scale_step, b_scale_step, activation = epilogue
    a_scale, b_scale, bias = vectors
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, part.type.layout)
    if a_scale_step >= 0:
        part = part * gl.convert_layout(a_scale, OF_ROWS)[:, None]
    if b_scale_step >= 0:
        part = part * gl.convert_layout(b_scale, OF_COLUMNS)[None, :]
    if bias_kind > 0:
        part = part + gl.convert_layout(floats_of_bits(bias_kind, bias), OF_COLUMNS)[None, :]
    if activation > 0:
        part = activate(part, activation, True)
    return part


@gluon.jit
def place_of(left, right, FORM: gl.constexpr):
    """Row and column of the output at row `left` of the left and `right` of the right operand."""
    if FORM.is_swapped:
        left, right = right, left
    return left, right


@gluon.jit
def fetch_halves(left, right, sizes, epilogue, LENGTH: gl.constexpr, HALVES: gl.constexpr, FORM: gl.constexpr):
    """`fetch_vectors` for each half of a consumer's sums, which has LENGTH rows of the right operand."""
    vectors = ()
    for half in gl.static_range(0 if FORM.is_plain else HALVES):
        row, column = place_of(left, right + half * LENGTH, FORM)
        if FORM.is_swapped:
            vectors += (fetch_vectors(row, column, sizes, epilogue, LENGTH, ROWS),)
        else:
            vectors += (fetch_vectors(row, column, sizes, epilogue, ROWS, LENGTH),)
    return vectors


@gluon.jit
def store_elements(part, out, row, column, COUNT: gl.constexpr, FORM: gl.constexpr):
    """Store `part` element by element, its first at `row` and `column`. COUNT rows of the right operand are the tile's.

    `out` is (pointer to bytes, elements from row to row and from column to column, rows, columns). Threads of a warp store
    neighbours in a row.
    """
    out_ptr, stride_om, stride_on, m, n = out
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    part = gl.convert_layout(part, LAYOUT)
    rows = gl.arange(0, part.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, part.shape[1], gl.SliceLayout(0, LAYOUT))
    in_rows = row + rows < m
    if FORM.is_swapped and part.shape[0] > COUNT:
        in_rows = in_rows & (rows < COUNT)
    in_columns = column + columns < n
    firsts = out_ptr.to(gl.pointer_type(FORM.out_type)) + (row + rows).to(gl.int64) * stride_om
    ptrs = firsts[:, None] + ((column + columns).to(gl.int64) * stride_on)[None, :]
    gl.store(ptrs, part, mask=in_rows[:, None] & in_columns[None, :])


@gluon.jit
def store_part(
    acc,
    vectors,
    out_desc,
    places,
    out,
    at,
    epilogue,
    CONSUMER: gl.constexpr,
    HALVES: gl.constexpr,
    COUNT: gl.constexpr,
    FORM: gl.constexpr,
):
    """Finish a consumer's sums and start storing them in HALVES parts. `at` is (product, row of left, of right operand).

    COUNT rows of the right operand are the tile's. `out` is that of `store_elements`.
    """
    entry, left, right = at
    LENGTH: gl.constexpr = acc.shape[1] // HALVES
    if HALVES == 2:
        first, second = split_columns(acc)
    for half in gl.static_range(HALVES):
        if HALVES == 1:
            part = acc
        elif half == 0:
            part = first
        else:
            part = second
        row, column = place_of(left, right + half * LENGTH, FORM)
        if FORM.is_swapped:
            part = part.permute((1, 0))
        if not FORM.is_plain:
            part = finish(part, vectors[half], epilogue)
        if FORM.stores_boxes:
            place = places.index(CONSUMER)
            # The store before this one must have read the place.
            tma.store_wait(0)
            matrix_of(place).store(part.to(FORM.out_type))
            fence_async_shared()
            if FORM.is_batched:
                tma.async_copy_shared_to_global(out_desc, [entry, row, column], place)
            else:
                tma.async_copy_shared_to_global(out_desc, [row, column], place)
        else:
            store_elements(part.to(FORM.out_type), out, row, column, COUNT - half * LENGTH, FORM)


@gluon.jit
def allocate_inbox(FORM: gl.constexpr):
    """Shared memory for the sums that programs of a cluster send each other: a place for each consumer, for all but one.

    As (place, columns / 8, rows, 8): threads of a warp write one run of memory, and columns that no one needs are the last.
    """
    SHAPE: gl.constexpr = [FORM.consumers * (FORM.splits - 1), FORM.main // 8, ROWS, 8]
    return gl.allocate_shared_memory(gl.float32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def share_sums(acc, inbox, arrived, CONSUMER: gl.constexpr, OWNER: gl.constexpr, FORM: gl.constexpr):
    """Returns a consumer's sums, which are whole in program OWNER of a cluster. The others send it theirs.

    It adds them up in order: its own and the first program's give the same either way, so OWNER is 0 or 1. Each sends once, so
    a program must have one tile.
    """
    OTHERS: gl.constexpr = FORM.splits - 1
    NUM_BYTES: gl.constexpr = ROWS * FORM.columns * 4
    part = gl.program_id(1)
    bar = arrived.index(CONSUMER)
    sums = acc.reshape([ROWS, FORM.main // 8, 8]).permute((1, 0, 2))
    if part == OWNER:
        mbarrier.expect(bar, OTHERS * NUM_BYTES)
        mbarrier.wait(bar, 0)
        tell_others(bar, OWNER)
        for other in gl.static_range(OTHERS):
            sums += inbox.index(CONSUMER * OTHERS + other).load(sums.type.layout)
    else:
        place = inbox.index(CONSUMER * OTHERS + part - (part > OWNER).to(gl.int32))
        place.store(sums)
        fence_async_shared()
        send(place, bar, NUM_BYTES, OWNER)
        # The owner says here that the copy has read this program's memory.
        mbarrier.wait(bar, 0)
    return gl.convert_layout(sums.permute((1, 0, 2)).reshape([ROWS, FORM.main]), acc.type.layout)


@gluon.jit
def begin_product(rings, filled, slot, phase, sums, USE: gl.constexpr, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """Begin the product of a slot, as soon as that is filled: added to `sums`, or with USE False in their place."""
    left_ring, right_ring, _ = rings
    mbarrier.wait(filled.index(slot), phase)
    left_tile = left_of(left_ring, slot, CONSUMER, FORM)
    right_tile = right_of(right_box(right_ring, slot, FORM), FORM)
    narrow_products(FORM.columns, FORM)
    return warpgroup_mma(left_tile, right_tile, sums, use_acc=USE, is_async=True)


@gluon.jit
def begin_tail(rings, slot, sums, USE: gl.constexpr, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """The same for the tail, behind `begin_product`."""
    left_tile = left_of(rings[0], slot, CONSUMER, FORM)
    right_tile = right_of(rings[2].index(slot), FORM)
    narrow_products(FORM.tail_columns, FORM)
    return warpgroup_mma(left_tile, right_tile, sums, use_acc=USE, is_async=True)


@gluon.jit
def promote_steps(rings, barriers, slot, phase, acc, num_steps, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """Returns `acc` with the products of so many steps, each summed by itself, and the slot and phase that follow.

    Two steps are multiplied at a time, so that the sums of the first are added while the second runs. The assembler allows
    no more: it lets all instructions wait where sums are added of products that began in another turn of the loop.
    """
    filled, emptied, _ = barriers
    MAIN: gl.constexpr = FORM.main
    LAYOUT: gl.constexpr = acc.type.layout
    zeros = gl.zeros([ROWS, MAIN], gl.float32, LAYOUT)
    for _ in range(num_steps // 2):
        first = begin_product(rings, filled, slot, phase, zeros, False, CONSUMER, FORM)
        other, phase = next_slot(slot, phase, FORM)
        second = begin_product(rings, filled, other, phase, zeros, False, CONSUMER, FORM)
        first, second = warpgroup_mma_wait(1, deps=(first, second))
        empty_slot(emptied, slot, True, FORM)
        acc += first
        second = warpgroup_mma_wait(0, deps=(second,))
        empty_slot(emptied, other, True, FORM)
        acc += second
        slot, phase = next_slot(other, phase, FORM)
    if num_steps % 2 == 1:
        first = begin_product(rings, filled, slot, phase, zeros, False, CONSUMER, FORM)
        first = warpgroup_mma_wait(0, deps=(first,))
        empty_slot(emptied, slot, True, FORM)
        acc += first
        slot, phase = next_slot(slot, phase, FORM)
    return acc, slot, phase


@gluon.jit
def multiply(
    out_descs, rings, barriers, places, out, sizes, epilogue, inbox, CONSUMER: gl.constexpr, FORM: gl.constexpr
):
    """A consumer, four warps: multiplies its 64 rows of each slot, empties the slot, and stores its part of the tile."""
    filled, emptied, arrived = barriers
    MAIN: gl.constexpr = FORM.main
    TAIL: gl.constexpr = FORM.tail
    COLUMNS: gl.constexpr = FORM.columns
    TAIL_COLUMNS: gl.constexpr = FORM.tail_columns
    WIDTH: gl.constexpr = 256 // rings[0].dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, WIDTH])
    zeros = gl.zeros([ROWS, MAIN], gl.float32, LAYOUT)
    if TAIL:
        TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, WIDTH])
        tail_zeros = gl.zeros([ROWS, TAIL], gl.float32, TAIL_LAYOUT)
    slot = 0
    phase = 0
    last = 0
    first_step, end_step = steps_of(sizes[2], FORM)
    for tile in range(gl.program_id(0), count_tiles(sizes, FORM), gl.num_programs(0)):
        acc = zeros
        if TAIL:
            tail_acc = tail_zeros
        num_steps = end_step - first_step
        if FORM.promotes == 2:
            acc, slot, phase = promote_steps(rings, barriers, slot, phase, acc, num_steps, CONSUMER, FORM)
            num_steps = 0
        for step in range(num_steps):
            if FORM.promotes:
                sums = begin_product(rings, filled, slot, phase, zeros, False, CONSUMER, FORM)
                if TAIL:
                    tail_sums = begin_tail(rings, slot, tail_zeros, False, CONSUMER, FORM)
                    sums, tail_sums = warpgroup_mma_wait(0, deps=(sums, tail_sums))
                    tail_acc += tail_sums
                else:
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                empty_slot(emptied, slot, True, FORM)
                acc += sums
            else:
                # The products of one step stay in flight. Those of the one before have read their slot.
                acc = begin_product(rings, filled, slot, phase, acc, True, CONSUMER, FORM)
                if TAIL:
                    tail_acc = begin_tail(rings, slot, tail_acc, True, CONSUMER, FORM)
                    acc, tail_acc = warpgroup_mma_wait(2, deps=(acc, tail_acc))
                else:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                empty_slot(emptied, last, step > 0, FORM)
            last = slot
            slot, phase = next_slot(slot, phase, FORM)
        # While the last products are in flight, unless sums are promoted.
        entry, left, right = find_tile(tile, sizes, FORM)
        left += CONSUMER * ROWS
        vectors = fetch_halves(left, right, sizes, epilogue, MAIN // FORM.halves, FORM.halves, FORM)
        if TAIL:
            tail_vectors = fetch_halves(left, right + MAIN, sizes, epilogue, TAIL, 1, FORM)
        if not FORM.promotes:
            if TAIL:
                acc, tail_acc = warpgroup_mma_wait(0, deps=(acc, tail_acc))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            # A program's share of K may be empty.
            empty_slot(emptied, last, end_step > first_step, FORM)
        at = (entry, left, right)
        is_whole = True
        if FORM.splits > 1:
            gl.static_assert(TAIL == 0)
            # Every second consumer's sums are the second program's, so both send and add up half of the tile.
            OWNER: gl.constexpr = CONSUMER % 2
            acc = share_sums(acc, inbox, arrived, CONSUMER, OWNER, FORM)
            is_whole = gl.program_id(1) == OWNER
        if is_whole:
            store_part(acc, vectors, out_descs[0], places[0], out, at, epilogue, CONSUMER, FORM.halves, COLUMNS, FORM)
        if TAIL:
            at = (entry, left, right + MAIN)
            store_part(
                tail_acc, tail_vectors, out_descs[1], places[1], out, at, epilogue, CONSUMER, 1, TAIL_COLUMNS, FORM
            )
    if FORM.stores_boxes:
        tma.store_wait(0)


@gluon.jit
def matmul_wgmma_kernel(
    a_desc,
    b_desc,
    out_desc,
    tail_desc,
    out_tail_desc,
    a_whole_desc,
    b_whole_desc,
    tail_whole_desc,
    out_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    m,
    n,
    k,
    batch,
    step_a,
    step_b,
    whole_k,
    stride_om,
    stride_on,
    bias_kind,
    a_scale_step,
    b_scale_step,
    activation,
    FORM: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Products of 16-bit or float8 operands, which descriptors can describe.

    Grid: (programs, splits of K). Each program takes every `programs`-th tile; without splits they are at most as many as run
    at a time, with splits one for each tile. Programs that share the K of a tile are a cluster; see `share_sums`. One warp
    loads steps of K into a ring in shared memory, which goes on while a tile is stored. Each consumer multiplies 64 rows of the
    left operand. `tail_desc` and `out_tail_desc` describe the right operand and the output by boxes of the tail, and are None
    without one. Where rows of the output begin anywhere, it has `out_ptr` instead of descriptors, and strides in
    elements. Reads past the end give zero.

    A box takes longer to load where rows end in it. So operands whose rows do not lie along K have a second descriptor,
    `…_whole_desc`: its rows are whole lines long, and reach into the next. The last rows, which would reach out of the
    operand, are not part of it. It describes those before `whole_k`. What is read too much meets columns that are not
    stored. Other arguments are those of `matmul_tma_kernel`.

    Where FORM has sharers, the first axis of the grid has a multiple of them. So many that follow one another are a cluster:
    they load the boxes of one operand in turns, each for all, and have tiles below or beside each other. See `clusters.py`.
    """
    if FORM.is_swapped:
        left_desc = b_desc
        right_desc = a_desc
        left_whole_desc = b_whole_desc
        right_whole_desc = a_whole_desc
        steps = (step_b, step_a)
    else:
        left_desc = a_desc
        right_desc = b_desc
        left_whole_desc = a_whole_desc
        right_whole_desc = b_whole_desc
        steps = (step_a, step_b)
    left_ring = allocate_boxes(left_desc, FORM.stages * FORM.consumers)
    right_ring = allocate_right(right_desc, FORM)
    tail_ring = right_ring
    if FORM.tail:
        tail_ring = allocate_boxes(tail_desc, FORM.stages)
    else:
        tail_desc = right_desc
        out_tail_desc = out_desc
    if FORM.left_is_k:
        left_whole_desc = left_desc
    if FORM.right_is_k:
        right_whole_desc = right_desc
    if FORM.right_is_k or not FORM.tail:
        tail_whole_desc = tail_desc
    places = right_ring
    tail_places = right_ring
    if FORM.stores_boxes:
        places = allocate_boxes(out_desc, FORM.consumers)
        tail_places = places
        # A part of the tile as large as the tail has a place that both can use in turns.
        if FORM.tail and FORM.tail != FORM.main // FORM.halves:
            tail_places = allocate_boxes(out_tail_desc, FORM.consumers)
    else:
        out_desc = right_desc
        out_tail_desc = right_desc
    filled = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = FORM.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        if FORM.sharers == 1:
            mbarrier.init(emptied.index(stage), count=FORM.consumers)
        elif is_loader(stage, FORM):
            mbarrier.init(emptied.index(stage), count=FORM.consumers * FORM.sharers)
        else:
            mbarrier.init(emptied.index(stage), count=FORM.consumers)
    inbox = right_ring
    arrived = emptied
    if FORM.splits > 1:
        inbox = allocate_inbox(FORM)
        arrived = gl.allocate_shared_memory(gl.int64, [FORM.consumers, 1], mbarrier.MBarrierLayout())
        CONSUMERS: gl.constexpr = FORM.consumers
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.init(arrived.index(consumer), count=1)
        begin_cluster(1, FORM.splits)
    if FORM.sharers > 1:
        begin_cluster(FORM.sharers, 1)
    wait_for_previous(OVERLAP)
    descs = (left_desc, right_desc, tail_desc)
    whole_descs = (left_whole_desc, right_whole_desc, tail_whole_desc)
    out_descs = (out_desc, out_tail_desc)
    places = (places, tail_places)
    rings = (left_ring, right_ring, tail_ring)
    barriers = (filled, emptied, arrived)
    sizes = (m, n, k, batch)
    out = (out_ptr, stride_om, stride_on, m, n)
    epilogue = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation)
    if FORM.consumers == 1:
        gl.warp_specialize(
            [
                (multiply, (out_descs, rings, barriers, places, out, sizes, epilogue, inbox, 0, FORM)),
                (load, (descs, whole_descs, whole_k, rings, barriers, sizes, steps, FORM, OVERLAP)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    elif FORM.consumers == 2:
        gl.warp_specialize(
            [
                (multiply, (out_descs, rings, barriers, places, out, sizes, epilogue, inbox, 0, FORM)),
                (multiply, (out_descs, rings, barriers, places, out, sizes, epilogue, inbox, 1, FORM)),
                (load, (descs, whole_descs, whole_k, rings, barriers, sizes, steps, FORM, OVERLAP)),
            ],
            [4, 1],
            [FORM.registers, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (out_descs, rings, barriers, places, out, sizes, epilogue, inbox, 0, FORM)),
                (multiply, (out_descs, rings, barriers, places, out, sizes, epilogue, inbox, 1, FORM)),
                (multiply, (out_descs, rings, barriers, places, out, sizes, epilogue, inbox, 2, FORM)),
                (load, (descs, whole_descs, whole_k, rings, barriers, sizes, steps, FORM, OVERLAP)),
            ],
            [4, 4, 1],
            [FORM.registers, FORM.registers, LOADER_REGISTERS],
        )
