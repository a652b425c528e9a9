"""Kernels of the GPU tests: compiled before the first one, once for all workers. A test has 180 s; compiling takes minutes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fills the kernel cache where it is not full; other workers wait for the one that does."""
    is_wanted = any(item.path.is_relative_to(HERE) for item in session.items) and not session.config.option.collectonly
    if not (is_wanted and torch.cuda.is_available()):
        return
    from triton import knobs

    from tilewire.kernels.build.precompile import images_of, precompile
    from tilewire.kernels.runtime.targets import current

    cache = Path(knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "tilewire-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = current(torch.cuda.current_device())
        if images_of(target) is None:
            precompile(target)


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Gives back what PyTorch keeps of a test's memory: workers share a device, and the largest tests take 15 GiB of it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
