"""Commands about residents at an engine that follows another: answers wait for the change that they are about."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from tests.support.jobs import JobBench
from tests.support.local_totals import LocalTotals
from tests.support.mappings import MappedAtOnce
from tests.support.resident_chain import homed
from tests.support.transfers import MovedAtOnce
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.jobs import Client
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import MAX_LISTED, TensorStore
from tilewire.service.engine.tensors.resident import make_copy
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.engine.tensors.transfers import TransferThread
from tilewire.service.errors import Lost, UnknownName
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.board import VersionBoard, home_of
from tilewire.service.ipc.messages import (
    AdoptTensor,
    AwaitCopy,
    DescribeTensor,
    Failed,
    FetchTensor,
    ListTensors,
    Stored,
    TensorInfo,
    Tensors,
    ToGateway,
)
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import MAX_MESSAGE_BYTES, VaultFeed, VaultFollower, VaultReader, VaultWriter

W = next(name for name in (f"w{n}" for n in itertools.count()) if home_of(name, 2) == 0)
KIND = TensorType("float32", (3,))


class Pair:
    """The home engine of `W`, an engine that follows it, and a gateway of both.

    Attributes:
        home: Residents of the home engine.
        follower: The engine that follows.
        gateway: Asks the follower.
        answers: What the follower has sent to the gateway later.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._deposits, home_end = self._pair(stack)
        feed_end, follower_end = self._pair(stack)
        self._wants, want_end = self._pair(stack)
        self._vault = VaultReader(2)
        self._vault.feeds[1] = VaultFeed(feed_end, self._vault.kept)
        board, backend = VersionBoard(), CpuBackend()
        writers = [VaultWriter(home_end.detach()), VaultWriter(want_end.detach(), 1)]
        self.home, residents = (
            Residents(backend, 2**20, writer, index=index, num_engines=2, board=board)
            for index, writer in enumerate(writers)
        )
        for writer in writers:
            stack.callback(writer.close)
        follower = VaultFollower(follower_end.fileno())
        stack.callback(follower.close)
        metrics = EngineMetrics(LocalTotals(), backend.identity, version="0", restarts=0)
        self.follower = TensorStore(
            backend,
            residents,
            Regions(backend, writers[1], MappedAtOnce(), max_bytes=0, max_copied_bytes=0),
            metrics,
            MovedAtOnce(backend),
            follower,
        )
        stack.callback(self.follower.close)
        self.answers: list[ToGateway] = []
        segment = Segment.create("tests", 4096)
        stack.callback(segment.close)
        self.gateway = Client("gateway", segment, self.answers.append)

    @staticmethod
    def _pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setblocking(False)
            stack.callback(end.close)
        return ends

    def keep(self, value: float) -> tuple[Stored, TensorInfo]:
        """A result of the follower, and what its home makes of it."""
        stored = self.follower.residents.keep(W, torch.full((3,), value), KIND)
        self.gateway.tickets.add(stored.ticket)
        return stored, self.home.order(stored.info, stored.ticket)[0]

    def spread(self) -> None:
        """Brings the changes of the home engine to the one that follows."""
        self._vault.drain(self._deposits)
        self.follower.follow()

    def is_wanted(self) -> bool:
        """Whether the follower has asked the vault for a tensor."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._wants.recv(MAX_MESSAGE_BYTES))
        return False


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(stack)


def test_a_tensor_that_cannot_be_brought_back_is_left_out(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    follower, name = pair.follower, homed("x", 1)
    kept = [TensorInfo(one, KIND, 0.0, version=5, engines=(1,)) for one in (name, homed("y", 1))]
    # Memory that is smaller than the tensor cannot be mapped.
    follower.restore(Kept(name, kept[0], make_copy(name, 0), version=5, home=1))
    follower.restore(Kept(kept[1].name, kept[1], make_copy(kept[1].name, KIND.nbytes), version=5, home=1))
    assert f"{name} is left out" in caplog.text
    with pytest.raises(Lost, match="lost with the engine; write it again"):
        follower.residents.get(name)
    assert follower.residents.get(kept[1].name).tensor is not None
    assert follower.residents.nbytes == KIND.nbytes
    follower.residents.keep(name, torch.ones(3), KIND)
    assert follower.residents.nbytes == 2 * KIND.nbytes


def test_a_part_that_cannot_be_brought_back_is_lost_and_nobody_waits_for_it(pair: Pair) -> None:
    follower = pair.follower
    info = TensorInfo(W, KIND, 0.0, version=5, placement="shard", engines=(0, 1), axis=-1, num_parts=2)
    follower.restore(Kept(W, info, make_copy(W, 0), version=5, home=0))
    with pytest.raises(Lost, match="lost with the engine; write it again"):
        follower.answer(pair.gateway, DescribeTensor(1, W, 5))
    # Written again.
    info = msgspec.structs.replace(info, version=6)
    follower.restore(Kept(W, info, make_copy(W, KIND.nbytes), version=6, home=0))
    described = follower.answer(pair.gateway, DescribeTensor(2, W, 6))
    assert isinstance(described, Tensors)
    assert described.tensors == (info,)


def test_a_list_comes_in_parts_that_lack_nothing(pair: Pair) -> None:
    names = [homed(prefix, 1) for prefix in ("a", "b/", "c")] + [f"n{number}" for number in range(2 * MAX_LISTED)]
    for version, name in enumerate(names, 1):
        info = TensorInfo(name, KIND, 0.0, version=version, engines=(1,))
        pair.follower.restore(Kept(name, info, make_copy(name, KIND.nbytes), version=version, home=1))
    listed: list[str] = []
    after = 0
    while not listed or after:
        part = pair.follower.answer(pair.gateway, ListTensors(1, after=after))
        assert isinstance(part, Tensors)
        assert len(part.tensors) <= MAX_LISTED
        listed += [info.name for info in part.tensors]
        after = part.next
        if len(listed) == MAX_LISTED:
            # Meanwhile one that was listed is deleted, and one is replaced: it is listed again, as it is now.
            pair.follower.residents.delete(names[0])
            pair.follower.residents.keep(names[1], torch.ones(3), KIND)
    assert sorted(listed) == sorted([*names, names[1]])
    found = pair.follower.answer(pair.gateway, ListTensors(2, "b/"))
    assert isinstance(found, Tensors)
    assert [info.name for info in found.tensors] == [names[1]]
    assert found.next == 0


def versions(pair: Pair) -> list[int]:
    """Versions of the tensors that were described later, by their order."""
    return [info.version for one in pair.answers if isinstance(one, Tensors) for info in one.tensors]


def test_a_tensor_is_described_when_it_has_its_version(pair: Pair) -> None:
    stored, ordered = pair.keep(1)
    assert pair.follower.answer(pair.gateway, DescribeTensor(1, W, ordered.version)) is None
    pair.follower.answer(pair.gateway, AdoptTensor(2, stored.ticket, ordered))
    assert versions(pair) == [ordered.version]
    # The next one takes its place: until then, whoever has heard of it does not get the older one.
    again, newer = pair.keep(2)
    assert pair.follower.answer(pair.gateway, DescribeTensor(3, W, newer.version)) is None
    described = pair.follower.answer(pair.gateway, DescribeTensor(4, W, ordered.version))
    assert isinstance(described, Tensors)
    assert described.tensors[0].version == ordered.version
    pair.follower.answer(pair.gateway, AdoptTensor(5, again.ticket, newer))
    assert versions(pair) == [ordered.version, newer.version]


def test_a_change_that_comes_before_its_tensor_is_waited_for(pair: Pair) -> None:
    stored, ordered = pair.keep(1)
    pair.spread()
    assert pair.follower.answer(pair.gateway, DescribeTensor(1, W)) is None
    # Nothing is sent there meanwhile.
    assert pair.follower.residents.info(W).engines == ()
    pair.follower.answer(pair.gateway, AdoptTensor(2, stored.ticket, ordered))
    assert versions(pair) == [ordered.version]
    assert pair.follower.residents.info(W).engines == (1,)


def test_a_tensor_whose_gateway_went_away_before_it_had_its_version_is_lost(pair: Pair) -> None:
    _, ordered = pair.keep(1)
    pair.spread()
    other = Client("other", pair.gateway.segment, pair.answers.append)
    assert pair.follower.answer(other, DescribeTensor(1, W, ordered.version)) is None
    pair.answers.clear()
    pair.follower.detach(pair.gateway)
    (answer,) = pair.answers
    assert isinstance(answer, Failed)
    assert answer.code == Lost.code


def test_a_name_that_is_not_known_yet_is_not_unknown(pair: Pair) -> None:
    _, ordered = pair.keep(1)
    deleted = pair.home.delete(W)
    assert pair.follower.answer(pair.gateway, DescribeTensor(1, W, deleted.version)) is None
    pair.spread()
    (answer,) = (one for one in pair.answers if isinstance(one, Failed))
    assert answer.code == UnknownName.code
    with pytest.raises(UnknownName):
        pair.follower.answer(pair.gateway, DescribeTensor(2, W, ordered.version))


def test_a_tensor_is_fetched_in_the_version_that_was_asked_for(pair: Pair) -> None:
    stored, ordered = pair.keep(1)
    pair.follower.answer(pair.gateway, AdoptTensor(1, stored.ticket, ordered))
    pair.spread()
    kept = pair.home.keep(W, torch.full((3,), 2.0), KIND).info
    # It has the older one, which is not the answer.
    assert pair.follower.answer(pair.gateway, FetchTensor(2, W, kept.version)) is None
    assert not pair.is_wanted()
    pair.spread()
    assert pair.is_wanted()
    assert versions(pair) == []


def test_a_copy_is_awaited_until_the_loop_has_it(pair: Pair) -> None:
    """The thread that copies is through a moment earlier: what was ordered then would have no copy."""
    bench = JobBench()
    job = bench.storing_job("add", AddOptions(), W, a=bench.put(torch.ones(3)), b=bench.put(torch.ones(3)))
    job.plan = dataclasses.replace(job.plan, kept=(W, KIND, True))
    assert job.kept is not None
    job.kept.tensor = torch.full((3,), 2.0)
    job.client = pair.gateway
    calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    pair.follower.transfers = TransferThread(pair.follower.backend, calls.put)
    stored = pair.follower.keep(job)
    take_copy = calls.get(timeout=10)
    assert pair.follower.answer(pair.gateway, AwaitCopy(1, stored.ticket)) is None
    take_copy()
    assert [type(answer) for answer in pair.answers] == [Tensors]
    assert isinstance(pair.follower.answer(pair.gateway, AwaitCopy(2, stored.ticket)), Tensors)
    ordered, _ = pair.home.order(stored.info, stored.ticket)
    pair.follower.answer(pair.gateway, AdoptTensor(3, stored.ticket, ordered))
    bench.close()
