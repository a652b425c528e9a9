"""Registered regions: names, quota, uses, and the bytes of tensors in them. Any order of events leaks nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.support.descriptors import num_opened, open_descriptors
from tests.support.mappings import MappedAtOnce, MappedWhenAsked
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.tensors.host_mappings import Mappings
from tilewire.service.engine.tensors.shared_regions import MAX_REGIONS, Regions, Use
from tilewire.service.engine.tensors.shm_files import SharedFile
from tilewire.service.errors import AlreadyExists, BeyondLimit, InvalidRequest, UnknownName
from tilewire.service.ipc.messages import RegionInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.handover import KeptRegion
from tilewire.service.supervisor.vault import VaultReader, VaultWriter

PAGE = 4096
OUT = "out"
KIND = TensorType("float32", (4,))


class AdoptingBackend(CpuBackend):
    """As a GPU's: regions are mapped, and what is adopted must be detached."""

    def __init__(self) -> None:
        super().__init__()
        self.adopted: dict[int, int] = {}
        self.num_adoptions = 0

    def adopt(self, fd: int, offset: int, nbytes: int) -> torch.Tensor:  # type: ignore[override]
        mapped = torch.zeros(nbytes, dtype=torch.uint8)
        self.adopted[mapped.data_ptr()] = nbytes
        self.num_adoptions += 1
        return mapped

    def detach(self, mapped: torch.Tensor) -> None:
        del self.adopted[mapped.data_ptr()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, pages in (("one", 1), ("four", 4)):
        (tmp_path / name).write_bytes(bytes(pages * PAGE))
    return tmp_path


@pytest.fixture
def regions(folder: Path) -> Iterator[Regions]:
    # Else descriptors that earlier tests let go of could be closed meanwhile.
    gc.collect()
    before = open_descriptors()
    regions = regions_of(folder)
    yield regions
    regions.unregister(None)
    assert (regions.nbytes, num_opened(before)) == (0, 0)


def regions_of(
    folder: Path, backend: CpuBackend | None = None, vault: VaultWriter | None = None, mappings: Mappings | None = None
) -> Regions:
    """Regions of eight pages together."""
    return Regions(
        CpuBackend() if backend is None else backend,
        VaultWriter(-1) if vault is None else vault,
        MappedAtOnce() if mappings is None else mappings,
        max_bytes=8 * PAGE,
        max_copied_bytes=8 * PAGE,
        folder=folder,
    )


def asked(name: str, key: str = "four", offset: int = 0, byte_size: int = PAGE) -> RegionInfo:
    return RegionInfo(name, key, offset, byte_size)


def stage_in(regions: Regions, uses: dict[str, Use]) -> dict[str, HostBytes]:
    """The operands and the result of a job that uses these places."""
    places = {name: use.place() for name, use in uses.items()}
    return {**places, **regions.stage_in(uses)}


def test_a_name_is_taken_until_it_is_given_back(regions: Regions) -> None:
    info = regions.register(asked("r"))
    assert regions.infos() == regions.infos("r") == (info,)
    assert info.stamp > 0
    with pytest.raises(AlreadyExists, match="registered already"):
        regions.register(asked("r"))
    regions.unregister("r")
    with pytest.raises(UnknownName, match="no shared memory region 'r'"):
        regions.infos("r")
    regions.unregister("r")
    assert regions.register(asked("r")).stamp > info.stamp


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(0, 4 * PAGE + 1), (4 * PAGE, 1), (-1, 1), (0, 0), (0, -1), (1, 4 * PAGE), (2**63 - 1, 1), (2**64, PAGE)],
)
def test_a_range_lies_inside_the_object(regions: Regions, offset: int, byte_size: int) -> None:
    with pytest.raises(InvalidRequest, match="byte_size"):
        regions.register(asked("r", offset=offset, byte_size=byte_size))
    assert len(regions) == 0


def test_more_than_may_be_registered_is_refused_until_room_is_made(regions: Regions) -> None:
    regions.register(asked("a", byte_size=4 * PAGE))
    regions.register(asked("b", byte_size=3 * PAGE))
    with pytest.raises(BeyondLimit, match="byte_size"):
        regions.register(asked("c", byte_size=PAGE + 1))
    regions.unregister("b")
    regions.register(asked("c", byte_size=2 * PAGE))
    assert regions.nbytes == 6 * PAGE


def test_there_is_an_end_to_the_number_of_regions(regions: Regions) -> None:
    for number in range(MAX_REGIONS):
        regions.register(asked(str(number), byte_size=1))
    with pytest.raises(BeyondLimit, match="regions are registered"):
        regions.register(asked("more", byte_size=1))
    regions.unregister(None)


@pytest.mark.parametrize("offset", [-1, -(2**63), PAGE - 15, PAGE, 2**63 - 8, 2**64])
def test_a_tensor_lies_inside_its_region(regions: Regions, offset: int) -> None:
    regions.register(asked("r"))
    with pytest.raises(InvalidRequest, match="a: 16 bytes at"):
        regions.find("r", offset, KIND, field="a")
    assert regions.find("r", PAGE - 16, KIND, field="a").offset == PAGE - 16


def test_an_unregistered_region_lives_until_its_last_use(regions: Regions, folder: Path) -> None:
    before = open_descriptors()
    regions.register(asked("r"))
    uses = {OUT: regions.find("r", 0, KIND, field="out", is_out=True)}
    regions.hold(uses)
    regions.hold(uses)
    regions.unregister("r")
    with pytest.raises(UnknownName):
        regions.find("r", 0, KIND, field="a")
    regions.register(asked("r", key="one"))
    assert regions.nbytes == 2 * PAGE
    places = stage_in(regions, uses)
    places[OUT].mapped.fill_(7)
    uses[OUT].stage_out(places[OUT])
    assert (folder / "four").read_bytes()[:17] == b"\7" * 16 + b"\0"
    regions.release(uses)
    assert num_opened(before) == 2
    regions.release(uses)
    assert num_opened(before) == 1


def test_bytes_go_in_and_out_through_the_descriptor(regions: Regions, folder: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    (folder / "one").write_bytes(bytes(40) + values.tobytes() + bytes(PAGE - 56))
    regions.register(asked("in", key="one", offset=33, byte_size=100))
    regions.register(asked("out", offset=5, byte_size=100))
    uses = {
        "a": regions.find("in", 7, KIND, field="a"),
        OUT: regions.find("out", 11, KIND, field="out", is_out=True),
    }
    places = stage_in(regions, uses)
    source = places["a"]
    np.testing.assert_array_equal(source.mapped.numpy().view(np.float32), values)
    places[OUT].mapped.copy_(source.mapped)
    uses[OUT].stage_out(places[OUT])
    assert (folder / "four").read_bytes()[16:32] == values.tobytes()


def test_a_cut_object_is_noticed_before_and_after_it_is_found(regions: Regions, folder: Path) -> None:
    regions.register(asked("r", key="one"))
    uses = {"a": regions.find("r", 8, KIND, field="a"), OUT: regions.find("r", 8, KIND, field="out", is_out=True)}
    os.truncate(folder / "one", 20)
    with pytest.raises(InvalidRequest, match=r"a: .* was cut"):
        regions.find("r", 8, KIND, field="a")
    with pytest.raises(InvalidRequest, match=r"a: .* was cut"):
        stage_in(regions, uses)
    with pytest.raises(InvalidRequest, match=r"out: .* was cut"):
        uses[OUT].stage_out(stage_in(regions, {OUT: uses[OUT]})[OUT])
    assert (folder / "one").stat().st_size == 20


def test_a_read_only_object_takes_no_result(regions: Regions, folder: Path) -> None:
    (folder / "one").chmod(0o444)
    regions.register(asked("r", key="one"))
    regions.find("r", 0, KIND, field="a")
    with pytest.raises(InvalidRequest, match="out: region 'r' is read-only"):
        regions.find("r", 0, KIND, field="out", is_out=True)


def test_a_second_engine_follows_the_first(folder: Path) -> None:
    first, second = (regions_of(folder) for _ in range(2))
    old = first.register(asked("r"))
    second.register(old)
    assert second.register(old) == old
    dropped = first.unregister("r")
    new = first.register(asked("r", key="one"))
    # What the gateways sent may come in another order.
    second.register(new)
    second.unregister("r", dropped)
    assert second.infos("r") == first.infos("r") == (new,)
    (folder / "one").unlink()
    (folder / "one").write_bytes(bytes(PAGE))
    newer = RegionInfo("s", "one", 0, PAGE, new.stamp + 1, new.inode)
    with pytest.raises(InvalidRequest, match="was replaced"):
        second.register(newer)
    for regions in (first, second):
        regions.unregister(None)


def test_the_next_engine_has_what_was_registered_even_without_its_name(folder: Path) -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    reader = VaultReader()
    writer = VaultWriter(theirs.detach())
    regions = regions_of(folder, vault=writer)
    kept = regions.register(asked("kept", key="one"))
    regions.register(asked("gone"))
    regions.unregister("gone")
    (folder / "one").unlink()
    reader.drain(ours)
    with reader.handover() as handed:
        (handed_region,) = handed.regions
    assert handed_region.region == kept
    regions.unregister(None)
    after = regions_of(folder)
    after.restore(KeptRegion(handed_region.region, os.dup(handed_region.fd)))
    assert after.infos() == (kept,)
    uses = {OUT: after.find("kept", 0, KIND, field="out", is_out=True)}
    uses[OUT].stage_out(stage_in(after, uses)[OUT])
    assert after.unregister(None) > kept.stamp
    # The first engine's farewell reaches the vault as well.
    reader.drain(ours)
    with reader.handover() as handed:
        assert handed.regions == []
    writer.close()
    ours.close()
    assert num_opened(before) == 0


def test_what_a_device_reaches_is_not_copied(folder: Path) -> None:
    backend = AdoptingBackend()
    regions = regions_of(folder, backend=backend)
    regions.register(asked("r", offset=PAGE + 10, byte_size=100))
    assert list(backend.adopted.values()) == [110]
    uses = {OUT: regions.find("r", 4, KIND, field="out", is_out=True)}
    out = stage_in(regions, uses)[OUT]
    assert out.is_foreign
    assert out.offset == 14
    assert not regions.stage_in(uses)
    regions.hold(uses)
    regions.unregister("r")
    assert backend.adopted
    regions.release(uses)
    assert not backend.adopted


def test_what_lies_in_a_region_is_copied_until_it_is_mapped(folder: Path) -> None:
    backend, mappings, settled = AdoptingBackend(), MappedWhenAsked(), []
    regions = regions_of(folder, backend=backend, mappings=mappings)
    regions.register(asked("r"))
    regions.settle(lambda: settled.append(len(backend.adopted)))
    early = {"a": regions.find("r", 0, KIND, field="a")}
    regions.hold(early)
    mappings.step()
    assert (len(backend.adopted), settled) == (1, [])
    late = {"a": regions.find("r", 0, KIND, field="a")}
    # The job that was there before it was mapped copies: its operands are bound.
    assert not stage_in(regions, early)["a"].is_foreign
    assert stage_in(regions, late)["a"].is_foreign
    regions.unregister("r")
    mappings.close()
    assert (len(backend.adopted), settled) == (1, [1])
    regions.release(early)
    assert (len(backend.adopted), regions.nbytes) == (1, PAGE)
    mappings.close()
    assert (len(backend.adopted), regions.nbytes) == (0, 0)


def test_a_region_that_is_unregistered_while_it_is_mapped_is_unmapped_behind_that(folder: Path) -> None:
    backend, mappings, settled = AdoptingBackend(), MappedWhenAsked(), []
    regions = Regions(backend, VaultWriter(-1), mappings, max_bytes=PAGE, max_copied_bytes=PAGE, folder=folder)
    regions.register(asked("r"))
    regions.unregister("r")
    # Its name is free. Its bytes count until they are.
    with pytest.raises(BeyondLimit, match="byte_size"):
        regions.register(asked("r"))
    while mappings.step():
        settled.append(len(backend.adopted))
    assert settled == [1, 0]
    regions.register(asked("r"))
    mappings.close()
    assert len(backend.adopted) == 1


def test_a_read_only_object_is_copied_even_where_a_device_could_reach_it(folder: Path) -> None:
    (folder / "one").chmod(0o444)
    backend = AdoptingBackend()
    regions = regions_of(folder, backend=backend)
    regions.register(asked("r", key="one"))
    assert not backend.adopted
    regions.unregister(None)


@dataclass(eq=False)
class Held:
    """A job's uses, and the names of those that the device reached when they were found."""

    uses: dict[str, Use]
    reached: list[str]


class AnyOrder(RuleBasedStateMachine):
    """Registrations, uses and unregistrations in any order; a model says what must be there."""

    held: Bundle[Held] = Bundle("held")
    folder: Path

    @initialize()
    def begin(self) -> None:
        self.fds = open_descriptors()
        self.backend, self.mappings = AdoptingBackend(), MappedWhenAsked()
        self.regions = Regions(
            self.backend,
            VaultWriter(-1),
            self.mappings,
            max_bytes=6 * PAGE,
            max_copied_bytes=6 * PAGE,
            folder=self.folder,
        )
        self.model: dict[str, int] = {}
        self.used: list[Held] = []
        self.num_registered = 0

    @rule(name=st.sampled_from("abc"), pages=st.integers(-1, 5), offset=st.integers(-1, 2 * PAGE))
    def register(self, name: str, pages: int, offset: int) -> None:
        fits = pages > 0 and offset >= 0 and offset + pages * PAGE <= 4 * PAGE
        has_room = self.regions.nbytes + pages * PAGE <= 6 * PAGE
        wrong = (
            AlreadyExists
            if name in self.model
            else InvalidRequest
            if not fits
            else BeyondLimit
            if not has_room
            else None
        )
        with pytest.raises(wrong) if wrong is not None else contextlib.nullcontext():
            self.regions.register(asked(name, offset=offset, byte_size=pages * PAGE))
        if wrong is None:
            self.model[name] = pages
            self.num_registered += 1

    @rule(name=st.sampled_from("abc"))
    def unregister(self, name: str) -> None:
        self.regions.unregister(name)
        self.model.pop(name, None)

    @rule()
    def unregister_all(self) -> None:
        self.regions.unregister(None)
        self.model.clear()

    @rule(target=held, names=st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    def use(self, names: list[str]) -> Held:
        uses: dict[str, Use] = {}
        for number, name in enumerate(names):
            try:
                uses[str(number)] = self.regions.find(name, 0, KIND, field="a")
            except UnknownName:
                assert name not in self.model
        self.regions.hold(uses)
        one = Held(uses, [name for name, use in uses.items() if use.place().is_foreign])
        self.used.append(one)
        return one

    @rule(one=consumes(held))
    def release(self, one: Held) -> None:
        for use in one.uses.values():
            assert use.region.file.nbytes == 4 * PAGE
        # Whatever was mapped or unregistered since it was found.
        assert [name for name, use in one.uses.items() if use.place().is_foreign] == one.reached
        assert set(self.regions.stage_in(one.uses)) == set(one.uses) - set(one.reached)
        self.regions.release(one.uses)
        self.used.remove(one)

    @rule()
    def map_or_unmap(self) -> None:
        self.mappings.step()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "regions"):
            return
        assert {info.name: info.byte_size // PAGE for info in self.regions.infos()} == self.model
        num_unmapped = self.num_registered - self.backend.num_adoptions
        assert num_opened(self.fds) == len(self.backend.adopted) + num_unmapped
        assert len(self.backend.adopted) + num_unmapped >= len(self.model)

    def teardown(self) -> None:
        if hasattr(self, "regions"):
            self.mappings.close()
            assert num_opened(self.fds) == len(self.backend.adopted)
            self.regions.unregister(None)
            for one in self.used:
                self.regions.release(one.uses)
            self.mappings.close()
            assert (self.regions.nbytes, self.backend.adopted, num_opened(self.fds)) == (0, {}, 0)


def test_any_order_leaks_nothing(folder: Path) -> None:
    AnyOrder.folder = folder
    AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    AnyOrder.TestCase().runTest()


def test_an_inherited_descriptor_knows_whether_it_is_writable(folder: Path) -> None:
    fd = os.open(folder / "one", os.O_RDONLY)
    file = SharedFile(fd)
    assert not file.is_writable
    file.close()
