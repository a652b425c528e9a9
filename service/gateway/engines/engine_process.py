"""Waits until an engine's process has ended: until then its device may write to slots and regions.

The kernel closes a killed process's sockets before the device's driver stops it. Kernels that write to the host's memory were
seen to go on for 0.28 s behind the end of a socket (NVIDIA H200; ADR 0024 has the figures). A process's descriptor (pidfd)
tells of its end when everything of it is gone.

Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

# Behind this nobody waits any more. Such a process may have closed its connection and live on, which no engine does.
MAX_EXIT_S = 60.0
# Where the kernel has no descriptors of processes, or a container's rules refuse them.
BLIND_S = 1.0


class EngineProcess:
    """One process; `on_ended` or `close` gives its descriptor back.

    Args:
        pid: Its number in this process's namespace; 0 for none, as in a test: then nothing writes late.
    """

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        self._blind_s = 0.0
        if not pid:
            return
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass
        except OSError:
            self._blind_s = BLIND_S

    def on_ended(self, call: Callable[[], None]) -> None:
        """Calls `call` once, from the event loop, when the process has ended."""
        loop, fd = asyncio.get_running_loop(), self._fd
        if fd is None:
            loop.call_later(self._blind_s, call)
            return

        def end() -> None:
            timer.cancel()
            loop.remove_reader(fd)
            self.close()
            call()

        timer = loop.call_later(MAX_EXIT_S, end)
        loop.add_reader(fd, end)

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
