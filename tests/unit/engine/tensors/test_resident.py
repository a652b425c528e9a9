"""Host copies when the system has no descriptor left."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

import pytest

from tilewire.service.engine.tensors.resident import make_copy, share_copy
from tilewire.service.errors import TooBusy


@pytest.fixture
def copy() -> Iterator[int]:
    """A host copy, beside which there is no descriptor any more."""
    fd = make_copy("w", 8)
    taken = [os.dup(fd) for _ in range(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = taken[-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    # Gaps below the limit.
    try:
        while True:
            taken.append(os.dup(fd))
    except OSError:
        pass
    yield fd
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for one in (fd, *taken):
        os.close(one)


@pytest.mark.parametrize(
    "make",
    [pytest.param(lambda _fd: make_copy("w", 8), id="made"), pytest.param(lambda fd: share_copy("w", fd), id="shared")],
)
def test_without_a_descriptor_a_copy_is_refused_and_the_engine_goes_on(copy: int, make: Callable[[int], int]) -> None:
    with pytest.raises(TooBusy, match="w: no host copy"):
        make(copy)
