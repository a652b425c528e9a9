"""`tilewire serve`: reads flags and variables, says what is wrong with them, and runs the supervisor."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import os
import sys
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import structlog
import typer
from pydantic import BeforeValidator, ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tilewire._variables import CLIENT_VARIABLES
from tilewire._version import __version__
from tilewire.service.config import preflight
from tilewire.service.config.preflight import PreflightError
from tilewire.service.config.settings import Settings, flag_name
from tilewire.service.supervisor.listeners import AddressRefused, PortTaken, StartError
from tilewire.service.supervisor.processes import Supervisor
from tilewire.service.telemetry import log
from tilewire.service.telemetry.log_handler import handler_of

EXIT_FAILED = 1
EXIT_USAGE = 2
PROBE_TIMEOUT_S = 1.0
PREFIX = str(Settings.model_config["env_prefix"]).upper()


def serve(**flags: object) -> None:
    """Serve: gateways in front, one engine for each device behind.

    Every flag is also a variable: --max-body-bytes is TILEWIRE_MAX_BODY_BYTES. docs/configuration.md lists all.
    """
    _open_standard_files()
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        for problem in error.errors():
            typer.echo(words_of(problem, given, os.environ), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    logger = log.configure(settings.log, process="supervisor")
    for name, remedy in unknown_variables(os.environ):
        logger.warning("a variable that is no setting", variable=name, remedy=remedy)
    try:
        preflight.check(settings, logger)
    except PreflightError as error:
        typer.echo(f"{shown_name(error.setting, given, os.environ)}: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    supervisor = Supervisor(settings, logger, lambda url, engines: announce(logger, settings, url, engines))
    try:
        status = asyncio.run(supervisor.run())
    except StartError as error:
        typer.echo(f"tilewire: {error}{remedy_of(error, settings)}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except Exception:
        logger.exception("the service cannot go on")
        raise typer.Exit(EXIT_FAILED) from None
    raise typer.Exit(status)


def _open_standard_files() -> None:
    """Opens what the caller closed of input, output and errors: another file with that number would get what is printed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "r" if name == "stdin" else "w", encoding="utf-8"))


def words_of(problem: ErrorDetails, given: Mapping[str, object], environment: Mapping[str, str]) -> str:
    """Says in one line what is wrong with a setting, under the name by which it was set."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    message = message.removeprefix(f"{name}: ")
    if problem["type"] == "int_parsing":
        message = f"{problem['input']!r} is no integer"
    return f"{shown_name(name, given, environment)}: {message}"


def shown_name(name: str, given: Mapping[str, object], environment: Mapping[str, str]) -> str:
    """Returns the name by which a setting was set: its flag or its variable. What is no setting keeps its own."""
    if name not in Settings.model_fields:
        return name
    variable = next((key for key in environment if key.upper() == variable_name(name)), None)
    return flag_name(name) if name in given or variable is None else variable


def unknown_variables(environment: Iterable[str]) -> list[tuple[str, str]]:
    """Lists the TILEWIRE_… variables that nothing reads, each with what to do about it."""
    found = []
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name.upper() in CLIENT_VARIABLES:
            continue
        setting = name.upper().removeprefix(PREFIX).lower()
        if setting not in Settings.model_fields:
            near = difflib.get_close_matches(setting, Settings.model_fields, 1)
            remedy = f"did you mean {variable_name(near[0])}?" if near else "`tilewire serve --help` lists the settings"
            found.append((name, remedy))
    return found


def remedy_of(error: StartError, settings: Settings) -> str:
    """Says what to do about an address that cannot be had; nothing for other errors."""
    if not isinstance(error, AddressRefused):
        return ""
    others = {
        settings.metrics_port: ("--metrics-host", "--metrics-port"),
        settings.grpc_port: ("--host", "--grpc-port"),
    }
    host_flag, port_flag = others.get(error.port, ("--host", "--port"))
    if not isinstance(error, PortTaken):
        return f"; look at {host_flag} and {port_flag}"
    if port_flag != "--port":
        return f"; another program has it: choose another {port_flag}"
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
    url = f"http://{host}:{settings.port}"
    if is_tilewire(url):
        return f"; a Tilewire answers there already, at {url}: use it, or type --port 0 for a free port"
    return "; another program has it: type --port 0 for a free port"


def is_tilewire(url: str) -> bool:
    """Whether a Tilewire answers at an address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/v2", timeout=PROBE_TIMEOUT_S) as response:
            return b'"tilewire"' in response.read(65536)
    except (OSError, ValueError):
        return False


def announce(logger: structlog.stdlib.BoundLogger, settings: Settings, url: str, engines: list[str]) -> None:
    """Prints where the service is and a curl to paste; the service goes on where nobody reads that any more."""
    name, metrics = f"Tilewire {__version__}", f", {url}/metrics" if settings.metrics_port is None else ""
    is_terminal = sys.stdout.isatty()
    title, at = (typer.style(text, bold=is_terminal or None, reset=is_terminal) for text in (name, url))
    lines = (
        f"\n{title} at {at}  ({'; '.join(engines)})",
        f"{settings.num_gateways} gateway(s), {len(engines)} engine(s); {url}/docs{metrics}",
        f"\nTry it:\n\n{curl_for(url, needs_key=settings.api_keys_file is not None)}\n",
    )
    try:
        # Not through the stream, which would wait for a reader that stalls, here or at the end.
        handler_of(sys.stdout).write("\n".join(lines))
    except OSError as error:
        logger.warning("the address cannot be printed", url=url, reason=error.strerror)


def curl_for(url: str, *, needs_key: bool = False) -> str:
    """A command that multiplies two matrices, ready to paste into a shell."""
    body = '{"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}'
    key = ' -H "x-api-key: $TILEWIRE_KEY"' if needs_key else ""
    return f"  curl -s {url}/v1/matmul{key} -H 'content-type: application/json' -d '{body}'"


def flag_of(name: str, field: FieldInfo) -> inspect.Parameter:
    """A command-line parameter for one setting: its text and its default come from `Settings`."""
    kind = bool if field.annotation is bool else str
    names = [flag_name(name)] if kind is str else [f"{flag_name(name)}/{flag_name('no_' + name)}"]
    shown = "" if field.default is None else f"default: {default_text(name, field)}; "
    option = typer.Option(
        *names,
        help=f"{field.description} ({shown}env: {variable_name(name)})",
        show_default=False,
        metavar=None if kind is bool else placeholder(field),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def placeholder(field: FieldInfo) -> str:
    """Returns the word for a setting's value in the help, as `<size>`."""
    if any(isinstance(one, BeforeValidator) for one in field.metadata):
        return "<size>"
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    words = [kind for kind in kinds if isinstance(kind, str)]
    named = {int: "integer", float: "number", Path: "path"}.get(kinds[0], "text")
    return f"<{'|'.join(words) or named}>"


def variable_name(name: str) -> str:
    """A setting's environment variable: `TILEWIRE_MAX_BODY_BYTES`."""
    return f"{PREFIX}{name}".upper()


def default_text(name: str, field: FieldInfo) -> str:
    """A setting's default as a person would write it."""
    value: Any = field.default
    return ByteSize(value).human_readable().replace(".0", "") if name.endswith("_bytes") else str(value)


serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [flag_of(name, field) for name, field in Settings.model_fields.items()]
)
serve.__annotations__ = {name: parameter.annotation for name, parameter in serve.__signature__.parameters.items()}  # type: ignore[attr-defined]
