"""Handles messages about residents and shared regions.

Runs in the engine's loop thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tilewire.service.engine.backends.contract import Backend
from tilewire.service.engine.loop.jobs import Client
from tilewire.service.engine.loop.resolve import in_segment
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.errors import TilewireError
from tilewire.service.ipc.messages import (
    AwaitTensor,
    DeleteTensor,
    DescribeKernels,
    DescribeTensor,
    Done,
    Failed,
    GetTensor,
    Kernels,
    ListRegions,
    ListTensors,
    PutTensor,
    RegionList,
    RegisterRegion,
    Stale,
    Tensors,
    Timings,
    ToGateway,
    UnregisterRegion,
    Upload,
)
from tilewire.service.supervisor.vault import VaultFollower

Question = (
    PutTensor
    | GetTensor
    | DescribeTensor
    | DeleteTensor
    | AwaitTensor
    | ListTensors
    | RegisterRegion
    | UnregisterRegion
    | ListRegions
    | DescribeKernels
)


@dataclass
class Holdings:
    """The residents and the regions of one engine, and what is known of its kernels.

    Attributes:
        backend: Device.
        residents: Resident tensors.
        regions: Clients' shared memory.
        metrics: Gets the residents' count and bytes.
        follower: Source of the home engine's changes, on the engines that follow.
    """

    backend: Backend
    residents: Residents
    regions: Regions
    metrics: EngineMetrics
    follower: VaultFollower = field(default_factory=lambda: VaultFollower(-1))
    _kernels: bytes = field(default=b"", init=False)
    _awaiting: list[tuple[Client, AwaitTensor]] = field(default_factory=list, init=False)

    def describe_kernels(self) -> None:
        """Works out the answer to `DescribeKernels`: when nobody waits, since it takes tens of milliseconds."""
        self._kernels = msgspec.json.encode(self.backend.kernels())

    def follow(self) -> None:
        """Takes over what the home engine has changed, and answers those who wait for it."""
        for change in self.follower.take():
            self.residents.follow(change)
        self._observe()
        awaiting, self._awaiting = self._awaiting, []
        for client, message in awaiting:
            try:
                reply: ToGateway | None = self._await(client, message)
            except TilewireError as error:
                reply = Failed(message.id, error.code, error.detail, error.retry_after_s)
            if reply is not None:
                client.send(reply)

    def answer(self, client: Client, message: Question) -> ToGateway | None:
        """Does what the message asks for.

        Returns:
            The answer; None when it follows later.

        Raises:
            TilewireError: Why not.
        """
        match message:
            case AwaitTensor():
                return self._await(client, message)
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
            case _:
                return self._answer_of_residents(client, message)

    def _await(self, client: Client, message: AwaitTensor) -> Tensors | None:
        if message.version > self.residents.version:
            self._awaiting.append((client, message))
            return None
        self.residents.check(message.name)
        return Tensors(message.id, ())

    def _answer_of_residents(
        self, client: Client, message: PutTensor | DescribeTensor | DeleteTensor | ListTensors
    ) -> Tensors:
        match message:
            case PutTensor(source=source):
                uploaded = in_segment(client, source)
                tensor, was_there = self.residents.put(message.name, uploaded)
                self._observe()
                return Tensors(message.id, (tensor,), replaced=was_there)
            case DescribeTensor():
                return Tensors(message.id, (self.residents.get(message.name).info(message.name),))
            case DeleteTensor():
                tensor = self.residents.delete(message.name, message.version)
                self._observe()
                return Tensors(message.id, (tensor,))
            case ListTensors():
                return Tensors(message.id, self.residents.infos())

    def _download(self, client: Client, message: GetTensor) -> Done | Stale:
        resident = self.residents.get(message.name)
        if resident.type != message.expected:
            return Stale(message.id, (resident.info(message.name),))
        self.backend.download(resident.tensor, in_segment(client, Upload(message.expected, message.out_offset)))
        return Done(message.id, Timings())

    def _observe(self) -> None:
        self.metrics.observe_residents(len(self.residents), self.residents.nbytes)
