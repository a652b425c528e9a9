"""The `tilewire` command. Owns flags and what is printed for a person; each command's work is elsewhere."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from tilewire._version import __version__
from tilewire.service.cli import precompile as precompiling
from tilewire.service.cli.launch import running_server
from tilewire.service.config import preflight
from tilewire.service.config.preflight import PreflightError
from tilewire.service.config.settings import Settings
from tilewire.service.keys import KeysError, entry_for, make_key
from tilewire.service.supervisor.listeners import StartError
from tilewire.service.supervisor.processes import Supervisor
from tilewire.service.telemetry import log

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="GPU linear algebra over HTTP: matmul, softmax and add."
)

BENCHMARKS = (
    "kernels",
    "batching",
    "dispatch",
    "shared_memory",
    "http",
    "gateway",
    "settings",
    "start",
    "client",
    "ring",
)

EXIT_FAILED = 1
EXIT_USAGE = 2
PROBE_TIMEOUT_S = 2.0


def serve(**flags: object) -> None:
    """Serve: gateways in front, one engine for each device behind. Every flag is also a TILEWIRE_… variable."""
    console = Console()
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        for problem in error.errors():
            flag = f"{flag_name(str(problem['loc'][0]))}: " if problem["loc"] else ""
            typer.echo(f"{flag}{problem['msg']}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    logger = log.configure(settings.log, process="supervisor")
    try:
        preflight.check(settings, logger)
    except PreflightError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    supervisor = Supervisor(settings, logger, lambda url, engines: announce(console, settings, url, engines))
    try:
        status = asyncio.run(supervisor.run())
    except StartError as error:
        typer.echo(f"tilewire: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    raise typer.Exit(status)


def announce(console: Console, settings: Settings, url: str, engines: list[str]) -> None:
    """Prints where the service is and a curl to paste."""
    console.print(f"\n[bold]Tilewire {__version__}[/bold] at [bold]{url}[/bold]  ({'; '.join(engines)})")
    metrics = f", {url}/metrics" if settings.metrics_port is None else ""
    console.print(f"{settings.num_gateways} gateway(s), {len(engines)} engine(s); {url}/docs{metrics}")
    console.print("\nTry it:\n")
    typer.echo(curl_for(url, needs_key=settings.api_keys_file is not None) + "\n")


def curl_for(url: str, *, needs_key: bool = False) -> str:
    """A command that multiplies two matrices, ready to paste into a shell."""
    body = '{"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}'
    key = ' -H "x-api-key: $TILEWIRE_KEY"' if needs_key else ""
    return f"  curl -s {url}/v1/matmul{key} -H 'content-type: application/json' -d '{body}'"


@app.command()
def demo(
    url: Annotated[
        str | None, typer.Argument(help="A running server; without it, one that answers here or a fresh one.")
    ] = None,
) -> None:
    """Upload a weight, post products in every format, check each against NumPy, print latencies and TFLOP/s."""
    # Imported here and not above: NumPy and the client would be a third of the time that `serve` takes to begin.
    import tilewire  # noqa: PLC0415
    from tilewire.service.cli import demo as demonstration  # noqa: PLC0415

    settings = Settings()
    url = url or f"http://{settings.host}:{settings.port}"
    if tilewire.Client(url, timeout=PROBE_TIMEOUT_S).ready():
        raise typer.Exit(demonstration.run(url))
    typer.echo("no server answers there: starting one")
    with running_server() as fresh:
        status = demonstration.run(fresh)
    raise typer.Exit(status)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help=f"Which one: {', '.join(BENCHMARKS)}; the rest is its own."),
    ],
) -> None:
    """Run a benchmark of a checkout and print what it measured."""
    if name not in BENCHMARKS:
        typer.echo(f"bench: no benchmark {name!r}; there are {', '.join(BENCHMARKS)}", err=True)
        raise typer.Exit(EXIT_USAGE)
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        typer.echo(
            "bench: the benchmarks are in the repository, not in the package; run this from a checkout", err=True
        )
        raise typer.Exit(EXIT_USAGE)
    sys.path.insert(0, str(root))
    # By name: a server that is installed without the repository has no benchmarks to import.
    raise typer.Exit(importlib.import_module(f"benchmarks.bench_{name}").run(context.args))


@app.command()
def tune(
    device: Annotated[int, typer.Option(help="Which GPU, as torch counts them.")] = 0,
    ops: Annotated[str, typer.Option(help="Comma-separated: what to tune.")] = "matmul,softmax,add",
    budget_s: Annotated[
        float, typer.Option(help="Seconds for candidates; checking what was chosen comes on top.", min=1.0)
    ] = 600.0,
    shapes: Annotated[
        Path | None, typer.Option(help="Shapes to tune for, a JSON object a line, most valuable first; see the docs.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The table; by default the device's own, in the package.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an interrupted run measured.")] = False,
) -> None:
    """Measure kernels on this machine's GPU and write its table: what dispatch chooses from."""
    if importlib.util.find_spec("triton") is None:
        typer.echo("tune: needs Triton and a GPU", err=True)
        raise typer.Exit(EXIT_FAILED)
    # By name: what it imports brings torch and Triton.
    command = importlib.import_module("tilewire.service.cli.tune")
    raise typer.Exit(command.run(device, ops.split(","), budget_s, shapes, out, restart=restart))


@app.command()
def key(name: Annotated[str, typer.Argument(help="For logs and metrics: who holds the key.")]) -> None:
    """Make an API key: the key on standard error, for its holder; its entry on standard output, for --api-keys-file."""
    secret = make_key()
    try:
        entry = entry_for(name, secret)
    except KeysError as error:
        typer.echo(f"key: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    typer.echo(f"key, shown once: {secret}", err=True)
    typer.echo(entry)


@app.command()
def precompile(
    target: Annotated[
        list[str],
        typer.Option(
            help="cuda:80, cuda:90, cuda:100, hip:gfx90a, hip:gfx942 or hip:gfx950; may be given several times."
        ),
    ],
    cache: Annotated[
        Path | None, typer.Option(help="The folder; without it, that of Triton (TRITON_CACHE_DIR).")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 for one on each core.")] = 0,
) -> None:
    """Compile every kernel of devices that need not be here into the cache that a server reads."""
    try:
        precompiling.run(target, cache, workers, Console())
    except (ValueError, precompiling.Failed) as error:
        typer.echo(f"tilewire: {error}", err=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED) from None


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def flag_of(name: str, field: FieldInfo) -> inspect.Parameter:
    """A command-line parameter for one setting: its text and its default come from `Settings`."""
    kind = bool if field.annotation is bool else str
    names = [flag_name(name)] if kind is str else [f"{flag_name(name)}/{flag_name('no_' + name)}"]
    shown = "" if field.default is None else f"default: {default_text(name, field)}; "
    option = typer.Option(*names, help=f"{field.description} ({shown}env: {variable_name(name)})", show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def flag_name(name: str) -> str:
    """A setting's flag: `--max-body-bytes`."""
    return f"--{name.replace('_', '-')}"


def variable_name(name: str) -> str:
    """A setting's environment variable: `TILEWIRE_MAX_BODY_BYTES`."""
    return f"{Settings.model_config['env_prefix']}{name}".upper()


def default_text(name: str, field: FieldInfo) -> str:
    """A setting's default as a person would write it."""
    value: Any = field.default
    return ByteSize(value).human_readable().replace(".0", "") if name.endswith("_bytes") else str(value)


serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [flag_of(name, field) for name, field in Settings.model_fields.items()]
)
serve.__annotations__ = {name: parameter.annotation for name, parameter in serve.__signature__.parameters.items()}  # type: ignore[attr-defined]
app.command()(serve)


if __name__ == "__main__":
    app()
