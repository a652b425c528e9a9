"""Puts Triton into its interpreter for this folder: kernels run on the CPU, operation by operation."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("triton was imported before tests/kernels could choose the interpreter")
    collect_ignore_glob = ["test_*.py"]  # On a GPU this folder needs a run of its own: `pytest tests/kernels`.
else:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "kernels":
            # NumPy, below the interpreter, warns of the NaN and overflow that these tests provoke.
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once_a_launch() -> Iterator[None]:
    """Triton's interpreter patches its language for a launch, and again at each call of a device function: half its time."""
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    tl, patch = interpreter.tl, interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        visible = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_patched = visible and all(language.static_print is print for language in visible)
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _reductions_combine_slices() -> Iterator[None]:
    """Triton's interpreter combines element by element where the function is ours: here, slice by slice in the same order."""
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")

    def combine_slices(reduction: Any, blocks: Any) -> list[Any]:
        blocks, axis = reduction.unravel(blocks, reduction.axis)

        def slice_at(place: int) -> tuple[Any, ...]:
            return tuple(reduction.to_tensor(block.handle.data.take(place, axis), block.dtype) for block in blocks)

        merged = slice_at(0)
        for place in range(1, blocks[0].shape[axis]):
            step = reduction.combine_fn.fn(*merged, *slice_at(place))
            merged = step if isinstance(step, tuple) else (step,)
        results = []
        for block, each in zip(blocks, merged, strict=True):
            data = each.handle.data.reshape(block.handle.data.shape[:axis] + block.handle.data.shape[axis + 1 :])
            data = np.expand_dims(data, axis) if reduction.keep_dims else data
            results.append(reduction.to_tensor(data if data.shape else data.item(), block.dtype))
        return results

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter.ReduceOps, "generic_reduce", combine_slices)
        yield
