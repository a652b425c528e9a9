"""The ops that an engine computes, by name, and the check that they are those of the service."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tilewire.service.engine.ops.add import EngineAdd
from tilewire.service.engine.ops.matmul import EngineMatmul
from tilewire.service.engine.ops.merge import EngineMerge
from tilewire.service.engine.ops.normalize import EngineNormalize
from tilewire.service.engine.ops.op import EngineOp
from tilewire.service.engine.ops.pointwise import EnginePointwise
from tilewire.service.engine.ops.program import EngineProgram
from tilewire.service.engine.ops.reduce import EngineReduce
from tilewire.service.engine.ops.search import EngineSearch
from tilewire.service.engine.ops.softmax import EngineSoftmax
from tilewire.service.engine.ops.topk import EngineTopk
from tilewire.service.ops.merge import MERGE
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS, PROGRAM_FAMILY

_ALL: tuple[EngineOp[Any], ...] = (
    EngineMatmul(),
    EngineSoftmax(),
    EngineAdd(),
    EngineNormalize(),
    EngineReduce(),
    EnginePointwise(),
    EngineTopk(),
    EngineSearch(),
)
_STEPS: Mapping[str, EngineOp[Any]] = {op.name: op for op in _ALL}
ENGINE_OPS: Mapping[str, EngineOp[Any]] = {
    **_STEPS,
    PROGRAM: EngineProgram(PROGRAM_FAMILY, _STEPS),
    MERGE: EngineMerge(),
}


class RegistryMismatch(Exception):
    """An op is served that nothing computes, or the other way round."""


def check_registries(kernel_names: Collection[str] | None = None) -> None:
    """Compares the ops that are served with those that the engine computes.

    Args:
        kernel_names: Names of the ops that have kernels on the engine's device; None on the CPU.

    Raises:
        RegistryMismatch: They differ; the text names the ops.
    """
    if odd := OPS.keys() ^ _STEPS.keys():
        raise RegistryMismatch(f"ops: {', '.join(sorted(odd))} are not both served and computed")
    if kernel_names is not None and (missing := OPS.keys() - set(kernel_names)):
        raise RegistryMismatch(f"ops: {', '.join(sorted(missing))} have no kernel")
