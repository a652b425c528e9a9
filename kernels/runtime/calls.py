"""A counter of launches. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Calls:
    """Number of calls; prepared launches that do the same may share one."""

    count: int = 0
