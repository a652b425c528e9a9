# mypy: ignore-errors
"""A process that says hello on a socket, and then has a device write to a shared file for as long as it lives and longer.

`python -m tests.support.late_writer FILE SOCKET`
"""

from __future__ import annotations

import mmap
import socket
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from tilewire.service.engine.backends.gpu.pinning import pin

BLOCK = 4096
# Of 256 MiB a launch takes some 5 ms: these last longer than anybody looks.
LAUNCHES = 400


@triton.jit
def fill_kernel(memory, value, BLOCK: tl.constexpr):
    """Writes a number to each word."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory + places, value)


class Pinned:
    """Pinned memory of the host, as a kernel's operand."""

    dtype = torch.int32

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """The address, for Triton."""
        return self._address


def main() -> None:
    """Writes until it is killed."""
    path, address = sys.argv[1:]
    with Path(path).open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    assert not pin(memory)
    # Later than the driver's files, as a gateway's connection is.
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    operand = Pinned(memory.data_ptr())
    for value in range(1, LAUNCHES + 1):
        fill_kernel[(memory.numel() // 4 // BLOCK,)](operand, value, BLOCK)
    link.send(b"queued")
    time.sleep(600)


if __name__ == "__main__":
    main()
