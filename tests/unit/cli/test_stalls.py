"""`benchmarks.stalls`: a core that stands still is noticed, and when."""

import os
import signal
import time

import pytest

from benchmarks.stalls import KINDS, Stalls


@pytest.mark.parametrize("kind", KINDS)
def test_a_watcher_that_is_stopped_notices_how_long(kind: str) -> None:
    with Stalls((kind,)) as stalls:
        process, _ = stalls._watchers[kind]
        assert process.pid is not None
        before = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGCONT)
        after = time.monotonic()
        time.sleep(0.05)
    assert 0.25 < stalls.longest_s(before, after) < after - before + 0.1
    assert stalls.found[kind] == sorted(stalls.found[kind])
    assert all(end - begin >= 0.002 for begin, end in stalls.found[kind])
    assert stalls.summary()[kind]["most_ms"] > 250


def test_what_ended_before_or_began_later_does_not_count() -> None:
    stalls = Stalls()
    stalls.found = {"clock": [(1.0, 2.0)], "memory": [(5.0, 5.5)]}
    assert stalls.longest_s(2.0, 5.0) == 0.0
    assert stalls.longest_s(1.9, 5.1) == 1.0
    assert stalls.longest_s(5.2, 9.0) == 0.5
