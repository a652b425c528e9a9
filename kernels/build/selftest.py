"""Running every binary of a target once, on small tensors whose result is known. Needs the device; imports no op.

Each self-test is one launch of one binary and one comparison on the device. Nothing is awaited until the end, so that a
thousand of them take about a second. Operands are exact in every dtype: whole numbers of a few bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tilewire.kernels.op import SelfTest
from tilewire.kernels.registry import KERNEL_OPS
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target


def self_tests(target: Target, device: torch.device) -> Iterator[SelfTest]:
    """Launches every variant of `target` on the current stream of `device`."""
    for op in KERNEL_OPS:
        for start in op.self_tests(target, device):
            yield start()


def wrong(tried: Sequence[SelfTest]) -> list[Variant]:
    """Waits for the device; the variants that gave a wrong result."""
    if not tried:
        return []
    flags = torch.stack([tested.is_right for tested in tried]).tolist()
    return [
        variant for tested, is_right in zip(tried, flags, strict=True) if not is_right for variant in tested.variants
    ]
