"""The `tilewire` console script: keeps children out of the working folder, and says how to install what is missing."""

from __future__ import annotations

import importlib
import os
import sys

from tilewire import _output
from tilewire._cli.commands import is_of_the_server
from tilewire._installing import how_to_install

_EXIT_USAGE = 2
# A shell's status of a program that SIGPIPE ended, where whoever read the output has left, as `head` does.
_EXIT_UNREAD = 128 + 13
# Parts of the project itself: their absence is a broken installation, not a missing extra.
_OWN = ("tilewire",)
_OF_THE_COMMAND = ("typer", "rich", "click")


def main() -> None:
    """Runs the command line."""
    # For each Python that a command starts, those of multiprocessing too: modules of the working folder would come first.
    os.environ["PYTHONSAFEPATH"] = "1"
    _output.accept_all_characters()
    try:
        # By name: the client is imported, and type-checked, without the packages of the command line.
        app = importlib.import_module("tilewire._cli.app").app
        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OWN or not missing:
            raise
        sys.stderr.write(f"tilewire: {_remedy_for(missing)}\n")
        raise SystemExit(_EXIT_USAGE) from None
    except SystemExit as error:
        # Typer and Rich end with 1 then, which says that the server refused.
        if isinstance(error.__context__, BrokenPipeError):
            raise SystemExit(_EXIT_UNREAD) from None
        raise
    except OSError as error:
        if not _output.is_unwritable(error):
            raise
        _output.discard()
        sys.stderr.write(f"tilewire: {error}\n")
        raise SystemExit(_EXIT_USAGE) from None


def _remedy_for(missing: str) -> str:
    if missing in sys.stdlib_module_names:
        return f"this Python has no module {missing}, which the command needs; the server needs Linux"
    is_of_the_client = missing in _OF_THE_COMMAND and not is_of_the_server(sys.argv[1:])
    return f"{missing} is not installed; run: {how_to_install('cli' if is_of_the_client else 'server')}"


if __name__ == "__main__":
    main()
