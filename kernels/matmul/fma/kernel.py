# mypy: ignore-errors
"""The matmul kernel for the scalar units of NVIDIA devices: float32 as it is. Jit functions only.

Written in Gluon, Triton's lower level. The compiler's own product of float32 gives a thread 4 × 4 sums, so that reading
shared memory is the limit. Here a thread has up to 8 × 16.

A row of `a` or a column of `b` is called a line. Steps of K lie in shared memory as (K, lines), whatever their order in
global memory. So a thread reads four lines of one K at a time, in four registers that follow one another. Lines that are
contiguous are copied there in the background, several steps ahead. Others pass through registers, one step ahead, and
are transposed on the way.

Two orders keep a transposed step from being written to one bank. Words of four lines are exchanged within eight K
(swizzled). And those eight K are not neighbours: a thread holds four that are, and its neighbour the next four.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tilewire.kernels.matmul.epilogue import store_any
from tilewire.kernels.matmul.kernel import combine_splits, locate_entry, number, steps_of_share, tile_coordinates
from tilewire.kernels.runtime.pdl import await_previous

# Lines of a thread that follow one another: 16 bytes.
WORD = gl.constexpr(4)
# K of a slab, which a thread reads at a time.
SLAB = gl.constexpr(8)


@gluon.constexpr_function
def sums_layout(warps_m, warps_n):
    """Which thread has which sums of a tile."""
    return gl.BlockedLayout([4, 4], [4, 8], [warps_m, warps_n], [1, 0])


@gluon.constexpr_function
def slab_layout(sums, axis, lines):
    """Which thread reads which lines of a slab (lines, K): those of its sums along `axis`, with all K."""
    step = WORD.value
    threads = []
    for counts in (sums.threads_per_warp, sums.warps_per_cta):
        own = []
        for _ in range(counts[axis].bit_length() - 1):
            own.append([step % lines, 0])
            step *= 2
        others = [[0, 0]] * (counts[1 - axis].bit_length() - 1)
        # Threads are numbered along the second dimension of a tile first.
        threads.append(others + own if axis == 0 else own + others)
    registers = [[1, 0], [2, 0], [0, 1], [0, 2], [0, 4]]
    while step < lines:
        registers.append([step, 0])
        step *= 2
    return gl.DistributedLinearLayout(registers, *threads, [], [lines, SLAB.value])


@gluon.constexpr_function
def step_layout(lines):
    """How a step (K, lines) lies in shared memory."""
    return gl.SwizzledSharedLayout(WORD.value, 1, min(SLAB.value, lines // WORD.value), [1, 0])


@gluon.constexpr_function
def copy_layout(lines, block_k, is_by_line, num_warps):
    """Which thread copies what of a step (K, lines): 16 bytes, neighbours what follows in memory."""
    if is_by_line:
        threads = min(32, block_k // WORD.value)
        warps = min(num_warps, lines * threads // 32)
        return gl.BlockedLayout([WORD.value, 1], [threads, 32 // threads], [num_warps // warps, warps], [0, 1])
    threads = min(32, lines // WORD.value)
    return gl.BlockedLayout([1, WORD.value], [32 // threads, threads], [num_warps, 1], [1, 0])


@gluon.jit
def locate(first, count, stride, first_k, LAYOUT: gl.constexpr, SHAPE: gl.constexpr, BY_LINE: gl.constexpr):
    """Offsets of the first step of the lines from `first` on, the K of each element, and which lines there are of `count`.

    `stride` is that of lines where each is contiguous (BY_LINE), else that of K. SHAPE is (length of a step, lines).
    Lines past the end are clamped or masked. Their sums are never stored.
    """
    BLOCK_K: gl.constexpr = SHAPE[0]
    at_k = gl.arange(0, BLOCK_K, gl.SliceLayout(1, LAYOUT))[:, None]
    lines = (first + gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT)))[None, :]
    if BY_LINE:
        lines = gl.minimum(lines, count - 1)
        offsets = lines.to(gl.int64) * stride + (first_k + at_k)
        is_there = lines >= 0
    else:
        # The order in which `place` stores the others.
        if BLOCK_K == 16:
            at_k = at_k % 8 // 2 * 4 + at_k // 8 * 2 + at_k % 2
        else:
            at_k = at_k // 32 * 32 + at_k % 8 * 4 + at_k % 32 // 8
        offsets = lines + (first_k + at_k).to(gl.int64) * stride
        # 16 bytes are there or not as a whole. What follows the last line is not used.
        is_there = lines // WORD * WORD < count
    return offsets, at_k, is_there


@gluon.jit
def fetch(ptrs, at_k, is_there, num_k, step, BY_LINE: gl.constexpr):
    """Start copying the next `num_k` elements of K to the place `step`; line by line to registers, which are returned."""
    value = 0.0
    if BY_LINE:
        # What follows the end of a line may be anything, and zero times anything need not be zero.
        value = gl.load(ptrs, mask=is_there & (at_k // WORD * WORD < num_k), other=0.0)
        value = gl.where(at_k < num_k, value, 0.0)
    else:
        async_copy.async_copy_global_to_shared(step, ptrs, mask=is_there & (at_k < num_k))
    return value


@gluon.jit
def place(value, step, BY_LINE: gl.constexpr):
    """Store what `fetch` returned."""
    if BY_LINE:
        BLOCK_K: gl.constexpr = value.shape[0]
        LINES: gl.constexpr = value.shape[1]
        if BLOCK_K == 16:
            value = value.reshape([4, 2, 2, LINES]).permute((1, 0, 2, 3))
        else:
            value = value.reshape([BLOCK_K // 32, 8, 4, LINES]).permute((0, 2, 1, 3))
        step.store(value.reshape([BLOCK_K, LINES]))


@gluon.jit
def start(ptrs, at_k, is_there, num_k, step, ring, AHEAD: gl.constexpr, BY_LINE: gl.constexpr):
    """Fetch and place the first AHEAD steps. Returns the pointers to the next."""
    BLOCK_K: gl.constexpr = at_k.shape[0]
    for stage in gl.static_range(AHEAD):
        value = fetch(ptrs, at_k, is_there, num_k - stage * BLOCK_K, ring.index(stage), BY_LINE)
        place(value, ring.index(stage), BY_LINE)
        async_copy.commit_group()
        ptrs += step
    return ptrs


@gluon.jit
def load_slab(slabs, number, LAYOUT: gl.constexpr, LINE: gl.constexpr):
    """Slab `number` as its eight K: tensors of one element a line."""
    slab = slabs.index(number).permute((1, 0)).load(LAYOUT)
    LINES: gl.constexpr = slab.shape[0]
    even, odd = slab.reshape([LINES, 4, 2]).split()
    k04, k26 = even.reshape([LINES, 2, 2]).split()
    k15, k37 = odd.reshape([LINES, 2, 2]).split()
    k0, k4 = k04.split()
    k1, k5 = k15.split()
    k2, k6 = k26.split()
    k3, k7 = k37.split()
    return (
        gl.convert_layout(k0, LINE, assert_trivial=True),
        gl.convert_layout(k1, LINE, assert_trivial=True),
        gl.convert_layout(k2, LINE, assert_trivial=True),
        gl.convert_layout(k3, LINE, assert_trivial=True),
        gl.convert_layout(k4, LINE, assert_trivial=True),
        gl.convert_layout(k5, LINE, assert_trivial=True),
        gl.convert_layout(k6, LINE, assert_trivial=True),
        gl.convert_layout(k7, LINE, assert_trivial=True),
    )


@gluon.jit
def matmul_fma_kernel(
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
    A_MAJOR: gl.constexpr,
    B_MAJOR: gl.constexpr,
    IN_PIECES: gl.constexpr,
    IN_UNIT: gl.constexpr,
    SUMS_BLOCKS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    WARPS_M: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    IN_PTX: gl.constexpr,
):
    """Any sizes, batched, of operands whose rows or columns start at multiples of 16 bytes.

    Arguments and grid are those of `matmul_kernel`. The ring of shared memory has STAGES steps. WARPS_M warps share the
    rows of a tile, the others its columns. Up to 12 bytes past the end of a row are read.
    """
    await_previous(OVERLAP)
    num_pid_m = gl.cdiv(m, BLOCK_M)
    num_pid_n = gl.cdiv(n, BLOCK_N)
    pid = gl.program_id(0)
    num_tiles = num_pid_m * num_pid_n
    entry = pid // num_tiles
    pid_m, pid_n = tile_coordinates(pid % num_tiles, num_pid_m, num_pid_n, GROUP_M)
    row = pid_m * BLOCK_M
    column = pid_n * BLOCK_N
    a_steps = (stride_az * IN_UNIT, stride_ay * IN_UNIT)
    b_steps = (stride_bz * IN_UNIT, stride_by * IN_UNIT)
    a_ptr, b_ptr, outer, inner = locate_entry(a_ptr, b_ptr, entry, batch_inner, a_steps, b_steps)
    steps = steps_of_share(k, BLOCK_K)
    first_k = gl.program_id(1) * steps * BLOCK_K
    num_k = gl.minimum(k - first_k, steps * BLOCK_K)

    NUM_WARPS: gl.constexpr = gl.num_warps()
    A_BY_LINE: gl.constexpr = A_MAJOR == "k"
    B_BY_LINE: gl.constexpr = B_MAJOR == "k"
    A_COPY: gl.constexpr = copy_layout(BLOCK_M, BLOCK_K, A_BY_LINE, NUM_WARPS)
    B_COPY: gl.constexpr = copy_layout(BLOCK_N, BLOCK_K, B_BY_LINE, NUM_WARPS)
    stride_a = (stride_am if A_BY_LINE else stride_ak) * IN_UNIT
    stride_b = (stride_bn if B_BY_LINE else stride_bk) * IN_UNIT
    a_at, a_k, a_there = locate(row, m, stride_a, first_k, A_COPY, (BLOCK_K, BLOCK_M), A_BY_LINE)
    b_at, b_k, b_there = locate(column, n, stride_b, first_k, B_COPY, (BLOCK_K, BLOCK_N), B_BY_LINE)
    step_a = BLOCK_K if A_BY_LINE else stride_a * BLOCK_K
    step_b = BLOCK_K if B_BY_LINE else stride_b * BLOCK_K

    A_STEP: gl.constexpr = step_layout(BLOCK_M)
    B_STEP: gl.constexpr = step_layout(BLOCK_N)
    a_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_K, BLOCK_M], A_STEP)
    b_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_K, BLOCK_N], B_STEP)
    SLABS: gl.constexpr = BLOCK_K // SLAB
    a_slabs = a_ring._reinterpret(gl.float32, [STAGES * SLABS, SLAB, BLOCK_M], A_STEP)
    b_slabs = b_ring._reinterpret(gl.float32, [STAGES * SLABS, SLAB, BLOCK_N], B_STEP)
    SUMS: gl.constexpr = sums_layout(WARPS_M, NUM_WARPS // WARPS_M)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    A_SLAB: gl.constexpr = slab_layout(SUMS, 0, BLOCK_M)
    B_SLAB: gl.constexpr = slab_layout(SUMS, 1, BLOCK_N)

    A_AHEAD: gl.constexpr = 1 if A_BY_LINE else STAGES - 1
    B_AHEAD: gl.constexpr = 1 if B_BY_LINE else STAGES - 1
    a_ptrs = start(a_ptr + a_at, a_k, a_there, num_k, step_a, a_ring, A_AHEAD, A_BY_LINE)
    b_ptrs = start(b_ptr + b_at, b_k, b_there, num_k, step_b, b_ring, B_AHEAD, B_BY_LINE)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUMS)
    slot = 0
    last = STAGES - 1
    for at in range(0, num_k, BLOCK_K):
        async_copy.wait_group(STAGES - 2)
        left = num_k - at
        a_next = fetch(a_ptrs, a_k, a_there, left - A_AHEAD * BLOCK_K, a_ring.index(last), A_BY_LINE)
        b_next = fetch(b_ptrs, b_k, b_there, left - B_AHEAD * BLOCK_K, b_ring.index(last), B_BY_LINE)
        async_copy.commit_group()
        a_ptrs += step_a
        b_ptrs += step_b
        sums = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUMS) if SUMS_BLOCKS else acc
        for slab in gl.static_range(SLABS):
            a = load_slab(a_slabs, slot * SLABS + slab, A_SLAB, ROWS)
            b = load_slab(b_slabs, slot * SLABS + slab, B_SLAB, COLUMNS)
            for each in gl.static_range(SLAB):
                sums = gl.fma(a[each][:, None], b[each][None, :], sums)
        acc = acc + sums if SUMS_BLOCKS else sums
        last = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        place(a_next, a_ring.index(slot), A_BY_LINE)
        place(b_next, b_ring.index(slot), B_BY_LINE)

    in_m = gl.arange(0, BLOCK_M, ROWS)
    in_n = gl.arange(0, BLOCK_N, COLUMNS)
    is_last = gl.num_programs(1) == 1
    if not is_last:
        acc, is_last = combine_splits(acc, number(in_m, in_n), partial_ptr, count_ptr, pid)
    epilogue = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation)
    mine = gl.where(is_last, m, 0)
    first = outer * stride_oz + inner * stride_oy
    offs_m = row + in_m
    offs_n = column + in_n
    store_any(acc, offs_m, offs_n, mine, n, out_ptr, out_kind, epilogue, first, stride_om, stride_on, IN_PIECES, IN_PTX)
