"""Runs what answers an op without a task: at once up to where it waits for something, and on when that is there.

A task would begin in the next turn of the loop, when what has come of the body has left the processor's cache. So there is no
current task in there: no `asyncio.timeout`, and no `TaskGroup`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any


class Driven:
    """Runs one coroutine; a subclass says what follows.

    Attributes:
        is_waiting: The coroutine waits for something.
    """

    _awaited: asyncio.Future[Any] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the coroutine waits for something."""
        return self._awaited is not None

    def drive(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Runs the coroutine up to where it waits; None for work that has ended.

        `ended` is called when it ends, perhaps before this returns.
        """
        if work is None:
            self.ended(None)
            return
        self._work = work
        self._context = contextvars.copy_context()
        self._step()

    def cancel(self, msg: object = None) -> None:
        """Cancels what the coroutine waits for, as of a task."""
        if self._awaited is not None:
            self._awaited.cancel(msg)

    def ended(self, error: Exception | None) -> None:
        """Takes note that the coroutine has ended, perhaps with an error."""
        raise NotImplementedError

    def _step(self, _done: object = None) -> None:
        """Runs the coroutine up to where it waits again."""
        failed: Exception | None = None
        try:
            awaited = self._context.run(self._work.send, None)
        except (StopIteration, asyncio.CancelledError):
            pass
        except Exception as error:  # noqa: BLE001  (it is handed over)
            failed = error
        else:
            if awaited is None:
                # It only lets others have their turn.
                loop = asyncio.get_running_loop()
                awaited = loop.create_future()
                loop.call_soon(_finish, awaited)
            # The runner of a coroutine marks a future as seen that way.
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self._step)
            self._awaited = awaited
            return
        del self._work, self._context
        self.ended(failed)
        self._awaited = None


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
