"""Handles messages about residents and shared regions.

Runs in the engine's loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tilewire.service.engine.backends.contract import Backend, HostBytes
from tilewire.service.engine.loop.jobs import BoundJob, Client, Copied
from tilewire.service.engine.loop.resolve import in_segment
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.host_copies import HostCopies, HostCopy
from tilewire.service.engine.tensors.residents import Resident, Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.errors import TilewireError, TooBusy, Unavailable
from tilewire.service.ipc.board import home_of
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
from tilewire.service.supervisor.vault import VaultFollower


@dataclass(slots=True, eq=False)
class Waiting:
    """A command whose answer follows when the engine has a change or a tensor.

    Attributes:
        client: Receiver of the answer.
        message: The command.
        wanted: Version of the tensor that the vault was asked for; None for none yet.
    """

    client: Client
    message: DescribeTensor | FetchTensor
    wanted: int | None = None


@dataclass(eq=False)
class TensorStore:
    """The residents and the regions of one engine, and what is known of its kernels.

    Attributes:
        backend: Device.
        residents: Resident tensors.
        regions: Clients' shared memory.
        metrics: Gets the residents' count and bytes.
        copies: Copies stored results to the host.
        follower: Source of the other engines' changes.
    """

    backend: Backend
    residents: Residents
    regions: Regions
    metrics: EngineMetrics
    copies: HostCopies
    follower: VaultFollower = field(default_factory=lambda: VaultFollower(-1))
    _kernels: bytes = field(default=b"", init=False)
    _clients: list[Client] = field(default_factory=list, init=False)
    _pending: dict[Resident, HostCopy] = field(default_factory=dict, init=False)
    # Copies of tensors that wait for their version, by ticket, and who awaits them.
    _held: dict[int, HostCopy] = field(default_factory=dict, init=False)
    _awaiting: dict[int, tuple[Client, AwaitCopy]] = field(default_factory=dict, init=False)
    _waiting: list[Waiting] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.residents.on_drop = self._drop_copy

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
        for ticket in tuple(client.tickets):
            self._release(client, ticket)
        self._answer_waiting()

    def follow(self) -> None:
        """Takes over what the other engines have changed, and reports it to the gateways."""
        for change in self.follower.take():
            self.residents.follow(change)
        self._observe()
        for client in self._clients:
            client.send(self._residing())
        self._answer_waiting()

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
        if stored.ticket:
            job.client.tickets.add(stored.ticket)
            if durable:
                home = home_of(name, len(self.residents.versions))
                copy = HostCopy(stored.info, job.kept.tensor, home, stored.ticket, is_awaited=True)
                self._held[stored.ticket] = copy
                self.copies.add(copy)
        else:
            self._copy(stored.info)
        self._observe()
        return stored

    def finish(self, copy: HostCopy) -> None:
        """Takes a host copy that the thread is through with."""
        if copy.ticket:
            copy.is_taken = True
            if copy.fd >= 0:
                self.residents.set_copy(copy.ticket, copy.fd)
            if (awaiting := self._awaiting.pop(copy.ticket, None)) is not None:
                client, message = awaiting
                client.send(_copied(message, copy))
            return
        resident = self.residents.at(copy.info.name)
        if resident is not None and self._pending.get(resident) is copy:
            del self._pending[resident]
            resident.has_copy = not copy.problem

    def close(self) -> None:
        """Ends the thread that copies."""
        self.copies.close()

    def answer(self, client: Client, message: Command) -> ToGateway | None:
        """Does what the message asks for.

        Returns:
            The answer; None when it follows later.

        Raises:
            TilewireError: Why not.
        """
        match message:
            case RegisterRegion():
                info = self.regions.register(message.region)
                return RegionList(message.id, (info,), info.stamp)
            case UnregisterRegion():
                return RegionList(message.id, (), self.regions.unregister(message.name, message.stamp))
            case ListRegions():
                return RegionList(message.id, self.regions.infos(message.name))
            case GetTensor():
                return self._download(client, message)
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
                waiting = Waiting(client, message)
                if (reply := self._described(waiting)) is None:
                    self._waiting.append(waiting)
                return reply
            case ListTensors():
                return Tensors(message.id, self.residents.infos())
            case _:
                reply = self._change(client, message)
                self._observe()
                return reply

    def _change(self, client: Client, message: PutTensor | DeleteTensor | OrderTensor | AdoptTensor) -> Tensors:
        match message:
            case PutTensor(name=name, source=source, placement=placement, axis=axis):
                uploaded = in_segment(client, source)
                if self.residents.is_home(name):
                    info, was_there = self.residents.put(name, uploaded, placement, axis)
                    return Tensors(message.id, (info,), replaced=was_there)
                info, ticket = self.residents.hold(name, uploaded, placement, axis)
                client.tickets.add(ticket)
                return Tensors(message.id, (info,), ticket=ticket)
            case OrderTensor(ticket=ticket):
                self._forget(client, ticket)
                info, was_there = self.residents.order(message.info, ticket)
                return Tensors(message.id, (info,), replaced=was_there)
            case AdoptTensor(ticket=ticket, info=info):
                if not info.version:
                    self._release(client, ticket)
                else:
                    self._forget(client, ticket)
                    adopted = self.residents.adopt(ticket, info)
                    if adopted is not None and not adopted.has_copy:
                        self._copy(info)
                self._answer_waiting()
                return Tensors(message.id, (info,))
            case DeleteTensor():
                return Tensors(message.id, (self.residents.delete(message.name),))

    def _copy(self, info: TensorInfo) -> None:
        resident = self.residents.get(info.name)
        assert resident.tensor is not None, "This is a bug."
        copy = self._pending[resident] = HostCopy(
            info, resident.tensor, home_of(info.name, len(self.residents.versions))
        )
        self.copies.add(copy)

    def _drop_copy(self, resident: Resident) -> None:
        if (copy := self._pending.pop(resident, None)) is not None:
            self.copies.drop(copy)

    def _release(self, client: Client, ticket: int) -> None:
        """Drops a tensor that gets no version."""
        if (copy := self._forget(client, ticket)) is not None:
            self.copies.drop(copy)
        self.residents.release(ticket)

    def _forget(self, client: Client, ticket: int) -> HostCopy | None:
        """Drops what is known here of a ticket; returns the copy that was made for it, if any."""
        client.tickets.discard(ticket)
        self._awaiting.pop(ticket, None)
        return self._held.pop(ticket, None)

    def _answer_waiting(self) -> None:
        """Answers the commands that waited for what this engine has now."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            try:
                reply: ToGateway | None = self._described(one)
            except TilewireError as error:
                reply = Failed(one.message.id, error.code, error.detail)
            if reply is None:
                self._waiting.append(one)
            else:
                one.client.send(reply)

    def _described(self, waiting: Waiting) -> Tensors | None:
        """Describes a tensor; None while this engine lacks the change, or the tensor that it was to fetch."""
        message = waiting.message
        if self.residents.lacks(message.name, message.version):
            return None
        resident = self.residents.get(message.name)
        if isinstance(message, FetchTensor) and resident.tensor is None:
            if waiting.wanted != resident.version:
                self.residents.request_copy(message.name)
                waiting.wanted = resident.version
            return None
        return Tensors(message.id, (self.residents.info(message.name),))

    def _download(self, client: Client, message: GetTensor) -> Done | Stale:
        resident = self.residents.get(message.name)
        part, is_right = resident.part, resident.type == message.expected
        if message.version or part is not None:
            is_right = is_right and message.version == resident.version
        if resident.tensor is None or not is_right:
            return Stale(message.id, (self.residents.info(message.name),))
        into = in_segment(client, Upload(message.expected, message.out_offset))
        if part is not None:
            kind, pitch = part.rows_in(resident.type)
            offset = into.offset + part.offset_in(resident.type)
            into = HostBytes(into.mapped, kind, offset, pitch=pitch)
        self.backend.download(resident.tensor, into)
        return Done(message.id, Timings())

    def _residing(self) -> Residing:
        return Residing(tuple(self.residents.versions))

    def _observe(self) -> None:
        self.metrics.observe_residents(len(self.residents), self.residents.nbytes)


def post_copies(copies: HostCopies, post: Callable[[Copied], None]) -> None:
    """Brings copies that are made from their thread to the loop's."""
    copies.on_done = lambda copy: post(Copied(copy))


def _copied(message: AwaitCopy, copy: HostCopy) -> Tensors | Failed:
    if copy.problem:
        return Failed(message.id, TooBusy.code, f"durable: {copy.problem}")
    return Tensors(message.id, (copy.info,))
