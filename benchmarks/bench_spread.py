"""How a burst of connections spreads over the gateways: one inherited socket, beside one socket each with SO_REUSEPORT.

    python -m benchmarks.bench_spread --gateways 4 --connections 64

Owns nothing but the count. The inherited socket is that of a real server; for SO_REUSEPORT the kernel alone decides, so
listeners without a server show the same.
"""

from __future__ import annotations

import argparse
import select
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from tilewire.service.cli.launch import running_server

SETTLE_S = 0.3
ASK = b"GET /healthz HTTP/1.1\r\nhost: bench\r\n\r\n"


def sockets_of_gateways() -> dict[int, int]:
    """Open sockets of every gateway on this machine, by process id."""
    counts = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"tilewire.service.gateway" in (process / "cmdline").read_bytes():
                links = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
                counts[int(process.name)] = sum(link.startswith("socket:") for link in links)
    return counts


def inherited(url: str, connections: int) -> list[int]:
    """Connections that each gateway of a running server takes of a burst."""
    place = urlsplit(url)
    before = sockets_of_gateways()
    clients = []
    for _ in range(connections):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex((place.hostname, place.port))
        clients.append(client)
    for client in clients:
        select.select([], [client], [], 5)
        client.setblocking(True)
        client.sendall(ASK)
    for client in clients:
        assert b" 200 " in client.recv(4096), "This is a bug."
    after = sockets_of_gateways()
    for client in clients:
        client.close()
    time.sleep(SETTLE_S)
    return sorted(after[pid] - before[pid] for pid in before)


def reuse_port(gateways: int, connections: int) -> list[int]:
    """Connections that each of several listeners on one port gets of a burst."""
    listeners: list[socket.socket] = []
    for _ in range(gateways):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", listeners[0].getsockname()[1] if listeners else 0))
        listener.listen(connections)
        listener.setblocking(False)
        listeners.append(listener)
    clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(connections)]
    counts = []
    for listener in listeners:
        taken = []
        with suppress(BlockingIOError):
            while True:
                taken.append(listener.accept()[0])
        counts.append(len(taken))
        for one in (*taken, listener):
            one.close()
    for client in clients:
        client.close()
    return sorted(counts)


def main() -> None:
    """Prints both spreads, burst by burst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--bursts", type=int, default=20)
    arguments = parser.parse_args()
    with running_server("--gateways", str(arguments.gateways), "--device", "cpu", "--arena-bytes", "64MiB") as url:
        show("inherited", arguments, lambda: inherited(url, arguments.connections))
    show("SO_REUSEPORT", arguments, lambda: reuse_port(arguments.gateways, arguments.connections))


def show(name: str, arguments: argparse.Namespace, burst: Callable[[], list[int]]) -> None:
    """Runs the bursts of one kind and prints how much more the busiest one has than its share."""
    spreads = [burst() for _ in range(arguments.bursts)]
    share = arguments.connections / arguments.gateways
    excess = [spread[-1] / share for spread in spreads]
    print(f"{name}: busiest over share, median {statistics.median(excess):.2f}, most {max(excess):.2f}; {spreads[:4]}")


if __name__ == "__main__":
    main()
