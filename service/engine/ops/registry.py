"""The ops that an engine computes, by name, and the check that they are those of the service."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tilewire.service.engine.backends.contract import CannotStart
from tilewire.service.engine.ops.merge import EngineMerge
from tilewire.service.engine.ops.op import EngineOp
from tilewire.service.engine.ops.program import EngineProgram
from tilewire.service.ops.merge import MERGE
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS, PROGRAM_FAMILY


def computed(ops: Iterable[AnyOp]) -> dict[str, EngineOp[Any]]:
    """Makes the `Engine<Class>` of each op, from the module of the op's name beside this one; leaves out ops without it."""
    found: dict[str, EngineOp[Any]] = {}
    for op in ops:
        path = f"{__package__}.{op.name}"
        if importlib.util.find_spec(path) is not None:
            engine_op = getattr(importlib.import_module(path), f"Engine{type(op).__name__}", None)
            found |= {} if engine_op is None else {op.name: engine_op()}
    return found


_STEPS = computed(OPS.values())
ENGINE_OPS: Mapping[str, EngineOp[Any]] = {
    **_STEPS,
    PROGRAM: EngineProgram(PROGRAM_FAMILY, _STEPS),
    MERGE: EngineMerge(),
}


def check_registries(kernel_names: Collection[str] | None = None, steps: Collection[str] = _STEPS.keys()) -> None:
    """Compares the ops that are served with those that the engine computes, and with those that have kernels on a GPU.

    Raises:
        CannotStart: They differ; the text names the ops.
    """
    if missing := sorted(OPS.keys() - set(steps)):
        classes = ", ".join(f"no Engine{type(OPS[name]).__name__} in service/engine/ops/{name}.py" for name in missing)
        raise CannotStart(f"ops: {classes}")
    if kernel_names is not None and (missing := sorted(OPS.keys() - set(kernel_names))):
        raise CannotStart(f"ops: no {', '.join(missing)} in KERNEL_OPS of kernels/registry.py")
