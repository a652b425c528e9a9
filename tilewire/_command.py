"""The `tilewire` console script. Owns one message: what to install when the server's packages are missing."""

from __future__ import annotations

import importlib
import sys

_EXIT_USAGE = 2
# Parts of the project itself: their absence is a broken installation, not a missing extra.
_OWN = ("tilewire",)


def main() -> None:
    """Runs the command line of the server, where it is installed."""
    try:
        # By name: the client must be importable, and type-checked, without the server.
        app = importlib.import_module("tilewire.service.cli.app").app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OWN:
            raise
        sys.stderr.write(f"tilewire: {error.name} is not installed; run: pip install 'tilewire[server]'\n")
        raise SystemExit(_EXIT_USAGE) from None
    app()
