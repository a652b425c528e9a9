"""Residents on the CPU backend: quota, replacement, what an engine before held, and changes that another engine orders."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.support.descriptors import num_opened, open_descriptors
from tests.support.resident_chain import (
    GONE,
    Chain,
    W,
    X,
    contents,
    engine,
    follow,
    homed,
    number,
    put,
    residents,
    restore,
    run,
    source,
    values,
)
from tests.support.tensor_bodies import to_safetensors
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.tensors.files import load_file
from tilewire.service.engine.tensors.resident import make_copy
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.errors import ResidentQuota, TooBusy, UnknownName
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.board import slot_of
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.files import open_file
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultReader, VaultWriter


def test_put_get_replace_delete() -> None:
    held = residents()
    info, was_there = put(held, "w", source(np.arange(6, dtype=np.float32)))
    assert (info.created, info.hits, was_there, held.nbytes) == (12.5, 0, False, 24)
    older = held.get("w").tensor
    info, was_there = put(held, "w", source(np.zeros((2, 2), np.float32)))
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
    put(held, "w", slot)
    slot.mapped.zero_()
    assert values(held, "w") == [1, 1, 1, 1]


def test_the_quota_counts_what_is_replaced_and_a_refusal_changes_nothing() -> None:
    held = residents(quota=100)
    put(held, "a", source(np.ones(15, np.float32)))
    put(held, "b", source(np.ones(10, np.float32)))
    for name, size in (("c", 1), ("a", 16), ("b", 11)):
        with pytest.raises(ResidentQuota, match=name):
            put(held, name, source(np.ones(size, np.float32)))
    assert held.nbytes == 100
    assert held.get("a").info.type.shape == (15,)
    put(held, "a", source(np.ones(5, np.float32)))
    put(held, "c", source(np.ones(10, np.float32)))
    assert held.nbytes == 100


def test_what_the_vault_kept_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(to_safetensors({"gone": np.ones(1, np.float32)}))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        writer = VaultWriter(theirs.detach())
        first = residents(vault=writer)
        file = open_file(path, "--tensors-dir")
        load_file(first, file, run)
        first.delete("file/gone")
        put(first, "w", source(np.zeros(9, np.float32)))
        put(first, "w", source(np.arange(4, dtype=np.float32)))
        put(first, "empty", source(np.zeros((0, 3), np.int8)))
        put(first, "forgotten", source(np.ones(1, np.float32)))
        first.delete("forgotten")
        writer.close()
        vault = VaultReader()
        vault.drain(ours)
        second = residents()
        load_file(second, file, run)
        os.close(file.fd)
        assert vault.kept.keys() == {"file/gone", "w", "empty"}
        for kept in vault.kept.values():
            restore(second, kept)
        assert [info.name for info in second.infos()] == ["empty", "w"]
        assert values(second, "w") == [0, 1, 2, 3]
        assert second.get("empty").info.type == TensorType("int8", (0, 3))
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
            put(held, "w", source(np.full(4, value, np.float32)))
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


def test_a_copy_that_is_replaced_stays_open_while_it_is_handed_over(chain: Chain) -> None:
    put(chain.home, W, number(1))
    chain.vault.drain(chain.deposits)
    with chain.vault.handover() as kept:
        (one,) = kept.tensors
        put(chain.home, W, number(2))
        chain.vault.drain(chain.deposits)
        assert os.fstat(one.fd).st_size > 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one.fd)


def test_a_follower_goes_through_the_changes_of_its_home(chain: Chain) -> None:
    held, follower = chain.follower()
    put(chain.home, W, number(1))
    put(chain.home, GONE, number(2))
    put(chain.home, W, number(3))
    chain.home.delete(GONE)
    chain.vault.drain(chain.deposits)
    seen = []
    for change in follower.take():
        follow(held, change)
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
    put(chain.home, W, number(1))
    put(chain.home, GONE, number(2))
    chain.home.delete(GONE)
    put(chain.home, W, number(3))
    # They wait in the socket of the process that is gone.
    held, follower = chain.follower()
    put(chain.home, X, number(4))
    chain.vault.drain(chain.deposits)
    before = open_descriptors()
    changes = follower.take()
    for change in changes:
        follow(held, change)
        assert GONE not in contents(held)
        assert contents(held)[W] == [3] * 3
    assert len(changes) == 5
    assert contents(held) == contents(chain.home) == {W: [3] * 3, X: [4] * 3}
    assert num_opened(before) == 0


def test_an_older_change_that_comes_late_is_ignored(chain: Chain) -> None:
    held, follower = chain.follower()
    put(chain.home, W, number(1))
    put(chain.home, W, number(2))
    chain.home.delete(W)
    chain.vault.drain(chain.deposits)
    first, second, deleted = follower.take()
    follow(held, second)
    follow(held, first)
    assert contents(held) == {W: [2] * 3}
    follow(held, deleted)
    follow(held, msgspec.structs.replace(second, fd=-1))
    assert contents(held) == {}


def test_a_feed_keeps_what_its_socket_has_no_room_for(chain: Chain) -> None:
    count = 1000

    async def run() -> None:
        held, follower = chain.follower()
        before = open_descriptors()
        for value in range(count):
            put(chain.home, W, number(value))
            chain.vault.drain(chain.deposits)
        # The copy of the vault, and the mapping of the home engine: what waits takes none.
        assert num_opened(before) <= 3
        num_taken = 0
        while num_taken < count:
            for change in follower.take():
                follow(held, change)
                num_taken += 1
            await asyncio.sleep(0)
        assert contents(held) == {W: [count - 1] * 3}
        # The copy of the vault, and the mappings of both engines.
        assert num_opened(before) <= 3

    asyncio.run(run())


class FullBackend(CpuBackend):
    """A device without memory for more than a few bytes."""

    def reserve(self, kept: HostBytes) -> torch.Tensor:
        """See `Backend`."""
        if kept.type.nbytes > 12:
            raise TooBusy("no memory on the device")
        return super().reserve(kept)


def test_a_tensor_that_a_follower_cannot_hold_is_left_to_the_engines_that_do(chain: Chain) -> None:
    _, follower = chain.follower()
    held = Residents(FullBackend(), 100, VaultWriter(-1), index=1, num_engines=2)
    put(chain.home, W, number(1))
    put(chain.home, W, source(np.ones(4, np.float32)))
    put(chain.home, X, number(2))
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        follow(held, change)
    assert held.get(W).tensor is None
    assert held.info(W).engines == (0,)
    assert values(held, X) == [2] * 3
    assert (held.nbytes, len(held)) == (12, 1)
    chain.home.delete(W)
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        follow(held, change)
    assert contents(held) == {X: [2] * 3}


def test_a_single_tensor_is_known_everywhere_and_held_by_one(chain: Chain) -> None:
    held, follower = chain.follower()
    put(chain.home, W, number(1), "single")
    chain.vault.drain(chain.deposits)
    (change,) = follower.take()
    assert change.fd < 0
    follow(held, change)
    assert held.get(W).tensor is None
    assert (held.info(W).engines, held.info(W).placement, held.nbytes) == ((0,), "single", 0)
    assert held.infos() == chain.home.infos()
    # So it is for an engine that starts later, and for the one that holds it.
    later, _ = chain.follower()
    assert later.infos() == held.infos()
    assert later.get(W).tensor is None
    with chain.vault.handover(0) as kept:
        again = engine(0, chain.board, VaultWriter(-1))
        restore(again, msgspec.structs.replace(kept.tensors[0], fd=os.dup(kept.tensors[0].fd)))
    assert values(again, W) == [1] * 3


def test_the_board_shows_every_change_before_it_is_deposited(chain: Chain) -> None:
    class Watching(VaultWriter):
        def keep(self, info: TensorInfo, fd: int = -1, holder: tuple[int, int] = (0, 0)) -> None:
            assert chain.board.versions[slot_of(info.name)] == info.version
            seen.append(info.version)

    seen: list[int] = []
    home = engine(0, chain.board, Watching(-1))
    put(home, W, number(1))
    put(home, W, number(2))
    assert seen == sorted(set(seen))
    deleted = home.delete(W)
    assert chain.board.versions[slot_of(W)] == deleted.version > seen[-1]


def seconds_of_a_load(count: int) -> float:
    """Shortest time in which a tensor comes into a full engine: one of so many gives way."""
    held = Residents(CpuBackend(), 2**20, VaultWriter(-1), count, has_store=True)
    spent = []
    for version in range(1, count + 101):
        kind = TensorType("float32", (4,))
        info = TensorInfo(f"w/{version}", kind, 0.0, version=version, engines=(0,), stored=version)
        began_s = time.perf_counter()
        held.check_room(info.name, kind.nbytes)
        spent.append(time.perf_counter() - began_s)
        restore(held, Kept(info.name, info, version=version))
    assert len(held.items()) == count
    return min(spent[count:])


def test_what_gives_way_is_found_as_soon_among_many() -> None:
    # Looking at each takes hundreds of times as long.
    assert seconds_of_a_load(5000) < 20 * seconds_of_a_load(20)


def test_the_copy_that_was_used_longest_ago_gives_way(chain: Chain) -> None:
    (follower, _), kind = chain.follower(), TensorType("float32", (4,))
    names = [homed(prefix) for prefix in "abcd"]
    for version, name in enumerate(names, 1):
        info = TensorInfo(name, kind, 0.0, version=version, placement="single", engines=(0,))
        restore(follower, Kept(name, info, make_copy(name, kind.nbytes), version=version))
    follower.use(follower.get(names[0]))
    follower.quota_bytes = 3 * kind.nbytes
    follower.check_room("w", kind.nbytes)
    held = [name for name in names if follower.get(name).tensor is not None]
    assert held == [names[0], names[3]]
    with pytest.raises(ResidentQuota):
        follower.check_room("w", 4 * kind.nbytes)
    assert follower.nbytes == 0
