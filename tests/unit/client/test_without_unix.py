"""The clients and commands on a Python that lacks what Windows lacks.

A simulation: in a process on this system the modules and names are removed that Python has on Unix alone. It shows that nothing
of them is used. How Windows itself treats sockets and files is not tried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.client.speaking_server import SpeakingServer

X = np.arange(6, dtype=np.float32).reshape(2, 3)
# asyncio and NumPy are loaded before: they look at the system and take its names, on Windows others.
_REMOVE = """
import asyncio, os, select, signal, socket, sys
import numpy


class Missing:
    def __get__(self, instance, owner=None):
        raise AttributeError("not on Windows")


for module in ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[module] = None
for owner, names in {
    os: "fork forkpty getuid geteuid getgid killpg memfd_create mkfifo posix_fallocate posix_spawn pread preadv pwrite pwritev"
    " sched_getaffinity sendfile setsid statvfs sysconf uname",
    select: "poll epoll",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGUSR1 SIGUSR2",
    socket: "MSG_DONTWAIT SO_REUSEPORT",
}.items():
    for name in names.split():
        vars(owner).pop(name, None)
for name in ("sendmsg", "recvmsg", "recvmsg_into", "sendmsg_afalg"):
    setattr(socket.socket, name, Missing())
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _REMOVE + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def tilewire(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("from tilewire._command import main; main()", *arguments)


def test_clients_send_and_receive(url: str, server: SpeakingServer, tmp_path: Path) -> None:
    code = """
import numpy as np, tilewire
url, path = sys.argv[1:]
x = np.arange(6, dtype=np.float32).reshape(2, 3)
with tilewire.Client(url) as c:
    for _ in range(2):
        np.testing.assert_array_equal(c.add(x, 1), x + 1)
    c.put("large", np.ones((1024, 2048), np.float32), progress=False)
    np.testing.assert_array_equal(c.get("large"), np.ones((1024, 2048), np.float32))
    for _ in range(2):
        c.get_file("large", path)
    c.put_file(path, "again")


async def calls():
    async with tilewire.AsyncClient(url) as c:
        for _ in range(2):
            np.testing.assert_array_equal(await c.add(x, 1), x + 1)


asyncio.run(calls())
"""
    path = tmp_path / "large.npy"
    done = python(code, url, path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(path), server.tensors["again"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["large.npy"]


@pytest.mark.slow
def test_commands_run(url: str, server: SpeakingServer, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    server.tensors["w"] = X.T.copy()
    listed = tilewire("ls", "--url", url)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "w " in listed.stdout
    product = tilewire("matmul", tmp_path / "x.npy", "@w", "--url", url, "--json")
    assert json.loads(product.stdout)["outputs"]["out"]["data"] == (X @ X.T).tolist(), product.stderr
    assert tilewire("get", "w", tmp_path / "w.npy", "--url", url).returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), X.T)
    assert tilewire("health", "--url", url).returncode == 0


def test_doctor_says_that_the_server_needs_linux() -> None:
    code = """
from tilewire._cli.client import app
sys.platform = "darwin"
app(["doctor", "--json"])
"""
    done = python(code)
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)
    assert (finding["what"], finding["verdict"]) == ("python", "wrong")
    assert finding["remedy"].startswith("the server needs Linux")


def test_a_part_of_python_that_is_missing_is_no_package() -> None:
    done = tilewire("serve")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "this Python has no module" in done.stderr
    assert "the server needs Linux" in done.stderr
    assert "pip install" not in done.stderr
