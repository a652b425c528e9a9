"""Both clients demand versions, and leave a change whose first try is in doubt to the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewire
from tests.unit.client.speaking_server import Call, SpeakingServer, problem

EYE = np.eye(3, dtype=np.float32)


def test_changes_demand_a_version(call: Call, server: SpeakingServer) -> None:
    with pytest.raises(tilewire.PreconditionFailed):
        call("put", "w", EYE, if_match="*")
    first = call("put", "w", EYE)
    assert first.version == call("head", "w").version == 17
    second = call("put", "w", 2 * EYE, if_match=first)
    assert second.version == 18
    with pytest.raises(tilewire.PreconditionFailed, match="'w' has version 18") as raised:
        call("put", "w", 3 * EYE, if_match=first.version)
    assert raised.value.status == 412
    assert isinstance(raised.value, tilewire.BadRequest)
    with pytest.raises(tilewire.PreconditionFailed):
        call("delete", "w", if_match=first)
    np.testing.assert_array_equal(server.tensors["w"], 2 * EYE)
    call("delete", "w", if_match=(17, 18))
    assert server.requests[-1].headers["if-match"] == '"17", "18"'
    with pytest.raises(tilewire.NotFound):
        call("delete", "w", if_match=18)


def test_reads_demand_a_version(call: Call, server: SpeakingServer, tmp_path: Path) -> None:
    old = call("put", "w", EYE)
    new = call("put", "w", 2 * EYE)
    program: dict[str, Any] = {"inputs": {"x": {"dtype": "float32", "shape": [3, 3]}}, "outputs": ["y"]}
    program["steps"] = [{"op": "matmul", "inputs": {"a": "x", "b": "@w"}, "as": "y"}]
    for demanded in (new, new.version, call("head", "w"), "*", [17, 18], np.int64(18), [old, new]):
        np.testing.assert_array_equal(call("get", "w", if_match=demanded), 2 * EYE)
        np.testing.assert_array_equal(call("matmul", EYE, "@w", if_match=demanded), 2 * EYE)
        np.testing.assert_array_equal(call("softmax", "@w", if_match=demanded).shape, (3, 3))
        assert call("get_file", "w", tmp_path / "w.npy", if_match=demanded).exists()
        answer = call("run_program", program, {"x": EYE}, if_match=demanded)
        np.testing.assert_array_equal(answer.array, 2 * EYE)
        assert "if-match" in server.requests[-1].headers
    for method, *arguments in (["get", "w"], ["matmul", EYE, "@w"], ["get_file", "w", tmp_path / "old.npy"]):
        with pytest.raises(tilewire.PreconditionFailed):
            call(method, *arguments, if_match=old)
    assert not (tmp_path / "old.npy").exists()


def test_handles_know_their_version(call: Call) -> None:
    stored = call("matmul", EYE, EYE, store="product")
    assert stored.version == 17
    assert [one.version for one in call("tensors")] == [17]


@pytest.mark.parametrize("wrong", ["17", -1, 1.5, True, [], [1, "2"], tilewire.TensorInfo("w", (), "float32", 4)])
def test_what_is_no_version_is_refused_before_anything_is_sent(call: Call, server: SpeakingServer, wrong: Any) -> None:
    with pytest.raises(TypeError, match="if_match: "):
        call("put", "w", EYE, if_match=wrong)
    with pytest.raises(TypeError, match="if_match: "):
        call("matmul", EYE, EYE, if_match=wrong)
    assert not server.requests


def test_a_version_that_nobody_has_asked_for_yet(call: Call, server: SpeakingServer) -> None:
    handle = tilewire.Client("http://tilewire.test").tensors["w"]
    with pytest.raises(TypeError, match=r"if_match: the version of @w is not known; .*describe"):
        call("put", "w", EYE, if_match=handle)
    assert not server.requests


def test_a_conditional_change_whose_first_try_is_in_doubt(call: Call, server: SpeakingServer) -> None:
    # The engine restarts while it has the change, which was done: the second try meets its own version.
    version = call("put", "w", EYE).version
    server.versions["w"] += 1
    doubt = problem(503, "the engine restarted while it had this request", **{"Retry-After": "0"})
    for method, *arguments in (["put", "w", EYE], ["delete", "w"], ["matmul", EYE, "@w"]):
        options = {"store": "w"} if method == "matmul" else {}
        server.refusals = [doubt]
        with pytest.raises(tilewire.Unavailable, match="while it had this request"):
            call(method, *arguments, if_match=version, **options)
    # One that was refused before it began is not in doubt, nor is a read.
    server.refusals = [problem(429, "full", **{"Retry-After": "0"})]
    with pytest.raises(tilewire.PreconditionFailed):
        call("put", "w", EYE, if_match=version)
    server.refusals = [doubt]
    with pytest.raises(tilewire.PreconditionFailed):
        call("get", "w", if_match=version)
    # Deleted by the first try.
    del server.tensors["w"]
    server.refusals = [doubt]
    with pytest.raises(tilewire.Unavailable):
        call("delete", "w", if_match=version)


def test_a_result_in_the_place_of_an_operand_is_not_computed_again(call: Call, server: SpeakingServer) -> None:
    call("put", "w", EYE)
    doubt = problem(503, "the engine restarted while it had this request", **{"Retry-After": "0"})
    busy = problem(429, "full", **{"Retry-After": "0"})
    # Refused before anything was done, and then not.
    server.refusals = [busy, doubt]
    before = len(server.requests)
    with pytest.raises(tilewire.Unavailable):
        call("add", "@w", EYE, store="w")
    assert len(server.requests) == before + 2
    server.refusals = [doubt]
    with pytest.raises(tilewire.Unavailable):
        call("add", "@w", EYE, store="@w", if_match="*")
    # A version keeps the second try from being done again, and another name has the same result.
    server.refusals = [doubt]
    call("add", "@w", EYE, store="w", if_match=server.versions["w"])
    server.refusals = [doubt]
    call("add", "@w", EYE, store="other")
