"""The self-test of topk: each binary once, on small whole numbers that tie often."""

from __future__ import annotations

import torch

from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.launch import Launch, device_number
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.topk.configs import Config, merge_sizes
from tilewire.kernels.topk.op import prepare
from tilewire.kernels.topk.reference import topk_reference
from tilewire.kernels.topk.variants import merge_variant


def self_test(dtype: str, width: int, config: Config, is_aligned: bool, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    if config.row is not None:
        n = config.row.block_n
    else:
        assert config.groups is not None, "This is a bug."
        n = max(2 * width * config.groups.group, 2 * config.groups.block_n)
    n -= 0 if is_aligned else 1
    rows = 1 + torch.arange(3, device=device)
    # Whole numbers up to 250 are exact in every dtype.
    x = (torch.arange(n, device=device) * 37 % (240 + rows[:, None])).to(getattr(torch, dtype))
    k = min(width, n)
    values = torch.full((3, k), float("nan"), dtype=x.dtype, device=device)
    indices = torch.full((3, k), -1, device=device)
    prepared = prepare(x, values, indices, axis=1, largest=True, config=config)
    prepared(x, values, indices)
    expected, order = topk_reference(x, k)
    return SelfTest(prepared.variants, (values == expected).all() & (indices == order).all())


def merge_self_test(width: int, device: torch.device) -> SelfTest:
    """Merges keys of three rows, two chunks each."""
    target = current(device_number(device))
    num_keys = merge_sizes(width, target)[0]
    n = 2 * num_keys - 5
    keys = torch.arange(3 * n, device=device).mul(7919).remainder(1_000_003).view(3, n)
    merged = torch.zeros((3, 2 * width), dtype=torch.int64, device=device)
    variant = merge_variant(width, num_keys, target)
    Launch(variant, (6,), {"n": n, "k": width, "chunks": 2}, device)(keys, merged)
    expected = [torch.sort(part, dim=1, descending=True).values[:, :width] for part in keys.split(num_keys, dim=1)]
    return SelfTest((variant,), (merged == torch.cat(expected, dim=1)).all())
