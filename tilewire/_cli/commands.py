"""Names of the commands, and whose they are. Loads neither side's packages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BENCHMARK = re.compile(r"[a-z_]+")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command that is loaded when it is called.

    Attributes:
        panel: Its group in `--help`.
        summary: Its line there.
    """

    panel: str
    summary: str


SERVE, KERNELS = "Serve", "Kernels"
SERVER_COMMANDS = {
    "serve": ServerCommand(SERVE, "Serve: gateways in front, one engine for each device behind."),
    "demo": ServerCommand(SERVE, "Run a whole round against a server, and check every answer against NumPy."),
    "key": ServerCommand(SERVE, "Make an API key."),
    "tune": ServerCommand(KERNELS, "Measure kernels on this machine's GPU and write its table."),
    "explain": ServerCommand(KERNELS, "Say in one line which configuration a shape gets, and why."),
    "precompile": ServerCommand(KERNELS, "Compile every kernel of devices that need not be here."),
}
# As they stand in `--help`.
COMMANDS = (
    *("serve", "doctor", "demo", "key"),
    *("matmul", "softmax", "add", "search", "topk", "reduce", "normalize", "pointwise", "run"),
    *("put", "get", "ls", "rm"),
    *("health", "top", "bench"),
    *("tune", "explain", "precompile", "version"),
)


def is_of_the_server(arguments: Sequence[str]) -> bool:
    """Whether a command needs the server's packages.

    Args:
        arguments: The command's name and what follows it.
    """
    if arguments[:1] == ["bench"]:
        # Else the address of a server.
        return len(arguments) > 1 and _BENCHMARK.fullmatch(arguments[1]) is not None
    return bool(arguments) and arguments[0] in SERVER_COMMANDS
