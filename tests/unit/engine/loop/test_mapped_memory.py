"""Arenas and regions are mapped and unmapped beside the loop: others are answered meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

from tests.support.engine_loop import WAIT_S, GatewayEnd, engine_of
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Call
from tilewire.service.engine.tensors.host_mappings import HostMappings
from tilewire.service.engine.tensors.shm_files import FOLDER
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import (
    DescribeKernels,
    Kernels,
    RegionInfo,
    RegionList,
    RegisterRegion,
    UnregisterRegion,
    Welcome,
)


class SlowDriver(CpuBackend):
    """Takes as long to map and to unmap as it is told."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.may_map, self.may_unmap = threading.Event(), threading.Event()
        self.maps, self.unmaps, self.has_unmapped = threading.Event(), threading.Event(), threading.Event()

    def attach(self, segment: Segment) -> torch.Tensor:
        self.maps.set()
        assert self.may_map.wait(WAIT_S)
        return super().attach(segment)

    def adopt(self, fd: int, offset: int, nbytes: int) -> torch.Tensor:  # type: ignore[override]
        self.maps.set()
        assert self.may_map.wait(WAIT_S)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def detach(self, mapped: torch.Tensor) -> None:
        self.unmaps.set()
        assert self.may_unmap.wait(WAIT_S)
        super().detach(mapped)
        self.has_unmapped.set()

    def allow(self) -> None:
        self.may_map.set()
        self.may_unmap.set()


class Scene:
    """An engine with a slow driver and a gateway that it has welcomed."""

    def __init__(self) -> None:
        self.mailbox, self.driver = Mailbox(), SlowDriver()
        self.engine, store = engine_of(self.mailbox, self.driver)
        store.describe_kernels()
        self.engine.start()
        self.driver.may_map.set()
        self.first = GatewayEnd(self.mailbox)
        assert isinstance(self.first.receive(), Welcome)
        self.driver.may_map.clear()
        self.driver.maps.clear()

    def asks(self) -> bool:
        """Whether the first gateway is answered."""
        self.first.send(DescribeKernels(1))
        return isinstance(self.first.receive(), Kernels)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    try:
        yield made
    finally:
        made.driver.allow()
        made.first.close()
        made.engine.stop()


def test_gateways_are_answered_while_the_arena_of_another_is_mapped(scene: Scene) -> None:
    second = GatewayEnd(scene.mailbox, 1)
    assert scene.driver.maps.wait(WAIT_S)
    assert scene.asks()
    scene.driver.may_map.set()
    assert isinstance(second.receive(), Welcome)
    second.close()


def test_gateways_are_answered_while_the_arena_of_another_is_unmapped(scene: Scene) -> None:
    scene.driver.may_map.set()
    second = GatewayEnd(scene.mailbox, 1)
    assert isinstance(second.receive(), Welcome)
    second.close()
    assert scene.driver.unmaps.wait(WAIT_S)
    assert scene.asks()
    assert not scene.driver.has_unmapped.is_set()
    scene.driver.may_unmap.set()
    assert scene.driver.has_unmapped.wait(WAIT_S)


def test_an_arena_whose_gateway_leaves_while_it_is_mapped_is_unmapped(scene: Scene) -> None:
    second = GatewayEnd(scene.mailbox, 1)
    assert scene.driver.maps.wait(WAIT_S)
    second.close()
    # The loop has heard of it, as it answers in order.
    assert scene.asks()
    scene.driver.allow()
    assert scene.driver.has_unmapped.wait(WAIT_S)


def test_an_engine_ends_when_what_it_unmaps_is_unmapped() -> None:
    scene = Scene()
    scene.first.close()
    assert scene.driver.unmaps.wait(WAIT_S)
    stopping = threading.Thread(target=scene.engine.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    scene.driver.allow()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert scene.driver.has_unmapped.is_set()


@pytest.fixture
def region() -> Iterator[RegionInfo]:
    path = FOLDER / f"tests-{uuid4().hex}"
    path.write_bytes(bytes(4096))
    yield RegionInfo("r", path.name, 0, 4096)
    path.unlink()


def test_a_region_is_answered_when_it_is_mapped_and_others_meanwhile(scene: Scene, region: RegionInfo) -> None:
    scene.first.send(RegisterRegion(2, region))
    assert scene.driver.maps.wait(WAIT_S)
    assert scene.asks()
    scene.driver.may_map.set()
    answer = scene.first.receive()
    assert isinstance(answer, RegionList)
    assert [one.name for one in answer.regions] == ["r"]


def test_unregistering_is_answered_when_the_memory_is_free_and_others_meanwhile(
    scene: Scene, region: RegionInfo
) -> None:
    scene.driver.may_map.set()
    scene.first.send(RegisterRegion(2, region))
    assert isinstance(scene.first.receive(), RegionList)
    scene.first.send(UnregisterRegion(3, "r"))
    assert scene.driver.unmaps.wait(WAIT_S)
    assert scene.asks()
    assert not scene.driver.has_unmapped.is_set()
    scene.driver.may_unmap.set()
    assert isinstance(scene.first.receive(), RegionList)
    assert scene.driver.has_unmapped.is_set()


def test_what_fails_beside_the_loop_is_raised_in_it() -> None:
    mailbox = Mailbox()
    mappings = HostMappings(lambda call: mailbox.post(Call(call)))

    def work() -> None:
        raise MemoryError("no pages")

    mappings.begin(work, lambda _: None)
    (event,) = mailbox.take(WAIT_S)
    assert isinstance(event, Call)
    with pytest.raises(MemoryError, match="no pages"):
        event.call()
    mappings.close()
    mailbox.close()
