"""Reads how much memory this process may use: the machine's, or its container's limit."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tilewire.service.config.cores import CGROUP


def memory_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of memory.

    Args:
        cgroup: Mount point of the container's limits, of version 2 or 1.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        # Without a limit, version 2 has a word here and version 1 a number that no machine has.
        with contextlib.suppress(OSError, ValueError):
            return min(machine, int((cgroup / limit).read_text()))
    return machine
