"""Files of `--tensors-dir` that are not right, at a start and at an engine's restart; uploads past the system's limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.live_server import COMMAND, POLL_S, ROOT, START_TIMEOUT_S, LiveServer, path_with, serving
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors

GOOD = to_safetensors({"x": np.ones(3, np.float32)})
OPEN_FILES = 150


def restart_engine(server: LiveServer, client: httpx.Client) -> None:
    (engine,) = server.engines()
    os.kill(engine, signal.SIGKILL)
    end_s = time.monotonic() + START_TIMEOUT_S
    while server.engines() in ([], [engine]) or client.get("/readyz").status_code != 200:
        assert time.monotonic() < end_s, server.log.read_text()
        assert server.process.poll() is None, server.log.read_text()
        time.sleep(POLL_S)


@pytest.mark.slow
def test_a_file_that_went_bad_is_left_out_at_a_restart(start_server: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "tensors"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(GOOD)
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--tensors-dir", str(folder))
    with server.client() as client:
        assert client.put("/v1/tensors/w", content=to_npy(np.ones(4))).status_code == 201
        (folder / "a.safetensors").write_bytes(GOOD[: len(GOOD) // 2])
        restart_engine(server, client)
        assert [one["name"] for one in client.get("/v1/tensors").json()] == ["b/x", "w"]
    assert "a file is left out" in server.log.read_text()
    assert "a.safetensors" in server.log.read_text()


def replace(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


def restart_one_of_two(server: LiveServer, client: httpx.Client) -> None:
    num_starts = server.log.read_text().count("name=engine-")
    os.kill(server.engines()[0], signal.SIGKILL)
    end_s = time.monotonic() + START_TIMEOUT_S
    # A death and a start.
    while server.log.read_text().count("name=engine-") < num_starts + 2 or len(client.get("/v2").json()["engines"]) < 2:
        assert time.monotonic() < end_s, server.log.read_text()
        time.sleep(POLL_S)


def test_a_new_engine_reads_the_files_that_the_others_have(start_server: StartServer, tmp_path: Path) -> None:
    """Whatever the folders have by then: a file of another inode, none, or a further one."""
    one, x = to_npy(np.ones(1, np.float32)), to_safetensors({"x": np.ones((2, 4), np.float32)})
    tensors, programs = tmp_path / "tensors", tmp_path / "programs"
    for folder in (tensors, programs):
        folder.mkdir()
    for name in ("a", "b", "c", "d"):
        (tensors / f"{name}.safetensors").write_bytes(to_safetensors({"x": np.zeros(1, np.float32)}))
    step = {"op": "softmax", "inputs": {"x": "x"}, "as": "p"}
    program = {"inputs": {"x": {"dtype": "float32", "shape": [-1, 4]}}, "steps": [step], "outputs": ["p"]}
    (programs / "soft.json").write_text(json.dumps(program))
    flags = ("--device", "cpu:0,1", "--tensors-dir", str(tensors), "--programs-dir", str(programs))
    server = start_server("--gateways", "1", *flags)
    calls = [*((f"/v1/add?b=@{name}/x", one) for name in "abcd"), ("/v1/programs/soft", x)]

    with server.client() as client, ThreadPoolExecutor(8) as pool:

        def answer(url: str, body: bytes) -> bytes | int:
            response = client.post(url, content=body)
            return response.content if response.status_code == 200 else response.status_code

        def answers() -> list[set[bytes | int]]:
            return [set(pool.map(answer, [url] * 40, [body] * 40)) for url, body in calls]

        def tags() -> dict[str, str]:
            return {name: client.head(f"/v1/tensors/{name}/x").headers["etag"] for name in "abcd"}

        before = answers(), tags()
        assert before[0][:4] == [{one}] * 4
        for name in ("a", "b", "new"):
            replace(tensors / f"{name}.safetensors", to_safetensors({"x": np.ones(1, np.float32)}))
        (tensors / "c.safetensors").unlink()
        program["steps"] = [{**step, "options": {"log": True}}]
        replace(programs / "soft.json", json.dumps(program).encode())
        restart_one_of_two(server, client)
        assert (answers(), tags()) == before
        assert client.post("/v1/add?b=@new/x", content=one).status_code == 404
        # What clients did stays, too.
        assert client.put("/v1/tensors/b/x", content=one).status_code == 200
        assert client.delete("/v1/tensors/d/x").status_code == 204
        restart_one_of_two(server, client)
        assert answers() == [{one}, {to_npy(np.full(1, 2, np.float32))}, {one}, {404}, before[0][4]]
    assert "a file is left out" not in server.log.read_text()
    assert "a file was written over" not in server.log.read_text()


@pytest.mark.slow
def test_requests_that_demand_a_version_of_a_file_get_no_other(start_server: StartServer, tmp_path: Path) -> None:
    """A file that was written over is no longer what it was: an engine that restarts reads what it has by then."""
    path, one = tmp_path / "a.safetensors", to_npy(np.ones(1, np.float32))
    path.write_bytes(to_safetensors({"x": np.zeros(1, np.float32)}))
    server = start_server("--gateways", "1", "--device", "cpu:0,1", "--tensors-dir", str(tmp_path))
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        with path.open("r+b") as file:
            file.write(to_safetensors({"x": np.ones(1, np.float32)}))
        restart_one_of_two(server, client)
        read = client.get("/v1/tensors/a/x")
        (values,) = from_safetensors(read.content).values()
        tag = {"if-match": read.headers["etag"]}
        answers = pool.map(lambda _: client.post("/v1/add?b=@a/x", content=one, headers=tag), range(200))
        assert {answer.content for answer in answers} == {to_npy(values + 1)}
    (line,) = (line for line in server.log.read_text().splitlines() if "a file was written over" in line)
    assert "a.safetensors" in line


@pytest.mark.parametrize(
    ("name", "key", "reason"),
    [
        pytest.param("two words", "x", "a name is 1 to 255", marks=pytest.mark.slow),
        ("a", "b/../c", "no empty and no '..' segment"),
        pytest.param("a", "x" * 255, "a name is 1 to 255", marks=pytest.mark.slow),
        pytest.param("a", "\x1b[31m", "a name is 1 to 255", marks=pytest.mark.slow),
        pytest.param("pipe", None, "not a regular file", marks=pytest.mark.slow),
        pytest.param("a", "65 dimensions", "a shape that is not served", marks=pytest.mark.slow),
    ],
)
def test_what_no_request_could_reach_is_refused_at_the_start(
    name: str, key: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.safetensors"
    if key is None:
        os.mkfifo(path)
    else:
        text = to_safetensors({"x" if key == "65 dimensions" else key: np.ones(1, np.float32)})
        if key == "65 dimensions":
            shape = ",".join(["1"] * 65).encode()
            header = text[8:-4].rstrip().replace(b"[1]", b"[" + shape + b"]")
            text = len(header).to_bytes(8, "little") + header + text[-4:]
        path.write_bytes(text)
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--device", "cpu", "--gateways", "1", "--tensors-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path_with(ROOT)},
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 1
    assert f"{name}.safetensors" in done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_uploads_end_with_507_where_descriptors_do(tmp_path: Path) -> None:
    """Each upload is a descriptor in the supervisor: none is acknowledged that it could not hold."""
    before = ("prlimit", f"--nofile={OPEN_FILES}:{OPEN_FILES}")
    flags = ("--gateways", "1", "--arena-bytes", "16MiB")
    with serving(tmp_path / "log", *flags, before=before) as server, server.client() as client:
        (engine,) = server.engines()
        num_open = len(list(Path(f"/proc/{engine}/fd").iterdir()))
        statuses = [
            client.put(f"/v1/tensors/t{number}", content=to_npy(np.full(2, number, np.float32))).status_code
            for number in range(OPEN_FILES)
        ]
        num_kept = statuses.count(201)
        assert OPEN_FILES // 3 < num_kept < OPEN_FILES
        assert statuses == [201] * num_kept + [507] * (OPEN_FILES - num_kept)
        refused = client.put("/v1/tensors/more", content=to_npy(np.ones(2)))
        assert "limits of open files" in refused.json()["detail"]
        # Replacing takes no more, and the engine keeps none of them open.
        assert client.put("/v1/tensors/t0", content=to_npy(np.zeros(2, np.float32))).status_code == 200
        assert len(list(Path(f"/proc/{engine}/fd").iterdir())) < num_open + 5
        restart_engine(server, client)
        for number in range(num_kept):
            (got,) = from_safetensors(client.get(f"/v1/tensors/t{number}").content).values()
            np.testing.assert_array_equal(got, np.full(2, number, np.float32))
        assert client.delete("/v1/tensors/t1").status_code == 204
        assert client.put("/v1/tensors/more", content=to_npy(np.ones(2))).status_code == 201


@pytest.mark.slow
def test_names_that_were_deleted_are_forgotten(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB")
    pid = server.process.pid

    def supervisor_kib() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))

    body = to_npy(np.ones(2, np.float32))
    with server.client() as client:

        def churn(start: int) -> None:
            for number in range(start, start + 1000):
                name = f"{'n' * 190}{number}"
                assert client.put(f"/v1/tensors/{name}", content=body).status_code == 201
                assert client.delete(f"/v1/tensors/{name}").status_code == 204

        churn(0)
        before_kib = supervisor_kib()
        churn(1000)
        # 600 bytes each, when they were kept.
        assert supervisor_kib() - before_kib < 200
