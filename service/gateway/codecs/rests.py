"""Rests of a thread that works long, so that others get the interpreter's lock.

NumPy gives the lock up in most calls, but only for a moment. That wakes a waiting thread too late to take it, and keeps it
from asking for it.
"""

import threading
import time

# Seconds of work between two rests, and of a rest: long enough that a waiting thread wakes and takes the lock.
_WORK_S, _REST_S = 0.003, 1e-6
_last = threading.local()


def rest() -> None:
    """Sleeps for an instant if this thread has not done so for a while."""
    if time.monotonic() - getattr(_last, "at_s", 0.0) > _WORK_S:
        time.sleep(_REST_S)
        _last.at_s = time.monotonic()
