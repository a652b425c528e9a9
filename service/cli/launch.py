"""Starts a server for as long as a block runs, the way a person would. Owns one child process."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Line that `tilewire serve` prints when it answers requests.
_ANNOUNCED = re.compile(r"at (https?://\S+)")
EXIT_TIMEOUT_S = 60.0
# Of <sys/prctl.h>: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class LaunchError(Exception):
    """The server ended before it was ready; its log is on standard error."""


def end_with_parent() -> None:
    """Has this process end with its parent, as a `preexec_fn`: a parent that is ended by a signal stops nothing itself."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running_server(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Starts `tilewire serve` on a free port, waits until it is ready, and drains it at the end.

    Yields:
        Its address.

    Raises:
        LaunchError: It did not become ready.
    """
    command = [sys.executable, "-P", "-m", "tilewire", "serve", "--port", "0", *flags]
    variables = {**os.environ, **(env or {})}
    with subprocess.Popen(  # noqa: S603  (our own command)
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
        preexec_fn=end_with_parent,  # noqa: PLW1509  (it takes no lock)
    ) as process:
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
