"""Until when a device writes to the host for a process that was killed: what gateways wait for before slots are others'."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NBYTES = 256 * 2**20
# Behind the end of the process.
WATCH_S = 1.0


def test_nothing_is_written_when_a_killed_process_has_ended(tmp_path: Path) -> None:
    """`service/gateway/engines/engine_process.py`; `pytest -s` prints the times."""
    # In memory: a mapping of a disk's file cannot be pinned everywhere.
    path, address = Path(f"/dev/shm/tilewire-test-{os.getpid()}"), str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener, path.open("w+b") as file:
        path.chmod(0o600)
        file.truncate(NBYTES)
        words = np.frombuffer(mmap.mmap(file.fileno(), NBYTES), dtype=np.int32)
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen([sys.executable, "-m", "tests.support.late_writer", str(path), address])
        try:
            listener.settimeout(120)
            link, _ = listener.accept()
            with link:
                link.settimeout(120)
                assert link.recv(16) == b"queued"
                while words[-1] < 3:
                    time.sleep(0.001)
                written_s, lost_s, ended_s = _kill_and_watch(process.pid, link, words)
        finally:
            process.kill()
            process.wait()
            path.unlink()
    print(
        f"last write after {written_s:.3f} s, end of the socket after {lost_s:.3f} s, of the process after {ended_s:.3f} s"
    )
    assert written_s <= ended_s


def _kill_and_watch(pid: int, link: socket.socket, words: np.ndarray) -> tuple[float, float, float]:
    """Seconds from the kill to the last write that was seen, the end of the link, and that of the process."""
    places = np.linspace(0, words.size - 1, 64).astype(int)
    end = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    link.setblocking(False)
    os.kill(pid, signal.SIGKILL)
    began, seen = time.perf_counter(), words[places]
    written_s, lost_s, ended_s = 0.0, -1.0, -1.0
    while ended_s < 0 or time.perf_counter() - began < ended_s + WATCH_S:
        # Looked for before the words are: what is written meanwhile counts as before the end.
        has_ended = ended_s < 0 and bool(poll.poll(0))
        if lost_s < 0 and _is_lost(link):
            lost_s = time.perf_counter() - began
        now = words[places]
        if (now != seen).any():
            seen, written_s = now, time.perf_counter() - began
        if has_ended:
            ended_s = time.perf_counter() - began
    os.close(end)
    return written_s, lost_s, ended_s


def _is_lost(link: socket.socket) -> bool:
    try:
        return link.recv(16) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
