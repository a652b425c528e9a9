"""Residents on the CPU backend: quota, replacement, restoring what an engine before held."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.support.tensor_bodies import Array, to_safetensors
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.tensors.files import load_tensors
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.errors import Lost, ResidentQuota, TooBusy, Unavailable, UnknownName
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.board import VersionBoard, home_of, slot_of
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Part
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultFeed, VaultFollower, VaultReader, VaultWriter


def source(array: Array) -> HostBytes:
    data = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)
    return HostBytes(data, TensorType(array.dtype.name, array.shape), 0)


def residents(quota: int = 10_000, vault: VaultWriter | None = None) -> Residents:
    return Residents(CpuBackend(), quota, vault or VaultWriter(-1), clock=lambda: 12.5)


def values(held: Residents, name: str) -> list[float]:
    tensor = held.get(name).tensor
    assert tensor is not None
    return tensor.tolist()


def homed(prefix: str, home: int = 0) -> str:
    """A name whose changes engine `home` of two orders."""
    return next(name for name in (f"{prefix}{number}" for number in itertools.count()) if home_of(name, 2) == home)


# For which the vault keeps what a dead process has offered, in seconds.
LEFT_S = 0.05
W, GONE, X = homed("w"), homed("gone"), homed("x")


def test_put_get_replace_delete() -> None:
    held = residents()
    info, was_there = held.put("w", source(np.arange(6, dtype=np.float32)))
    assert (info.created, info.hits, was_there, held.nbytes) == (12.5, 0, False, 24)
    older = held.get("w").tensor
    info, was_there = held.put("w", source(np.zeros((2, 2), np.float32)))
    assert (info.type.shape, was_there, held.nbytes, len(held)) == ((2, 2), True, 16, 1)
    # Whoever resolved the old one goes on with it.
    assert older is not None
    assert older.tolist() == [0, 1, 2, 3, 4, 5]
    held.delete("w")
    assert (held.nbytes, len(held), held.infos()) == (0, 0, ())
    with pytest.raises(UnknownName, match="b: no resident tensor 'w'"):
        held.get("w", field="b")
    with pytest.raises(UnknownName):
        held.delete("w")


def test_a_put_copies_what_the_slot_held() -> None:
    held = residents()
    slot = source(np.ones(4, np.float32))
    held.put("w", slot)
    slot.mapped.zero_()
    assert values(held, "w") == [1, 1, 1, 1]


def test_the_quota_counts_what_is_replaced_and_a_refusal_changes_nothing() -> None:
    held = residents(quota=100)
    held.put("a", source(np.ones(15, np.float32)))
    held.put("b", source(np.ones(10, np.float32)))
    for name, size in (("c", 1), ("a", 16), ("b", 11)):
        with pytest.raises(ResidentQuota, match=name):
            held.put(name, source(np.ones(size, np.float32)))
    assert held.nbytes == 100
    assert held.get("a").type.shape == (15,)
    held.put("a", source(np.ones(5, np.float32)))
    held.put("c", source(np.ones(10, np.float32)))
    assert held.nbytes == 100


def test_what_the_vault_kept_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(to_safetensors({"gone": np.ones(1, np.float32)}))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        writer = VaultWriter(theirs.detach())
        first = residents(vault=writer)
        load_tensors(first, path)
        first.delete("file/gone")
        first.put("w", source(np.zeros(9, np.float32)))
        first.put("w", source(np.arange(4, dtype=np.float32)))
        first.put("empty", source(np.zeros((0, 3), np.int8)))
        first.put("forgotten", source(np.ones(1, np.float32)))
        first.delete("forgotten")
        writer.close()
        vault = VaultReader()
        vault.drain(ours)
        second = residents()
        load_tensors(second, path)
        assert vault.kept.keys() == {"file/gone", "w", "empty"}
        for kept in vault.kept.values():
            second.restore(kept)
        assert [info.name for info in second.infos()] == ["empty", "w"]
        assert values(second, "w") == [0, 1, 2, 3]
        assert second.get("empty").type == TensorType("int8", (0, 3))
        assert second.nbytes == 16


def test_a_replaced_copys_descriptor_is_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        writer = VaultWriter(theirs.detach())
        vault = VaultReader()
        held = Residents(CpuBackend(), 10_000, writer)
        fds = set()
        for value in range(5):
            held.put("w", source(np.full(4, value, np.float32)))
            vault.drain(ours)
            fds.add(vault.kept["w"].fd)
        writer.close()
        kept = vault.kept["w"]
        copy = Segment(os.dup(kept.fd), 16)
        assert np.frombuffer(bytes(copy.view), np.float32).tolist() == [4] * 4
        copy.close()
        os.close(kept.fd)
        # The same few numbers were used again: nothing piles up.
        assert len(fds) <= 2


def engine(index: int, board: VersionBoard, vault: VaultWriter, quota: int = 2**30) -> Residents:
    return Residents(CpuBackend(), quota, vault, index=index, num_engines=2, board=board)


class Chain:
    """A home engine's residents, the vault, and the feed of an engine that follows."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.deposits, home_end = pair(stack)
        self.feed_end, self.follower_end = pair(stack)
        self.vault = VaultReader(2, LEFT_S)
        self.vault.feeds[1] = VaultFeed(self.feed_end, self.vault.kept)
        writer = VaultWriter(home_end.detach())
        stack.callback(writer.close)
        self.board = VersionBoard()
        self.writer = writer
        self.home = engine(0, self.board, writer)
        self._stack = stack

    def follower(self) -> tuple[Residents, VaultFollower]:
        """A process of the engine that follows, as it begins: with the vault's state."""
        self.vault.drain(self.deposits)
        begun = engine(1, self.board, VaultWriter(-1))
        with self.vault.handover(1) as kept:
            for one in kept.tensors:
                begun.restore(msgspec.structs.replace(one, fd=os.dup(one.fd) if one.fd >= 0 else -1))
            begun.versions = list(kept.versions)
        follower = VaultFollower(self.follower_end.fileno())
        self._stack.callback(follower.close)
        return begun, follower


def test_a_copy_that_is_replaced_stays_open_while_it_is_handed_over(chain: Chain) -> None:
    chain.home.put(W, number(1))
    chain.vault.drain(chain.deposits)
    with chain.vault.handover() as kept:
        (one,) = kept.tensors
        chain.home.put(W, number(2))
        chain.vault.drain(chain.deposits)
        assert os.fstat(one.fd).st_size > 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one.fd)


def pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return stack.enter_context(ours), stack.enter_context(theirs)


@pytest.fixture
def chain() -> Iterator[Chain]:
    with contextlib.ExitStack() as stack:
        yield Chain(stack)


def num_descriptors() -> int:
    # Else descriptors that earlier tests let go of could be closed meanwhile.
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def number(value: float) -> HostBytes:
    return source(np.full(3, value, np.float32))


def contents(held: Residents) -> dict[str, list[float]]:
    return {info.name: values(held, info.name) for info in held.infos()}


def test_a_follower_goes_through_the_changes_of_its_home(chain: Chain) -> None:
    held, follower = chain.follower()
    chain.home.put(W, number(1))
    chain.home.put(GONE, number(2))
    chain.home.put(W, number(3))
    chain.home.delete(GONE)
    chain.vault.drain(chain.deposits)
    seen = []
    for change in follower.take():
        held.follow(change)
        seen.append(contents(held))
    assert seen == [
        {W: [1] * 3},
        {GONE: [2] * 3, W: [1] * 3},
        {GONE: [2] * 3, W: [3] * 3},
        {W: [3] * 3},
    ]
    assert [info.version for info in held.infos()] == [info.version for info in chain.home.infos()]
    assert (held.versions, held.nbytes) == (chain.home.versions, chain.home.nbytes)


def test_changes_that_a_restarted_follower_has_from_the_vault_are_not_made_again(chain: Chain) -> None:
    chain.home.put(W, number(1))
    chain.home.put(GONE, number(2))
    chain.home.delete(GONE)
    chain.home.put(W, number(3))
    # They wait in the socket of the process that is gone.
    held, follower = chain.follower()
    chain.home.put(X, number(4))
    chain.vault.drain(chain.deposits)
    descriptors = num_descriptors()
    changes = follower.take()
    for change in changes:
        held.follow(change)
        assert GONE not in contents(held)
        assert contents(held)[W] == [3] * 3
    assert len(changes) == 5
    assert contents(held) == contents(chain.home) == {W: [3] * 3, X: [4] * 3}
    assert num_descriptors() == descriptors


def test_an_older_change_that_comes_late_is_ignored(chain: Chain) -> None:
    held, follower = chain.follower()
    chain.home.put(W, number(1))
    chain.home.put(W, number(2))
    chain.home.delete(W)
    chain.vault.drain(chain.deposits)
    first, second, deleted = follower.take()
    held.follow(second)
    held.follow(first)
    assert contents(held) == {W: [2] * 3}
    held.follow(deleted)
    held.follow(msgspec.structs.replace(second, fd=-1))
    assert contents(held) == {}


def test_a_feed_keeps_what_its_socket_has_no_room_for(chain: Chain) -> None:
    count = 1000

    async def run() -> None:
        held, follower = chain.follower()
        descriptors = num_descriptors()
        for value in range(count):
            chain.home.put(W, number(value))
            chain.vault.drain(chain.deposits)
        # The copy of the vault, and the mapping of the home engine: what waits takes none.
        assert num_descriptors() <= descriptors + 3
        num_taken = 0
        while num_taken < count:
            for change in follower.take():
                held.follow(change)
                num_taken += 1
            await asyncio.sleep(0)
        assert contents(held) == {W: [count - 1] * 3}
        # The copy of the vault, and the mappings of both engines.
        assert num_descriptors() <= descriptors + 3

    asyncio.run(run())


class FullBackend(CpuBackend):
    """A device without memory for more than a few bytes."""

    def upload(self, source: HostBytes) -> torch.Tensor:
        """See `Backend`."""
        if source.type.nbytes > 12:
            raise TooBusy("no memory on the device")
        return super().upload(source)


def test_a_tensor_that_a_follower_cannot_hold_is_left_to_the_engines_that_do(chain: Chain) -> None:
    _, follower = chain.follower()
    held = Residents(FullBackend(), 100, VaultWriter(-1), index=1, num_engines=2)
    chain.home.put(W, number(1))
    chain.home.put(W, source(np.ones(4, np.float32)))
    chain.home.put(X, number(2))
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        held.follow(change)
    assert held.get(W).tensor is None
    assert held.info(W).engines == (0,)
    assert values(held, X) == [2] * 3
    assert (held.nbytes, len(held)) == (12, 1)
    chain.home.delete(W)
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        held.follow(change)
    assert contents(held) == {X: [2] * 3}


def test_a_single_tensor_is_known_everywhere_and_held_by_one(chain: Chain) -> None:
    held, follower = chain.follower()
    chain.home.put(W, number(1), "single")
    chain.vault.drain(chain.deposits)
    (change,) = follower.take()
    assert change.fd < 0
    held.follow(change)
    assert held.get(W).tensor is None
    assert (held.info(W).engines, held.info(W).placement, held.nbytes) == ((0,), "single", 0)
    assert held.infos() == chain.home.infos()
    # So it is for an engine that starts later, and for the one that holds it.
    later, _ = chain.follower()
    assert later.infos() == held.infos()
    assert later.get(W).tensor is None
    with chain.vault.handover(0) as kept:
        again = engine(0, chain.board, VaultWriter(-1))
        again.restore(msgspec.structs.replace(kept.tensors[0], fd=os.dup(kept.tensors[0].fd)))
    assert values(again, W) == [1] * 3


def test_the_board_shows_every_change_before_it_is_deposited(chain: Chain) -> None:
    class Watching(VaultWriter):
        def keep(self, info: TensorInfo, fd: int = -1, holder: tuple[int, int] = (0, 0)) -> None:
            assert chain.board.versions[slot_of(info.name)] == info.version
            seen.append(info.version)

    seen: list[int] = []
    home = engine(0, chain.board, Watching(-1))
    home.put(W, number(1))
    home.put(W, number(2))
    assert seen == sorted(set(seen))
    deleted = home.delete(W)
    assert chain.board.versions[slot_of(W)] == deleted.version > seen[-1]


# ── results that stay ─────────────────────────────────────────────────────────────────────────────


def result(value: float) -> tuple[torch.Tensor, TensorType]:
    return torch.full((3,), value), TensorType("float32", (3,))


def restored(chain: Chain, index: int, name: str) -> list[float]:
    """What the next process of an engine has under a name."""
    begun = engine(index, chain.board, VaultWriter(-1))
    with chain.vault.handover(index) as kept:
        for one in kept.tensors:
            begun.restore(msgspec.structs.replace(one, fd=os.dup(one.fd) if one.fd >= 0 else -1))
    return values(begun, name)


class Offers:
    """The engine beside the home of a chain, which holds results of names that the home orders.

    Attributes:
        holder: Its residents.
        deposits: The vault's end of its socket.
        feed_end: Where the home follows.
    """

    def __init__(self, chain: Chain, stack: contextlib.ExitStack) -> None:
        self.deposits, holder_end = pair(stack)
        ours, self.feed_end = pair(stack)
        chain.vault.feeds[0] = VaultFeed(ours, chain.vault.kept)
        writer = VaultWriter(holder_end.detach(), 1)
        stack.callback(writer.close)
        self.holder = engine(1, chain.board, writer)
        # From its start on, the supervisor listens to it.
        chain.vault.drain(self.deposits, 1)


@pytest.fixture
def offers(chain: Chain) -> Iterator[Offers]:
    with contextlib.ExitStack() as stack:
        yield Offers(chain, stack)


def copy_of(value: float) -> int:
    fd = os.memfd_create("copy")
    os.write(fd, np.full(3, value, np.float32).tobytes())
    return fd


def test_a_result_is_lost_with_its_engine_until_it_is_written_again_or_deleted(chain: Chain) -> None:
    stored = chain.home.keep(W, *result(1))
    assert (stored.ticket, stored.replaced, stored.info.engines) == (0, False, (0,))
    chain.home.keep(X, *result(2))
    held, _follower = chain.follower()
    assert held.get(W).tensor is None
    # The process of the home engine dies: nobody else had it.
    with chain.vault.handover(0) as kept:
        again = engine(0, chain.board, VaultWriter(-1))
        for one in kept.tensors:
            again.restore(one)
        again.versions = list(kept.versions)
    for name in (W, X):
        with pytest.raises(Lost, match=r"^b: .*lost with the engine"):
            again.get(name, field="b")
    assert again.infos() == ()
    assert not again.put(W, number(3))[1] or again.get(W).tensor is not None
    assert values(again, W) == [3] * 3
    again.delete(X)
    with pytest.raises(UnknownName):
        again.get(X)


def test_a_copy_saves_a_result_and_brings_it_to_the_other_engines(chain: Chain) -> None:
    held, follower = chain.follower()
    info = chain.home.keep(W, *result(1)).info
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        held.follow(change)
    assert held.get(W).tensor is None
    fd = copy_of(1)
    chain.writer.keep_copy(info, fd, 0)
    os.close(fd)
    chain.vault.drain(chain.deposits)
    (change,) = follower.take()
    held.follow(change)
    assert values(held, W) == [1] * 3
    assert held.info(W).engines == (0, 1)
    with chain.vault.handover(0) as kept:
        again = engine(0, chain.board, VaultWriter(-1))
        again.restore(msgspec.structs.replace(kept.tensors[0], fd=os.dup(kept.tensors[0].fd)))
    assert values(again, W) == [1] * 3


@pytest.mark.parametrize("then", ["put", "delete"])
def test_a_copy_that_comes_after_the_next_change_does_nothing(chain: Chain, then: str) -> None:
    held, follower = chain.follower()
    info = chain.home.keep(W, *result(1)).info
    if then == "put":
        chain.home.put(W, number(2))
    else:
        chain.home.delete(W)
    descriptors = num_descriptors()
    fd = copy_of(1)
    chain.writer.keep_copy(info, fd, 0)
    os.close(fd)
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        held.follow(change)
    assert contents(held) == ({W: [2] * 3} if then == "put" else {})
    assert (W in chain.vault.kept) == (then == "put")
    # The vault's copy of what was put.
    assert num_descriptors() <= descriptors + 1


def test_a_copy_may_overtake_the_change_itself(chain: Chain) -> None:
    """Changes come by the home engine's socket, copies by that of the engine that holds the result."""
    name = homed("w", 1)
    home = engine(1, chain.board, VaultWriter(-1))
    holder, follower = chain.home, chain.follower()[0]
    stored = holder.keep(name, *result(1))
    assert stored.ticket
    ordered, was_there = home.order(stored.info, stored.ticket)
    assert (ordered.version > 0, was_there, ordered.engines) == (True, False, (0,))
    adopted = holder.adopt(stored.ticket, ordered)
    assert adopted is not None
    assert values(holder, name) == [1] * 3
    copy = Kept(name, ordered, copy_of(1), ordered.version, 1, is_copy=True)
    third = engine(0, chain.board, VaultWriter(-1))
    third.follow(copy)
    assert values(third, name) == [1] * 3
    third.follow(Kept(name, ordered, -1, ordered.version, 1))
    assert values(third, name) == [1] * 3
    assert third.versions == [0, ordered.version]
    # The home itself has it from then on, too.
    home.follow(msgspec.structs.replace(copy, fd=copy_of(1)))
    assert values(home, name) == [1] * 3
    del follower


def test_a_result_is_adopted_unless_its_name_has_changed_since(chain: Chain) -> None:
    name = homed("w", 1)
    home, holder = engine(1, chain.board, VaultWriter(-1)), chain.home
    first, second = holder.keep(name, *result(1)), holder.keep(name, *result(2))
    assert holder.nbytes == 24
    ordered, _ = home.order(first.info, first.ticket)
    again, was_there = home.order(second.info, second.ticket)
    assert was_there
    assert holder.adopt(second.ticket, again) is not None
    assert holder.adopt(first.ticket, ordered) is None
    assert (values(holder, name), holder.nbytes) == ([2] * 3, 12)
    third = holder.keep(name, *result(3))
    ordered, _ = home.order(third.info, third.ticket)
    deleted = home.delete(name)
    holder.follow(Kept(name, None, -1, deleted.version, 1))
    assert holder.adopt(third.ticket, ordered) is None
    with pytest.raises(UnknownName):
        holder.get(name)
    # A gateway that went away never brings the version.
    holder.release(holder.keep(name, *result(4)).ticket)
    assert holder.nbytes == 0
    with pytest.raises(Unavailable, match="restarted"):
        holder.adopt(99, again)


def test_a_durable_result_takes_the_place_of_an_older_tensor_with_its_copy(chain: Chain) -> None:
    chain.home.put(W, number(1))
    stored = chain.home.keep(W, *result(2), durable=True)
    assert stored.ticket
    # Whenever the engine dies until it is ordered, the older one is there.
    chain.vault.drain(chain.deposits)
    assert restored(chain, 0, W) == [1] * 3
    chain.home.set_copy(stored.ticket, copy_of(2))
    assert values(chain.home, W) == [1] * 3
    ordered, was_there = chain.home.order(stored.info, stored.ticket)
    assert (was_there, ordered.engines) == (True, (0,))
    assert (values(chain.home, W), chain.home.nbytes) == ([2] * 3, 12)
    chain.vault.drain(chain.deposits)
    assert restored(chain, 0, W) == [2] * 3


def test_a_copy_that_another_engine_offers_comes_with_the_change(chain: Chain, offers: Offers) -> None:
    name = homed("w", 0)
    chain.home.put(name, number(1))
    stored = offers.holder.keep(name, *result(2), durable=True)
    offers.holder.set_copy(stored.ticket, copy_of(2))
    ordered, _ = chain.home.order(stored.info, stored.ticket)
    # The socket with the change is read first, and the holder dies before it adopts the tensor.
    chain.vault.drain(chain.deposits)
    assert restored(chain, 1, name) == [2] * 3
    # The home has it from now on, too; the holder has not heard of it twice.
    follower = VaultFollower(offers.feed_end.fileno())
    for change in follower.take():
        chain.home.follow(change)
    follower.close()
    assert values(chain.home, name) == [2] * 3
    assert ordered.engines == (1,)


def test_an_offer_ends_with_its_ticket(chain: Chain, offers: Offers) -> None:
    name = homed("w", 0)
    stored = offers.holder.keep(name, *result(1), durable=True)
    offers.holder.set_copy(stored.ticket, copy_of(1))
    offers.holder.release(stored.ticket)
    assert offers.holder.nbytes == 0
    chain.vault.drain(offers.deposits, 1)
    chain.home.order(stored.info, stored.ticket)
    chain.vault.drain(chain.deposits)
    assert chain.vault.kept[name].fd == -1


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_offer_outlives_its_process_for_a_while(chain: Chain, offers: Offers, *, is_in_time: bool) -> None:
    name = homed("w", 0)
    chain.home.put(name, number(1))
    stored = offers.holder.keep(name, *result(2), durable=True)
    offers.holder.set_copy(stored.ticket, copy_of(2))
    chain.vault.drain(offers.deposits, 1)

    async def run() -> None:
        # The next process of the holder begins before the home orders what the last one held.
        begun, follower = chain.follower()
        if not is_in_time:
            num_open = num_descriptors()
            # The loop drops what was left before it goes on here.
            await asyncio.sleep(2 * LEFT_S)
            assert num_descriptors() == num_open - 1
        chain.home.order(stored.info, stored.ticket)
        chain.vault.drain(chain.deposits)
        for change in follower.take():
            begun.follow(change)
        if is_in_time:
            assert values(begun, name) == restored(chain, 1, name) == [2] * 3
        else:
            with pytest.raises(Lost):
                begun.get(name)

    asyncio.run(run())


@pytest.mark.parametrize("is_ordered_first", [True, False])
def test_what_a_holder_drops_unsure_comes_back_with_its_version(
    chain: Chain, offers: Offers, *, is_ordered_first: bool
) -> None:
    name = homed("w", 0)
    chain.home.put(name, number(1))
    stored = offers.holder.keep(name, *result(2), durable=True)
    offers.holder.set_copy(stored.ticket, copy_of(2))

    def order() -> None:
        chain.home.order(stored.info, stored.ticket)
        chain.vault.drain(chain.deposits)
        fed(chain, offers.holder)

    async def run() -> None:
        # The gateway dies when it has sent the order.
        if is_ordered_first:
            order()
        offers.holder.release(stored.ticket, is_unsure=True)
        assert offers.holder.nbytes == 0
        chain.vault.drain(offers.deposits, 1)
        if not is_ordered_first:
            order()
        fed(chain, offers.holder)

    asyncio.run(run())
    assert values(offers.holder, name) == restored(chain, 1, name) == [2] * 3


def test_a_result_counts_against_the_quota() -> None:
    held = residents(quota=20)
    held.keep("a", *result(1))
    with pytest.raises(ResidentQuota, match="b: 12 bytes more"):
        held.keep("b", *result(2))
    assert held.keep("a", *result(3)).replaced
    assert values(held, "a") == [3] * 3


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = np.arange(12, dtype=np.float32).reshape(2, 6)


def rows(held: Residents) -> list[list[float]]:
    """The part of the tensor that an engine has."""
    tensor = held.get(W).tensor
    assert tensor is not None
    return tensor.tolist()


def taken(chain: Chain, offers: Offers, array: Array, name: str = W) -> tuple[int, TensorInfo]:
    """A tensor of whose columns each engine has taken its own, ordered by the home; the ticket of the other."""
    _, ticket, _ = offers.holder.hold(name, source(array), "shard", -1)
    ordered, _ = chain.home.put(name, source(array), "shard", -1)
    chain.vault.drain(chain.deposits)
    return ticket, ordered


def fed(chain: Chain, held: Residents) -> None:
    """Brings what the vault has fed to the engine that follows."""
    follower = VaultFollower(chain.follower_end.fileno())
    for change in follower.take():
        held.follow(change)
    follower.close()


@pytest.mark.parametrize("is_adopted_first", [True, False])
def test_each_engine_holds_its_part(chain: Chain, offers: Offers, *, is_adopted_first: bool) -> None:
    held = offers.holder
    ticket, ordered = taken(chain, offers, COLUMNS)
    assert (ordered.engines, ordered.axis, ordered.num_parts, ordered.type.shape) == ((0, 1), -1, 2, (2, 6))
    if is_adopted_first:
        held.adopt(ticket, ordered)
        fed(chain, held)
    else:
        fed(chain, held)
        # It has the change, and its part is still to come.
        assert held.lacks(W, ordered.version)
        assert held.get(W).tensor is None
        held.adopt(ticket, ordered)
    assert not held.lacks(W, ordered.version)
    assert (rows(chain.home), rows(held)) == ([[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]])
    assert (chain.home.nbytes, held.nbytes, len(held)) == (24, 24, 1)
    assert held.info(W) == ordered
    resident = held.get(W)
    assert resident.tensor_of(resident.part) is resident.tensor
    assert resident.tensor_of(None) is None
    assert resident.tensor_of(Part(-1, 0, 3)) is None
    # From the vault, with the next process.
    ticket, ordered = taken(chain, offers, COLUMNS.T.copy())
    held.adopt(ticket, ordered)
    assert np.array_equal(restored(chain, 1, W), COLUMNS.T[:, 1:])
    chain.home.delete(W)
    chain.vault.drain(chain.deposits)
    fed(chain, held)
    assert (held.nbytes, len(held), held.versions) == (0, 0, chain.home.versions)


def test_a_part_whose_gateway_died_comes_from_the_vault(chain: Chain, offers: Offers) -> None:
    held = offers.holder
    for is_followed_first in (True, False):
        ticket, ordered = taken(chain, offers, COLUMNS)
        if is_followed_first:
            fed(chain, held)
            held.release(ticket)
            assert held.lacks(W, ordered.version)
            chain.vault.drain(offers.deposits, 1)
        else:
            held.release(ticket)
        fed(chain, held)
        assert rows(held) == [[3, 4, 5], [9, 10, 11]]
        assert held.nbytes == 24
        chain.home.delete(W)
        chain.vault.drain(chain.deposits)
        fed(chain, held)


def test_a_part_of_an_older_upload_that_is_adopted_late_gives_way(chain: Chain, offers: Offers) -> None:
    held = offers.holder
    first, older = taken(chain, offers, COLUMNS)
    second, newer = taken(chain, offers, COLUMNS + 100)
    fed(chain, held)
    # The gateway of the second died, and that of the first is late.
    held.release(second)
    held.adopt(first, older)
    assert held.get(W).version == newer.version
    chain.vault.drain(offers.deposits, 1)
    fed(chain, held)
    assert rows(held) == [[103, 104, 105], [109, 110, 111]]
    assert held.nbytes == 24


def test_a_part_counts_against_the_quota_of_its_engine() -> None:
    held = Residents(CpuBackend(), 24, VaultWriter(-1), num_engines=2)
    held.put(W, source(COLUMNS), "shard", -1)
    assert held.nbytes == 24
    with pytest.raises(ResidentQuota, match="24 bytes more"):
        held.put(homed("more"), source(COLUMNS), "shard", -1)
    held.put(W, source(COLUMNS + 1), "shard", -1)
    assert rows(held) == [[1, 2, 3], [7, 8, 9]]
    # A slice of a tensor in one piece, as of a bias beside sharded columns.
    held.put(W, source(COLUMNS[0]))
    whole = held.get(W)
    piece = whole.tensor_of(Part(-1, 2, 4))
    assert piece is not None
    assert piece.tolist() == [2, 3]
