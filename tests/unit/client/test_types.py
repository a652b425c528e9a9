"""What type checkers say of user code, and what hints say at run time: wrong words are errors, results have types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import tilewire

CODE = """\
import numpy as np
import tilewire

x = np.ones((2, 2), np.float32)
c = tilewire.Client()
reveal_type(c.matmul(x, "@w", activation="relu"))
reveal_type(c.softmax([[1.0, 2.0]]))
reveal_type(c.matmul(x, x, store="y"))
reveal_type(c.search(x, x).indices)
c.matmul(x, x, activation="rleu")
c.matmul(x, x, activatoin="relu")
c.reduce(x, "total")
c.pointwise("sin", x)
c.softmax(c.matmul(x, x, store="y"), if_match="17")


async def use() -> None:
    a = tilewire.AsyncClient()
    reveal_type(await a.matmul(x, x, out_dtype=np.float16))
    reveal_type(await a.add(x, 1.0, store="y"))
    await a.normalize(x, "batch")
    reveal_type((await a.topk(x, 1)).values)


def record(x: tilewire.Traced) -> tilewire.TopK:
    reveal_type(x.topk(1).values)
    return x.topk(1)
"""
ARRAY = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]"
REVEALED = {
    6: ARRAY,
    7: ARRAY,
    8: "tilewire._clients.tensors.Tensor",
    9: ARRAY,
    19: ARRAY,
    20: "tilewire._clients.async_tensors.AsyncTensor",
    22: ARRAY,
    26: "tilewire._programs.trace.Traced",
}
WRONG = (10, 11, 12, 13, 14, 21)


@pytest.mark.slow
def test_mypy_finds_wrong_words(tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(CODE, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "--no-color-output", str(path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=170)
    lines = [line.partition("user.py:")[2].partition(": ") for line in done.stdout.splitlines() if "user.py:" in line]
    revealed = {int(number): text for number, _, text in lines if "Revealed type" in text}
    wrong = {int(number) for number, _, text in lines if text.startswith("error")}
    assert {number: text.partition('"')[2].rstrip('"') for number, text in revealed.items()} == REVEALED
    assert wrong == set(WRONG), done.stdout


@pytest.mark.parametrize("name", sorted(name for name in tilewire.__all__ if name.endswith("Options")))
def test_hints_of_options_resolve_at_run_time(name: str) -> None:
    hints = get_type_hints(getattr(tilewire, name))
    assert {"timeout_ms", "request_id", "if_match"} <= set(hints)
    if name == "MatmulOptions":
        assert get_origin(hints["activation"]) is Literal
        assert "gelu" in get_args(hints["activation"])
