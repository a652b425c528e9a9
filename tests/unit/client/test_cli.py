"""The client's commands against a server that speaks the contract: text, JSON, files, exit statuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner, Result

import tilewire
from tests.support.live_server import path_with
from tests.unit.client.speaking_server import SpeakingServer, on_a_socket, problem
from tilewire._cli.app import app
from tilewire._cli.commands import COMMANDS, SERVER_COMMANDS
from tilewire._cli.doctor import examine
from tilewire._cli.session import write
from tilewire._installing import how_to_install

X = np.array([[1, 2], [3, 4]], np.float32)
Run = Callable[..., Result]
# In front of a command that is to meet files without rights: root has all, by its capabilities.
WITHOUT_RIGHTS = () if os.geteuid() else ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")


@pytest.fixture
def run(url: str) -> Run:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"TILEWIRE_URL": url})

    return run


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_matmul_of_files(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    safetensors.numpy.save_file({"b": X}, tmp_path / "b.safetensors")
    for name, read in (("c.npy", np.load), ("c.npz", lambda path: np.load(path)["out"])):
        done = run("matmul", tmp_path / "a.npy", tmp_path / "b.safetensors", "-o", tmp_path / name)
        assert done.exit_code == 0, done.output
        assert "out: float32 2×2" in done.output
        np.testing.assert_array_equal(read(tmp_path / name), X @ X)
    run("matmul", tmp_path / "a.npy", "[[1], [1]]", "-o", tmp_path / "c.json", "--activation", "relu")
    assert json.loads((tmp_path / "c.json").read_text()) == {"out": [[3], [7]]}
    run("matmul", tmp_path / "a.npy", "[[1], [1]]", "-o", tmp_path / "c.safetensors", "--out-dtype", "bfloat16")
    assert safetensors.numpy.load_file(tmp_path / "c.safetensors")["out"].dtype.name == "bfloat16"


def test_results_in_the_terminal(run: Run) -> None:
    assert run("matmul", "[[1, 2]]", "[[3], [4]]").output.strip() == "[[11.]]"
    got = document(run("add", "[1, 2]", "0.5", "--alpha", 2, "--json"))
    assert got["outputs"]["out"] == {"shape": [2], "dtype": "float32", "data": [2.0, 3.0]}
    assert got["batch_size"] == 4
    assert got["timings_ms"]["queue"] == 1.0
    assert "values: float32 1×1" in run("search", "[[1, 0]]", "[[1, 0], [0, 1]]", "-k", 1).output
    assert document(run("softmax", "[0, 0]", "--log", "--json"))["outputs"]["out"]["data"] == pytest.approx(
        [-0.693147] * 2
    )


def test_ops_on_one_array(run: Run, server: SpeakingServer, tmp_path: Path) -> None:
    outputs = document(run("topk", "[[3, 1, 2]]", "-k", 2, "--smallest", "--json"))["outputs"]
    assert (outputs["values"]["data"], outputs["indices"]["data"]) == ([[1, 2]], [[1, 2]])
    assert run("reduce", "sum", "[[1, 2], [3, 4]]").output.strip() == "[3. 7.]"
    assert run("reduce", "max", "[[1, 2], [3, 4]]", "--axis", "all", "--keepdims").output.strip() == "[[4.]]"
    assert dict(server.requests[-1].url.params) == {"kind": "max", "axis": "all", "keepdims": "true"}
    done = run("normalize", "layer", "[[0, 2]]", "--weight", "[1, 2]", "--bias", "[10, 10]", "--eps", "0", "--json")
    assert document(done)["outputs"]["out"]["data"] == [[9, 12]]
    assert run("pointwise", "mul", "[1, 2]", "[3, 4]", "--scale", 2, "--shift", -1).output.strip() == "[ 5. 15.]"
    np.save(tmp_path / "x.npy", X)
    for arguments in (("reduce", "mean"), ("normalize", "layer"), ("pointwise", "relu")):
        assert "stored @kept: float32" in run(*arguments, tmp_path / "x.npy", "--store", "kept").output


def test_tensors(run: Run, server: SpeakingServer, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", X)
    assert document(run("put", tmp_path / "w.npy", "weights/w", "--json"))[0]["name"] == "weights/w"
    assert run("put", tmp_path / "w.npy", "--placement", "shard", "--axis", "-2").exit_code == 0
    assert dict(server.requests[-1].url.params) == {"placement": "shard", "axis": "-2"}
    listing = run("ls").output
    assert "weights/w" in listing
    assert "2×2" in listing
    assert [entry["name"] for entry in document(run("ls", "weights", "--json"))] == ["weights/w"]
    assert document(run("matmul", "[[1, 1]]", "@weights/w", "--store", "y", "--json"))["stored"] == "y"
    assert "stored @y2: float32 1×2" in run("matmul", "[[1, 1]]", "@weights/w", "--store", "y2").output
    assert run("get", "weights/w", tmp_path / "back.safetensors").exit_code == 0
    nowhere = tmp_path / "nowhere" / "back.npy"
    assert run("get", "weights/w", nowhere).stderr.endswith(f"No such file or directory: {str(nowhere)!r}\n")
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "back.safetensors")["weights/w"], X)
    assert document(run("rm", "w", "y", "--json")) == {"removed": ["w", "y"]}
    half = run("rm", "nothing", "y2", "never")
    assert (half.exit_code, half.stdout) == (1, "removed y2\n")
    assert half.stderr == "tilewire: name: no tensor 'nothing'; name: no tensor 'never'\n"
    run("put", tmp_path / "w.npy", "y2")
    half = run("rm", "nothing", "y2", "--json")
    assert json.loads(half.stdout) == {"error": "name: no tensor 'nothing'", "removed": ["y2"]}
    half = run("rm", "no name", "w3", "y2")
    assert (half.exit_code, half.stdout) == (1, "")
    assert "'no name' cannot name a tensor; expected " in half.stderr
    assert half.stderr.endswith("; name: no tensor 'w3'; name: no tensor 'y2'\n")
    nameless = run("put", tmp_path / "w.npy", "")
    assert (nameless.exit_code, nameless.stderr.count("\n")) == (2, 1)
    np.savez(tmp_path / "empty.npz")
    empty = run("put", tmp_path / "empty.npz")
    assert (empty.exit_code, empty.stderr) == (2, f"tilewire: {tmp_path / 'empty.npz'}: holds no tensors\n")
    run("put", tmp_path / "w.npy", "y2")
    assert set(server.tensors) == {"weights/w", "y2"}


def test_a_listing_has_a_line_for_each_tensor(run: Run, server: SpeakingServer) -> None:
    names = [f"weights/{'layer.' * 20}{number}" for number in range(3)]
    server.tensors |= dict.fromkeys((*names, "w"), X)
    titles, *lines = run("ls", "weights/*").stdout.splitlines()
    assert titles.split() == ["NAME", "DTYPE", "SHAPE", "SIZE", "HITS"]
    assert [line.split()[:3] for line in lines] == [[name, "float32", "2×2"] for name in names]
    assert {line.index(" float32") for line in lines} == {titles.index(" DTYPE")}
    assert len(run("ls", "*").stdout.splitlines()) == 5


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [("utf-8", "2×2"), ("ascii", "2x2"), ("ascii:surrogateescape", "2x2"), ("ascii:replace", "2?2")],
)
def test_output_has_what_its_encoding_has(server: SpeakingServer, url: str, encoding: str, shape: str) -> None:
    def tilewire(*arguments: str) -> str:
        env = {**os.environ, "PYTHONIOENCODING": encoding, "TILEWIRE_URL": url}
        command = [sys.executable, "-m", "tilewire", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
        return done.stdout.decode(encoding.partition(":")[0])

    server.tensors["w"] = X
    assert f" {shape} " in tilewire("ls")
    assert "'größe'" in json.loads(tilewire("matmul", "größe", "@w", "--json"))["error"]


def test_programs(run: Run, server: SpeakingServer, tmp_path: Path) -> None:
    step = {"op": "matmul", "inputs": {"a": "x", "b": "x"}, "as": "y"}
    program = {"inputs": {"x": {"dtype": "float32", "shape": [2, 2]}}, "steps": [step], "outputs": ["y"]}
    path = tmp_path / "square.json"
    path.write_text(json.dumps(program))
    assert document(run("run", path, "x=[[1, 2], [3, 4]]", "--json"))["outputs"]["y"]["data"] == (X @ X).tolist()
    assert run("run", path, "x=[[1, 2], [3, 4]]", "--keep", "square").exit_code == 0
    assert server.programs["square"] == program
    assert document(run("run", "square", "x=[[0, 1], [1, 0]]", "--json"))["outputs"]["y"]["data"] == [[1, 0], [0, 1]]
    for text in ("x", "=[[0, 1], [1, 0]]"):
        assert "expected an input as NAME=OPERAND" in run("run", "square", text).stderr
    twice = run("run", path, "x=[[1]]", "x=[[2]]")
    assert (twice.exit_code, twice.stderr) == (2, "tilewire: 'x=[[2]]': the input x is given twice\n")
    kept = run("run", "square", "x=[[1]]", "--keep", "new")
    assert kept.exit_code == 2
    assert kept.stderr.startswith("tilewire: --keep: square is the name of a program that is kept already")
    np.save(tmp_path / "x.npy", X.astype(np.float64))
    cast = document(run("run", "square", f"x={tmp_path / 'x.npy'}", "--cast", "float32", "--json"))
    assert cast["outputs"]["y"]["data"] == (X @ X).tolist()
    path.write_text("{")
    assert run("run", path, "x=[[1]]").stderr.startswith(f"tilewire: {path}: ")


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("9007199254740993", "9007199254740993"),
        ("-9223372036854775808", "-9223372036854775808"),
        ("2.0", "2"),
        ("1e3", "1000"),
        ("0.1", "0.1"),
        ("1e30", "1e+30"),
        ("inf", "inf"),
    ],
)
def test_alpha_is_sent_as_it_was_written(run: Run, server: SpeakingServer, text: str, sent: str) -> None:
    run("add", "[1, 2]", "[3, 4]", f"--alpha={text}")
    assert server.requests[-1].url.params["alpha"] == sent


def test_outputs_may_have_any_name_in_an_npz(tmp_path: Path) -> None:
    arrays = {"file": X, "allow_pickle": X.T, "args": np.float32(3), "kwds": np.zeros((0, 2)), "a/b": X[0]}
    write(tmp_path / "r.npz", {name: np.asarray(array) for name, array in arrays.items()})
    with np.load(tmp_path / "r.npz", allow_pickle=False) as members:
        assert members.files == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(members[name], array)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".json"])
def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r{suffix}"
    write(path, {"out": X})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '.*r\{suffix}'"):
            write(path, {"out": np.ones(2**12, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("matmul", "[[1]]", "@missing"), 1, "missing"),
        (("matmul", "nothing.npy", "[[1]]"), 2, "nothing.npy"),
        (("matmul", "nothing", "[[1]]"), 2, "expected a .npy, .npz or .safetensors file, @name, or JSON"),
        (
            ("matmul", "[[1]]", "[[1]]", "-o", "x.txt"),
            2,
            "expected a file that ends in .npz, .safetensors, .json, .npy",
        ),
        (("matmul", "[[1]]", "[[1]]", "-o", "x.npy", "--store", "y"), 2, "--out and --store: give one"),
        (
            ("matmul", "[[1]]", "[[1]]", "-o", "x.npy", "--out-dtype", "bfloat16"),
            2,
            "x.npy: .npy files carry no bfloat16",
        ),
        *(
            ((*command, "--out-dtype", "flaot"), 2, "--out-dtype: 'flaot' is no dtype that can be sent")
            for command in (("matmul", "[[1]]", "[[1]]"), ("softmax", "[1]"), ("add", "[1]", "[1]"))
        ),
        (("softmax", "[1]", "--cast", "flaot"), 2, "--cast: 'flaot' is no dtype that can be sent"),
        (("add", "[1]", "[1]", "--alpha", "two"), 2, "--alpha: 'two' is no number"),
        *(
            (("top", "-n", "1", "-i", text), 2, f"--interval: {float(text)} is no length")
            for text in ("inf", "nan", "1e300", "0")
        ),
        (("rm", "missing"), 1, "no tensor 'missing'"),
        (("reduce", "x.npy", "sum"), 2, "sum: comes before the operands; type `tilewire reduce sum x.npy`"),
        (("normalize", "[1]", "rms"), 2, "rms: comes before the operands; type `tilewire normalize rms [1]`"),
        (("pointwise", "x.npy", "exp"), 2, "exp: comes before the operands; type `tilewire pointwise exp x.npy`"),
        (("pointwise", "@x", "mul", "@y"), 2, "type `tilewire pointwise mul @x @y`"),
        (("pointwise", "@x", "@y", "mul"), 2, "type `tilewire pointwise mul @x @y`"),
        (("get", "missing", "x.npy"), 1, "no tensor 'missing'"),
        (("run", "nothing.json"), 2, "nothing.json"),
        (("get", "missing", "nowhere/x.npy"), 1, "no tensor 'missing'"),
        (("ls", "--url", "localhost:8000"), 2, "type 'http://localhost:8000'"),
        (("bench", "http://127.0.0.1:9", "--op", "conv"), 2, "--op: 'conv' is none of matmul, softmax, add"),
        (("bench", "http://127.0.0.1:9", "--seconds", "nan"), 2, "--seconds: nan is no length"),
        (("bench", "http://127.0.0.1:9", "--seconds", "0.01"), 2, "--seconds: 0.01 is no length"),
        (("bench", "http://127.0.0.1:9", "--dtype", "flaot"), 2, "--dtype: 'flaot' is no dtype that can be sent"),
        (
            ("bench", "http://127.0.0.1:9", "--dtype", "float64"),
            2,
            "--dtype: matmul does not take float64; it takes fl",
        ),
    ],
)
def test_errors_are_one_line(
    run: Run, server: SpeakingServer, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == status, done.output
    assert message in done.stderr
    assert done.stderr.startswith("tilewire: ")
    assert done.stderr.count("\n") == 1
    if arguments[0] != "bench":
        as_json = run(*arguments, "--json")
        assert as_json.exit_code == status
        assert message in json.loads(as_json.stdout)["error"]


@pytest.mark.parametrize("arguments", [("put",), ("get", "w"), ("add", "[1]", "[1]", "-o")])
def test_a_file_without_rights_is_no_usage_error(
    server: SpeakingServer, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    server.tensors["w"] = X
    path = tmp_path / "x.npy"
    np.save(path, X)
    path.chmod(0)
    with on_a_socket(server) as url:
        command = [*WITHOUT_RIGHTS, sys.executable, "-m", "tilewire", *arguments, str(path), "--json", "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    if arguments[0] == "put":
        assert done.returncode == 2
        assert json.loads(done.stdout) == {"error": f"[Errno 13] Permission denied: '{path}'"}
    else:
        # Another file takes its place.
        assert done.returncode == 0


def test_commands_say_what_to_type_in_a_shell(run: Run, server: SpeakingServer, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.astype(np.float64))
    done = run("softmax", tmp_path / "x.npy")
    assert (done.exit_code, done.stderr) == (
        2,
        "tilewire: x: softmax does not take float64; type --cast float32; softmax takes float16, bfloat16, float32\n",
    )
    server.refusals = [problem(401, "key: send one")]
    done = run("ls")
    assert (done.exit_code, done.stderr) == (1, "tilewire: key: send one; type --key KEY, or set TILEWIRE_KEY\n")


def test_bench_has_a_bound_of_connections(run: Run) -> None:
    done = run("bench", "http://127.0.0.1:9", "-c", "4097")
    assert done.exit_code == 2
    # Typer's own words, which differ by its version.
    assert "--connections" in done.stderr
    assert "4096" in done.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "a.npy: no .npy file"), (b"text", "a.npy: no .npy file: it begins otherwise"), (b"\x93NUMPY", "a.npy: ")],
)
def test_files_that_are_none(run: Run, tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    for arguments in (("matmul", path, "[[1]]"), ("put", path)):
        done = run(*arguments)
        assert done.exit_code == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_a_pipe_is_no_file(run: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    os.mkfifo(path)
    for arguments in (("put", path), ("softmax", path)):
        done = run(*arguments)
        assert (done.exit_code, done.stderr) == (2, f"tilewire: {path}: no regular file; copy it to one first\n")


def test_a_damaged_npz_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(1000))
    whole = path.read_bytes()
    for data in (b"PK\x03\x04junk", whole[:100], whole[:80] + b"\xff" * 20 + whole[100:]):
        path.write_bytes(data)
        done = run("put", path)
        assert done.exit_code == 2
        assert "a.npz: " in done.stderr
        assert done.stderr.count("\n") == 1


def test_health_needs_no_key(run: Run, server: SpeakingServer, url: str) -> None:
    server.needs_key = True
    done = run("health")
    assert (done.exit_code, done.output) == (0, f"{url}: ready\n")


def test_health(run: Run, server: SpeakingServer, url: str) -> None:
    done = run("health")
    assert (done.exit_code, done.output) == (0, f"{url}: ready, tilewire 0 on a processor (cpu)\n")
    assert document(run("health", "--json"))["ready"] is True
    server.is_ready_after = 100
    assert run("health").exit_code == 1
    nobody = run("health", "--url", "http://127.0.0.1:9")
    refused = "http://127.0.0.1:9: [Errno 111] Connection refused; is a server running there?"
    assert (nobody.exit_code, nobody.output) == (1, f"{refused}\n")
    nobody = run("health", "--url", "http://127.0.0.1:9", "--json")
    assert json.loads(nobody.stdout) == {"url": "http://127.0.0.1:9", "live": False, "ready": False, "reason": refused}


@pytest.mark.parametrize("engines", [None, 3, {"0": {"device": "cpu"}}, ["cpu"]], ids=str)
def test_health_of_a_server_that_lists_its_engines_otherwise(run: Run, server: SpeakingServer, engines: Any) -> None:
    about = {"name": "tilewire", "version": "9", "engines": engines}
    server.refusals = [httpx.Response(200, json=one) for one in ({"live": True}, {"ready": True}, about)]
    done = run("health")
    assert done.exit_code == 0, done.output
    assert done.output.endswith(": ready, tilewire 9 on ?\n")


def test_top_of_metrics_that_are_none(run: Run, server: SpeakingServer) -> None:
    server.refusals = [httpx.Response(200, text="tilewire_queue_depth many\n")]
    done = run("top", "-n", 1, "-i", 0.1)
    assert done.exit_code == 1
    assert done.stderr.startswith("tilewire: expected metrics in Prometheus' text, got status 200 and text/plain; ")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "command",
    [
        ("ls",),
        ("ls", "--json"),
        ("health", "--json"),
        ("add", "[1]", "[1]", "--json"),
        ("--version",),
        ("--help",),
        ("top", "-n", "1", "-i", "0.1"),
        ("explain", "--help"),
    ],
)
def test_output_that_cannot_be_written_is_one_line(url: str, command: tuple[str, ...], buffering: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tilewire", *command],
            env={**os.environ, "PYTHONUNBUFFERED": buffering, "TILEWIRE_URL": url},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "tilewire: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("status", [200, 302])
@pytest.mark.parametrize("command", [("health",), ("top", "-n", 1, "-i", 0.1)], ids=["health", "top"])
def test_watching_another_server_is_an_error(
    run: Run, server: SpeakingServer, command: tuple[object, ...], status: int
) -> None:
    for is_json in (False, True):
        page = httpx.Response(status, html="<p>sign in</p>", headers={"Location": "https://x"})
        server.refusals = [page] * 3
        done = run(*command, *(["--json"] if is_json else []))
        assert done.exit_code == 1
        message = json.loads(done.stdout)["error"] if is_json else done.stderr
        assert ("text/html" if status == 200 else "redirects to https://x") in message
        assert message.count("\n") == (not is_json)


def test_top(run: Run) -> None:
    done = run("top", "-n", 2, "-i", 0.1, "--json")
    assert done.exit_code == 0, done.output
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    for look in looks:
        assert look["requests_per_s"] > 0
        assert set(look["failed_per_s"]) == {"429"}
        assert set(look["refused_per_s"]) == {"queue"}
        assert (look["in_flight"], look["engines_up"]) == (3, 1)
        matmul = look["ops"]["matmul"]
        assert (matmul["p50_s"], matmul["p99_s"], matmul["tflops"]) == (0.001, 0.01, pytest.approx(2.0))
    shown = run("top", "-n", 2, "-i", 0.1).output.splitlines()
    # Without a terminal each look is printed, in whole lines.
    assert [line.split()[:1] for line in shown].count(["matmul"]) == 2
    assert sum("refused: queue" in line for line in shown) == 2
    assert sum("requests/s" in line and line.endswith(" MB/s") for line in shown) == 2


@pytest.mark.parametrize("path", ["", "/metrics"])
def test_top_takes_the_address_of_the_metrics_with_and_without_its_path(run: Run, url: str, path: str) -> None:
    done = run("top", "-n", 1, "-i", 0.1, "--json", "--url", "http://127.0.0.1:1", "--metrics-url", f"{url}{path}")
    assert document(done)["engines_up"] == 1


def test_top_names_the_option_for_metrics_that_have_a_port_apart(run: Run, server: SpeakingServer) -> None:
    server.refusals = [problem(404, "path: there is nothing at '/metrics'")]
    done = run("top", "-n", 1, "-i", 0.1)
    assert done.exit_code == 1
    assert done.stderr.startswith("tilewire: path: there is nothing at '/metrics'; ")
    assert "--metrics-url" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("names_url", [True, False], ids=["argument", "variable"])
def test_bench_of_a_server(run: Run, url: str, server: SpeakingServer, names_url: bool) -> None:
    arguments = ("--rows", 2, "--columns", 4, "-c", 3, "-s", 0.2, "--json")
    report = document(run("bench", *([url] if names_url else []), *arguments))
    assert report["statuses"].keys() == {"200"}
    assert report["requests_per_s"] > 0
    assert report["mean_batch"] == 4
    assert report["p50_ms"] <= report["p99_ms"]
    assert server.tensors == {}


def weights_of(server: SpeakingServer) -> set[str]:
    """Names of the weights that runs of `bench` have used."""
    sent = {request.url.params.get("b", "") for request in server.requests}
    return {name for name in sent if name.startswith("@tilewire-bench/")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_ended_leaves_no_weight_and_disturbs_no_other(
    url: str, server: SpeakingServer, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "tilewire", "bench", url, "--rows", "2", "--columns", "4", "-c", "1", "-s", "60"]
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    ]
    try:
        end_s = time.monotonic() + 60
        while len(weights_of(server)) < 2:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert {f"@{name}" for name in server.tensors} == weights_of(server)
        for process in running:
            # As a terminal sends Ctrl-C, to the processes of the run too; SIGTERM comes to the command alone.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        ended = [(process.communicate(timeout=30)[1], process.returncode) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [status for _, status in ended] == [128 + number] * 2
    assert not [text for text, _ in ended if b"Traceback" in text]
    assert server.tensors == {}


def test_no_child_imports_the_folder_that_a_command_was_typed_in(url: str, tmp_path: Path) -> None:
    # As the console script starts: the folder of the script is on the path, not the working folder.
    script = tmp_path / "bin" / "tilewire"
    script.parent.mkdir()
    script.write_text("from tilewire._command import main\n\nif __name__ == '__main__':\n    main()\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("queue", "types", "multiprocessing", "service"):
        (folder / f"{name}.py").write_text("raise RuntimeError('the folder was imported')\n")
    command = [
        sys.executable,
        str(script),
        "bench",
        url,
        "--rows",
        "2",
        "--columns",
        "4",
        "-c",
        "2",
        "-s",
        "0.2",
        "--json",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path_with(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests_per_s"] > 0


def test_doctor_names_what_is_wrong_and_what_to_type(run: Run) -> None:
    findings = {finding.what: finding for finding in examine(0)}
    assert {"python", "packages", "torch", "compiler", "shared memory", "memory", "limits", "port"} <= set(findings)
    assert all(finding.remedy for finding in findings.values() if finding.verdict == "wrong")
    with on_a_socket(SpeakingServer()) as url:
        taken = run("doctor", "--port", url.rpartition(":")[2], "--json")
    assert taken.exit_code == 1
    (port,) = [finding for finding in json.loads(taken.stdout) if finding["what"] == "port"]
    assert port["verdict"] == "wrong"
    assert "--port 0" in port["remedy"]
    assert "compiler" in run("doctor", "--port", 0).output


def test_help_groups_the_commands_and_serve_is_first(run: Run) -> None:
    shown = run("--help").output
    places = [shown.index(f"│ {name} ") for name in COMMANDS if name != "version"]
    assert places == sorted(places)
    assert shown.index("Serve") < shown.index("Compute") < shown.index("Resident tensors")
    assert "--version" in shown
    assert "--install-completion" in shown
    assert run("--version").output == f"{tilewire.__version__}\n"


def test_commands_of_the_server_are_its_own(run: Run) -> None:
    from typer.main import get_command

    from tilewire.service.cli.app import app as server_app

    commands: dict[str, Any] = get_command(server_app).commands  # type: ignore[attr-defined]
    assert set(commands) == {*SERVER_COMMANDS, "bench"}
    assert "--max-body-bytes" in run("serve", "--help").output
    assert "no benchmark 'nonsense'" in run("bench", "nonsense").output


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("command", "others"),
    [
        # Typer has loaded pydantic since 0.29.
        ("ls", "{'pydantic_settings', 'torch', 'structlog', 'httpx'}"),
        ("serve", "{'numpy', 'torch', 'httpx', 'tilewire._cli.client'}"),
    ],
)
def test_commands_load_their_own_side_alone(command: str, others: str) -> None:
    code = (
        "import contextlib, sys; from tilewire._command import main\n"
        f"sys.argv = ['tilewire', {command!r}, '--help']\n"
        f"with contextlib.suppress(SystemExit): main()\nprint({others} & set(sys.modules))"
    )
    assert python(code).stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("ls", "--json"), ("version",)])
def test_a_reader_that_leaves_ends_a_command_as_it_does_others(url: str, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tilewire", *arguments]
    env = os.environ | {"TILEWIRE_URL": url}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", "ls", "cli"),
        ("typer", "bench http://127.0.0.1:9", "cli"),
        ("typer", "", "cli"),
        ("typer", "serve", "server"),
        ("typer", "bench http", "server"),
        ("pydantic", "serve", "server"),
    ],
)
def test_a_missing_package_is_one_line(missing: str, arguments: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['tilewire', *{arguments.split()!r}]\n"
        "import tilewire.__main__"
    )
    done = python(code)
    assert done.returncode == 2
    assert done.stderr == f"tilewire: {missing} is not installed; run: {how_to_install(extra)}\n"
    # In a checkout the name alone would lead to an index that does not have it.
    assert str(Path(__file__).parents[3]) in how_to_install(extra)
