"""Rests of a thread that works long, so that others get the interpreter's lock.

NumPy gives the lock up in most calls, but only for a moment. That wakes a waiting thread too late to take it, and keeps it
from asking for it.
"""

import threading
import time

# Seconds of work between two rests, and of a rest: long enough that a waiting thread wakes and takes the lock.
_WORK_S, _REST_S = 0.003, 1e-6


class _Work(threading.local):
    """Times of this thread: when it began or last rested, and when it last checked."""

    begun_s = asked_s = 0.0


_work = _Work()


def rest() -> None:
    """Sleeps for an instant where this thread has worked for a while. Ask between pieces of at most a millisecond."""
    now_s = time.monotonic()
    if now_s - _work.asked_s > _WORK_S:
        # Something new: what takes less than a while is not held up, in an event loop above all.
        _work.begun_s = now_s
    elif now_s - _work.begun_s > _WORK_S:
        time.sleep(_REST_S)
        _work.begun_s = now_s = time.monotonic()
    _work.asked_s = now_s
