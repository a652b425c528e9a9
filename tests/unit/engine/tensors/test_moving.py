"""Uploads, downloads and followed changes that are under way while an engine answers others."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch

from tests.support.descriptors import num_opened, open_descriptors
from tests.support.engine_loop import GatewayEnd, engine_of
from tests.support.jobs import template_of
from tests.support.local_totals import LocalTotals
from tests.support.mappings import MappedAtOnce
from tests.support.resident_chain import Chain, W, X, number, put
from tests.support.transfers import MovedWhenAsked
from tilewire.service.engine.backends.contract import DeviceLost, LaunchSpec, Running
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Client
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.errors import TooBusy
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import (
    DescribeTensor,
    Done,
    Failed,
    GetTensor,
    Job,
    ListTensors,
    OutputSpec,
    PutTensor,
    Tensors,
    ToGateway,
    Upload,
    Welcome,
)
from tilewire.service.match import Match
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions
from tilewire.service.supervisor.vault import VaultFollower, VaultWriter

KIND = TensorType("float32", (3,))
QUOTA = 40
OUT = 2048


class Engine:
    """The tensors of an engine, with transfers that wait for `moving.step`, and a gateway.

    Attributes:
        moved: Gateways whose transfers are over.
    """

    def __init__(
        self, stack: contextlib.ExitStack, residents: Residents, follower: VaultFollower | None = None
    ) -> None:
        backend = CpuBackend()
        metrics = EngineMetrics(LocalTotals(), backend.identity, version="0", restarts=0)
        self.moving = MovedWhenAsked(backend)
        regions = Regions(backend, VaultWriter(-1), MappedAtOnce(), max_bytes=0, max_copied_bytes=0)
        self.store = TensorStore(backend, residents, regions, metrics, self.moving, follower or VaultFollower(-1))
        self.moved: list[Client] = []
        self.store.on_moved = self.moved.append
        self.answers: list[ToGateway] = []
        self.segment = Segment.create("tests", 4096)
        stack.callback(self.segment.close)
        self.client = Client("gateway", self.segment, self.answers.append)
        self.client.mapped = torch.frombuffer(self.segment.view, dtype=torch.uint8)
        # Its buffer is closed last.
        stack.callback(setattr, self.client, "mapped", None)

    def begin_put(
        self, number: int, value: float, size: int = 3, *, name: str = "w", match: Match | None = None
    ) -> None:
        offset = 64 * number
        self.segment.view[offset : offset + 4 * size] = np.full(size, value, np.float32).tobytes()
        kind = TensorType("float32", (size,))
        assert self.store.answer(self.client, PutTensor(number, name, Upload(kind, offset), match=match)) is None

    def value(self, name: str = "w") -> float:
        tensor = self.store.residents.get(name).tensor
        assert tensor is not None
        return float(tensor[0])


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def engine(stack: contextlib.ExitStack) -> Engine:
    return Engine(stack, Residents(CpuBackend(), QUOTA, VaultWriter(-1)))


def test_the_older_tensor_serves_while_another_comes(engine: Engine) -> None:
    engine.begin_put(1, 1)
    engine.moving.step()
    assert isinstance(engine.answers.pop(), Tensors)
    engine.begin_put(2, 2)
    assert (engine.answers, engine.value(), engine.store.is_moving, engine.client.num_launched) == ([], 1, True, 1)
    described = engine.store.answer(engine.client, DescribeTensor(3, "w"))
    assert isinstance(described, Tensors)
    engine.moving.step()
    stored = engine.answers.pop()
    assert isinstance(stored, Tensors)
    assert (stored.id, stored.replaced, engine.value()) == (2, True, 2)
    assert stored.tensors[0].version > described.tensors[0].version
    assert (engine.store.is_moving, engine.client.num_launched, engine.moved) == (False, 0, [engine.client] * 2)


def test_a_download_brings_what_was_there_when_it_began(engine: Engine) -> None:
    engine.begin_put(1, 1)
    engine.moving.step()
    assert engine.store.answer(engine.client, GetTensor(2, "w", KIND, OUT)) is None
    engine.begin_put(3, 5)
    # The upload is over first.
    engine.moving._waiting.rotate(1)
    engine.moving.step()
    engine.store.residents.delete("w")
    engine.moving.step()
    done = engine.answers.pop()
    assert isinstance(done, Done)
    assert done.stored is not None
    assert done.stored.info.type == KIND
    assert np.frombuffer(bytes(engine.segment.view[OUT : OUT + 12]), np.float32).tolist() == [1] * 3


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_upload_that_does_not_come_leaves_nothing(engine: Engine, *, is_gone: bool) -> None:
    engine.begin_put(1, 1)
    engine.moving.step()
    before, nbytes = open_descriptors(), engine.store.residents.nbytes
    engine.answers.clear()
    engine.begin_put(2, 2)
    engine.begin_put(3, 3, name="new")
    if is_gone:
        engine.client.is_gone = True
        engine.store.detach(engine.client)
    assert all(one.is_needless == is_gone for one in engine.moving._waiting)
    for _ in range(2):
        engine.moving.step(None if is_gone else TooBusy("no memory"))
    assert (engine.value(), engine.store.residents.at("new")) == (1, None)
    assert (engine.store.residents.nbytes, num_opened(before), engine.client.num_launched) == (nbytes, 0, 0)
    failed = [one.id for one in engine.answers if isinstance(one, Failed) and one.code == "too_busy"]
    assert failed == ([] if is_gone else [2, 3])
    assert engine.client.tickets == set()


def test_a_device_that_fails_under_a_transfer_ends_the_engine(engine: Engine) -> None:
    engine.begin_put(1, 1)
    with pytest.raises(DeviceLost):
        engine.moving.step(DeviceLost("gone"))


def test_of_two_uploads_on_one_condition_one_is_refused(engine: Engine) -> None:
    engine.begin_put(1, 1)
    engine.moving.step()
    stored = engine.answers.pop()
    assert isinstance(stored, Tensors)
    match = (stored.tensors[0].version,)
    for number_ in (2, 3):
        engine.begin_put(number_, number_, match=match)
    engine.moving.step()
    engine.moving.step()
    first, second = engine.answers
    assert isinstance(first, Tensors)
    assert isinstance(second, Failed)
    assert (second.code, engine.value(), engine.store.residents.nbytes) == ("precondition_failed", 2, 12)


def test_the_quota_counts_each_name_once_while_uploads_are_under_way(engine: Engine) -> None:
    engine.begin_put(1, 1, 6)
    engine.moving.step()
    # Replaced twice at once, and another beside it: 24 and 16 bytes at the end.
    engine.begin_put(2, 2, 6)
    engine.begin_put(3, 3, 6)
    engine.begin_put(4, 4, 4, name="other")
    with pytest.raises(Exception, match="exceed the quota"):
        engine.begin_put(5, 5, 1, name="more")
    # What is to replace a larger one may fail to.
    engine.begin_put(6, 6, 1)
    with pytest.raises(Exception, match="exceed the quota"):
        engine.begin_put(7, 7, 1, name="more")
    while len(engine.moving):
        engine.moving.step()
    assert engine.store.residents.nbytes == 4 + 16
    engine.begin_put(8, 8, 5, name="more")


def test_changes_are_followed_in_their_order(stack: contextlib.ExitStack, chain: Chain) -> None:
    residents, follower = chain.follower()
    engine = Engine(stack, residents, follower)
    put(chain.home, W, number(1))
    put(chain.home, X, number(2))
    chain.home.delete(X)
    chain.vault.drain(chain.deposits)
    engine.store.follow()
    # One that asks for the first change waits, and nobody else does.
    described = chain.home.get(W).info
    assert engine.store.answer(engine.client, DescribeTensor(1, W, described.version)) is None
    assert (residents.versions[0], len(engine.moving)) == (0, 1)
    engine.moving.step()
    assert [type(one) for one in engine.answers] == [Tensors]
    assert engine.value(W) == 1
    put(chain.home, W, number(3))
    chain.vault.drain(chain.deposits)
    engine.store.follow()
    while len(engine.moving):
        engine.moving.step()
    assert (residents.versions, engine.value(W), residents.at(X)) == (chain.home.versions, 3, None)
    assert residents.nbytes == 12


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_tensor_that_is_replaced_is_freed_at_once(stack: contextlib.ExitStack) -> None:
    # By its last reference: the collector of an engine looks for cycles after thousands of objects, whatever their size.
    mailbox = Mailbox()
    loop, store = engine_of(mailbox)
    gateway = GatewayEnd(mailbox)
    stack.callback(gateway.close)
    loop.start()
    stack.callback(loop.stop)
    while not isinstance(gateway.receive(), Welcome):
        pass
    kind = TensorType("int8", (2**14,))
    older: list[weakref.ref[torch.Tensor]] = []
    for number_ in range(0, 6, 2):
        gateway.send(PutTensor(number_, "w", Upload(kind, 0)))
        assert isinstance(gateway.receive(), Tensors)
        gateway.send(GetTensor(number_ + 1, "w", kind, 2**15))
        assert isinstance(gateway.receive(), Done)
        tensor = store.residents.get("w").tensor
        assert tensor is not None
        older.append(weakref.ref(tensor))
        del tensor
    assert [one() is None for one in older] == [True, True, False]


class LeavingGateway(CpuBackend):
    """Its gateway dies while it computes."""

    gateway: GatewayEnd

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        self.gateway.close()
        return super().begin(launches)


def test_a_durable_result_for_a_gateway_that_is_gone_leaves_nothing(stack: contextlib.ExitStack) -> None:
    mailbox, backend = Mailbox(), LeavingGateway("cpu")
    loop, store = engine_of(mailbox, backend)
    backend.gateway = gateway = GatewayEnd(mailbox)
    loop.start()
    stack.callback(loop.stop)
    while not isinstance(gateway.receive(), Welcome):
        pass
    template = template_of("softmax", SoftmaxOptions(), {"x": KIND}, store="y")
    durable = msgspec.structs.replace(template, outputs=(OutputSpec(KIND, resident="y", durable=True),))
    gateway.send(durable, Job(1, 1, (0,)))
    # The next gateway is welcomed behind it.
    other = GatewayEnd(mailbox, 1)
    stack.callback(other.close)
    while not isinstance(other.receive(), Welcome):
        pass
    other.send(ListTensors(2))
    listed = other.receive()
    assert isinstance(listed, Tensors)
    assert (listed.tensors, store.residents.nbytes) == ((), 0)


def test_an_engine_ends_when_uploads_are_answered() -> None:
    mailbox = Mailbox()
    loop, _store = engine_of(mailbox)
    gateway = GatewayEnd(mailbox)
    loop.start()
    while not isinstance(gateway.receive(), Welcome):
        pass
    gateway.send(PutTensor(1, "w", Upload(TensorType("int8", (2**15,)), 0)))
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    stored = gateway.receive()
    assert isinstance(stored, Tensors)
    assert stored.tensors[0].type.shape == (2**15,)
    stopping.join(timeout=10)
    assert not stopping.is_alive()
    gateway.close()
