"""Keeps residents in step with the folder of `--store`: writes changes there first, and loads what this host lacks.

Runs in the engine's loop thread, which waits for no file: `shared_store` works in threads, and its outcomes come as calls. The
home engine of a name does this for its host. The others look at the folder, too: an engine that dies takes no look.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tilewire.service.engine.loop.jobs import Client
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.arrivals import Arrival
from tilewire.service.engine.tensors.folder import Base, StoredVersion, StoreFolder, Written
from tilewire.service.engine.tensors.resident import Resident, close_copy, make_copy
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_store import Change, SharedStore, Watched
from tilewire.service.errors import ResidentQuota, TilewireError, Unavailable, UnknownName
from tilewire.service.ipc.messages import DeleteTensor, DescribeTensor, Failed, FetchTensor, TensorInfo, Tensors
from tilewire.service.match import Match, is_match
from tilewire.service.placement import placement_of

# Names whose last version in the folder is remembered.
MAX_SEEN = 65_536
# Longest wait of a new engine for its first look at the folder, in seconds: one that does not answer keeps no engine away.
FIRST_LOOK_S = 5.0
# A file is read and brought to the device at about this rate or faster: when to ask again for a large one.
LOAD_BYTES_PER_S = 2**28
MAX_RETRY_S = 60


@dataclass(slots=True, eq=False)
class Waiting:
    """A command whose answer follows when the engine has a change or a tensor.

    Attributes:
        wanted: Version of the tensor that the vault was asked for; None for none yet.
        is_looked_up: The store was looked at for it.
    """

    client: Client
    message: DescribeTensor | FetchTensor
    wanted: int | None = None
    is_looked_up: bool = False

    def fail(self, error: TilewireError) -> None:
        """Answers it with an error."""
        self.client.send(Failed.of(self.message.id, error))


@dataclass(slots=True)
class Load:
    """A load under way.

    Attributes:
        seen: Last version that was known when it began.
        resident: Tensor that had the name then.
        waiting: Commands that wait for it.
        large_bytes: Bytes of a tensor that no request waits for; 0 for others.
    """

    seen: int
    resident: Resident | None
    waiting: list[Waiting] = field(default_factory=list)
    large_bytes: int = 0


class ReadThrough:
    """The residents of an engine whose names the folder of `--store` has, too.

    Args:
        residents: Residents of this engine.
        folder: The folder.
        metrics: Receiver of loads and evictions.
        call: Has the loop's thread call a function.
        check_s: Time between two looks at what other hosts have changed.
        wait_bytes: Largest tensor whose load a request waits for.

    Attributes:
        answer: Called with commands whose load is done.
        bring: Has a tensor brought to the device, and calls a function when it is, or with why not.
    """

    def __init__(
        self,
        residents: Residents,
        folder: StoreFolder,
        metrics: EngineMetrics,
        call: Callable[[Callable[[], None]], object],
        *,
        check_s: float,
        wait_bytes: int,
    ) -> None:
        self._residents = residents
        self._metrics = metrics
        self._wait_bytes = wait_bytes
        self._folder = folder
        self._store = SharedStore(folder, check_s, call, self.watched, self.on_changed, metrics.record_failed_looks)
        self._loads: dict[str, Load] = {}
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._call = call
        self.answer: Callable[[Sequence[Waiting]], None] = lambda _waiting: None
        self.bring: Callable[[Arrival, Callable[[Exception | None], object]], None] = lambda _arrival, _end: None
        residents.on_evict = lambda _resident: metrics.record_eviction()

    def start(self) -> None:
        """Starts the threads, and waits for what other hosts have changed while this engine was away."""
        self._store.start(FIRST_LOOK_S if len(self._residents) else 0.0)

    def close(self) -> None:
        """Ends the threads."""
        self._store.close()

    # ── reads ─────────────────────────────────────────────────────────────────────────────────────

    def looks(self, waiting: Waiting) -> bool:
        """Whether a command waits for a look at the folder from now on; `answer` is called with it.

        Raises:
            Unavailable: Its tensor is large and being loaded.
            TooBusy: Too many files wait to be read.
        """
        name, resident = waiting.message.name, self._residents.at(waiting.message.name)
        if waiting.is_looked_up or not self._residents.is_home(name) or not self._is_missing(waiting, resident):
            return False
        load = self._loads.get(name)
        if load is not None and load.large_bytes:
            raise _loading(name, load.large_bytes)
        if load is None:
            load = self._begin(name)
        waiting.is_looked_up = True
        load.waiting.append(waiting)
        return True

    def forget(self, client: Client) -> None:
        """Drops the commands of a gateway that is gone."""
        for load in self._loads.values():
            load.waiting = [one for one in load.waiting if one.client is not client]

    @staticmethod
    def _is_missing(waiting: Waiting, resident: Resident | None) -> bool:
        if resident is None:
            return True
        message = waiting.message
        match = message.match if isinstance(message, DescribeTensor) else None
        # The engine that held this version has given it up: it has seen that another host changed the name.
        is_given_up = resident.tensor is None and message.version >= resident.info.version
        return is_given_up or not is_match(match, resident.info.tag)

    def _begin(self, name: str) -> Load:
        resident = self._residents.at(name)
        is_away = resident is None or (resident.info.stored > 0 and resident.tensor is None)
        have = 0 if resident is None or is_away else resident.info.stored or resident.info.base
        load = Load(self._seen.get(name, 0), resident)
        work = partial(self._folder.load, name, have, partial(self._make_room, name))
        self._store.submit(name, work, partial(self._on_loaded, name))
        self._loads[name] = load
        return load

    def _make_room(self, name: str, stored: StoredVersion) -> int:
        """Makes memory for a tensor that is read; called by a thread."""
        assert stored.type is not None, "This is a bug."
        nbytes = stored.type.nbytes
        if nbytes > self._residents.quota_bytes:
            raise ResidentQuota(f"{name}: {nbytes} bytes; the quota is {self._residents.quota_bytes}")
        if nbytes > self._wait_bytes:
            self._call(partial(self._on_large, name, nbytes))
        return make_copy(name, nbytes)

    def _on_large(self, name: str, nbytes: int) -> None:
        load = self._loads[name]
        load.large_bytes = nbytes
        waiting, load.waiting = load.waiting, []
        for one in waiting:
            one.fail(_loading(name, nbytes))

    def _on_loaded(self, name: str, outcome: tuple[StoredVersion | None, int] | TilewireError) -> None:
        if isinstance(outcome, TilewireError):
            self._end_load(name, outcome)
            return
        stored, fd = outcome
        is_current, arrival = self._is_current(name), None
        try:
            if is_current:
                arrival = self._take_in(name, stored, fd)
        except TilewireError as error:
            close_copy(fd)
            self._end_load(name, error)
            return
        if arrival is None:
            close_copy(fd)
            self._end_load(name, None, is_current=is_current)
        else:
            self.bring(arrival, partial(self._on_brought, name, arrival))

    def _on_brought(self, name: str, arrival: Arrival, error: Exception | None) -> None:
        is_current = self._is_current(name)
        try:
            if error is None and is_current:
                info = arrival.resident.info
                self._note(name, info.stored)
                self._residents.end_load(arrival)
                self._metrics.record_load(info.type.nbytes)
            else:
                self._residents.uncount(arrival)
        finally:
            close_copy(arrival.fd)
        if error is not None and not isinstance(error, TilewireError):
            raise error
        self._end_load(name, error, is_current=is_current)

    def _is_current(self, name: str) -> bool:
        """Whether nobody on this host has changed a name since its load began."""
        load = self._loads[name]
        return self._seen.get(name, 0) == load.seen and self._residents.at(name) is load.resident

    def _end_load(self, name: str, error: TilewireError | None, *, is_current: bool = True) -> None:
        load = self._loads.pop(name)
        try:
            if error is None and not is_current and load.waiting and self._residents.at(name) is None:
                self._begin(name).waiting = load.waiting
                return
        except TilewireError as failure:
            error = failure
        if error is None:
            self.answer(load.waiting)
            return
        for one in load.waiting:
            one.fail(error)

    def _take_in(self, name: str, stored: StoredVersion | None, fd: int) -> Arrival | None:
        """Takes over what the folder has; a tensor that is brought, or None."""
        resident = self._residents.at(name)
        version = 0 if stored is None else stored.version
        is_here = resident is not None and (resident.tensor is not None or not resident.info.stored)
        if resident is not None and is_here and not _state_of(resident).is_changed(version):
            return None
        if stored is None or stored.type is None:
            if resident is not None:
                self._residents.delete(name)
            return None
        if fd < 0:
            return None
        placement = stored.placement or placement_of(stored.type.nbytes, self._residents.quota_bytes)
        info = TensorInfo(name, stored.type, stored.created, placement=placement, stored=stored.version)
        return self._residents.load(info, fd)

    # ── changes of this host ──────────────────────────────────────────────────────────────────────

    def write(
        self, info: TensorInfo, fd: int, match: Match | None, done: Callable[[Written | TilewireError], None]
    ) -> Change:
        """Writes the next version of a name; `done` gets the outcome in the loop's thread.

        Raises:
            TooBusy: Too much waits already.
        """

        def on_written(outcome: Written | TilewireError) -> None:
            if isinstance(outcome, Written):
                # A version that another host has written behind it comes with the next look at the folder.
                self._note(info.name, outcome.version + (not outcome.is_last))
            done(outcome)

        return self._store.write(info, fd, self._condition(info.name, match), on_written)

    def find_base(self, name: str, done: Callable[[int | TilewireError], None]) -> None:
        """Looks up the last version of a name in the folder, for a result that is to be ordered; 0 for none.

        Raises:
            TooBusy: Too much waits already.
        """
        self._store.submit(name, partial(self._folder.last_version, name), done)

    def is_superseded(self, info: TensorInfo) -> bool:
        """Whether a later version of a name than that of a tensor is known; else this one is, from now on."""
        older = self._residents.at(info.name)
        self._note(info.name, max(info.stored, 0 if older is None else older.info.stored))
        return 0 < info.stored < self._seen[info.name]

    def delete(self, client: Client, message: DeleteTensor) -> None:
        """Deletes a tensor in the folder and on this host; the answer follows.

        Raises:
            TooBusy: Too much waits already.
        """
        match = self._condition(message.name, message.match)
        work = partial(self._folder.delete, message.name, match, Change().is_awaited)
        self._store.submit(message.name, work, partial(self._on_deleted, client, message))

    def _condition(self, name: str, match: Match | None) -> Match | None:
        """Returns the condition on the folder of a change that may demand a result which only this host has."""
        resident = self._residents.at(name)
        if match is None or resident is None or resident.info.stored or not is_match(match, resident.info.tag):
            return match
        return Base(resident.info.base)

    def _on_deleted(self, client: Client, message: DeleteTensor, outcome: Written | TilewireError | None) -> None:
        resident, tensors = self._residents.at(message.name), tuple[TensorInfo, ...]()
        try:
            if isinstance(outcome, TilewireError):
                raise outcome
            if outcome is not None:
                self._note(message.name, outcome.version)
                if resident is not None and resident.info.stored < outcome.version:
                    tensors = (self._residents.delete(message.name),)
            elif resident is None or resident.info.stored:
                if resident is not None:
                    self._residents.delete(message.name)
                raise UnknownName(f"name: no resident tensor {message.name!r}")
            else:
                # Only this host has it: a file of its own, or a result that is not durable.
                tensors = (self._residents.delete(message.name, message.match),)
        except TilewireError as error:
            client.send(Failed.of(message.id, error))
        else:
            client.send(Tensors(message.id, tensors))

    # ── changes of other hosts ────────────────────────────────────────────────────────────────────

    def watched(self) -> list[Watched]:
        """Returns the names to look at; called by a thread."""
        return [
            _state_of(one)
            for name, one in self._residents.items()
            # The home engine may be away for a while.
            if self._residents.is_home(name) or one.tensor is not None
        ]

    def on_changed(self, watched: Watched, version: int) -> None:
        """Drops a tensor that another host has changed; the next request has the home engine load it."""
        residents, name = self._residents, watched.name
        if residents.is_home(name):
            self._note(name, version)
        resident = residents.at(name)
        if resident is not None and resident.generation == watched.generation:
            residents.give_up(name)

    def _note(self, name: str, version: int) -> None:
        self._seen[name] = max(version, self._seen.get(name, 0))
        self._seen.move_to_end(name)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)


def _state_of(resident: Resident) -> Watched:
    info = resident.info
    return Watched(info.name, info.stored, info.base, resident.generation)


def _loading(name: str, nbytes: int) -> Unavailable:
    retry_after_s = min(MAX_RETRY_S, 1 + nbytes // LOAD_BYTES_PER_S)
    return Unavailable(f"{name}: its {nbytes} bytes are being loaded from the store", retry_after_s=retry_after_s)
