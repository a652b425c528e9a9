"""The whole `tilewire` command: the client's commands, and the server's, which are loaded when one of them is called."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewire._cli import bench, compute, doctor, status, tensors
from tilewire._version import __version__

_SERVER_APP = "tilewire.service.cli.app"
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


SERVE, COMPUTE, TENSORS, WATCH, KERNELS = "Serve", "Compute", "Resident tensors", "Watch and measure", "Kernels"
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
    *("matmul", "softmax", "add", "search", "run"),
    *("put", "get", "ls", "rm"),
    *("health", "top", "bench"),
    *("tune", "explain", "precompile", "version"),
)


class Group(TyperGroup):
    """Lists all commands, and loads the server's packages for the server's commands only."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names, in the order of `--help`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command, or for one of the server's its line in the list."""
        if cmd_name not in SERVER_COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = SERVER_COMMANDS[cmd_name]
        stub = typer.Typer(add_completion=False)
        stub.command(name=cmd_name, help=command.summary, rich_help_panel=command.panel)(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command itself."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in SERVER_COMMANDS or (name == "bench" and rest and _BENCHMARK.fullmatch(rest[0])):
            loaded: Any = typer.main.get_command(importlib.import_module(_SERVER_APP).app)
            command = loaded.commands[name]
        return name, command, rest


def show_version(is_asked: bool) -> None:
    """Prints the version and ends."""
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def everything(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GPU linear algebra over HTTP: a server, and commands that use it.

    The address comes from `--url` or TILEWIRE_URL, an API key from TILEWIRE_KEY.
    """


@app.command("version", rich_help_panel=KERNELS, hidden=True)
def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


_FUNCTIONS: dict[str, dict[str, Callable[..., None]]] = {
    SERVE: {"doctor": doctor.doctor},
    COMPUTE: {
        "matmul": compute.matmul,
        "softmax": compute.softmax,
        "add": compute.add,
        "search": compute.search,
        "run": compute.run,
    },
    TENSORS: {"put": tensors.put, "get": tensors.get, "ls": tensors.ls, "rm": tensors.rm},
    WATCH: {"health": status.health, "top": status.top, "bench": bench.bench},
}
for _panel, _commands in _FUNCTIONS.items():
    for _name, _function in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_function)


if __name__ == "__main__":
    app()
