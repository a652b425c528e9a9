"""The self-test of search: each binary once, on small whole numbers that tie often."""

from __future__ import annotations

import torch

from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.launch import Launch, device_number
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.search.configs import METRICS, Config, Problem
from tilewire.kernels.search.op import item_norms, norms_launch, prepare
from tilewire.kernels.search.variants import centre_variant, finish_variant
from tilewire.kernels.topk.configs import MAX_K, Block, num_kept


def norms_self_test(dtype: str, device: torch.device) -> SelfTest:
    """Computes norms of rows of any length."""
    x = _whole((37, 131), dtype, device)
    out = torch.full((37,), float("nan"), device=device)
    launch = norms_launch(x, "l2")
    launch(x, out)
    return SelfTest(launch.variants, (out == x.float().square().sum(1)).all())


def centre_self_test(device: torch.device) -> SelfTest:
    """Subtracts a centre from queries of any length."""
    a, norms = _whole((3, 131), "float32", device), _whole((1, 20 + 131), "float32", device)[0]
    out = torch.full((3, 132), float("nan"), device=device)
    variant = centre_variant(current(device_number(device)))
    sizes = {"n": 20, "k": 131, "stride_a": 131, "stride_out": 132}
    Launch(variant, (3, 1), sizes, device)(a, norms, out)
    return SelfTest((variant,), (out[:, :131] == a - norms[20:]).all())


def finish_self_test(block: Block, is_scores: bool, device: torch.device) -> SelfTest:
    """Finds the best scores of nine queries, as many as a block holds but for three."""
    num_keys = block.block_n - 3
    k = min(num_keys // 2, MAX_K if block.sort else 3)
    order = torch.arange(9 * num_keys, device=device).mul(7919).remainder(1009).view(9, num_keys)
    # Whole numbers from 1 on, whose bits are their orders, and the places of the items.
    scored = torch.full((9, block.block_n), float("nan"), device=device)
    scored[:, :num_keys] = order + 1
    if not is_scores:
        bits = scored[:, :num_keys].contiguous().view(torch.int32).long()
        scored = bits << 32 | torch.arange(num_keys, device=device) ^ 0xFFFFFFFF
    absent = torch.zeros(1, device=device)
    values = torch.full((9, k), float("nan"), device=device)
    indices = torch.full((9, k), -1, device=device)
    most = num_kept(k)
    scratch = torch.empty((9, 2, most), dtype=torch.int64, device=device)
    variant = finish_variant(block, is_scores, current(device_number(device)))
    sizes = {"m": 9, "num_keys": num_keys, "pitch": block.block_n // 4, "k": k, "most": most}
    sizes |= {"metric": METRICS.index("dot"), "has_bias": 0}
    launch = Launch(variant, (-(-9 // block.block_rows),), sizes, device)
    launch(scored, absent, absent, absent, scratch, values, indices)
    best = torch.sort(order, dim=1, descending=True, stable=True)
    is_right = (indices == best.indices[:, :k]).all() & (values == best.values[:, :k] + 1).all()
    return SelfTest((variant,), is_right)


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    k = 33 if config.kernel == "tile" else min(config.block_k, problem.k)
    n = max(3 * config.block_n, problem.width * config.group // 2) + 5
    # Rows of their own length lie unaligned unless that is whole words.
    stride = -(-k // 16) * 16 if problem.is_aligned else 35
    a, b = (_whole((size, stride), problem.dtype, device)[:, :k] for size in (config.block_m + 3, n))
    bias = None if problem.is_plain else (torch.arange(n, device=device) % 5).float()
    scores = a.float() @ b.float().mT
    norms = None
    if bias is not None:
        norms = item_norms(b, "l2")
        scores = a.float().square().sum(1)[:, None] - 2 * scores + b.float().square().sum(1) + bias
    # Most groups are left out, or their order would not matter.
    best = min(problem.width, -(-n // config.group) // 4 + 1)
    shape = (a.shape[0], best)
    values = torch.full(shape, float("nan"), device=device)
    indices = torch.full(shape, -1, device=device)
    metric = "dot" if bias is None else "l2"
    prepared = prepare(a, b, best, metric=metric, bias=bias, precision=problem.precision, config=config)
    prepared(a, b, norms, bias, values, indices)
    order = torch.sort(scores, dim=1, descending=bias is None, stable=True).indices[:, :best]
    return SelfTest(prepared.variants, (indices == order).all() & (values == scores.gather(1, order)).all())


def _whole(shape: tuple[int, int], dtype: str, device: torch.device) -> torch.Tensor:
    values = torch.arange(shape[0] * shape[1], device=device) * 7919 % 1009 % 7 - 3
    return values.view(shape).to(getattr(torch, dtype))
