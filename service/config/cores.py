"""Counts the cores that this process may use, from its affinity and its container's quota."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_cores(cgroup: Path = CGROUP) -> int:
    """Cores that can all be busy at once, at least 1.

    Args:
        cgroup: Mount point of the container's limits, of version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota(cgroup: Path) -> float | None:
    """The quota in cores, or None for no limit that can be read."""
    with contextlib.suppress(OSError, ValueError):
        granted, period = (cgroup / "cpu.max").read_text().split()
        return None if granted == "max" else int(granted) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return microseconds / int(period) if microseconds > 0 else None
    return None
