"""A process that is forked beside a client's kept connections, and its parent: each reads its own answers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.live_server import ROOT, LiveServer, path_with

# Several children at once; each has values of its own.
SCRIPT = """
import asyncio, os, sys
import numpy as np
import tilewire

kind, url = sys.argv[1:]
if kind == "blocking":
    client = tilewire.Client(url)
    add = client.add
elif kind == "asyncio":
    client = tilewire.AsyncClient(url)
    add = lambda a, b: asyncio.run(client.add(a, b))
else:
    import dask, dask.array as da, tilewire.dask as td
    dask.config.set(scheduler="synchronous")
    services = td.Services([url])
    def add(a, b):
        x = da.from_array(a, chunks=a.shape)
        return td.matmul(x, da.from_array(2 * np.eye(4, dtype=np.float32), chunks=(4, 4)), services).compute()

x = np.ones((3, 4), np.float32)
add(x, x)
children = []
begin, end = os.pipe()
for number in range(2, 5):
    if not (pid := os.fork()):
        children = None
        x *= number
        break
    children.append(pid)
# All begin at once.
os.close(end)
os.read(begin, 1)
num_wrong = sum(not np.array_equal(add(x, x), x + x) for _ in range(200))
if children is None:
    os._exit(num_wrong > 0)
assert num_wrong == 0, f"{num_wrong} wrong in the parent"
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocking", "asyncio", "dask"])
def test_answers_are_ones_own(server: LiveServer, kind: str) -> None:
    command = [sys.executable, "-c", SCRIPT, kind, server.url]
    env = os.environ | {"PYTHONPATH": path_with(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
