"""The whole `tilewire` command. The client's commands and the server's are loaded when one of them is called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewire._cli.commands import COMMANDS, SERVER_COMMANDS, is_of_the_server
from tilewire._version import __version__

_SERVER_APP = "tilewire.service.cli.app"
_CLIENT_APP = "tilewire._cli.client"


class Group(TyperGroup):
    """Lists all commands, and loads each side's packages for its own commands only."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names, in the order of `--help`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command, or for one of the server's its line in the list."""
        if cmd_name not in SERVER_COMMANDS:
            self.commands = self.commands or _commands(_CLIENT_APP)
            return super().get_command(ctx, cmd_name)
        command = SERVER_COMMANDS[cmd_name]
        stub = typer.Typer(add_completion=False)
        stub.command(name=cmd_name, help=command.summary, rich_help_panel=command.panel)(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command itself."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and is_of_the_server([name, *rest]):
            command = _commands(_SERVER_APP)[name]
        return name, command, rest


def _commands(module: str) -> dict[str, Any]:
    loaded: Any = typer.main.get_command(importlib.import_module(module).app)
    return dict(loaded.commands)


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

    The address comes from `--url`, for `bench` and `demo` from their argument, or from TILEWIRE_URL; an API key from
    `--key` or TILEWIRE_KEY.
    """


if __name__ == "__main__":
    app()
