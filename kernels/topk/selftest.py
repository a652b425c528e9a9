"""The self-test of topk: each binary once, on small whole numbers that tie often."""

from __future__ import annotations

import torch

from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.launch import Launch, device_number
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.topk.configs import MAX_K, Block, Config
from tilewire.kernels.topk.op import prepare
from tilewire.kernels.topk.reference import topk_reference
from tilewire.kernels.topk.variants import select_variant


def self_test(dtype: str, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    if config.row is not None:
        n = config.row.block_n
        k = min(n // 2 + 1, MAX_K)
    else:
        assert config.groups is not None, "This is a bug."
        assert config.finish is not None, "This is a bug."
        k = config.finish.block_n // config.group
        n = max(2 * k * config.group, 2 * config.groups.block_n)
    # Rows that begin anywhere in 16 bytes.
    n -= 9
    k = min(k, n)
    rows = 1 + torch.arange(3, device=device)
    # Whole numbers up to 250 are exact in every dtype.
    x = (torch.arange(n, device=device) * 37 % (240 + rows[:, None])).to(getattr(torch, dtype))
    values = torch.full((3, k), float("nan"), dtype=x.dtype, device=device)
    indices = torch.full((3, k), -1, device=device)
    prepared = prepare(x, values, indices, axis=1, largest=True, config=config)
    prepared(x, values, indices)
    expected, order = topk_reference(x, k)
    return SelfTest(prepared.variants, (values == expected).all() & (indices == order).all())


def select_self_test(block: Block, of_keys: bool, device: torch.device) -> SelfTest:
    """Selects among orders or keys of three rows, two chunks each."""
    n, k = 2 * block.block_n - 5, min(block.block_n // 2, MAX_K)
    order = torch.arange(3 * n, device=device).mul(7919).remainder(1009).view(3, n)
    index = torch.arange(n, device=device)
    keys = order << 32 | index ^ 0xFFFFFFFF
    found = torch.zeros((3, 2 * k), dtype=torch.int64, device=device)
    variant = select_variant(block, of_keys, current(device_number(device)))
    launch = Launch(variant, (6,), {"n": n, "k": k, "chunks": 2, "shift": 0}, device)
    launch(keys if of_keys else order.int(), found)
    chunks = keys.split(block.block_n, dim=1)
    best = [torch.sort(chunk, dim=1, descending=True).values[:, :k] for chunk in chunks]
    found = torch.cat([torch.sort(part, dim=1, descending=True).values for part in found.split(k, dim=1)], dim=1)
    return SelfTest((variant,), (found == torch.cat(best, dim=1)).all())
