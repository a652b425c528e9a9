"""Reads how many cores, how much memory and how many descriptors this process may use: by machine, container or limits."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# Descriptors of a process for its own files and sockets.
OWN_DESCRIPTORS = 128


def num_cores(cgroup: Path = CGROUP) -> int:
    """Cores that can all be busy at once, at least 1."""
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


def memory_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A process with a limit of addresses (`ulimit -v`) cannot map more than that.
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        machine = min(machine, addresses)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        # Without a limit, version 2 has a word here and version 1 a number that no machine has.
        with contextlib.suppress(OSError, ValueError):
            return min(machine, int((cgroup / limit).read_text()))
    return machine


def num_descriptors(num_files: int = 0) -> int:
    """Descriptors that connections or tensors may hold. Where a process may have few, it keeps half of them for itself.

    Args:
        num_files: Number of files that it holds open beside its own.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - num_files
    return max(allowed // 2, allowed - OWN_DESCRIPTORS)
