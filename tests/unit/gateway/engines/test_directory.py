"""A gateway's memory of residents: it has a bound, and what is forgotten is looked up again."""

from __future__ import annotations

import msgspec

from tests.support.scripted_engines import KIND, ScriptedEngine, info
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.ipc.board import VersionBoard


def test_the_resident_that_was_seen_first_is_forgotten() -> None:
    """Nobody says so when another gateway deletes it."""
    directory = Directory([ScriptedEngine(0), ScriptedEngine(1)], VersionBoard(), max_known=2)
    for name in ("a", "b", "a", "c"):
        directory.learn(msgspec.structs.replace(info(0, 0, 1, placement="shard"), name=name), 0, 0)
    assert directory.types == {"b": KIND, "c": KIND}
    assert [directory.has_sharded([name]) for name in ("a", "b", "c")] == [False, True, True]
