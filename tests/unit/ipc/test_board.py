"""Which engine orders the changes of a name, and what a process keeps of that."""

from __future__ import annotations

from tilewire.service.ipc.board import MAX_RANKINGS, SLOTS, home_of, ranking, slot_of


def test_every_slot_ranks_all_engines_and_homes_are_spread() -> None:
    homes = [0, 0, 0]
    for slot in range(SLOTS):
        ranked = ranking(slot, 3)
        assert sorted(ranked) == [0, 1, 2]
        homes[ranked[0]] += 1
    assert min(homes) > SLOTS / 3 * 0.9


def test_a_name_has_one_home_and_few_rankings_are_kept() -> None:
    homes = {f"soak/none-{number}": home_of(f"soak/none-{number}", 4) for number in range(2 * SLOTS)}
    assert ranking.cache_info().currsize <= MAX_RANKINGS < SLOTS
    assert all(home_of(name, 4) == home == ranking(slot_of(name), 4)[0] for name, home in homes.items())
