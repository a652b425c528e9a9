"""Results that stay as residents: their copies, offers to other engines, and what a lost engine takes along."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from tests.support.descriptors import num_of_file, num_opened, open_descriptors
from tests.support.resident_chain import (
    LEFT_S,
    Chain,
    Offers,
    W,
    X,
    contents,
    copy_of,
    engine,
    fed,
    follow,
    homed,
    number,
    put,
    residents,
    restore,
    restored,
    result,
    values,
)
from tilewire.service.errors import Lost, ResidentQuota, Unavailable, UnknownName
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultFollower, VaultWriter


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
            restore(again, one)
        again.versions = list(kept.versions)
    for name in (W, X):
        with pytest.raises(Lost, match=r"^b: .*lost with the engine"):
            again.get(name, field="b")
    assert again.infos() == ()
    assert not put(again, W, number(3))[1] or again.get(W).tensor is not None
    assert values(again, W) == [3] * 3
    again.delete(X)
    with pytest.raises(UnknownName):
        again.get(X)


def test_a_copy_saves_a_result_and_brings_it_to_the_other_engines(chain: Chain) -> None:
    held, follower = chain.follower()
    info = chain.home.keep(W, *result(1)).info
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        follow(held, change)
    assert held.get(W).tensor is None
    fd = copy_of(1)
    chain.writer.keep_copy(info, fd, 0)
    os.close(fd)
    chain.vault.drain(chain.deposits)
    (change,) = follower.take()
    follow(held, change)
    assert values(held, W) == [1] * 3
    assert held.info(W).engines == (0, 1)
    with chain.vault.handover(0) as kept:
        again = engine(0, chain.board, VaultWriter(-1))
        restore(again, msgspec.structs.replace(kept.tensors[0], fd=os.dup(kept.tensors[0].fd)))
    assert values(again, W) == [1] * 3


@pytest.mark.parametrize("then", ["put", "delete"])
def test_a_copy_that_comes_after_the_next_change_does_nothing(chain: Chain, then: str) -> None:
    held, follower = chain.follower()
    info = chain.home.keep(W, *result(1)).info
    if then == "put":
        put(chain.home, W, number(2))
    else:
        chain.home.delete(W)
    before = open_descriptors()
    fd = copy_of(1)
    chain.writer.keep_copy(info, fd, 0)
    os.close(fd)
    chain.vault.drain(chain.deposits)
    for change in follower.take():
        follow(held, change)
    assert contents(held) == ({W: [2] * 3} if then == "put" else {})
    assert (W in chain.vault.kept) == (then == "put")
    # The vault's copy of what was put.
    assert num_opened(before) <= 1


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
    follow(third, copy)
    assert values(third, name) == [1] * 3
    follow(third, Kept(name, ordered, -1, ordered.version, 1))
    assert values(third, name) == [1] * 3
    assert third.versions == [0, ordered.version]
    # The home itself has it from then on, too.
    follow(home, msgspec.structs.replace(copy, fd=copy_of(1)))
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
    follow(holder, Kept(name, None, -1, deleted.version, 1))
    assert holder.adopt(third.ticket, ordered) is None
    with pytest.raises(UnknownName):
        holder.get(name)
    # A gateway that went away never brings the version.
    holder.release(holder.keep(name, *result(4)).ticket)
    assert holder.nbytes == 0
    with pytest.raises(Unavailable, match="restarted"):
        holder.adopt(99, again)


def test_a_durable_result_takes_the_place_of_an_older_tensor_with_its_copy(chain: Chain) -> None:
    put(chain.home, W, number(1))
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
    put(chain.home, name, number(1))
    stored = offers.holder.keep(name, *result(2), durable=True)
    offers.holder.set_copy(stored.ticket, copy_of(2))
    ordered, _ = chain.home.order(stored.info, stored.ticket)
    # The socket with the change is read first, and the holder dies before it adopts the tensor.
    chain.vault.drain(chain.deposits)
    assert restored(chain, 1, name) == [2] * 3
    # The home has it from now on, too; the holder has not heard of it twice.
    follower = VaultFollower(offers.feed_end.fileno())
    for change in follower.take():
        follow(chain.home, change)
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
    put(chain.home, name, number(1))
    stored = offers.holder.keep(name, *result(2), durable=True)
    fd = copy_of(2)
    inode = os.fstat(fd).st_ino
    offers.holder.set_copy(stored.ticket, fd)
    chain.vault.drain(offers.deposits, 1)

    async def run() -> None:
        # The next process of the holder begins before the home orders what the last one held.
        begun, follower = chain.follower()
        if not is_in_time:
            num_open = num_of_file(inode)
            # The loop drops what was left before it goes on here.
            await asyncio.sleep(2 * LEFT_S)
            assert num_of_file(inode) == num_open - 1
        chain.home.order(stored.info, stored.ticket)
        chain.vault.drain(chain.deposits)
        for change in follower.take():
            follow(begun, change)
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
    put(chain.home, name, number(1))
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
        if is_ordered_first:
            # It is on its way, and not lost: readers wait.
            assert offers.holder.get(name).tensor is None
            assert offers.holder.lacks(name, 0)
        chain.vault.drain(offers.deposits, 1)
        if not is_ordered_first:
            order()
        fed(chain, offers.holder)

    asyncio.run(run())
    assert values(offers.holder, name) == restored(chain, 1, name) == [2] * 3


def test_what_was_lost_before_does_not_come_back_with_a_ticket_that_ends(chain: Chain, offers: Offers) -> None:
    name = homed("w", 0)
    first = offers.holder.keep(name, *result(1))
    offers.holder.release(first.ticket)
    restore(offers.holder, Kept(name, msgspec.structs.replace(first.info, version=1), version=1))
    stored = offers.holder.keep(name, *result(2), durable=True)
    offers.holder.set_copy(stored.ticket, copy_of(2))
    offers.holder.release(stored.ticket, is_unsure=True)
    assert chain.vault.kept == {}
    with pytest.raises(Lost):
        offers.holder.get(name)


def test_a_result_counts_against_the_quota() -> None:
    held = residents(quota=20)
    held.keep("a", *result(1))
    with pytest.raises(ResidentQuota, match="b: 12 bytes more"):
        held.keep("b", *result(2))
    assert held.keep("a", *result(3)).replaced
    assert values(held, "a") == [3] * 3
