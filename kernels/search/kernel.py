"""The search kernels: jit bodies only.

Scores are a · bᵀ of (M, K) queries and (N, K) items, turned into similarities of which the greatest is best. Each tile leaves
the best order of every group of GROUP neighbouring items, and no score. The k best groups of each query are selected
(`topk_select_kernel`). Only their scores are computed again, in float32, and sorted. Where items are few, or most of them
would be selected, the scores of all are sorted instead: products by the kernels of `matmul`, distances by those here.
`topk/kernel.py` describes orders and keys, and why this is exact. 2·M·N·K flops; N·K·input size bytes at least.

Products and norms for `l2` lose what query and item have in common, which may be most of their digits. So float32 queries and
items count from a centre, one of the items, while groups are selected. Groups that are near a query beside its own distance
from there get their order from differences.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.pdl import await_previous
from tilewire.kernels.topk.kernel import (
    LOWEST,
    NONE,
    from_order,
    index_of,
    num_above,
    places_of_best,
    sort_keys,
    store_kept,
    take_best,
    to_key,
    to_order,
)

COSINE = tl.constexpr(1)
L2 = tl.constexpr(2)
CENTRED = tl.constexpr(3)
# Smallest part of the square of a query's norm whose distance norms and products give: above it they lose 6 bits at most.
NEAR = tl.constexpr(1 / 16)


@triton.jit
def search_norms_kernel(
    x_ptr, out_ptr, rows, k, stride_row, kind, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr
):
    """Norms of rows in float32: `kind` 0 the square, 1 the inverse (0 of a zero row), 2 the norm. Grid: (row blocks,).

    CENTRED gives the squared distance from the centre, which lies in `out_ptr` behind the norms.
    """
    await_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    from_row = row.to(tl.int64) * stride_row
    total = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    for start in range(0, k, BLOCK_K):
        mask = (row < rows)[:, None] & (start + offs_k < k)[None, :]
        x = tl.load(x_ptr + from_row[:, None] + (start + offs_k)[None, :], mask=mask, other=0).to(tl.float32)
        x -= tl.load(out_ptr + rows + start + offs_k, mask=(start + offs_k < k) & (kind == CENTRED), other=0.0)[None, :]
        total += x * x
    square = tl.sum(total, axis=1)
    out = tl.where(kind == 1, inverse_norm(square), tl.where(kind == 2, tl.sqrt_rn(square), square))
    tl.store(out_ptr + row, out, mask=row < rows)


@triton.jit
def search_centre_kernel(
    a_ptr, norms_ptr, centred_ptr, n, k, stride_a, stride_out, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr
):
    """Float32 queries (M, K) less the centre, which lies behind the `n` norms. Grid: blocks of K for each query."""
    await_previous(OVERLAP)
    blocks = tl.maximum(tl.cdiv(k, BLOCK_K), 1)
    offs_k = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = offs_k < k
    query = (tl.program_id(0) // blocks).to(tl.int64)
    a = tl.load(a_ptr + query * stride_a + offs_k, mask=mask)
    tl.store(centred_ptr + query * stride_out + offs_k, a - tl.load(norms_ptr + n + offs_k, mask=mask), mask=mask)


@triton.jit
def inverse_norm(square):
    """1 / √square, 0 where it is 0."""
    return tl.where(square == 0.0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(square)))


@triton.jit
def store_groups(
    acc,
    first_m,
    first_n,
    m,
    n,
    groups,
    orders_ptr,
    affine,
    AFFINE: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Turn a tile of products into similarities, and store the best order of each group in `orders_ptr`, (m, groups).

    Each query's similarities may be off by a factor and a summand of its own, which do not change their order. With
    AFFINE they are acc · norms + factor · bias for `cosine`, where the factor is the norm of the query. For `l2` they
    are acc - (norms + bias) / 2. `affine` is (norms_ptr, factors_ptr, bias_ptr, metric, has_bias). Items past the end
    are NaN, which no maximum takes.
    """
    norms_ptr, factors_ptr, bias_ptr, metric, has_bias = affine
    BLOCK_M: tl.constexpr = acc.shape[1] if SWAPPED else acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[0] if SWAPPED else acc.shape[1]
    NUM: tl.constexpr = BLOCK_N // GROUP
    N_AXIS: tl.constexpr = 0 if SWAPPED else 1
    score = acc.to(tl.float32)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if AFFINE:
        norm = tl.load(norms_ptr + offs_n, mask=(offs_n < n) & (metric > 0), other=0.0)
        bias = tl.load(bias_ptr + offs_n, mask=(offs_n < n) & (has_bias > 0), other=0.0)
        is_scaled = (metric == COSINE) & (has_bias > 0)
        factor = tl.load(factors_ptr + offs_m, mask=(offs_m < m) & is_scaled, other=1.0)
        scale = tl.where(metric == COSINE, norm, 1.0)
        shift = tl.where(metric == L2, -0.5 * (norm + bias), bias)
        score = score * tl.expand_dims(scale, 1 - N_AXIS)
        score += tl.expand_dims(factor, N_AXIS) * tl.expand_dims(shift, 1 - N_AXIS)
    score = tl.where(tl.expand_dims(offs_n < n, 1 - N_AXIS), score, float("nan"))
    number = first_n // GROUP + tl.arange(0, NUM)
    rows = offs_m.to(tl.int64) * groups
    if SWAPPED:
        tops = tl.max(tl.reshape(score, (NUM, GROUP, BLOCK_M)), axis=1)
        place = rows[None, :] + number[:, None]
        mask = (offs_m < m)[None, :] & (number < groups)[:, None]
    else:
        tops = tl.max(tl.reshape(score, (BLOCK_M, NUM, GROUP)), axis=2)
        place = rows[:, None] + number[None, :]
        mask = (offs_m < m)[:, None] & (number < groups)[None, :]
    tl.store(orders_ptr + place, to_order(tops, 0, LOWEST), mask=mask)


@triton.jit
def from_centre(b, affine, n, k, first, AFFINE: tl.constexpr):
    """Float32 items, their elements from `first` on, less the centre for `l2`; others as they are."""
    if AFFINE and b.dtype == tl.float32:
        norms_ptr, _, _, metric, _ = affine
        offs_k = first + tl.arange(0, b.shape[1])
        b -= tl.load(norms_ptr + n + offs_k, mask=(offs_k < k) & (metric == L2), other=0.0)[None, :]
    return b


@triton.jit
def multiply(a, b, acc, SWAPPED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """`acc` + a · bᵀ of (BLOCK_M, BLOCK_K) and (BLOCK_N, BLOCK_K), or its transpose when SWAPPED."""
    if UPCAST:
        # Triton's interpreter multiplies the bit patterns of bfloat16.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if SWAPPED:
        acc = tl.dot(b, a.T, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    else:
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


@triton.jit
def search_tma_kernel(
    a_desc,
    b_desc,
    norms_ptr,
    factors_ptr,
    bias_ptr,
    orders_ptr,
    m,
    n,
    k,
    groups,
    metric,
    has_bias,
    AFFINE: tl.constexpr,
    SWAPPED: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best orders of groups; operands whose rows start at multiples of 16 bytes. Grid: (programs, blocks of queries).

    Each program walks every `programs`-th tile of items. WHOLE: K ≤ BLOCK_K, and the queries are read once. SWAPPED
    computes the tile's transpose, so that BLOCK_M can be 16 while the matrix unit takes its 64 rows from the items.
    """
    await_previous(OVERLAP)
    IS_INTEGER: tl.constexpr = a_desc.dtype == tl.int8
    ACC_TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N)
    first_m = tl.program_id(1) * BLOCK_M
    affine = (norms_ptr, factors_ptr, bias_ptr, metric, has_bias)
    if WHOLE:
        a = a_desc.load([first_m, 0])
        for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.num_programs(0)):
            b = from_centre(b_desc.load([tile * BLOCK_N, 0]), affine, n, k, 0, AFFINE)
            acc = multiply(a, b, tl.zeros(SHAPE, ACC_TYPE), SWAPPED, PRECISION, UPCAST)
            store_groups(acc, first_m, tile * BLOCK_N, m, n, groups, orders_ptr, affine, AFFINE, SWAPPED, GROUP)
    else:
        for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.num_programs(0), flatten=FLATTEN):
            acc = tl.zeros(SHAPE, ACC_TYPE)
            for step in range(tl.cdiv(k, BLOCK_K)):
                a = a_desc.load([first_m, step * BLOCK_K])
                b = b_desc.load([tile * BLOCK_N, step * BLOCK_K])
                b = from_centre(b, affine, n, k, step * BLOCK_K, AFFINE)
                acc = multiply(a, b, acc, SWAPPED, PRECISION, UPCAST)
            store_groups(acc, first_m, tile * BLOCK_N, m, n, groups, orders_ptr, affine, AFFINE, SWAPPED, GROUP)


@triton.jit
def search_pointer_kernel(
    a_ptr,
    b_ptr,
    norms_ptr,
    factors_ptr,
    bias_ptr,
    orders_ptr,
    m,
    n,
    k,
    stride_a,
    stride_b,
    groups,
    metric,
    has_bias,
    UNIT: tl.constexpr,
    AFFINE: tl.constexpr,
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best orders of groups for rows at any distance. Grid: (tiles of items, blocks of queries).

    Strides come in UNITs, and so are rows read; what lies behind their end is not used. Rows past the end are clamped, and
    masked when their orders are stored.
    """
    await_previous(OVERLAP)
    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    whole = tl.cdiv(k, UNIT) * UNIT
    first_m = tl.program_id(1) * BLOCK_M
    first_n = tl.program_id(0) * BLOCK_N
    offs_k = tl.arange(0, BLOCK_K)
    rows_a = tl.minimum(first_m + tl.arange(0, BLOCK_M), m - 1).to(tl.int64) * (stride_a * UNIT)
    rows_b = tl.minimum(first_n + tl.arange(0, BLOCK_N), n - 1).to(tl.int64) * (stride_b * UNIT)
    a_ptrs = a_ptr + rows_a[:, None] + offs_k[None, :]
    b_ptrs = b_ptr + rows_b[:, None] + offs_k[None, :]
    ZERO: tl.constexpr = 0 if IS_INTEGER else 0.0
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N)
    acc = tl.zeros(SHAPE, tl.int32 if IS_INTEGER else tl.float32)
    affine = (norms_ptr, factors_ptr, bias_ptr, metric, has_bias)
    for start in range(0, k, BLOCK_K):
        in_words, in_k = (offs_k < whole - start)[None, :], (offs_k < k - start)[None, :]
        a = tl.where(in_k, tl.load(a_ptrs, mask=in_words, other=ZERO), ZERO)
        b = tl.where(in_k, tl.load(b_ptrs, mask=in_words, other=ZERO), ZERO)
        b = from_centre(b, affine, n, k, start, AFFINE)
        acc = multiply(a, b, acc, SWAPPED, PRECISION, UPCAST)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    store_groups(acc, first_m, first_n, m, n, groups, orders_ptr, affine, AFFINE, SWAPPED, GROUP)


@triton.jit
def sum_rows(a_ptr, b_ptrs, k, metric, UNIT: tl.constexpr, NUM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of a query's row with each of NUM rows, (NUM,) float32: of products, or for `l2` of squared differences.

    Also the squares of the query's elements for `cosine`, (1, BLOCK_K). Rows are read in UNITs.
    """
    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    whole = tl.cdiv(k, UNIT) * UNIT
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((NUM, BLOCK_K), TYPE)
    squares = tl.zeros((1, BLOCK_K), tl.float32)
    for start in range(0, k, BLOCK_K):
        in_words, in_k = offs_k < whole - start, offs_k < k - start
        # What lies behind a row may be NaN.
        a = tl.where(in_k, tl.load(a_ptr + offs_k + start, mask=in_words, other=0), 0).to(TYPE)
        b = tl.where(in_k, tl.load(b_ptrs[:, None] + offs_k + start, mask=in_words, other=0), 0).to(TYPE)
        if metric == L2:
            total += (b - a) * (b - a)
        else:
            total += b * a
        if metric == COSINE:
            squares += a.to(tl.float32) * a.to(tl.float32)
    return tl.sum(total, axis=1).to(tl.float32), squares


@triton.jit
def search_distances_kernel(
    a_ptr,
    b_ptr,
    centred_ptr,
    bias_ptr,
    orders_ptr,
    n,
    k,
    groups,
    programs,
    stride_a,
    stride_b,
    stride_centred,
    has_bias,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Turn the orders of groups for `l2` into those of distances, in place. Grid: (M × `programs`,).

    A similarity and the query's square make a distance. Where that is small beside the square, most of its digits are lost:
    the distances of the group's items are computed again from differences. `centred_ptr` is the queries that were multiplied.
    Each program walks every `programs`-th block of a query's groups.
    """
    await_previous(OVERLAP)
    query = (tl.program_id(0) // programs).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    squares = tl.zeros((1, BLOCK_K), tl.float32)
    for start in range(0, k, BLOCK_K):
        centred_ptrs = centred_ptr + query * stride_centred + start + offs_k
        centred = tl.load(centred_ptrs, mask=start + offs_k < k, other=0).to(tl.float32)
        squares += centred * centred
    square = tl.sum(squares, axis=1)
    orders_ptr += query * groups
    for block in range(tl.program_id(0) % programs, tl.cdiv(groups, BLOCK_N), programs):
        number = block * BLOCK_N + tl.arange(0, BLOCK_N)
        score = square - 2.0 * from_order(tl.load(orders_ptr + number, mask=number < groups, other=0), 0)
        # Infinite squares may be those of finite differences.
        is_known = ((tl.abs(score) >= square * NEAR) & (square < float("inf"))) | (square != square)
        tl.store(orders_ptr + number, to_order(score, -1, LOWEST ^ -1), mask=(number < groups) & is_known)
        left = tl.where((number < groups) & (is_known == 0), number, -1)
        group = tl.max(left, axis=0)
        while group >= 0:
            item = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
            b_ptrs = b_ptr + tl.minimum(item, n - 1) * (stride_b * UNIT)
            distance, _ = sum_rows(a_ptr + query * (stride_a * UNIT), b_ptrs, k, L2, UNIT, GROUP, BLOCK_K)
            distance += tl.load(bias_ptr + item, mask=(item < n) & (has_bias > 0), other=0.0)
            order = tl.where(item < n, to_order(distance, -1, LOWEST ^ -1), LOWEST)
            tl.store(orders_ptr + group, tl.max(order, axis=0))
            left = tl.where(left == group, -1, left)
            group = tl.max(left, axis=0)


@triton.jit
def scored_keys(score, squares, norms_ptr, bias_ptr, item, is_there, metric, has_bias):
    """Keys of (queries, items) products, or of distances; what is not there has NONE.

    `squares` (queries, 1) are those of the queries' norms, for `cosine`.
    """
    norm = tl.load(norms_ptr + item, mask=is_there & (metric == COSINE), other=1.0)[None, :]
    score *= norm * tl.where(metric == COSINE, inverse_norm(squares), 1.0)
    score += tl.load(bias_ptr + item, mask=is_there & (has_bias > 0), other=0.0)[None, :]
    flip = tl.where(metric == L2, -1, 0)
    return tl.where(is_there[None, :], to_key(to_order(score, flip, flip ^ LOWEST), item[None, :]), NONE)


@triton.jit
def search_score_kernel(
    a_ptr,
    b_ptr,
    norms_ptr,
    bias_ptr,
    groups_ptr,
    keys_ptr,
    n,
    k,
    kept,
    is_selected,
    stride_a,
    stride_b,
    metric,
    has_bias,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keys of the scores of the items in groups. Grid: (M × ceil(`kept` / GROUPS),).

    `groups_ptr` is (M, `kept`) keys of the best groups of each query, unless not `is_selected`: then the `kept` groups are all
    that there are. `keys_ptr` is (M, `kept` · GROUP). Strides come in UNITs, and so are rows read.
    """
    await_previous(OVERLAP)
    blocks = tl.cdiv(kept, GROUPS)
    query = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    number = (place // GROUP).to(tl.int64)
    in_groups = (number < kept) & (is_selected > 0)
    group = tl.load(groups_ptr + query * kept + number, mask=in_groups, other=NONE)
    is_there = (number < kept) & ((group != NONE) | (is_selected == 0))
    item = tl.where(in_groups, index_of(group), number) * GROUP + place % GROUP
    is_there &= item < n
    b_ptrs = b_ptr + tl.where(is_there, item, 0) * (stride_b * UNIT)
    sums, squares = sum_rows(a_ptr + query * (stride_a * UNIT), b_ptrs, k, metric, UNIT, GROUPS * GROUP, BLOCK_K)
    score = sums[None, :]
    square = tl.sum(squares, axis=1, keep_dims=True)
    keys = scored_keys(score, square, norms_ptr, bias_ptr, item, is_there, metric, has_bias)
    to_keys = keys_ptr + query * kept * GROUP + place[None, :]
    tl.store(to_keys, keys, mask=(place < kept * GROUP)[None, :])


@triton.jit
def search_tile_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    keys_ptr,
    m,
    n,
    k,
    num_keys,
    stride_a,
    stride_b,
    has_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keys of the distances of all items, (`m`, `num_keys` ≥ `n`). Grid: (tiles of items × blocks of queries,).

    Rows past the end are clamped. Sums of squared differences walk along K one element at a time.
    """
    await_previous(OVERLAP)
    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    tiles = tl.cdiv(num_keys, BLOCK_N)
    query = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    item = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + tl.minimum(query, m - 1) * stride_a
    b_ptrs = b_ptr + tl.minimum(item, n - 1) * stride_b
    total = tl.zeros((BLOCK_M, BLOCK_N), TYPE)
    for place in range(k):
        gap = tl.load(b_ptrs + place).to(TYPE)[None, :] - tl.load(a_ptrs + place).to(TYPE)[:, None]
        total += gap * gap
    score = total.to(tl.float32)
    score += tl.load(bias_ptr + item, mask=(item < n) & (has_bias > 0), other=0.0)[None, :]
    keys = tl.where((item < n)[None, :], to_key(to_order(score, -1, LOWEST ^ -1), item[None, :]), NONE)
    mask = (query < m)[:, None] & (item < num_keys)[None, :]
    tl.store(keys_ptr + (query * num_keys)[:, None] + item[None, :], keys, mask=mask)


@triton.jit
def load_keys(scored_ptr, affine, query, offs, m, num_keys, pitch):
    """The keys of queries, from keys, (m, num_keys), or from products, (m, 4 · pitch) float32; NONE where there are none.

    Products become similarities: times `norms` and factors of queries for `cosine`, plus `bias`. `affine` is (norms_ptr,
    factors_ptr, bias_ptr, metric, has_bias).
    """
    is_there = (query < m) & (offs < num_keys)
    if scored_ptr.dtype.element_ty == tl.int64:
        keys = tl.load(scored_ptr + query * num_keys + offs, mask=is_there, other=NONE)
    else:
        norms_ptr, factors_ptr, bias_ptr, metric, has_bias = affine
        # What lies behind a row may be anything.
        in_pitch = (query < m) & (offs < pitch * 4)
        score = tl.load(scored_ptr + query * (pitch * 4) + offs, mask=in_pitch, other=0.0)
        norm = tl.load(norms_ptr + offs, mask=(offs < num_keys) & (metric == COSINE), other=1.0)
        score *= norm * tl.load(factors_ptr + query, mask=(query < m) & (metric == COSINE), other=1.0)
        score += tl.load(bias_ptr + offs, mask=(offs < num_keys) & (has_bias > 0), other=0.0)
        keys = tl.where(is_there, to_key(to_order(score, 0, LOWEST), offs), NONE)
    return keys


@triton.jit
def search_finish_kernel(
    scored_ptr,
    norms_ptr,
    factors_ptr,
    bias_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,
    m,
    num_keys,
    pitch,
    k,
    most,
    metric,
    has_bias,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SORT: tl.constexpr,
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Scores and indices of the `k` best keys of each query, num_keys ≤ BLOCK_N; see `load_keys`.

    Grid: (ceil(`m` / BLOCK_ROWS),). Without SORT the best are taken out one after the other; several queries are ranked whole
    otherwise.
    """
    await_previous(OVERLAP)
    offs = tl.arange(0, BLOCK_N)[None, :]
    affine = (norms_ptr, factors_ptr, bias_ptr, metric, has_bias)
    query = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    if BLOCK_ROWS > 1 or SORT == 0:
        query += tl.arange(0, BLOCK_ROWS)[:, None]
    keys = load_keys(scored_ptr, affine, query, offs, m, num_keys, pitch)
    if SORT == 0:
        for place in range(k):
            keys, best = take_best(keys)
            store_scores(best, values_ptr, indices_ptr, query * k + place, query < m, metric)
    elif BLOCK_ROWS > 1:
        # Read again, turned. What is no item ranks behind all that are, which are `k` or more.
        others = load_keys(scored_ptr, affine, tl.trans(query), tl.trans(offs), m, num_keys, pitch)
        rank = num_above(others, keys)
        store_scores(keys, values_ptr, indices_ptr, query * k + rank, (query < m) & (rank < k), metric)
    else:
        finish_query(keys, keys_ptr, values_ptr, indices_ptr, query, k, most, metric, SORT, THREADS, UNIT)


@triton.jit
def store_scores(key, values_ptr, indices_ptr, place, mask, metric):
    """Store the score and the index of each key."""
    score = from_order((key >> 32).to(tl.int32), tl.where(metric == L2, -1, 0))
    tl.store(values_ptr + place, score, mask=mask)
    tl.store(indices_ptr + place, index_of(key), mask=mask)


@triton.jit
def finish_query(
    keys,
    keys_ptr,
    values_ptr,
    indices_ptr,
    query,
    k,
    most,
    metric,
    SORT: tl.constexpr,
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Store scores and indices of the `k` best `keys`, (1, elements), of one query, best first."""
    order, index = (keys >> 32).to(tl.int32), index_of(keys).to(tl.int32)
    is_best, place, count = places_of_best(order, index, k, most, 0, THREADS, UNIT)
    keys_ptr += query * 2 * most
    count = store_kept(keys_ptr, place, keys, is_best, count)
    best_ptr = sort_keys(keys_ptr, count, most, SORT)
    to_out = query * k
    for first in range(0, k, SORT):
        rank = first + tl.arange(0, SORT)
        key = tl.load(best_ptr + rank, mask=rank < k, other=NONE)
        store_scores(key, values_ptr, indices_ptr, to_out + rank, rank < k, metric)
