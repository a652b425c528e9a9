"""How a result says which command repeats it. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Sequence


def command_of(module: str, argv: Sequence[str]) -> str:
    """The command that repeats the run, without where it wrote on that machine."""
    kept = [
        "benchmarks/results" if before == "--out" else word for before, word in zip(["", *argv], argv, strict=False)
    ]
    return " ".join(["python -m", module, *kept])
