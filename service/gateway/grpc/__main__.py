"""The gRPC gateway's process: `python -m tilewire.service.gateway.grpc`, started by the supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# The library reads it when it is imported. Below errors it writes a line for each handshake that fails: clients would write our
# log, 2,000 lines a second.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from tilewire.service.gateway import process
from tilewire.service.gateway.grpc.server import GrpcServer
from tilewire.service.gateway.request.context import Gateway

# The library wakes the loop for one event at a time, so requests that came together would be jobs in as many writes. Gathered,
# 64 at once take a third less CPU time of the engine, and up to a fifth less here; 64 turns do no better (docs/grpc.md).
GATHER_TURNS = 32


def open_servers(gateway: Gateway) -> Sequence[GrpcServer]:
    """The only server of this gateway."""
    return [GrpcServer(gateway)]


if __name__ == "__main__":
    sys.exit(process.run(open_servers, GATHER_TURNS))
