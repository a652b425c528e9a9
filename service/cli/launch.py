"""Starts a server for as long as a block runs, the way a person would. Owns one child process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

# Line that `tilewire serve` prints when it answers requests.
_ANNOUNCED = re.compile(r"at (https?://\S+)")
EXIT_TIMEOUT_S = 60.0
# Python that asks for SIGTERM when process argv[1] ends (PR_SET_PDEATHSIG of <sys/prctl.h> is 1), and becomes the command after
# it. Not a `preexec_fn`: that would run in a fork of a process that may have threads.
_ENDING_WITH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class LaunchError(Exception):
    """The server ended before it was ready; its log is on standard error."""


def ending_with_us(command: Sequence[str]) -> list[str]:
    """`command`, but its process gets SIGTERM when this one ends: one that is ended by a signal stops nothing itself."""
    return [sys.executable, "-I", "-S", "-c", _ENDING_WITH, str(os.getpid()), *command]


@contextmanager
def running_server(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Starts `tilewire serve` on a free port, waits until it is ready, and drains it at the end.

    Yields:
        Its address.

    Raises:
        LaunchError: It did not become ready.
    """
    command = ending_with_us([sys.executable, "-P", "-m", "tilewire", "serve", "--port", "0", *flags])
    variables = {**os.environ, **(env or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:  # noqa: S603  (ours)
        assert process.stdout is not None, "This is a bug."
        try:
            for line in process.stdout:
                if (announced := _ANNOUNCED.search(line)) is not None:
                    break
            else:
                raise LaunchError(f"the server ended with status {process.wait(EXIT_TIMEOUT_S)}")
            yield announced[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(EXIT_TIMEOUT_S)
