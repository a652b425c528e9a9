"""From a specialization and its blocks to the binary that computes it."""

from __future__ import annotations

from tilewire.kernels.pointwise.kernel import pointwise_kernel
from tilewire.kernels.runtime.elementwise import Config, Specialization
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.runtime.walks import elementwise_binary


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """The binary of `specialization` with the blocks of `config`."""
    types = dict.fromkeys(("scale", "shift"), "fp64")
    return elementwise_binary(pointwise_kernel, types, {}, specialization, config, target)
