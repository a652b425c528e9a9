"""Arguments of benchmarks, and the command that repeats one. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def command_of(module: str, argv: Sequence[str]) -> str:
    """The command that repeats the run, without where it wrote on that machine."""
    kept = [
        "benchmarks/results" if before == "--out" else word for before, word in zip(["", *argv], argv, strict=False)
    ]
    return " ".join(["python -m", module, *kept])


def out_folder(text: str) -> Path:
    """Type of an argument: a folder, made where it is missing, before anything is measured."""
    path = Path(text)
    path.mkdir(parents=True, exist_ok=True)
    return path
