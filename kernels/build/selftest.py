"""Running every binary of a target once, on small tensors whose result is known. Needs the device; imports no op.

Each trial is one launch of one binary and one comparison on the device. Nothing is awaited until the end, so that a
thousand of them take about a second. What is tried is exact in every dtype: whole numbers of a few bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tilewire.kernels.op import Trial
from tilewire.kernels.registry import KERNEL_OPS
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target


def trials(target: Target, device: torch.device) -> Iterator[Trial]:
    """Launches every variant of `target` on the current stream of `device`."""
    for op in KERNEL_OPS:
        for start in op.trials(target, device):
            yield start()


def wrong(tried: Sequence[Trial]) -> list[Variant]:
    """Waits for the device; the variants that gave a wrong result."""
    if not tried:
        return []
    flags = torch.stack([trial.is_right for trial in tried]).tolist()
    return [variant for trial, is_right in zip(tried, flags, strict=True) if not is_right for variant in trial.variants]
