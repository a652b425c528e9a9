"""Puts Triton into its interpreter for this folder: kernels run on the CPU, operation by operation."""

import os
import sys

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
