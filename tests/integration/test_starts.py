"""Starting: what a service needs, what ends it before it serves, and what it says of that."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.live_server import COMMAND, POLL_S, ROOT, START_TIMEOUT_S, LiveServer, path_with, serving
from tests.support.programs import free_port
from tests.support.tensor_bodies import to_safetensors

ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
PLAIN = ("--gateways", "1", "--arena-bytes", "16MiB")
# For what a server takes before requests come.
FRESH = ("--gateways", "2", "--arena-bytes", "256MiB")


# Every folder that `tempfile` looks at becomes a read-only file system, and so is the working directory. The checkout,
# which may lie in one of them, stays where it is.
NO_TEMPORARY_FOLDERS = """
mount --bind "$0" /mnt
for at in /tmp /var/tmp /usr/tmp; do [ ! -d $at ] || mount -t tmpfs none $at; done
mkdir -p "$0" && mount --bind /mnt "$0"
for at in /tmp /var/tmp /usr/tmp; do [ ! -d $at ] || mount -o remount,ro $at; done
cd /sys; exec "$@"
"""


@pytest.mark.slow
def test_a_start_needs_no_writable_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    before = ("unshare", "--mount", "sh", "-c", NO_TEMPORARY_FOLDERS, str(ROOT))
    if subprocess.run([*before[:2], "mount", "-t", "tmpfs", "none", "/sys"], check=False).returncode:
        pytest.skip("this user may not mount")
    flags = ("--gateways", "1", "--arena-bytes", "16MiB")
    with serving(tmp_path_factory.mktemp("start") / "log", *flags, before=before) as server, server.client() as client:
        assert client.post("/v1/matmul", content=ONES).status_code == 200


@pytest.mark.slow
def test_the_first_burst_of_large_requests_finds_pages(shared_server: StartServer) -> None:
    server = shared_server(*FRESH)
    (engine,) = server.engines()
    end_s = time.monotonic() + START_TIMEOUT_S
    while held_kib(engine, "RssShmem") < 32 * 1024:
        assert time.monotonic() < end_s, held_kib(engine, "RssShmem")
        time.sleep(POLL_S)
    # An eighth, not all: the rest of the arena is the machine's until it is used.
    assert held_kib(engine, "RssShmem") < 64 * 1024


def held_kib(pid: int, kind: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_start_with_a_closed_file_opens_it_and_drains(closed: int) -> None:
    """Otherwise the next file that is opened gets its number, and what is printed; libuv aborts when it closes one of them."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = ["bash", "-c", f'exec "$0" "$@" {closed}>&-', *COMMAND, *PLAIN, "--port", str(port), "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as process:
        try:
            _await(process, lambda: _is_ready(address))
            assert Path(f"/proc/{process.pid}/fd/{closed}").readlink() == Path(os.devnull)
        finally:
            process.terminate()
        assert process.wait(START_TIMEOUT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pipe", "/dev/full"])
def test_a_service_serves_where_nobody_reads_its_address(tmp_path: Path, target: str) -> None:
    address, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    if target == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(target, os.O_WRONLY)
    command = [*COMMAND, *PLAIN, "--port", str(port), "--device", "cpu"]
    with log.open("wb") as errors, subprocess.Popen(command, stdout=writer, stderr=errors, env=env) as process:
        os.close(writer)
        try:
            _await(process, lambda: "the address cannot be printed" in log.read_text())
            assert _is_ready(address)
        finally:
            process.terminate()
        assert process.wait(START_TIMEOUT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("stalled", ["stdout", "stderr"])
def test_output_that_nobody_reads_holds_up_no_request(stalled: str) -> None:
    """As of a reader that was stopped: a terminal by Ctrl-S, a pager, a collector that hangs."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    command = [*COMMAND, *PLAIN, "--access-log", "--port", str(port), "--device", "cpu"]
    os.write(writer, bytes(4096))
    output, errors = (writer if stalled == name else subprocess.DEVNULL for name in ("stdout", "stderr"))
    with subprocess.Popen(command, stdout=output, stderr=errors, env=env) as process:
        os.close(writer)
        try:
            _await(process, lambda: _is_ready(address))
            with httpx.Client(base_url=address, trust_env=False) as client:
                assert {client.post("/v1/matmul", content=ONES).status_code for _ in range(50)} == {200}
            process.terminate()
            assert process.wait(START_TIMEOUT_S) == 0
        finally:
            process.kill()
    os.close(reader)


def _await(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Waits for a service that starts."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(POLL_S)


def _is_ready(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{address}/readyz", trust_env=False).status_code == 200
    return False


@pytest.mark.slow
def test_a_start_behind_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *PLAIN, before=("env", "--ignore-signal=SIGHUP")) as server:
        server.process.send_signal(signal.SIGHUP)
        with server.client() as client:
            assert client.post("/v1/matmul", content=ONES).status_code == 200
    assert server.log.read_text().count("draining") == 1


@pytest.mark.slow
def test_engines_start_where_the_folder_of_the_command_was_deleted(tmp_path: Path) -> None:
    (folder := tmp_path / "old").mkdir()
    before = ("sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(folder))
    with serving(tmp_path / "log", *PLAIN, before=before) as server, server.client() as client:
        assert client.post("/v1/matmul", content=ONES).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_a_command_started_ends_with_it(number: signal.Signals) -> None:
    """As `tilewire demo` and the benchmarks start one. Where it forked, threads of other libraries might hang it."""
    text = (
        "import os, sys, time\nfrom tilewire.service.cli.launch import running_server\n"
        "os.register_at_fork(before=lambda: os._exit(1))\n"
        "with running_server(*sys.argv[1:]) as url:\n    print(url, flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-P", "-c", text, *PLAIN, "--device", "cpu", "--no-spare-engine"]
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        process.send_signal(number)
    end_s = time.monotonic() + START_TIMEOUT_S
    while _is_ready(url):
        assert time.monotonic() < end_s
        time.sleep(POLL_S)


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_so(server: LiveServer, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    done = subprocess.run(
        [*COMMAND, "--port", str(server.port), "--device", "cpu"], capture_output=True, text=True, env=env, timeout=60
    )
    assert done.returncode == 1
    assert str(server.port) in done.stderr
    assert "the port is taken: trying again" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_port_that_another_start_has_first_is_said_so() -> None:
    """The system lets both bind, and refuses it to the second one that listens."""
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        command = [*COMMAND, *PLAIN, "--port", str(port), "--device", "cpu", "--metrics-port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
            assert process.stderr is not None
            try:
                # Its own port is bound by then, and no gateway has started.
                assert "metrics are served apart" in process.stderr.readline()
                other.listen()
                stderr = process.communicate(timeout=START_TIMEOUT_S)[1]
            finally:
                process.kill()
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: another program took it first" in stderr
    assert stderr.splitlines()[-1] == "tilewire: gateway-0 cannot start; its reason is logged above"
    assert "Traceback" not in stderr


@pytest.mark.parametrize("flags", [["--device", "tpu"], ["--max-rank", "1"], ["--arena-bytes", "lots"]])
def test_settings_that_cannot_be_are_said_so(flags: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert flags[0] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("limit", [12, 39])
def test_too_few_open_files_are_said_so(limit: int) -> None:
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    flags = ("--port", "0", "--device", "cpu", "--gateways", "1")
    command = ["prlimit", f"--nofile={limit}:{limit}", *COMMAND, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == f"tilewire: {limit} files may be open, and 40 are needed at least: raise the limit (ulimit -n)"


def test_too_small_files_are_said_so() -> None:
    """Shared memory is a file for `ulimit -f`."""
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    flags = ("--port", "0", "--device", "cpu", "--gateways", "2", "--arena-bytes", "8MiB")
    command = ["prlimit", f"--fsize={2**22 - 1}", *COMMAND, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tilewire: a file may have {2**22 - 1} bytes")
    assert "ulimit -f" in line


def test_an_engine_that_cannot_map_an_arena_ends_the_service(tmp_path: Path) -> None:
    """Each gateway that it refuses ends; those that were never attached end the service, with the reason."""
    (tmp_path / "sitecustomize.py").write_text(
        "import resource, sys\nif 'tilewire.service.engine' in sys.orig_argv:\n"
        f"    resource.setrlimit(resource.RLIMIT_AS, ({2**33}, {2**33}))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), path_with(ROOT)])}
    flags = ("--port", "0", "--device", "cpu", "--gateways", "1", "--arena-bytes", "8GiB", "--no-spare-engine")
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    refusals = [line for line in done.stderr.splitlines() if "cannot be mapped: Cannot allocate memory" in line]
    assert len(refusals) == 3, done.stderr
    assert f"{2**33} bytes of shared memory" in refusals[0]
    assert done.stderr.splitlines()[-1].startswith("tilewire: gateway-0 died 3 times before")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tilewire.service.gateway", "tilewire.service.engine"])
def test_a_process_that_never_gets_ready_ends_the_service(module: str, tmp_path: Path) -> None:
    """Three deaths are the end, with the reason; and where no gateway answers, no connection is taken."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif {module!r} in sys.orig_argv:\n    os.write(2, b'not today\\n')\n    os._exit(3)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), path_with(ROOT)])}
    port = free_port()
    flags = ["--port", str(port), "--device", "cpu", "--gateways", "1", "--arena-bytes", "16MiB"]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as it:
        end_s = time.monotonic() + START_TIMEOUT_S
        while it.poll() is None and time.monotonic() < end_s:
            if module.endswith("gateway"):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), timeout=1)
            time.sleep(POLL_S)
        it.kill()
        stdout, stderr = it.communicate()
    assert it.returncode == 1, stderr
    assert stderr.count("not today") == 3
    assert stderr.splitlines()[-1].startswith(f"tilewire: {module.rpartition('.')[2]}-0 died 3 times before")
    assert "Traceback" not in stderr
    assert stdout == ""
