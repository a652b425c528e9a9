"""`tilewire health` and `tilewire top`: whether a server takes requests, and what it does."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tilewire._cli.exposition import Change, parse
from tilewire._cli.session import (
    EXIT_FAILED,
    URL,
    JsonOption,
    KeyOption,
    UrlOption,
    check_seconds,
    connected,
    print_json,
    reported,
    say,
)
from tilewire._cli.tables import table_lines
from tilewire._clients.client import Client
from tilewire._errors import ConnectionFailed, NotFound
from tilewire._transport import wire

_FAILURES = ("4", "5")
_NO_KEY = (401, 403)


def health(url: UrlOption = URL, key: KeyOption = None, is_json: JsonOption = False) -> None:
    """Say whether a server takes requests, and what it runs on. The exit status is 0 only when it is ready."""
    with reported(is_json=is_json), Client(url, api_key=key, max_retries=0) as client:
        state: dict[str, Any] = {"url": url, "live": False, "ready": False}
        try:
            state["live"] = wire.parse_object(client.exchange("GET", "/v2/health/live")).get("live") is True
        except ConnectionFailed as error:
            state["reason"] = error.detail
        if state["live"]:
            state["ready"] = client.ready()
            answer = client.exchange("GET", "/v2")
            # Without a key only what it runs on is missing.
            if answer.status not in _NO_KEY:
                state["server"] = wire.parse_object(answer)
    with reported(is_json=is_json):
        if is_json:
            print_json(state)
        else:
            say(_sentence(state))
    if not state["ready"]:
        raise typer.Exit(EXIT_FAILED)


def top(
    interval_s: Annotated[
        float, typer.Option("--interval", "-i", help="Seconds between two looks, 0.1 or more.")
    ] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Number of looks; 0 for no end.")] = 0,
    metrics_url: Annotated[
        str | None, typer.Option(help="Address of the metrics, where the server has a port apart for them.")
    ] = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show live what a server does: requests, latency, batches, trouble first. Ctrl-C ends it."""
    console = Console()
    # As the server's log and a scraper's settings have it, or without the path.
    asked = url if metrics_url is None else metrics_url.removesuffix("/metrics")
    with connected(asked, key, is_json=is_json) as client:
        check_seconds("--interval", interval_s)
        live = Live(console=console, transient=True) if console.is_terminal and not is_json else None
        before, began_s, looks = _samples(client), time.monotonic(), 0
        try:
            if live is not None:
                live.start()
            while not count or looks < count:
                time.sleep(interval_s)
                now, now_s = _samples(client), time.monotonic()
                figures = figures_of(Change(before, now, now_s - began_s))
                before, began_s, looks = now, now_s, looks + 1
                if is_json:
                    print_json(figures)
                elif live is None:
                    console.print(_screen(url, figures), soft_wrap=True)
                else:
                    live.update(_screen(url, figures))
        except KeyboardInterrupt:
            pass
        finally:
            if live is not None:
                live.stop()


def figures_of(change: Change) -> dict[str, Any]:
    """Returns the figures that `top` shows."""
    by_code = change.label_rates("tilewire_requests_total", "code")
    ops = {
        op: {
            "per_s": rate,
            "p50_s": change.quantile(0.5, "tilewire_request_duration_seconds", op=op),
            "p99_s": change.quantile(0.99, "tilewire_request_duration_seconds", op=op),
            "tflops": _tflops(change, op),
        }
        for op, rate in change.label_rates("tilewire_requests_total", "op").items()
    }
    return {
        "requests_per_s": sum(by_code.values()),
        "failed_per_s": {code: rate for code, rate in by_code.items() if code.startswith(_FAILURES)},
        "refused_per_s": change.label_rates("tilewire_rejected_total", "reason"),
        "ops": ops,
        "in_flight": change.gauge("tilewire_in_flight_requests"),
        "queue_depth": change.gauge("tilewire_queue_depth"),
        "resident_bytes": change.gauge("tilewire_resident_bytes"),
        "engines_up": change.gauge("tilewire_engine_up"),
        "received_bytes_per_s": change.rate("tilewire_request_bytes_total"),
        "sent_bytes_per_s": change.rate("tilewire_response_bytes_total"),
    }


def _samples(client: Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    try:
        reply = wire.checked(client.exchange("GET", "/metrics"))
    except NotFound as error:
        remedy = "a server with --metrics-port has its metrics there: give --metrics-url http://HOST:PORT"
        raise NotFound(f"{error.detail}; {remedy}", status=error.status, request_id=error.request_id) from error
    if wire.content_type(reply.headers) != "text/plain":
        raise wire.unexpected(reply, "text/plain")
    try:
        return parse(bytes(reply.body).decode(errors="replace"))
    except ValueError as error:
        raise wire.unexpected(reply, "metrics in Prometheus' text") from error


def _tflops(change: Change, op: str) -> float | None:
    seconds = change.rate("tilewire_kernel_seconds_total", op=op)
    return change.rate("tilewire_flops_total", op=op) / seconds / 1e12 if seconds else None


def _sentence(state: dict[str, Any]) -> str:
    if not state["live"]:
        return state.get("reason") or f"{state['url']}: no Tilewire answers"
    server = state.get("server", {})
    listed = server.get("engines")
    engines = [
        f"{engine.get('device_name') or engine.get('device', '?')} ({engine.get('backend', '?')})"
        for engine in (listed if isinstance(listed, list) else ())
        if isinstance(engine, dict)
    ]
    word = "ready" if state["ready"] else "not ready yet"
    if not server:
        return f"{state['url']}: {word}"
    return (
        f"{state['url']}: {word}, {server.get('name', '?')} {server.get('version', '?')} on {', '.join(engines) or '?'}"
    )


def _screen(url: str, figures: dict[str, Any]) -> Group:
    trouble = [f"[red]{rate:.1f}/s with status {code}[/red]" for code, rate in figures["failed_per_s"].items()]
    trouble += [f"[red]{rate:.1f}/s refused: {reason}[/red]" for reason, rate in figures["refused_per_s"].items()]
    heading = (
        f"[bold]{url}[/bold]  {figures['requests_per_s']:,.0f} requests/s, {figures['in_flight']:.0f} in flight, "
        f"{figures['queue_depth']:.0f} queued, {figures['engines_up']:.0f} engine(s), "
        f"{figures['resident_bytes'] / 2**20:,.0f} MiB resident, in {figures['received_bytes_per_s'] / 1e6:,.1f} MB/s, "
        f"out {figures['sent_bytes_per_s'] / 1e6:,.1f} MB/s"
    )
    rows = [
        (
            op,
            f"{row['per_s']:,.1f}",
            _ms(row["p50_s"]),
            _ms(row["p99_s"]),
            "" if row["tflops"] is None else f"{row['tflops']:.2f}",
        )
        for op, row in figures["ops"].items()
    ]
    titles, *lines = table_lines(("OP", "PER SECOND", "P50 BELOW", "P99 BELOW", "TFLOP/S"), rows, left=("OP",))
    return Group(*trouble, heading, Text(titles, style="bold"), *map(Text, lines))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.3g} ms"
