"""Runs the work of `--store` in threads: writes, deletions, loads, and looks at what other hosts have changed.

The engine's loop hands work over and gets each outcome as a call in its own thread. The threads are daemons: a folder that
does not answer keeps neither the loop nor the end of the process waiting.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from tilewire.service.engine.tensors.folder import (
    BUCKETS,
    SETTLED_S,
    StoreFolder,
    Written,
    bucket_of,
    stem_of,
)
from tilewire.service.engine.tensors.resident import close_copy
from tilewire.service.errors import TilewireError, TooBusy, Unavailable
from tilewire.service.ipc.messages import WRITE_TIMEOUT_S, TensorInfo
from tilewire.service.match import Match

logger = logging.getLogger(__name__)

# Files that are read or written at once: enough for a network's latency, few beside the cores.
NUM_THREADS = 4
# Work that waits for a thread; more is refused.
MAX_WAITING = 1024
# A look that takes longer counts as failed: the folder does not answer.
LOOK_S = 10.0

OutcomeT = TypeVar("OutcomeT")


class Watched(NamedTuple):
    """A name whose version in the folder is looked at.

    Attributes:
        stored: Version that this host has; 0 for a tensor that is not in the folder.
        base: As in `TensorInfo`.
        generation: Number of the tensor on this host, which no other has.
    """

    name: str
    stored: int
    base: int
    generation: int

    def is_changed(self, version: int) -> bool:
        """Whether another host has changed the name, whose last version in the folder is given."""
        return version != self.stored if self.stored else version > self.base


class Change:
    """A change that waits for a thread, or that one makes.

    Args:
        fd: Descriptor of the tensor's host copy, which this owns; -1 for a deletion.
        timeout_s: How long somebody awaits it.
    """

    def __init__(self, fd: int = -1, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._fd = fd
        self._deadline_s = time.monotonic() + timeout_s
        self._lock = threading.Lock()

    def is_awaited(self) -> bool:
        """Whether somebody awaits its outcome."""
        return time.monotonic() < self._deadline_s

    def take(self) -> int:
        """Returns the descriptor, which the caller owns from now on; -1 where there is none any more."""
        with self._lock:
            fd, self._fd = self._fd, -1
        return fd

    def drop(self) -> None:
        """Ends the wait for it: it is not made unless it is already, and its host copy is freed."""
        self._deadline_s = 0.0
        close_copy(self.take())


@dataclass
class _Seen:
    """Findings of a look at a bucket.

    Attributes:
        changed_ns: Time of the bucket's last change.
        since_s: When that time was first seen, on the monotonic clock.
        listed_s: When its files were listed last.
        names: Names that were looked at since then, with their generation.
    """

    changed_ns: int
    since_s: float
    listed_s: float
    names: dict[str, int] = field(default_factory=dict)


class SharedStore:
    """The folder of `--store`, for an engine's loop.

    Args:
        folder: The folder.
        check_s: Time between two looks at what others have changed.
        call: Has the loop's thread call a function; called by the threads.
        watched: Returns the names to look at; called by a thread.
        on_changed: Called in the loop's thread for a name that another host has changed: with its state on this host, and
            with its last version in the folder, 0 for none.
        on_failure: Called by one thread after each look for which the folder could not be read, and in each `check_s` that a
            look takes too long.
        look_s: Longest time of a look, in seconds.
    """

    def __init__(
        self,
        folder: StoreFolder,
        check_s: float,
        call: Callable[[Callable[[], None]], object],
        watched: Callable[[], Sequence[Watched]],
        on_changed: Callable[[Watched, int], None],
        on_failure: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
    ) -> None:
        self._folder = folder
        self._check_s = check_s
        self._call = call
        self._watched = watched
        self._on_changed = on_changed
        self._on_failure = on_failure
        self._look_s = look_s
        self._work: queue.Queue[Callable[[], None]] = queue.Queue(MAX_WAITING)
        self._closing, self._has_looked = threading.Event(), threading.Event()
        self._seen: dict[int, _Seen] = {}
        self._is_failing = False
        self._next_cleaned = 0

    # ── the loop's thread ─────────────────────────────────────────────────────────────────────────

    def start(self, wait_s: float) -> None:
        """Starts the threads.

        Args:
            wait_s: Longest wait for the first look; the calls of its outcomes come before what is called later.
        """
        for number in range(NUM_THREADS):
            threading.Thread(target=self._run, name=f"store-{number}", daemon=True).start()
        threading.Thread(target=self._watch, name="store-watch", daemon=True).start()
        self._has_looked.wait(wait_s)

    def close(self) -> None:
        """Ends the threads once each is through with its file."""
        self._closing.set()

    def write(
        self, info: TensorInfo, fd: int, match: Match | None, done: Callable[[Written | TilewireError], None]
    ) -> Change:
        """Writes the next version of a name, and closes `fd`; `done` gets the outcome.

        Raises:
            TooBusy: Too much waits already.
        """
        change = Change(fd)

        def work() -> Written:
            source = change.take()
            try:
                if source < 0:
                    raise Unavailable(f"store: {info.name}: nobody awaits it any more")
                return self._folder.write(info.name, info.type, info.placement, source, match, change.is_awaited)
            finally:
                close_copy(source)

        try:
            self.submit(info.name, work, done)
        except TooBusy:
            change.drop()
            raise
        return change

    def submit(self, name: str, work: Callable[[], OutcomeT], done: Callable[[OutcomeT | TilewireError], None]) -> None:
        """Has a thread do some work on a name; `done` gets the outcome.

        Raises:
            TooBusy: Too much waits already.
        """

        def run() -> None:
            try:
                outcome: OutcomeT | TilewireError = work()
            except TilewireError as error:
                outcome = error
            except Exception:
                logger.exception("store: work on %s failed", name)
                outcome = Unavailable(f"store: {name}: the work on its file failed; the log says why")
            self._call(partial(done, outcome))

        try:
            self._work.put_nowait(run)
        except queue.Full:
            raise TooBusy(f"store: {name}: {MAX_WAITING} files wait to be read or written") from None

    # ── the threads ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing.is_set():
            self._work.get()()

    def _watch(self) -> None:
        looks: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        while not self._closing.is_set():
            # A thread of its own: the folder may not answer.
            try:
                threading.Thread(target=self._try_to_look, args=(looks,), name="store-look", daemon=True).start()
            except RuntimeError as error:
                # The system allows no more threads now.
                looks.put(error)
            self._note_look(looks)
            self._has_looked.set()
            self._closing.wait(self._check_s)

    def _try_to_look(self, looks: queue.SimpleQueue[Exception | None]) -> None:
        error = None
        try:
            self.look()
        except OSError as failure:
            error = failure
        except Exception:
            logger.exception("store: a look at the folder failed")
        looks.put(error)

    def _note_look(self, looks: queue.SimpleQueue[Exception | None]) -> None:
        """Waits for the end of a look; counts one that takes too long as often as others would have failed meanwhile."""
        wait_s = self._look_s
        while not self._closing.is_set():
            try:
                error = looks.get(timeout=wait_s)
            except queue.Empty:
                self._note_failure(f"a look takes more than {self._look_s:g} s")
                wait_s = self._check_s
                continue
            if error is not None:
                self._note_failure(error)
            elif self._is_failing:
                logger.info("store: the folder can be read again")
                self._is_failing = False
            return

    def _note_failure(self, reason: object) -> None:
        if not self._is_failing:
            logger.error("store: the folder cannot be read: %s", reason)
        self._is_failing = True
        self._on_failure()

    def look(self) -> None:
        """Compares what this host has with the folder once, and cleans a part of it.

        Raises:
            OSError: The folder cannot be read.
        """
        by_bucket: dict[int, list[Watched]] = {}
        for one in self._watched():
            by_bucket.setdefault(bucket_of(one.name), []).append(one)
        self._seen = {bucket: seen for bucket, seen in self._seen.items() if bucket in by_bucket}
        cleaned, self._next_cleaned = self._next_cleaned, (self._next_cleaned + 1) % BUCKETS
        works = [partial(self._look_at, bucket, those) for bucket, those in by_bucket.items()]
        errors: list[OSError] = []
        # One part that cannot be read holds up no other.
        for work in (*works, partial(self._folder.clean, cleaned)):
            try:
                work()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _look_at(self, bucket: int, watched: Sequence[Watched]) -> None:
        try:
            changed_ns = self._folder.changed_ns(bucket)
        except FileNotFoundError:
            # None of these was ever written there; or the folder is gone, and what is resident goes on.
            return
        now_s, seen = time.monotonic(), self._seen.get(bucket)
        if seen is None or seen.changed_ns != changed_ns:
            seen = self._seen[bucket] = _Seen(changed_ns, now_s, now_s)
        # The last list may be older than a change in the same step of the filesystem's clock.
        is_settled = seen.listed_s - seen.since_s > SETTLED_S
        due = [one for one in watched if not is_settled or seen.names.get(one.name) != one.generation]
        if not due:
            return
        seen.listed_s = now_s
        versions = self._folder.last_versions(bucket, [stem_of(one.name) for one in due])
        for one in due:
            version = versions.get(stem_of(one.name), 0)
            if one.is_changed(version):
                self._call(partial(self._on_changed, one, version))
        # Those that were not due were looked at before; those that this host has no more are forgotten.
        seen.names = {one.name: one.generation for one in watched}
