"""Puts Triton into its interpreter for this folder: kernels run on the CPU, operation by operation."""

import os
import sys
from collections.abc import Iterator
from typing import Any

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
