"""Residents on the CPU backend: quota, replacement, restoring what an engine before held."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
import torch

from tests.support.tensor_bodies import Array
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.errors import ResidentQuota, UnknownName
from tilewire.service.ipc.arena import Segment
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.vault import VaultReader, VaultWriter


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


def test_what_the_vault_kept_is_restored() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        writer = VaultWriter(theirs.detach())
        first = residents(vault=writer)
        first.put("w", source(np.zeros(9, np.float32)))
        first.put("w", source(np.arange(4, dtype=np.float32)))
        first.put("empty", source(np.zeros((0, 3), np.int8)))
        first.put("gone", source(np.ones(1, np.float32)))
        first.delete("gone")
        writer.close()
        vault = VaultReader()
        vault.drain(ours)
        second = residents()
        second.put("gone", source(np.ones(1, np.float32)))
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
