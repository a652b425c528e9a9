"""A load generator that is not Python: wrk, with a generated script of what to send. Owns its command, script and result.

wrk keeps a number of connections busy, each sending its next request when its last was answered (a closed loop). Knows no
server.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

# Longest wait for what an earlier load has left unanswered.
_SETTLED_S = 120.0
_SCRIPT = """
local sent = {{}}
local count = {count}
local number = 0
local function read(i)
  local file = io.open("{folder}/" .. i .. ".body", "rb")
  local body = file:read("*a")
  file:close()
  local head = io.open("{folder}/" .. i .. ".head", "r")
  local path, kind = head:read("*l"), head:read("*l")
  head:close()
  return path, {{["Content-Type"] = kind}}, body
end
if count == 1 then
  -- Without a function that is asked for each request, wrk sends from one buffer and copies nothing.
  wrk.method = "POST"
  wrk.path, wrk.headers, wrk.body = read(1)
else
  function init(args)
    for i = 1, count do
      sent[i] = wrk.format("POST", read(i))
    end
  end
  function request()
    number = number % count + 1
    return sent[number]
  end
end
function done(summary, latency, requests)
  local e = summary.errors
  io.stderr:write(string.format(
    '{{"requests": %d, "seconds": %.6f, "p50_us": %d, "p90_us": %d, "p99_us": %d, "max_us": %d, "errors": %d, "refused": %d}}',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    latency.max, e.connect + e.read + e.write + e.timeout, e.status))
end
"""


@dataclass(frozen=True)
class Call:
    """One request to send.

    Attributes:
        path: With its query.
        content_type: Of the body.
        body: Its bytes.
    """

    path: str
    content_type: str
    body: bytes


@dataclass(frozen=True)
class Load:
    """What wrk measured.

    Attributes:
        requests: Answered.
        seconds: Of the run.
        p50_us: Latency that half of the requests were under; likewise 90 and 99 in 100.
        p90_us: See above.
        p99_us: See above.
        max_us: Longest.
        errors: Connections refused, reset or timed out.
        refused: Answers with a status over 399.
    """

    requests: int
    seconds: float
    p50_us: int
    p90_us: int
    p99_us: int
    max_us: int
    errors: int
    refused: int

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def find_wrk() -> str | None:
    """The wrk program: `WRK` in the environment, or on the path."""
    return os.environ.get("WRK") or shutil.which("wrk")


def run_load(url: str, calls: Sequence[Call], *, connections: int, seconds: float, threads: int = 4) -> Load:
    """Sends the calls in turn over every connection for some time.

    wrk ends with requests unanswered, one a connection. A server that works through them would do so in the next load's time;
    the first call is therefore sent once before, and waited for.

    Raises:
        RuntimeError: wrk is missing, failed, saw an error, or nothing was answered.
    """
    wrk = find_wrk()
    if wrk is None:
        raise RuntimeError("wrk is not installed; it is a package of Debian and of most others, or set WRK to its path")
    first = calls[0]
    httpx.post(url + first.path, content=first.body, headers={"content-type": first.content_type}, timeout=_SETTLED_S)
    with tempfile.TemporaryDirectory() as folder:
        for number, call in enumerate(calls, 1):
            Path(folder, f"{number}.body").write_bytes(call.body)
            Path(folder, f"{number}.head").write_text(f"{call.path}\n{call.content_type}\n")
        script = Path(folder, "load.lua")
        script.write_text(_SCRIPT.format(count=len(calls), folder=folder))
        command = [
            wrk,
            "-t",
            str(min(threads, connections)),
            "-c",
            str(connections),
            "-d",
            # It takes whole seconds.
            f"{math.ceil(seconds)}s",
            "--timeout",
            "30s",
        ]
        done = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"wrk failed: {done.stderr or done.stdout}")
    load = Load(**json.loads(done.stderr))
    if load.errors or load.refused:
        raise RuntimeError(f"under load, {load.errors} connections failed and {load.refused} requests were refused")
    if not load.requests:
        raise RuntimeError(f"under load, nothing was answered in {load.seconds:.1f} s")
    return load
