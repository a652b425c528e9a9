"""Decides whether a request is sent again, and after which wait. Sends and sleeps nothing itself.

A call that is pure, or that replaces what was there, may be sent twice: that is as good as once. A conditional change is
done at most once; whether its first try did it is not always known. A result that is kept in the place of an operand would
be computed of itself: such a call is sent again only where nothing was done.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from tilewire._errors import ConnectionFailed
from tilewire._transport.wire import Call, Reply, retry_after_s

# Refused before anything was done.
_REFUSED = 429
_STATUSES = (_REFUSED, 503)
_DONE, _GONE, _MISMATCH = 204, 404, 412
_FIRST_WAIT_S = 0.25
MAX_WAIT_S = 30.0


class Retries:
    """The tries of one call: at once, then after waits that double, until the count or the deadline is reached.

    Args:
        call: Call to send.
        max_retries: Number of times that it may be sent again.
    """

    def __init__(self, call: Call, max_retries: int) -> None:
        self._call = call
        self._left = max_retries
        self._is_again = False
        self._wait_s = _FIRST_WAIT_S
        self._began_s = time.monotonic()
        self._doubt: Reply | ConnectionFailed | None = None

    def wait_s(self, outcome: Reply | ConnectionFailed) -> float | None:
        """Returns the seconds to wait before the next try, or None where the outcome stands.

        Args:
            outcome: Reply or error of the last try.
        """
        if self._left <= 0 or not _is_temporary(outcome):
            return None
        if self._call.counts_each_time and not _was_nothing_done(outcome):
            return None
        asked = retry_after_s(outcome) if isinstance(outcome, Reply) else None
        # Spread, so that clients that were refused together do not return together.
        wait_s = self._wait_s * random.uniform(0.5, 1.0) if asked is None else asked  # noqa: S311  (no secret)
        wait_s = min(MAX_WAIT_S, wait_s)
        left_s = self._left_s()
        if left_s is not None and wait_s >= left_s:
            return None
        self._left -= 1
        self._is_again = True
        if not _was_nothing_done(outcome):
            self._doubt = outcome
        self._wait_s *= 2
        return wait_s

    def settled(self, outcome: Reply | ConnectionFailed) -> Reply | ConnectionFailed:
        """Returns what became of the call.

        A conditional change that is refused for its version may have been done by an earlier try, whose answer was lost:
        then that try's outcome stands. A plain deletion that finds nothing after a lost answer has nothing left to do.

        Args:
            outcome: Reply or error of the last try.
        """
        if self._doubt is None or not isinstance(outcome, Reply):
            return outcome
        is_gone = outcome.status == _GONE and self._call.method == "DELETE"
        if self._call.is_conditional_change:
            return self._doubt if is_gone or outcome.status == _MISMATCH else outcome
        return replace(outcome, status=_DONE) if is_gone and isinstance(self._doubt, ConnectionFailed) else outcome

    def next_call(self) -> Call:
        """Returns the call of the next try, with what is left of its deadline."""
        left_s = self._left_s()
        if left_s is None or not self._is_again:
            return self._call
        left_ms = max(1, round(left_s * 1e3))
        return replace(self._call, headers={**self._call.headers, "X-Timeout-Ms": str(left_ms)})

    def _left_s(self) -> float | None:
        if self._call.timeout_ms is None:
            return None
        return self._call.timeout_ms / 1e3 - (time.monotonic() - self._began_s)


def _is_temporary(outcome: Reply | ConnectionFailed) -> bool:
    return outcome.status in _STATUSES if isinstance(outcome, Reply) else outcome.was_broken


def _was_nothing_done(outcome: Reply | ConnectionFailed) -> bool:
    return outcome.status == _REFUSED if isinstance(outcome, Reply) else outcome.was_refused
