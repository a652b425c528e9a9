"""What grpc.aio leaves to a server of tensors at best: bytes in, bytes out, and one message to another process and back.

    python -m benchmarks.grpc_floor --port 9000

No message is parsed, checked, copied, counted or computed. Its answer has the size of an answer of Tilewire. The other process
answers at once, over a Unix socket, as many messages as have come.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

import grpc
import uvloop

from tilewire.service.gateway.grpc.paths import SERVICE

# Lengths of a job and of its report in Tilewire, about.
JOB_BYTES, REPORT_BYTES = 64, 40
READ_BYTES = 2**16


def answer_jobs(fd: int) -> None:
    """Answers each job until the socket is closed; runs in a process of its own."""
    with socket.socket(fileno=fd) as sock:
        rest = 0
        while data := sock.recv(READ_BYTES):
            jobs, rest = divmod(rest + len(data), JOB_BYTES)
            sock.sendall(bytes(jobs * REPORT_BYTES))


class Jobs(asyncio.Protocol):
    """Sends jobs to the other process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._rest = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's call: the socket is ours."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Asyncio's call: reports came."""
        reports, self._rest = divmod(self._rest + len(data), REPORT_BYTES)
        for _ in range(reports):
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def run(self) -> None:
        """Sends a job and waits for its report."""
        done = self._loop.create_future()
        self._waiting.append(done)
        self._transport.write(bytes(JOB_BYTES))
        await done


async def serve(port: int, sock: socket.socket) -> None:
    """Serves until the process is ended.

    Args:
        port: Port of the loopback.
        sock: Socket to the other process.
    """
    jobs = Jobs()
    sock.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: jobs, sock)

    async def answer(_requests: AsyncIterator[bytes], call: grpc.aio.ServicerContext) -> bytes:
        message: bytes = await call.read()
        await jobs.run()
        return message

    server = grpc.aio.server()
    handlers = {"ModelInfer": grpc.stream_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Runs the server, or the process behind it, which ends with its socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int)
    parser.add_argument("--answers", type=int, help="answer jobs on this descriptor instead")
    given = parser.parse_args()
    if given.answers is not None:
        answer_jobs(given.answers)
        return
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        # By its path, so that the CPU time of the server's module is that of this process alone.
        subprocess.Popen([sys.executable, __file__, "--answers", str(fd)], pass_fds=[fd])
    uvloop.run(serve(given.port, ours))


if __name__ == "__main__":
    main()
