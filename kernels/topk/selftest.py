"""The self-test of topk: each binary once, on small whole numbers that tie often."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.pipeline import bound
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import DTYPES, WIDTHS, Config, enumerate_configs, merge_sizes
from tilewire.kernels.topk.op import prepare
from tilewire.kernels.topk.reference import topk_reference
from tilewire.kernels.topk.variants import merge_variant


def self_tests(target: Target, device: torch.device) -> Iterator[Callable[[], SelfTest]]:
    """Yields one call for each binary of a target, which launches and checks it."""
    for width, config in enumerate_configs(target):
        for dtype in DTYPES:
            for is_aligned in (True, False):
                yield functools.partial(_self_test, width, config, dtype, device, is_aligned=is_aligned)
    for width in WIDTHS:
        yield functools.partial(merge_self_test, width, target, device)


def _self_test(width: int, config: Config, dtype: str, device: torch.device, *, is_aligned: bool) -> SelfTest:
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


def merge_self_test(width: int, target: Target, device: torch.device) -> SelfTest:
    """Merges keys of three rows, two chunks each."""
    num_keys = merge_sizes(width, target)[0]
    n = 2 * num_keys - 5
    keys = torch.arange(3 * n, device=device).mul(7919).remainder(1_000_003).view(3, n)
    merged = torch.zeros((3, 2 * width), dtype=torch.int64, device=device)
    variant = merge_variant(width, num_keys, target)
    index = device.index if device.index is not None else -1
    bound(variant, target, 6, {"n": n, "k": width, "chunks": 2}, index)(keys, merged)
    expected = [torch.sort(part, dim=1, descending=True).values[:, :width] for part in keys.split(num_keys, dim=1)]
    return SelfTest((variant,), (merged == torch.cat(expected, dim=1)).all())
