"""Residents on the CPU backend: quota, replacement, restoring what an engine before held."""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.errors import ResidentQuota, TooBusy, UnknownName
from tilewire.service.ipc.arena import Segment
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.vault import VaultFeed, VaultFollower, VaultReader, VaultWriter


def source(array: Array) -> HostBytes:
    data = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)
    return HostBytes(data, TensorType(array.dtype.name, array.shape), 0)


def residents(quota: int = 10_000, vault: VaultWriter | None = None) -> Residents:
    return Residents(CpuBackend(), quota, vault or VaultWriter(-1), clock=lambda: 12.5)


def test_put_get_replace_delete() -> None:
    held = residents()
    info, was_there = held.put("w", source(np.arange(6, dtype=np.float32)))
    assert (info.created, info.hits, was_there, held.nbytes) == (12.5, 0, False, 24)
    older = held.use(held.get("w"))
    info, was_there = held.put("w", source(np.zeros((2, 2), np.float32)))
    assert (info.type.shape, was_there, held.nbytes, len(held)) == ((2, 2), True, 16, 1)
    # Whoever resolved the old one goes on with it.
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
    assert held.get("w").tensor.tolist() == [1, 1, 1, 1]


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
        first.load_file(path)
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
        second.load_file(path)
        assert vault.kept.keys() == {"file/gone", "w", "empty"}
        for kept in vault.kept.values():
            second.restore(kept)
        assert [info.name for info in second.infos()] == ["empty", "w"]
        assert second.get("w").tensor.tolist() == [0, 1, 2, 3]
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


class Chain:
    """A home engine's residents, the vault, and the feed of an engine that follows."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.deposits, home_end = pair(stack)
        self.feed_end, self.follower_end = pair(stack)
        self.vault = VaultReader()
        self.feed = VaultFeed(self.feed_end)
        self.vault.feeds.append(self.feed)
        writer = VaultWriter(home_end.detach())
        stack.callback(writer.close)
        self.home = residents(quota=2**30, vault=writer)
        self._stack = stack

    def follower(self) -> tuple[Residents, VaultFollower]:
        """A process of the engine that follows, as it begins: with the vault's state."""
        self.vault.drain(self.deposits)
        begun = residents()
        with self.vault.handover() as kept:
            for one in kept.tensors:
                begun.restore(msgspec.structs.replace(one, fd=os.dup(one.fd) if one.fd >= 0 else -1))
            begun.version = kept.version
        follower = VaultFollower(os.dup(self.follower_end.fileno()))
        self._stack.callback(follower.close)
        return begun, follower


def test_a_copy_that_is_replaced_stays_open_while_it_is_handed_over(chain: Chain) -> None:
    chain.home.put("w", number(1))
    chain.vault.drain(chain.deposits)
    with chain.vault.handover() as kept:
        (one,) = kept.tensors
        chain.home.put("w", number(2))
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
    return {info.name: held.get(info.name).tensor.tolist() for info in held.infos()}


def test_a_follower_goes_through_the_changes_of_its_home(chain: Chain) -> None:
    held, follower = chain.follower()
    chain.home.put("w", number(1))
    chain.home.put("gone", number(2))
    chain.home.put("w", number(3))
    chain.home.delete("gone")
    chain.vault.drain(chain.deposits)
    seen = []
    for change in follower.take():
        held.follow(change)
        seen.append(contents(held))
    assert seen == [
        {"w": [1] * 3},
        {"gone": [2] * 3, "w": [1] * 3},
        {"gone": [2] * 3, "w": [3] * 3},
        {"w": [3] * 3},
    ]
    assert held.infos() == chain.home.infos()
    assert (held.version, held.nbytes) == (chain.home.version, chain.home.nbytes)


def test_changes_that_a_restarted_follower_has_from_the_vault_are_not_made_again(chain: Chain) -> None:
    chain.home.put("w", number(1))
    chain.home.put("gone", number(2))
    chain.home.delete("gone")
    chain.home.put("w", number(3))
    # They wait in the socket of the process that is gone.
    held, follower = chain.follower()
    chain.home.put("x", number(4))
    chain.vault.drain(chain.deposits)
    descriptors = num_descriptors()
    changes = follower.take()
    for change in changes:
        held.follow(change)
        assert "gone" not in contents(held)
        assert contents(held)["w"] == [3] * 3
    assert len(changes) == 5
    assert contents(held) == contents(chain.home) == {"w": [3] * 3, "x": [4] * 3}
    assert num_descriptors() == descriptors


def test_an_older_change_that_comes_late_is_ignored(chain: Chain) -> None:
    held, follower = chain.follower()
    chain.home.put("w", number(1))
    chain.home.put("w", number(2))
    chain.home.delete("w")
    chain.vault.drain(chain.deposits)
    first, second, deleted = follower.take()
    held.follow(second)
    held.follow(first)
    assert contents(held) == {"w": [2] * 3}
    held.follow(deleted)
    held.follow(msgspec.structs.replace(second, fd=-1))
    assert contents(held) == {}


def test_a_feed_keeps_what_its_socket_has_no_room_for(chain: Chain) -> None:
    count = 1000

    async def run() -> None:
        held, follower = chain.follower()
        descriptors = num_descriptors()
        for value in range(count):
            chain.home.put("w", number(value))
            chain.vault.drain(chain.deposits)
        num_taken = 0
        while num_taken < count:
            for change in follower.take():
                held.follow(change)
                num_taken += 1
            await asyncio.sleep(0)
        assert contents(held) == {"w": [count - 1] * 3}
        # The copy of the vault, and the mappings of both engines.
        assert num_descriptors() <= descriptors + 3

    asyncio.run(run())


def test_only_the_version_that_was_named_is_deleted() -> None:
    held = residents()
    first, _ = held.put("w", number(1))
    second, _ = held.put("w", number(2))
    assert first.version < second.version
    with pytest.raises(UnknownName, match="replaced"):
        held.delete("w", first.version)
    assert held.delete("w", second.version).version > second.version
    assert contents(held) == {}


class FullBackend(CpuBackend):
    """A device without memory for more than a few bytes."""

    def upload(self, source: HostBytes) -> torch.Tensor:
        """See `Backend`."""
        if source.type.nbytes > 12:
            raise TooBusy("no memory on the device")
        return super().upload(source)


def test_a_tensor_that_a_follower_cannot_hold_leaves_none_of_its_name(chain: Chain) -> None:
    _, follower = chain.follower()
    held = Residents(FullBackend(), 0, VaultWriter(-1))
    chain.home.put("w", number(1))
    chain.home.put("w", source(np.ones(4, np.float32)))
    chain.home.put("x", number(2))
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        held.follow(change)
    assert contents(held) == {"x": [2] * 3}
    held.check("x")
    with pytest.raises(TooBusy, match="no memory"):
        held.check("w")
    chain.home.delete("w")
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        held.follow(change)
    held.check("w")
    assert held.nbytes == 12
