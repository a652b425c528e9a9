"""The client's commands. `tilewire._cli.app` brings them in when one of them is called, or all are listed."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tilewire._cli import array_ops, bench, compute, doctor, status, tensors
from tilewire._cli.commands import KERNELS, SERVE
from tilewire._version import __version__

app = typer.Typer(rich_markup_mode="markdown")


@app.command("version", rich_help_panel=KERNELS, hidden=True)
def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


_FUNCTIONS: dict[str, dict[str, Callable[..., None]]] = {
    SERVE: {"doctor": doctor.doctor},
    "Compute": {
        "matmul": compute.matmul,
        "softmax": compute.softmax,
        "add": compute.add,
        "search": compute.search,
        "topk": array_ops.topk,
        "reduce": array_ops.reduce,
        "normalize": array_ops.normalize,
        "pointwise": array_ops.pointwise,
        "run": compute.run,
    },
    "Resident tensors": {"put": tensors.put, "get": tensors.get, "ls": tensors.ls, "rm": tensors.rm},
    "Watch and measure": {"health": status.health, "top": status.top, "bench": bench.bench},
}
for _panel, _functions in _FUNCTIONS.items():
    for _name, _function in _functions.items():
        app.command(_name, rich_help_panel=_panel)(_function)
