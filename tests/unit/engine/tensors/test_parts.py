"""Residents of which each engine holds a part."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.resident_chain import Chain, Offers, W, fed, homed, put, receive, restored, source
from tests.support.tensor_bodies import Array
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.errors import ResidentQuota
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.placement import Part
from tilewire.service.supervisor.vault import VaultWriter

COLUMNS = np.arange(12, dtype=np.float32).reshape(2, 6)


def rows(held: Residents) -> list[list[float]]:
    """The part of the tensor that an engine has."""
    tensor = held.get(W).tensor
    assert tensor is not None
    return tensor.tolist()


def taken(chain: Chain, offers: Offers, array: Array, name: str = W) -> tuple[int, TensorInfo]:
    """A tensor of whose columns each engine has taken its own, ordered by the home; the ticket of the other."""
    ticket, _ = receive(offers.holder, name, source(array), "shard", -1)
    ordered, _ = put(chain.home, name, source(array), "shard", -1)
    chain.vault.drain(chain.deposits)
    return ticket, ordered


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
    assert held.get(W).info.version == newer.version
    chain.vault.drain(offers.deposits, 1)
    fed(chain, held)
    assert rows(held) == [[103, 104, 105], [109, 110, 111]]
    assert held.nbytes == 24


def test_a_part_counts_against_the_quota_of_its_engine() -> None:
    held = Residents(CpuBackend(), 24, VaultWriter(-1), num_engines=2)
    put(held, W, source(COLUMNS), "shard", -1)
    assert held.nbytes == 24
    with pytest.raises(ResidentQuota, match="24 bytes more"):
        put(held, homed("more"), source(COLUMNS), "shard", -1)
    put(held, W, source(COLUMNS + 1), "shard", -1)
    assert rows(held) == [[1, 2, 3], [7, 8, 9]]
    # A slice of a tensor in one piece, as of a bias beside sharded columns.
    put(held, W, source(COLUMNS[0]))
    whole = held.get(W)
    piece = whole.tensor_of(Part(-1, 2, 4))
    assert piece is not None
    assert piece.tolist() == [2, 3]
