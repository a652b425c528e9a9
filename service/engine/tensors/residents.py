"""Holds the tensors that stay on the device: names, quota, replacement, order of changes, host copies and hits.

Owned by the engine's loop thread; takes no lock. A tensor that is replaced or deleted lives on in the jobs that resolved it
before.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import torch

from tilewire.service.engine.backends.contract import Backend, HostBytes
from tilewire.service.engine.tensors.arrivals import Arrival, begin_arrival
from tilewire.service.engine.tensors.resident import Held, Resident, close_copy, make_copy, map_copy
from tilewire.service.engine.tensors.transfers import Steps
from tilewire.service.errors import Lost, ResidentQuota, TilewireError, Unavailable, UnknownName
from tilewire.service.ipc.board import VersionBoard, home_of
from tilewire.service.ipc.messages import Stored, TensorInfo
from tilewire.service.match import Match, check_match
from tilewire.service.ops.op import AnyOp, OpOptions, TensorType
from tilewire.service.placement import PLACEMENTS, Placement, part_of, placement_of
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultWriter

logger = logging.getLogger(__name__)


class Residents:
    """The resident tensors of one device, and the names of those that other devices hold.

    The home engine of a name orders its changes: it gives each a version (`order`, `order_here`, `end_load`, `keep`, `delete`).
    The other engines take them over in that order (`follow`). An engine's state of a name is its home engine's up to
    `versions[home]`.

    Args:
        backend: Backend of the device that holds them.
        quota_bytes: Their sum on the device, at most.
        vault: Gets every change that this engine orders.
        max_kept: Number of host copies, at most: each is a descriptor in the supervisor.
        clock: Unix time in seconds.
        clock_ns: The machine's monotonic clock.
        index: Index of this engine.
        num_engines: Number of engines.
        board: Gets the version of every change that this engine orders.
        has_store: Whether tensors are kept in the folder of `--store`: copies of those give way to others.

    Attributes:
        nbytes: Their sum on the device.
        placed_bytes: The same by placement.
        versions: Version of the last change, by the index of its home engine.
        on_drop: Called with each tensor that is replaced or deleted.
        on_evict: Called with each tensor that gives way.
        on_change: Called with the name of each tensor that is no more, or not on the device any more.
    """

    def __init__(
        self,
        backend: Backend,
        quota_bytes: int,
        vault: VaultWriter,
        max_kept: int = 2**20,
        clock: Callable[[], float] = time.time,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        index: int = 0,
        num_engines: int = 1,
        board: VersionBoard | None = None,
        has_store: bool = False,
    ) -> None:
        self._backend = backend
        self.quota_bytes = quota_bytes
        self._vault = vault
        self._max_kept = max_kept
        # Names that files have: their deletion must be remembered, or the next engine would load them again.
        self._of_files: set[str] = set()
        self._clock = clock
        self._clock_ns = clock_ns
        self._board = board or VersionBoard()
        self._by_name: dict[str, Resident] = {}
        # Those that may give way to others: the one whose change or use was longest ago first.
        self._by_use: OrderedDict[str, Resident] = OrderedDict()
        self._held: dict[int, Held] = {}
        # Those that were begun without a ticket.
        self._arriving: set[Arrival] = set()
        # The clock outlives this process: a ticket of its predecessor names nothing here.
        self._tickets = itertools.count(clock_ns())
        # Names that were uploaded or stored: each has a host copy, or will have one.
        self._kept: set[str] = set()
        # Names of tensors that were dropped here and come back from the vault, which has their host copies.
        self._returning: set[str] = set()
        self._last_generation = 0
        self.index = index
        self.nbytes = self._num_here = self._num_spares = 0
        self.placed_bytes = dict.fromkeys(PLACEMENTS.values(), 0)
        self.versions = [0] * num_engines
        self.has_store = has_store
        self.on_drop: Callable[[Resident], None] = lambda _: None
        self.on_evict: Callable[[Resident], None] = lambda _: None
        self.on_change: Callable[[str], None] = lambda _: None

    def __len__(self) -> int:
        """Number of residents on the device."""
        return self._num_here

    def home_of(self, name: str) -> int:
        """Returns the index of the engine that orders the changes of a name."""
        return home_of(name, len(self.versions))

    def is_home(self, name: str) -> bool:
        """Whether this engine orders the changes of a name."""
        return self.home_of(name) == self.index

    def receive(self, name: str, source: HostBytes, placement: Placement = "replicate", axis: int = 0) -> Arrival:
        """Makes room for a tensor, or its part of `source`; when its bytes are here it waits for its version, or for its file.

        Returns:
            The tensor, with a ticket for `order_here` or `adopt`, and the descriptor of its host copy for `set_copy`. Of a
            sharded tensor only the home engine makes the host copy.

        Raises:
            ResidentQuota: The quota would be exceeded.
            TooBusy: No memory on the device, or no descriptor.
        """
        resident = self._new(name, source.type, placement, axis)
        self.check_room(name, resident.held_type.nbytes)
        fd = make_copy(name, source.type.nbytes) if resident.part is None or self.is_home(name) else -1
        try:
            copy = HostBytes(map_copy(name, fd, source.type.nbytes), source.type, 0) if fd >= 0 else None
            steps = begin_arrival(self._backend, resident, copy, source, fd)
        except BaseException:
            close_copy(fd)
            raise
        return Arrival(resident, steps, fd, self._hold(resident)[1])

    def load(self, info: TensorInfo, fd: int) -> Arrival:
        """Makes room for a tensor whose bytes were read from the folder of `--store`; `end_load` ends it.

        Raises:
            ResidentQuota: It does not fit the quota.
            TooBusy: No memory on the device.
        """
        self.check_room(info.name, info.type.nbytes)
        # A request waits for it: it is not the next to give way.
        resident = Resident(msgspec.structs.replace(info, engines=(self.index,)), last_used=self._clock())
        arrival = self._begin(resident, fd)
        arrival.fd = fd
        return arrival

    def end_load(self, arrival: Arrival) -> None:
        """Makes a tensor resident that was brought."""
        self.uncount(arrival)
        self._order(arrival.resident, arrival.fd)

    def check_match(self, name: str, match: Match | None) -> None:
        """Refuses a change whose condition does not hold.

        Raises:
            PreconditionFailed: The tensor has another version.
        """
        older = self._by_name.get(name)
        check_match(name, match, None if older is None else older.info.tag)

    def keep(self, name: str, tensor: torch.Tensor, kind: TensorType, *, durable: bool = False) -> Stored:
        """Makes a result resident where it is; it has no host copy yet.

        A durable one waits for its host copy, and then for its version. With `--store`, all wait for their version.

        Raises:
            ResidentQuota: The quota would be exceeded.
        """
        self.check_room(name, kind.nbytes)
        resident = self._new(name, kind, placement_of(kind.nbytes, self.quota_bytes))
        resident.tensor, resident.has_copy = tensor, False
        if durable or self.has_store or not self.is_home(name):
            return Stored(*self._hold(resident))
        info, was_there = self._order(resident)
        return Stored(info, replaced=was_there)

    def set_copy(self, ticket: int, fd: int) -> None:
        """Takes the host copy of a tensor that waits for its version, and closes the descriptor when it needs it no more.

        The vault gets it before the change that makes it resident, which another engine orders.
        """
        held = self._held.get(ticket)
        if held is None:
            close_copy(fd)
            return
        held.resident.has_copy = True
        if self.is_home(held.resident.info.name):
            self._held[ticket] = held._replace(fd=fd)
            return
        self._vault.offer(ticket, fd)
        self._held[ticket] = held._replace(is_offered=True)
        close_copy(fd)

    def deposit(self, resident: Resident, fd: int) -> None:
        """Gives the vault the host copy of a result that has its version."""
        self._vault.keep_copy(resident.info, fd, self.home_of(resident.info.name))
        resident.has_copy = True

    def order(self, info: TensorInfo, ticket: int, match: Match | None = None) -> tuple[TensorInfo, bool]:
        """Gives a tensor that waits here, or on another engine, its version.

        Returns:
            Its description, and whether it replaced another.

        Raises:
            PreconditionFailed: The older tensor does not meet `match`.
            Unavailable: The ticket is not known: this engine was restarted since.
        """
        (holder,) = info.engines
        if holder == self.index:
            return self.order_here(info, ticket, match)
        self.check_match(info.name, match)
        return self._order(self._absent(info), holder=(holder, ticket))

    def order_here(self, info: TensorInfo, ticket: int, match: Match | None = None) -> tuple[TensorInfo, bool]:
        """Gives a tensor that waits here, or whose part does, its version; see `order`."""
        self.check_match(info.name, match)
        held = self._take_held(ticket, info.name)
        held.resident.info = msgspec.structs.replace(held.resident.info, stored=info.stored, base=info.base)
        try:
            return self._order(held.resident, held.fd)
        finally:
            close_copy(held.fd)

    def _take_held(self, ticket: int, name: str) -> Held:
        held = self._held.pop(ticket, None)
        if held is None:
            raise Unavailable(f"{name}: the engine restarted while it had this tensor")
        self._count(held.resident, -1)
        return held

    def adopt(self, ticket: int, info: TensorInfo) -> Resident | None:
        """Makes a tensor resident that `hold` or `keep` took.

        Returns:
            The tensor; None when a later change of the name has come.

        Raises:
            Unavailable: The ticket is not known: this engine was restarted since.
        """
        resident = self._take_held(ticket, info.name).resident
        older, home = self._by_name.get(info.name), self.home_of(info.name)
        is_last = info.version > self.versions[home] if older is None else older.info.version <= info.version
        if is_last:
            resident.info = msgspec.structs.replace(
                resident.info, version=info.version, created=info.created, stored=info.stored, base=info.base
            )
            self._set(resident)
        self._request_missing(info.name)
        return resident if is_last else None

    def release(self, ticket: int, *, is_unsure: bool = False) -> None:
        """Forgets a ticket, and the tensor with it unless it was adopted.

        Unsure means that the home engine may have given it a version, or may yet: then it comes back from the vault.
        """
        held = self._held.pop(ticket, None)
        if held is not None:
            self._count(held.resident, -1)
            self._backend.free(held.resident.take_tensors())
            close_copy(held.fd)
            if held.is_offered:
                self._vault.withdraw(ticket, is_unsure=is_unsure)
            name = held.resident.info.name
            is_missing = self._request_missing(name)
            # What was missing before is lost, and does not come back.
            if is_missing and held.is_offered and self._by_name[name].info.version > held.before:
                self._returning.add(name)

    def delete(self, name: str, match: Match | None = None) -> TensorInfo:
        """Forgets a tensor.

        Returns:
            The tensor, with the version of its deletion.

        Raises:
            UnknownName: There is none of that name.
            PreconditionFailed: It does not meet `match`.
        """
        resident = self._by_name.get(name)
        if resident is None:
            raise UnknownName(f"name: no resident tensor {name!r}")
        self.check_match(name, match)
        version = self._next_version(name)
        description = msgspec.structs.replace(self._info(resident), version=version)
        self._vault.forget(name, version, is_of_file=name in self._of_files)
        self._drop(name)
        return description

    def give_up(self, name: str) -> None:
        """Drops a tensor that is out of date, or that has no room; the engine that orders its name loads the last version."""
        if self.is_home(name):
            self.delete(name)
            return
        resident, home = self._by_name[name], self.home_of(name)
        self._empty(resident)
        self._by_use.pop(name, None)
        resident.info = msgspec.structs.replace(resident.info, engines=(home,))
        self._vault.evict(name, resident.info.version, home)

    def follow(self, change: Kept) -> Arrival | None:
        """Takes over a change or a copy of another engine.

        One that is contained already does nothing. A tensor that the device has no room for is left to the engines that
        hold it.

        Returns:
            The tensor that is brought, for `end_follow`; None when the change is taken over, and its descriptor closed.
        """
        older = self._by_name.get(change.name)
        if change.is_copy and change.info is None:
            if older is not None and older.info.version == change.version:
                self.delete(change.name)
            return None
        arrival = None
        if self._is_contained(change):
            close_copy(change.fd)
        elif change.info is None:
            self._drop(change.name)
        else:
            arrival = self.restore(change)
        if arrival is None:
            self._advance(change)
        return arrival

    def end_follow(self, change: Kept, arrival: Arrival, error: Exception | None) -> None:
        """Takes over a change whose tensor was brought, unless a later one has come meanwhile."""
        if self._is_contained(change):
            self.uncount(arrival)
        else:
            self.end_restore(arrival, error)
        self._advance(change)

    def _is_contained(self, change: Kept) -> bool:
        """Whether a change or a copy is here already, or a later one is."""
        older = self._by_name.get(change.name)
        if older is not None and older.info.version != change.version:
            return older.info.version > change.version or change.version <= self.versions[change.home]
        if older is not None and (change.is_copy or older.part is not None):
            return older.tensor is not None
        return change.version <= self.versions[change.home]

    def _advance(self, change: Kept) -> None:
        if not change.is_copy:
            self.versions[change.home] = max(self.versions[change.home], change.version)

    def get(self, name: str, *, field: str = "name") -> Resident:
        """Looks a name up without counting a use; the tensor may be on another device.

        Raises:
            UnknownName: There is none of that name; the detail names `field`.
            Lost: It died with the engine that held it.
        """
        resident = self._by_name.get(name)
        if resident is None:
            raise UnknownName(f"{field}: no resident tensor {name!r}")
        if self._is_missing(resident) and not self._is_coming(resident):
            raise Lost(f"{field}: resident tensor {name!r} was lost with the engine; write it again")
        return resident

    def at(self, name: str) -> Resident | None:
        """Returns what has a name, if anything."""
        return self._by_name.get(name)

    def items(self) -> list[tuple[str, Resident]]:
        """All of them with their names, at one moment; for any thread."""
        # One step of the interpreter: nothing changes meanwhile.
        return list(self._by_name.items())

    def use(self, resident: Resident) -> None:
        """Counts a use."""
        resident.hits += 1
        resident.last_used = self._clock()
        self._by_use.move_to_end(resident.info.name)

    def lay_out(self, resident: Resident, op: AnyOp, field: str, options: OpOptions) -> None:
        """Lays a tensor out for the op whose input `field` it is, unless a request has read it before: that chose."""
        if resident.tensor is not None and not resident.is_laid_out:
            resident.is_laid_out = True
            resident.tensor = self._backend.lay_out(resident.tensor, op, field, options)

    def info(self, name: str) -> TensorInfo:
        """Describes a tensor, with the engines that can serve it now; see `get`."""
        resident = self.get(name)
        described = self._info(resident)
        if resident.tensor is not None:
            return described
        return msgspec.structs.replace(described, engines=tuple(set(described.engines) - {self.index}))

    def lacks(self, name: str, version: int) -> bool:
        """Whether the change of a name with a version, 0 for any, or a tensor that this engine shall hold, is to come."""
        resident = self._by_name.get(name)
        if resident is None or resident.info.version < version:
            return self.versions[self.home_of(name)] < version
        return self._is_missing(resident) and self._is_coming(resident)

    def infos(self, prefix: str = "", after: int = 0, max_count: int | None = None) -> tuple[TensorInfo, ...]:
        """Describes those whose names begin with `prefix`, by name, without those that are lost.

        Only those of generations behind `after` are described, and the first `max_count` of them; None for all.
        """
        # Each change of a name puts it behind all others.
        behind = (one for name, one in self._by_name.items() if name.startswith(prefix) and one.generation > after)
        found = itertools.islice((one for one in behind if not self._is_missing(one)), max_count)
        return tuple(map(self._info, sorted(found, key=lambda one: one.info.name)))

    def restore(self, kept: Kept) -> Arrival | None:
        """Takes over the last change of a name, as the vault has it.

        Returns:
            The tensor that is brought, for `end_restore`; None when there is nothing to bring. The descriptor is closed.

        Raises:
            TilewireError: The device has no room for a whole tensor that it alone holds.
        """
        info = kept.info
        if info is None:
            self._of_files.add(kept.name)
            self._drop(kept.name)
            return None
        resident = self._absent(info)
        is_adopted = resident.part is not None and self._is_held(kept.name)
        if kept.fd < 0 or is_adopted:
            close_copy(kept.fd)
            older = self._by_name.get(kept.name)
            if older is None or older.info.version != kept.version:
                self._set(resident)
            return None
        try:
            if self.index not in info.engines:
                self.check_room(kept.name, info.type.nbytes, may_evict=False)
            return self._begin(resident, kept.fd)
        except TilewireError as error:
            self._set_absent(resident, error)
            return None
        finally:
            os.close(kept.fd)

    def end_restore(self, arrival: Arrival, error: Exception | None = None) -> None:
        """Makes a tensor resident that was brought.

        Raises:
            Exception: It was not brought, and the device alone holds it whole.
        """
        self.uncount(arrival)
        if error is None:
            self._set(arrival.resident)
        else:
            self._set_absent(arrival.resident, error)

    def leave_out(self, info: TensorInfo) -> None:
        """Takes over a tensor that could not be brought: it is lost where this device should hold it."""
        self._set(self._absent(info, is_left_out=True))

    def _set_absent(self, resident: Resident, error: Exception) -> None:
        info = resident.info
        if not isinstance(error, TilewireError) or (self.index in info.engines and resident.part is None):
            raise error
        logger.warning("%s is not on this device: %s", info.name, error)
        self.leave_out(info)

    def mark(self) -> None:
        """Orders a change of no tensor: the board may show one of this engine's last process that was never deposited."""
        if len(self.versions) > 1:
            self._vault.forget("", self._next_version(None), is_of_file=False)

    def is_spare(self, resident: Resident) -> bool:
        """Whether a tensor is a copy that gives way to others: another engine holds it.

        Such are tensors that were fetched, and replicas of what `--store` has.
        """
        info = resident.info
        is_elsewhere = resident.tensor is not None and self.index not in info.engines
        return is_elsewhere and (info.placement == "single" or info.stored > 0)

    def request_copy(self, name: str) -> None:
        """Requests a tensor that another engine holds, which comes by `follow`.

        Raises:
            UnknownName: There is none of that name.
            ResidentQuota: There is no room for it.
        """
        self.check_room(name, self.get(name).info.type.nbytes)
        self._vault.request_copy(name)

    def check_room(self, name: str, nbytes: int, *, may_evict: bool = True) -> None:
        """Makes room for a tensor, and refuses it where the quota has none, or the system no descriptor.

        Unless they may not, copies of what `--store` has give way, least recently used first.

        Raises:
            ResidentQuota: It would be exceeded.
        """
        older = self._by_name.get(name)
        more_bytes = nbytes - (older.nbytes if older is not None else 0) - self._outdated_bytes(name)
        self._drop_spares(more_bytes)
        if may_evict and self.has_store and nbytes <= self.quota_bytes:
            self._evict(name, more_bytes)
        self._check_quota(name, more_bytes)
        if name not in self._kept and len(self._kept) >= self._max_kept:
            raise ResidentQuota(
                f"{name}: {len(self._kept)} tensors were uploaded; the system's limits of open files and mappings allow no more"
            )

    def add(self, tensors: Iterable[tuple[str, HostBytes]], run: Callable[[Steps], None], changed_s: float) -> None:
        """Makes the tensors of a file resident: all of them, or none.

        Args:
            tensors: Their names, and memory that they may keep.
            run: Brings one to the device and waits for it.
            changed_s: Unix time of the file's last change, from which clients see the version.

        Raises:
            ResidentQuota: The quota would be exceeded.
            TooBusy: No memory on the device.
        """
        added: list[Resident] = []
        nbytes = 0
        for name, source in tensors:
            nbytes += source.type.nbytes
            self._check_quota(name, nbytes)
            resident = Resident(TensorInfo(name, source.type, changed_s))
            run(begin_arrival(self._backend, resident, source))
            added.append(resident)
        for resident in added:
            self._set(resident)
            self._of_files.add(resident.info.name)

    def _evict(self, name: str, more_bytes: int) -> None:
        """Drops copies of what the folder of `--store` has, until there is room."""
        while True:
            is_crowded = name not in self._kept and len(self._kept) >= self._max_kept
            if self.nbytes + more_bytes <= self.quota_bytes and not is_crowded:
                return
            copies = (one for other, one in self._by_use.items() if one.info.stored and other != name)
            # Only the engine that orders a name makes the supervisor close its descriptor.
            gives_way = (
                one for one in copies if (self.is_home(one.info.name) if is_crowded else one.tensor is not None)
            )
            if (one := next(gives_way, None)) is None:
                return
            self.give_up(one.info.name)
            self.on_evict(one)

    def _drop_spares(self, more_bytes: int) -> None:
        """Drops copies that other engines hold, until there is room."""
        while self._num_spares and self.nbytes + more_bytes > self.quota_bytes:
            self._empty(next(filter(self.is_spare, self._by_use.values())))

    def _check_quota(self, name: str, more_bytes: int) -> None:
        if self.nbytes + more_bytes > self.quota_bytes:
            raise ResidentQuota(
                f"{name}: {more_bytes} bytes more than the {self.nbytes} that are resident exceed the quota "
                f"of {self.quota_bytes}, --resident-bytes"
            )

    def _outdated_bytes(self, name: str) -> int:
        """Returns the bytes that are here until what is under way, and a tensor of this name, take the place of others.

        Of each other name the largest counts: a smaller one may fail to come.
        """
        coming: dict[str, list[int]] = {}
        for one in (
            *(held.resident for held in self._held.values()),
            *(arrival.resident for arrival in self._arriving),
        ):
            coming.setdefault(one.info.name, []).append(one.nbytes)
        nbytes = sum(coming.pop(name, ()))
        for other, sizes in coming.items():
            older = self._by_name.get(other)
            sizes.append(0 if older is None else older.nbytes)
            nbytes += sum(sizes) - max(sizes)
        return nbytes

    def _begin(self, resident: Resident, fd: int) -> Arrival:
        """Makes room for a tensor whose host copy is there; it counts until `uncount`."""
        copy = HostBytes(map_copy(resident.info.name, fd, resident.info.type.nbytes), resident.info.type, 0)
        arrival = Arrival(resident, begin_arrival(self._backend, resident, copy))
        self._count(resident, 1)
        self._arriving.add(arrival)
        return arrival

    def uncount(self, arrival: Arrival) -> None:
        """Counts a tensor no more that was brought, or is brought no more."""
        self._count(arrival.resident, -1)
        self._arriving.discard(arrival)

    def _new(self, name: str, kind: TensorType, placement: Placement, axis: int = 0) -> Resident:
        """Returns a resident of this engine, still without its tensor."""
        count = len(self.versions)
        engines, num_parts = (tuple(range(count)), count) if axis else ((self.index,), 0)
        return self._absent(
            TensorInfo(name, kind, self._clock(), placement=placement, engines=engines, axis=axis, num_parts=num_parts)
        )

    def _absent(self, info: TensorInfo, *, is_left_out: bool = False) -> Resident:
        part = part_of(info.type, info.axis, self.index, len(self.versions)) if info.axis else None
        return Resident(info, part, last_used=info.last_used, hits=info.hits, is_left_out=is_left_out)

    def _is_missing(self, resident: Resident) -> bool:
        """Whether this engine should have a tensor and has not."""
        return resident.tensor is None and self.index in resident.info.engines

    def _is_coming(self, resident: Resident) -> bool:
        """Whether a tensor that is not here will be: it waits for its version, or the vault has the part."""
        name, is_part = resident.info.name, resident.part is not None
        return not resident.is_left_out and (is_part or name in self._returning or self._is_held(name))

    def _request_missing(self, name: str) -> bool:
        """Requests a tensor, or its part, that is missing here and that none of those that wait for a version will bring."""
        resident = self._by_name.get(name)
        if resident is None or not self._is_missing(resident) or self._is_held(name):
            return False
        self._vault.request_copy(name)
        return True

    def _is_held(self, name: str) -> bool:
        """Whether a tensor of this name waits for its version."""
        return any(held.resident.info.name == name for held in self._held.values())

    def _hold(self, resident: Resident) -> tuple[TensorInfo, int]:
        ticket = next(self._tickets)
        there = self._by_name.get(resident.info.name)
        self._held[ticket] = Held(resident, 0 if there is None else there.info.version)
        self._count(resident, 1)
        return resident.info, ticket

    def _order(self, resident: Resident, fd: int = -1, holder: tuple[int, int] = (0, 0)) -> tuple[TensorInfo, bool]:
        name = resident.info.name
        was_there = name in self._by_name
        resident.info = msgspec.structs.replace(resident.info, version=self._next_version(name))
        info = self._info(resident)
        self._vault.keep(info, fd, holder)
        self._set(resident)
        return info, was_there

    def _next_version(self, name: str | None) -> int:
        # The clock outlives this process: a version that was given and not deposited is not given again.
        version = self.versions[self.index] = max(self.versions[self.index] + 1, self._clock_ns())
        if name is not None:
            assert self.is_home(name), "This is a bug: only the home engine orders changes."
            # First of all: from now on only an engine with this change serves the name.
            self._board.write(name, version)
        return version

    def _info(self, one: Resident) -> TensorInfo:
        engines = one.info.engines
        if one.tensor is not None and self.index not in engines:
            engines = (*engines, self.index)
        return msgspec.structs.replace(one.info, last_used=one.last_used, hits=one.hits, engines=engines)

    def _count(self, resident: Resident, sign: Literal[1, -1]) -> None:
        nbytes = sign * resident.nbytes
        self.nbytes += nbytes
        self.placed_bytes[resident.info.placement] += nbytes

    def _empty(self, resident: Resident) -> None:
        self.on_change(resident.info.name)
        self._count(resident, -1)
        self._num_spares -= self.is_spare(resident)
        tensors = resident.take_tensors()
        self._num_here -= len(tensors)
        self._backend.free(tensors)

    def _drop(self, name: str) -> None:
        older = self._by_name.pop(name, None)
        self._by_use.pop(name, None)
        self._kept.discard(name)
        self._returning.discard(name)
        if older is not None:
            self.on_drop(older)
            self._empty(older)

    def _set(self, resident: Resident) -> None:
        name = resident.info.name
        self._drop(name)
        self._count(resident, 1)
        self._num_here += resident.tensor is not None
        self._last_generation += 1
        resident.generation = self._last_generation
        self._num_spares += self.is_spare(resident)
        self._by_name[name] = self._by_use[name] = resident
        if resident.info.version:
            self._kept.add(name)
