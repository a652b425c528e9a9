"""Maps a specialization and a configuration to the binary, and lists all that can be chosen."""

from __future__ import annotations

import triton.language as tl

from tilewire.kernels.add.kernel import add_kernel
from tilewire.kernels.runtime.elementwise import Config, Specialization
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.runtime.walks import elementwise_binary

_COMPUTE = {"float64": tl.float64, "int32": tl.int32, "int64": tl.int64}


def build(specialization: Specialization, config: Config, target: Target) -> Variant:
    """The binary of `specialization` with the blocks of `config` on `target`."""
    types = {"alpha": "fp64" if "float" in specialization.dtype else "i64"}
    # Types of 16 bits are computed in float32, the others in themselves.
    compute = _COMPUTE.get(specialization.dtype, tl.float32)
    return elementwise_binary(add_kernel, types, {"COMPUTE": compute}, specialization, config, target)
