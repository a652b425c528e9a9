"""Handles messages about residents and shared regions.

Runs in the engine's loop thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch

from tilewire.service.engine.backends.contract import Backend, DeviceLost
from tilewire.service.engine.loop.jobs import BoundJob, Client
from tilewire.service.engine.loop.resolve import in_segment
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.arrivals import Arrival
from tilewire.service.engine.tensors.folder import Written
from tilewire.service.engine.tensors.host_copies import HostCopy, copy_steps, download_steps
from tilewire.service.engine.tensors.read_through import ReadThrough, Waiting
from tilewire.service.engine.tensors.resident import Resident, close_copy, share_copy
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.engine.tensors.transfers import Steps, Transfer, Transfers
from tilewire.service.errors import BeyondLimit, InternalError, TilewireError, TooBusy, Unavailable
from tilewire.service.ipc.messages import (
    AdoptTensor,
    AwaitCopy,
    Command,
    DeleteTensor,
    DescribeKernels,
    DescribeTensor,
    Done,
    Failed,
    FetchTensor,
    GetTensor,
    Kernels,
    ListRegions,
    ListTensors,
    OrderTensor,
    PutTensor,
    RegionList,
    RegisterRegion,
    Residing,
    Stale,
    Stored,
    TensorInfo,
    Tensors,
    Timings,
    ToGateway,
    UnregisterRegion,
    Upload,
)
from tilewire.service.match import Match
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultFollower

logger = logging.getLogger(__name__)

# Residents that are described at once: that takes about a millisecond.
MAX_LISTED = 512


@dataclass(eq=False)
class TensorStore:
    """The residents and the regions of one engine, and what is known of its kernels.

    Attributes:
        follower: Source of the other engines' changes.
        shared: The folder of `--store`; None without one.
        on_moved: Called with the gateway of each transfer that is over.
    """

    backend: Backend
    residents: Residents
    regions: Regions
    metrics: EngineMetrics
    transfers: Transfers
    follower: VaultFollower = field(default_factory=lambda: VaultFollower(-1))
    shared: ReadThrough | None = None
    on_moved: Callable[[Client], object] = field(default_factory=lambda: _ignore, init=False)
    _kernels: bytes = field(default=b"", init=False)
    _clients: list[Client] = field(default_factory=list, init=False)
    _pending: dict[Resident, HostCopy] = field(default_factory=dict, init=False)
    # Copies of tensors that wait for their version, by ticket, and who awaits them.
    _held: dict[int, HostCopy] = field(default_factory=dict, init=False)
    _awaiting: dict[int, tuple[Client, AwaitCopy]] = field(default_factory=dict, init=False)
    _waiting: list[Waiting] = field(default_factory=list, init=False)
    # Transfers from and to the segments of gateways.
    _moving: dict[Transfer, Client] = field(default_factory=dict, init=False)
    # Changes that wait for the tensor of an earlier one.
    _changes: deque[Kept] = field(default_factory=deque, init=False)
    _is_following: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.residents.on_drop = self._drop_copy
        if self.shared is not None:
            self.shared.answer = self._answer_loaded
            self.shared.bring = self._bring

    def start(self) -> None:
        """Begins to look at what other hosts change."""
        if self.shared is not None:
            self.shared.start()

    @property
    def is_moving(self) -> bool:
        """Whether gateways wait for transfers."""
        return bool(self._moving)

    def describe_kernels(self) -> None:
        """Works out the answer to `DescribeKernels`: when nobody waits, since it takes tens of milliseconds."""
        self._kernels = msgspec.json.encode(self.backend.kernels())

    def attach(self, client: Client) -> Residing:
        """Returns how far this engine has followed the others; from now on the gateway gets every change of that."""
        self._clients.append(client)
        return self._residing()

    def detach(self, client: Client) -> None:
        """Drops what only this gateway would have finished."""
        if client in self._clients:
            self._clients.remove(client)
        self._waiting = [one for one in self._waiting if one.client is not client]
        if self.shared is not None:
            self.shared.forget(client)
        for transfer in [one for one, gateway in self._moving.items() if gateway is client]:
            self.transfers.drop(transfer)
        for ticket in tuple(client.tickets):
            self._release(client, ticket, is_unsure=True)
        self._answer_waiting()

    def follow(self, *, at_once: bool = False) -> None:
        """Takes over what the other engines have changed, in its order, and reports it to the gateways.

        A change whose tensor is brought holds up the later ones; the loop waits for it only where it shall be at once.
        """
        self._changes += self.follower.take()
        while self._changes and not self._is_following:
            change = self._changes.popleft()
            arrival = self.residents.follow(change)
            if arrival is not None and at_once:
                self.residents.end_follow(change, arrival, self._run(arrival))
            elif arrival is not None:
                self._is_following = True
                self._bring(arrival, partial(self._on_followed, change, arrival))
        self._observe()
        for client in self._clients:
            client.send(self._residing())
        self._answer_waiting()

    def _on_followed(self, change: Kept, arrival: Arrival, error: Exception | None) -> None:
        self._is_following = False
        self.residents.end_follow(change, arrival, error)
        self.follow()

    def _run(self, arrival: Arrival) -> Exception | None:
        try:
            self.transfers.run(arrival.steps)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  (whoever ends the arrival gets it)
            return error
        return None

    def _bring(self, arrival: Arrival, end: Callable[[Exception | None], object]) -> None:
        self.transfers.add(Transfer(arrival.steps, end))

    def restore(self, kept: Kept) -> None:
        """Brings back what the vault has, before the loop serves; see `Residents.restore`.

        A tensor that a bug keeps from coming back is left out: each later process would end by it, too.
        """
        try:
            arrival = self.residents.restore(kept)
            if arrival is not None:
                self.residents.end_restore(arrival, self._run(arrival))
        except (TilewireError, DeviceLost):
            raise
        except Exception:
            logger.exception("%s is left out", kept.name)
            assert kept.info is not None, "This is a bug: a deletion brings nothing."
            self.residents.leave_out(kept.info)

    def keep(self, job: BoundJob) -> Stored:
        """Makes the result of a job resident where it is; a host copy follows.

        Raises:
            ResidentQuota: The quota would be exceeded.
        """
        assert job.kept is not None, "This is a bug."
        assert job.kept.tensor is not None, "This is a bug: the backend kept nothing."
        assert job.plan.kept is not None, "This is a bug."
        name, kind, durable = job.plan.kept
        stored = self.residents.keep(name, job.kept.tensor, kind, durable=durable)
        if stored.ticket and job.client.is_gone:
            # Nobody would have it ordered, and what waits for a version counts.
            self._release(job.client, stored.ticket)
        elif stored.ticket:
            job.client.tickets.add(stored.ticket)
            if durable:
                self._held[stored.ticket] = self._begin_copy(stored.info, job.kept.tensor, stored.ticket)
        else:
            self._copy(self.residents.at(name), stored.info)
        self._observe()
        return stored

    def _begin_copy(self, info: TensorInfo, tensor: torch.Tensor, ticket: int = 0) -> HostCopy:
        """Begins the host copy of a result; a request awaits that of one which has a ticket."""
        copy = HostCopy(info, ticket=ticket)
        copy.transfer = Transfer(partial(copy_steps, copy, tensor), partial(self._finish, copy), is_awaited=ticket > 0)
        self.transfers.add(copy.transfer)
        return copy

    def _finish(self, copy: HostCopy, error: Exception | None) -> None:
        """Takes a host copy that is made, failed or needless."""
        if error is not None:
            if not isinstance(error, TilewireError | DeviceLost):
                logger.error("no host copy of %s", copy.info.name, exc_info=error)
            elif not copy.ticket:
                logger.warning("no host copy of %s, which is lost with the engine: %s", copy.info.name, error)
            cause = BeyondLimit if isinstance(error, BeyondLimit) else TooBusy
            copy.error = cause(f"durable: {error}")
        fd, copy.fd = copy.fd, -1
        if copy.error is not None or copy.transfer is None or copy.transfer.is_needless:
            close_copy(fd)
            fd = -1
        if copy.ticket:
            if fd >= 0 and self.shared is not None and self._held.get(copy.ticket) is copy:
                self._write(copy, fd)
            else:
                self._take(copy)
            if fd >= 0:
                self.residents.set_copy(copy.ticket, fd)
            return
        resident = self.residents.at(copy.info.name)
        if resident is not None and self._pending.get(resident) is copy:
            del self._pending[resident]
            if fd >= 0:
                self.residents.deposit(resident, fd)
        close_copy(fd)

    def _write(self, copy: HostCopy, fd: int, match: Match | None = None) -> None:
        """Writes a tensor that waits for its version to the store; whoever awaits its copy awaits that, too."""
        assert self.shared is not None, "This is a bug."
        try:
            source, done = share_copy(copy.info.name, fd), partial(self._on_written, copy)
            copy.change = self.shared.write(copy.info, source, match, done)
        except TilewireError as error:
            self._on_written(copy, error)

    def _on_written(self, copy: HostCopy, outcome: Written | TilewireError) -> None:
        if isinstance(outcome, TilewireError):
            copy.error = outcome
        else:
            copy.info = msgspec.structs.replace(copy.info, stored=outcome.version)
            copy.replaced = copy.replaced or outcome.replaced
        self._take(copy)

    def _take(self, copy: HostCopy) -> None:
        """Answers whoever awaits the copy of a tensor that waits for its version."""
        copy.is_taken = True
        if (awaiting := self._awaiting.pop(copy.ticket, None)) is not None:
            client, message = awaiting
            client.send(_copied(message, copy))

    def close(self) -> None:
        """Ends the threads that move tensors and that read and write files."""
        self.transfers.close()
        if self.shared is not None:
            self.shared.close()

    def answer(self, client: Client, message: Command) -> ToGateway | None:
        """Executes the message.

        Returns:
            The answer; None when it follows later.

        Raises:
            TilewireError: Why not.
        """
        match message:
            case RegisterRegion():
                info = self.regions.register(message.region)
                self._settle(client, RegionList(message.id, (info,), info.stamp))
                return None
            case UnregisterRegion():
                stamp = self.regions.unregister(message.name, message.stamp)
                self._settle(client, RegionList(message.id, (), stamp))
                return None
            case ListRegions():
                return RegionList(message.id, self.regions.infos(message.name))
            case GetTensor():
                return self._download(client, message)
            case PutTensor():
                self._put(client, message)
                return None
            case DescribeKernels():
                return Kernels(message.id, self._kernels)
            case AwaitCopy(ticket=ticket):
                if (copy := self._held.get(ticket)) is None:
                    raise Unavailable("store: the engine restarted while it had this tensor")
                if copy.is_taken:
                    return _copied(message, copy)
                self._awaiting[ticket] = (client, message)
                return None
            case DescribeTensor() | FetchTensor():
                return self._describe(Waiting(client, message))
            case ListTensors():
                return self._list(message)
            case _:
                reply = self._change(client, message)
                self._observe()
                return reply

    def _list(self, message: ListTensors) -> Tensors:
        found = self.residents.infos(message.prefix, message.after, MAX_LISTED)
        last = 0
        if len(found) == MAX_LISTED:
            last = max(self.residents.get(info.name).generation for info in found)
        return Tensors(message.id, found, next=last)

    def _settle(self, client: Client, reply: RegionList) -> None:
        """Sends an answer when the device reaches what was registered, and unregistered memory is free."""

        def call() -> None:
            if not client.is_gone:
                client.send(reply)

        self.regions.settle(call)

    def _change(self, client: Client, message: DeleteTensor | OrderTensor | AdoptTensor) -> Tensors | None:
        match message:
            case OrderTensor(info=info):
                if self.shared is not None and not info.stored:
                    self.shared.find_base(info.name, partial(self._on_base, client, message))
                    return None
                return self._order(client, message)
            case AdoptTensor(ticket=ticket, info=info):
                if not info.version:
                    self._release(client, ticket, is_unsure=message.is_unsure)
                else:
                    self._forget(client, ticket)
                    self._copy(self.residents.adopt(ticket, info), info)
                self._answer_waiting()
                return Tensors(message.id, (info,))
            case DeleteTensor():
                if self.shared is not None:
                    self.shared.delete(client, message)
                    return None
                return Tensors(message.id, (self.residents.delete(message.name, message.match),))

    def _on_base(self, client: Client, message: OrderTensor, base: int | TilewireError) -> None:
        """Orders a result that is not in the store, whose last version of the name is known now."""
        try:
            if isinstance(base, TilewireError):
                raise base
            info = msgspec.structs.replace(message.info, base=base)
            client.send(self._order(client, msgspec.structs.replace(message, info=info)))
        except TilewireError as error:
            client.send(Failed.of(message.id, error))
        self._observe()

    def _order(self, client: Client, message: OrderTensor) -> Tensors:
        """Gives a tensor that waits here, or on another engine, its version."""
        ticket = message.ticket
        if self.shared is not None and self.shared.is_superseded(message.info):
            # It was there for a moment; what came behind it is in the store.
            self._release(client, ticket)
            return Tensors(message.id, (msgspec.structs.replace(message.info, version=0),))
        self._forget(client, ticket)
        info, was_there = self.residents.order(message.info, ticket, message.match)
        self._copy(self.residents.at(info.name), info)
        return Tensors(message.id, (info,), replaced=was_there)

    def _put(self, client: Client, message: PutTensor) -> None:
        """Begins an upload. With a store, or for another home engine, it waits for its version then."""
        if self.shared is None and self.residents.is_home(message.name):
            self.residents.check_match(message.name, message.match)
        source = in_segment(client, message.source)
        arrival = self.residents.receive(message.name, source, message.placement, message.axis)
        client.tickets.add(arrival.ticket)

        def end(error: Exception | None) -> Tensors:
            try:
                if error is None and not client.is_gone:
                    return self._received(client, message, arrival)
                self._release(client, arrival.ticket)
                close_copy(arrival.fd)
                raise error or Unavailable("the gateway is gone")
            finally:
                self._observe()

        self._move(client, message, arrival.steps, end)

    def _received(self, client: Client, message: PutTensor, arrival: Arrival) -> Tensors:
        name, ticket, info, fd = message.name, arrival.ticket, arrival.resident.info, arrival.fd
        if self.shared is None and self.residents.is_home(name):
            self.residents.set_copy(ticket, fd)
            try:
                info, was_there = self.residents.order_here(info, ticket, message.match)
            finally:
                self._release(client, ticket)
            return Tensors(message.id, (info,), replaced=was_there)
        if self.shared is not None:
            older = self.residents.at(name)
            is_above = older is not None and not older.info.stored
            self._held[ticket] = HostCopy(info, ticket=ticket, replaced=is_above)
            self._write(self._held[ticket], fd, message.match)
        if fd >= 0:
            self.residents.set_copy(ticket, fd)
        return Tensors(message.id, (info,), ticket=ticket)

    def _move(
        self, client: Client, message: Command, steps: Steps, end: Callable[[Exception | None], ToGateway]
    ) -> None:
        """Begins a transfer from or to a gateway's segment, and answers a message when it is over.

        `end` returns the answer, or raises why there is none. Nobody gets that of a gateway which is gone.
        """

        def over(error: Exception | None) -> None:
            del self._moving[transfer]
            client.num_launched -= 1
            try:
                reply = end(error)
            except DeviceLost:
                raise
            except TilewireError as failure:
                reply = Failed.of(message.id, failure)
            except Exception:
                logger.exception("a message of %s failed", client.name, extra={"request_id": message.request_id})
                reply = Failed.of(message.id, InternalError("internal error"))
            if not client.is_gone:
                client.send(reply)
            self.on_moved(client)

        # Its segment stays mapped.
        client.num_launched += 1
        transfer = Transfer(steps, over)
        self._moving[transfer] = client
        self.transfers.add(transfer)

    def _copy(self, resident: Resident | None, info: TensorInfo) -> None:
        """Has the host copy of a result made, unless there is one."""
        if resident is None or resident.has_copy:
            return
        assert resident.tensor is not None, "This is a bug."
        self._pending[resident] = self._begin_copy(info, resident.tensor)

    def _drop_copy(self, resident: Resident) -> None:
        self._drop(self._pending.pop(resident, None))

    def _drop(self, copy: HostCopy | None) -> None:
        if copy is not None and copy.transfer is not None:
            self.transfers.drop(copy.transfer)
        if copy is not None and copy.change is not None:
            copy.change.drop()

    def _release(self, client: Client, ticket: int, *, is_unsure: bool = False) -> None:
        """Drops a tensor that gets no version; see `Residents.release`."""
        self._drop(self._forget(client, ticket))
        self.residents.release(ticket, is_unsure=is_unsure)

    def _forget(self, client: Client, ticket: int) -> HostCopy | None:
        """Drops what is known here of a ticket; returns the copy that was made for it, if any."""
        client.tickets.discard(ticket)
        self._awaiting.pop(ticket, None)
        return self._held.pop(ticket, None)

    def _answer_waiting(self) -> None:
        """Answers the commands that waited for what this engine has now."""
        waiting, self._waiting = self._waiting, []
        self._answer_each(waiting)

    def _answer_loaded(self, waiting: Sequence[Waiting]) -> None:
        """Answers the commands that waited for a look at the store."""
        self._observe()
        self._answer_each(waiting)

    def _answer_each(self, waiting: Sequence[Waiting]) -> None:
        for one in waiting:
            try:
                reply = self._describe(one)
            except TilewireError as error:
                one.fail(error)
                continue
            if reply is not None:
                one.client.send(reply)

    def _describe(self, waiting: Waiting) -> Tensors | None:
        """Describes a tensor; None for a command that waits from now on for the change, or for the tensor that it fetches."""
        message = waiting.message
        if self.residents.lacks(message.name, message.version):
            self._waiting.append(waiting)
            return None
        if self.shared is not None and self.shared.looks(waiting):
            return None
        resident = self.residents.get(message.name)
        if isinstance(message, FetchTensor) and resident.tensor is None:
            if waiting.wanted != resident.info.version:
                self.residents.request_copy(message.name)
                waiting.wanted = resident.info.version
            self._waiting.append(waiting)
            return None
        return Tensors(message.id, (self.residents.info(message.name),))

    def _download(self, client: Client, message: GetTensor) -> Stale | None:
        if self.shared is not None and self.residents.at(message.name) is None:
            return Stale(message.id, (), (message.name,))
        resident = self.residents.get(message.name)
        part, is_right = resident.part, resident.info.type == message.expected
        if message.version or part is not None:
            is_right = is_right and message.version == resident.info.version
        if resident.tensor is None or not is_right:
            return Stale(message.id, (self.residents.info(message.name),))
        into = in_segment(client, Upload(message.expected, message.out_offset))
        # As it is now: it may be replaced meanwhile.
        stored = Stored(self.residents.info(message.name))

        def end(error: Exception | None) -> Done:
            if error is not None:
                raise error
            return Done(message.id, Timings(), stored=stored)

        self._move(client, message, download_steps(resident.tensor, into, part), end)
        return None

    def _residing(self) -> Residing:
        return Residing(tuple(self.residents.versions))

    def _observe(self) -> None:
        self.metrics.observe_residents(len(self.residents), self.residents.placed_bytes)


def _ignore(_client: Client) -> None:
    pass


def _copied(message: AwaitCopy, copy: HostCopy) -> Tensors | Failed:
    if copy.error is not None:
        return Failed.of(message.id, copy.error)
    return Tensors(message.id, (copy.info,), replaced=copy.replaced)
