"""Says what a command of the kernels lacks, and how that is installed."""

from __future__ import annotations

from tilewire._installing import how_to_install


def needs_triton(command: str) -> str:
    """Returns the line for a machine without Triton, which serves on the CPU alone and need not have it."""
    return f"{command}: needs Triton; run: {how_to_install('triton')}"
