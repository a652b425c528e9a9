"""Two services on one folder of `--store`: what one is told, the other has."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import scrape, total
from tests.support.live_server import COMMAND, LiveServer, serving
from tests.support.problems import check_problem
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors

CHECK_S = 0.2
FLAGS = ("--gateways", "1", "--arena-bytes", "64MiB", "--store-check-s", str(CHECK_S))
# A look comes each `CHECK_S`; a busy machine takes longer.
WAIT_S = 20.0
POLL_S = 0.02
EYE = np.eye(2, dtype=np.float32)


class Host:
    """A service on the folder.

    Args:
        server: The service.
        client: An HTTP client of it.
    """

    def __init__(self, server: LiveServer, client: httpx.Client) -> None:
        self.server = server
        self.client = client

    def put(self, name: str, value: float, **headers: str) -> httpx.Response:
        array = np.full((2, 2), value, np.float32)
        return self.client.put(f"/v1/tensors/{name}", content=to_npy(array), headers=headers)

    def get(self, name: str, **headers: str) -> float | int:
        """First number of a tensor, or the status."""
        answer = self.client.get(f"/v1/tensors/{name}", headers=headers)
        if answer.status_code != 200:
            return answer.status_code
        return float(from_safetensors(answer.content)[name][0, 0])

    def product(self, name: str, **headers: str) -> float | int:
        """First number of the product of one and a tensor, or the status."""
        answer = self.client.post(f"/v1/matmul?b=@{name}", content=to_safetensors({"a": EYE}), headers=headers)
        if answer.status_code != 200:
            return answer.status_code
        return float(from_safetensors(answer.content)["out"][0, 0])

    def figure(self, name: str, **labels: str) -> float:
        """Value of a metric."""
        return total(scrape(self.client), name, **labels)

    def names(self) -> set[str]:
        """Names of the residents."""
        return {one["name"] for one in self.client.get("/v1/tensors").json()}


StartHost = Callable[..., Host]


def at_once(calls: Sequence[Callable[[], httpx.Response]]) -> list[httpx.Response]:
    """Answers of calls that begin at once."""
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda call=call: answers.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def until(read: Callable[[], object], expected: object) -> None:
    end_s = time.monotonic() + WAIT_S
    while (seen := read()) != expected:
        assert time.monotonic() < end_s, f"{seen} instead of {expected}"
        time.sleep(POLL_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def hosts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    logs = tmp_path_factory.mktemp("logs")
    flags = (*FLAGS, "--store", str(folder))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(logs / name, *flags)) for name in ("a", "b")]
        one, other = (Host(server, stack.enter_context(server.client())) for server in servers)
        yield one, other


@pytest.fixture
def start_host(start_server: StartServer) -> Iterator[StartHost]:
    """Starts services of a test's own."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path, *flags: str) -> Host:
            server = start_server(*FLAGS, "--store", str(folder), *flags)
            return Host(server, stack.enter_context(server.client()))

        yield start


def files_of(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"*/{name}@*.safetensors"))


@pytest.mark.slow
def test_an_upload_on_one_host_is_multiplied_on_the_other(hosts: tuple[Host, Host], folder: Path) -> None:
    one, other = hosts
    answer = one.put("shared", 3.0)
    assert answer.status_code == 201
    (file,) = files_of(folder, "shared")
    assert answer.headers["etag"] == f'"{file.stem.partition("@")[2]}"'
    assert other.product("shared") == 3.0
    assert other.get("shared") == 3.0
    assert other.client.head("/v1/tensors/shared").headers["etag"] == answer.headers["etag"]


@pytest.mark.slow
def test_a_replaced_tensor_is_seen_within_the_interval(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("replaced", 1.0)
    assert other.product("replaced") == 1.0
    assert other.put("replaced", 2.0).status_code == 200
    assert other.product("replaced") == 2.0
    until(lambda: one.product("replaced"), 2.0)
    until(lambda: one.get("replaced"), 2.0)


def test_a_deletion_is_seen_within_the_interval(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("deleted", 1.0)
    assert other.get("deleted") == 1.0
    assert other.client.delete("/v1/tensors/deleted").status_code == 204
    assert other.get("deleted") == 404
    until(lambda: one.product("deleted"), 404)
    assert one.client.delete("/v1/tensors/deleted").status_code == 404
    # It was never resident here, and is deleted all the same.
    one.put("unseen", 1.0)
    assert other.client.delete("/v1/tensors/unseen").status_code == 204
    assert other.put("unseen", 2.0).status_code == 201
    until(lambda: one.get("unseen"), 2.0)


@pytest.mark.slow
def test_files_that_are_removed_by_hand_are_deleted_tensors(hosts: tuple[Host, Host], folder: Path) -> None:
    one, other = hosts
    one.put("by/hand", 1.0)
    assert other.product("by/hand") == 1.0
    for file in files_of(folder, "by+hand"):
        file.unlink()
    for host in hosts:
        until(partial(host.product, "by/hand"), 404)
    assert other.put("by/hand", 2.0).status_code == 201
    assert one.product("by/hand") == 2.0


def test_what_nobody_has_is_404_on_both(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        assert host.get("nothing") == 404
        assert host.product("nothing") == 404
        assert host.client.delete("/v1/tensors/nothing").status_code == 404


# ── restarts and deaths ───────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_what_is_in_the_store_outlives_all_hosts(tmp_path: Path, start_host: StartHost) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    first = start_host(folder)
    first.put("kept", 5.0)
    first.put("gone", 6.0)
    assert first.client.delete("/v1/tensors/gone").status_code == 204
    durable = first.client.post("/v1/matmul?b=@kept&store=@result&durable=true", content=to_safetensors({"a": EYE}))
    assert durable.status_code == 201
    passing = first.client.post("/v1/matmul?b=@kept&store=@passing", content=to_safetensors({"a": EYE}))
    assert passing.status_code == 201
    program = {
        "inputs": {"x": {"dtype": "float32", "shape": [-1, 2]}},
        "steps": [{"op": "matmul", "inputs": {"a": "x", "b": "@kept"}, "as": "y"}],
        "outputs": ["y"],
    }
    assert first.client.put("/v1/programs/scores", json=program).status_code == 201
    assert first.get("passing") == 5.0
    first.server.stop()
    second = start_host(folder)
    assert second.product("kept") == 5.0
    assert second.get("gone") == 404
    assert second.get("result") == 5.0
    # It was never promised to outlive its host.
    assert second.get("passing") == 404
    run = second.client.post("/v1/programs/scores", content=to_safetensors({"x": EYE}))
    assert run.status_code == 200
    assert from_safetensors(run.content)["y"][0, 0] == 5.0
    assert second.figure("tilewire_store_loads_total") == 3
    assert second.figure("tilewire_store_load_bytes_total") > 2 * EYE.nbytes


@pytest.mark.slow
def test_an_engine_that_restarts_keeps_step(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("survivor", 1.0)
    assert other.get("survivor") == 1.0
    (engine,) = other.server.engines()
    os.kill(engine, signal.SIGKILL)
    until(lambda: other.get("survivor"), 1.0)
    one.put("survivor", 2.0)
    until(lambda: other.get("survivor"), 2.0)


@pytest.mark.slow
def test_a_host_that_dies_in_an_upload_leaves_nothing_that_counts(tmp_path: Path, start_host: StartHost) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    dying = start_host(folder, "--max-body-bytes", "64MiB")
    assert dying.put("large", 1.0).status_code == 201
    body = to_npy(np.ones((3000, 3000), np.float32))
    (engine,) = dying.server.engines()
    killed = threading.Event()

    def kill() -> None:
        # As soon as the file is being written.
        while len(list(folder.glob("*/@*.tmp"))) == 0:
            time.sleep(POLL_S / 20)
        os.kill(engine, signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    statuses = set()
    end_s = time.monotonic() + WAIT_S
    while not killed.is_set() and time.monotonic() < end_s:
        with contextlib.suppress(httpx.HTTPError):
            statuses.add(dying.client.put("/v1/tensors/large", content=body).status_code)
    killer.join()
    assert statuses <= {200, 503}
    survivor = start_host(folder)
    found = survivor.client.get("/v1/tensors/large")
    assert found.status_code == 200
    shape = from_safetensors(found.content)["large"].shape
    assert shape == (3000, 3000) if 200 in statuses else shape in ((2, 2), (3000, 3000))


# ── eviction ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_what_was_not_used_for_longest_gives_way_and_comes_back(tmp_path: Path, start_host: StartHost) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    # Room for three of these.
    host = start_host(folder, "--resident-bytes", str(3 * EYE.nbytes))
    for number in range(3):
        assert host.put(f"w{number}", number).status_code == 201
    assert host.product("w0") == 0.0
    assert host.put("w3", 3.0).status_code == 201
    assert host.names() == {"w0", "w2", "w3"}
    assert host.figure("tilewire_store_evictions_total") == 1
    for number in range(4):
        assert host.product(f"w{number}") == number
    assert len(host.names()) == 3
    # A result that is not durable is here only, and stays.
    stored = host.client.post("/v1/matmul?b=@w3&store=@here", content=to_safetensors({"a": EYE}))
    assert stored.status_code == 201
    for number in range(4):
        assert host.get(f"w{number}") == number
        assert "here" in host.names()
    check_problem(host.client.put("/v1/tensors/huge", content=to_npy(np.ones(100, np.float32))), 507, "huge")


@pytest.mark.slow
def test_residents_of_one_request_that_the_quota_cannot_hold_are_507(tmp_path: Path, start_host: StartHost) -> None:
    """Loading one evicts another: however often it is tried, they are never there together."""
    folder = tmp_path / "store"
    folder.mkdir()
    host = start_host(folder, "--resident-bytes", str(2 * EYE.nbytes - 1))
    for number in range(2):
        assert host.put(f"w{number}", number).status_code == 201
    check_problem(host.client.post("/v1/add?a=@w0&b=@w1"), 507, f"w0, w1: {2 * EYE.nbytes} bytes")
    assert host.client.post("/v1/add?a=@w1&b=@w1").status_code == 200
    assert [host.product(f"w{number}") for number in range(2)] == [0.0, 1.0]


def test_many_waiters_share_one_load(hosts: tuple[Host, Host]) -> None:
    one, host = hosts
    one.put("popular", 4.0)
    num_loads = host.figure("tilewire_store_loads_total")
    answers: list[float | int] = []
    with host.server.client() as client:
        mine = Host(host.server, client)
        threads = [threading.Thread(target=lambda: answers.append(mine.product("popular"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [4.0] * 8
    assert host.figure("tilewire_store_loads_total") == num_loads + 1


@pytest.mark.slow
def test_a_large_tensor_is_503_until_it_is_there(hosts: tuple[Host, Host], folder: Path, start_host: StartHost) -> None:
    hosts[0].put("large", 4.0)
    host = start_host(folder, "--store-wait-bytes", "8")
    answer = host.client.get("/v1/tensors/large")
    check_problem(answer, 503, "large")
    assert int(answer.headers["retry-after"]) >= 1
    until(lambda: host.product("large"), 4.0)


# ── several engines ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_hosts_of_two_engines_share_names_and_make_room(tmp_path: Path, start_host: StartHost) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    flags = ("--device", "cpu:0,1", "--resident-bytes", str(40 * EYE.nbytes))
    one, other = start_host(folder, *flags), start_host(folder, *flags)
    for number in range(64):
        assert one.put(f"w{number}", number).status_code == 201
    single = np.full((8, 16), 2.0, np.float32)
    for number in range(4):
        path = f"/v1/tensors/single{number}?placement=single"
        assert one.client.put(path, content=to_npy(single)).status_code == 201
    for host in (other, one, other):
        for number in range(64):
            assert host.product(f"w{number}") == number
            assert host.get(f"w{number}") == number
        for number in range(4):
            assert host.get(f"single{number}") == 2.0
            assert host.client.head(f"/v1/tensors/single{number}").status_code == 200
        assert host.figure("tilewire_store_evictions_total") > 0
    # Residents of two home engines in one request.
    for number in range(0, 64, 7):
        query = f"a=@w{number}&b=@w{63 - number}"
        answer = other.client.post(f"/v1/add?{query}")
        assert answer.status_code == 200, answer.text
        assert from_safetensors(answer.content)["out"][0, 0] == 63
    for number in range(0, 64, 5):
        assert other.client.delete(f"/v1/tensors/w{number}").status_code == 204
        until(partial(one.product, f"w{number}"), 404)
    # The folder has whole tensors.
    large = np.zeros((64, 64), np.float32)
    check_problem(one.client.put("/v1/tensors/x?placement=shard", content=to_npy(single)), 400, "placement")
    check_problem(one.client.put("/v1/tensors/x", content=to_npy(large)), 507, "x")


# ── conditions ────────────────────────────────────────────────────────────────────────────────────


def test_a_condition_makes_reads_and_changes_exact(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    first = one.put("exact", 1.0).headers["etag"]
    assert other.product("exact") == 1.0
    second = one.put("exact", 2.0, **{"if-match": first}).headers["etag"]
    assert second != first
    # The other host still has the first one, or not: the demand decides.
    assert other.product("exact", **{"if-match": second}) == 2.0
    assert other.get("exact", **{"if-match": f'"1", {second}'}) == 2.0
    assert other.get("exact", **{"if-match": "*"}) == 2.0
    for status in (
        other.get("exact", **{"if-match": first}),
        other.product("exact", **{"if-match": first}),
        other.put("exact", 3.0, **{"if-match": first}).status_code,
        other.client.delete("/v1/tensors/exact", headers={"if-match": first}).status_code,
        other.client.head("/v1/tensors/exact", headers={"if-match": "W/" + second}).status_code,
        other.put("absent", 1.0, **{"if-match": "*"}).status_code,
    ):
        assert status == 412
    assert other.get("exact", **{"if-match": "17"}) == 400
    assert other.client.delete("/v1/tensors/exact", headers={"if-match": second}).status_code == 204
    assert one.product("exact", **{"if-match": second}) in (404, 2.0)
    until(lambda: one.get("exact", **{"if-match": second}), 404)


def test_of_two_hosts_that_write_at_once_one_comes_last_for_both(hosts: tuple[Host, Host]) -> None:
    tags: list[str] = []
    for attempt in range(20):
        answers = at_once([partial(host.put, "race", value) for value, host in enumerate(hosts, 2 * attempt)])
        tags += [answer.headers["etag"] for answer in answers]
    assert len(set(tags)) == len(tags)
    last = max(tags, key=lambda tag: int(tag.strip('"')))
    until(lambda: {host.client.head("/v1/tensors/race").headers["etag"] for host in hosts}, {last})
    assert len({host.get("race") for host in hosts}) == 1


def test_of_two_that_demand_the_same_version_one_wins(hosts: tuple[Host, Host]) -> None:
    tag = hosts[0].put("contested", 0.0).headers["etag"]
    for attempt in range(10):
        answers = at_once([partial(host.put, "contested", 1.0, **{"if-match": tag}) for host in hosts])
        assert sorted(answer.status_code for answer in answers) == [200, 412], attempt
        (tag,) = (answer.headers["etag"] for answer in answers if answer.status_code == 200)


# ── a folder that is not as it should be ──────────────────────────────────────────────────────────


@pytest.mark.slow
def test_what_nobody_of_us_wrote_is_left_alone(tmp_path: Path, start_host: StartHost) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    host = start_host(folder)
    for name in ("pipe", "link", "folder", "cut", "garbage"):
        host.put(name, 1.0)
    tag = int(host.put("other", 2.0).headers["etag"].strip('"'))
    host.server.stop()
    places = {name: files_of(folder, name)[0] for name in ("pipe", "link", "folder", "cut", "garbage", "other")}

    def next_of(name: str) -> Path:
        file = places[name]
        return file.with_name(f"{name}@{tag + 1000}.safetensors")

    os.mkfifo(next_of("pipe"))
    next_of("link").symlink_to(places["other"])
    next_of("folder").mkdir()
    next_of("cut").write_bytes(places["cut"].read_bytes()[:-1])
    next_of("garbage").write_bytes(b"garbage")
    (places["other"].parent / "@0123.tmp").write_bytes(b"half")
    (places["other"].parent / "no such name!@1.safetensors").write_bytes(b"")
    (folder / "unknown").mkdir()
    second = start_host(folder)
    # What is no file was never a version of ours; a damaged one may have been.
    for name in ("pipe", "link", "folder"):
        assert second.product(name) == 1.0
    for name in ("cut", "garbage"):
        check_problem(second.client.get(f"/v1/tensors/{name}"), 503, "damaged")
        assert f"{name}@" in second.server.log.read_text()
    assert second.product("other") == 2.0
    for name in places:
        assert second.put(name, 3.0).status_code == 200
        assert second.product(name) == 3.0
    third = start_host(folder)
    for name in places:
        assert third.product(name) == 3.0


@pytest.mark.slow
def test_a_folder_that_vanishes_stops_changes_and_not_reads(tmp_path: Path, start_host: StartHost) -> None:
    folder, aside = tmp_path / "store", tmp_path / "aside"
    folder.mkdir()
    host = start_host(folder)
    host.put("there", 1.0)
    assert host.figure("tilewire_store_failed_looks_total") == 0
    folder.rename(aside)
    until(lambda: host.figure("tilewire_store_failed_looks_total") >= 2, True)
    until(lambda: "cannot be read" in host.server.log.read_text() or host.product("there"), True)
    assert host.product("there") == 1.0
    check_problem(host.client.put("/v1/tensors/new", content=to_npy(EYE)), 503, "store")
    check_problem(host.client.put("/v1/tensors/there", content=to_npy(EYE * 2)), 503, "store")
    check_problem(host.client.delete("/v1/tensors/there"), 503, "store")
    check_problem(host.client.get("/v1/tensors/absent"), 503, "store")
    assert host.product("there") == 1.0
    aside.rename(folder)
    assert host.put("new", 2.0).status_code == 201
    assert host.product("there") == 1.0


@pytest.mark.slow
def test_durable_results_give_way_wherever_they_were_made(tmp_path: Path, start_host: StartHost) -> None:
    """Also on the engine that does not order their names."""
    host = start_host(tmp_path, "--device", "cpu:0,1", "--resident-bytes", "8KiB")
    names, quarter = [f"made/{number}" for number in range(24)], np.ones((16, 32), np.float32)
    for name in names:
        path = f"/v1/pointwise?fn=abs&store=@{name}&durable=true"
        assert host.client.post(path, content=to_safetensors({"x": quarter})).status_code == 201
    assert [host.get(name) for name in names] == [1.0] * len(names)
    listed = host.client.get("/v1/tensors").json()
    assert 0 < sum(one["bytes"] for one in listed) <= 2 * 8192
    until(lambda: host.figure("tilewire_store_evictions_total") >= len(names), True)


def test_a_result_that_only_its_host_has_can_be_changed_by_its_version(hosts: tuple[Host, Host]) -> None:
    """Also above a tensor of the store, but not once another host has changed that."""
    one, other = hosts

    def keep(value: float) -> str:
        scaled = one.client.post(f"/v1/pointwise?fn=abs&scale={value}&store=@above", content=to_safetensors({"x": EYE}))
        assert scaled.status_code == 201, scaled.text
        assert one.get("above") == value
        return f'"{scaled.json()["version"]}"'

    tag = keep(2.0)
    assert other.get("above") == 404
    assert one.put("above", 3.0, **{"if-match": '"17"'}).status_code == 412
    assert one.put("above", 3.0, **{"if-match": tag}).status_code == 200
    assert other.get("above") == 3.0
    tag = keep(4.0)
    assert one.put("above", 5.0, **{"if-match": tag}).status_code == 200
    until(lambda: other.get("above"), 5.0)
    tag = keep(6.0)
    assert one.client.delete("/v1/tensors/above", headers={"if-match": tag}).status_code == 204
    assert one.get("above") == 404
    until(lambda: other.get("above"), 404)
    tag = keep(7.0)
    other.put("above", 8.0)
    assert one.put("above", 9.0, **{"if-match": tag}).status_code == 412
    until(lambda: one.get("above"), 8.0)


@pytest.mark.slow
def test_a_folder_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--device", "cpu", *FLAGS, "--store", str(tmp_path / "nowhere")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"--store: ")
    assert b"nowhere: No such file or directory" in done.stderr
