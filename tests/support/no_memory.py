"""A process that gets no more memory of the system."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_more_memory(spare_bytes: int = 2**25) -> Iterator[None]:
    """Nothing of more than `spare_bytes` is mapped meanwhile."""
    (pages, *_) = Path("/proc/self/statm").read_text().split()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(pages) * resource.getpagesize() + spare_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
