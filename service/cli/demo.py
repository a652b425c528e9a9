"""The demonstration behind `tilewire demo`: a running server under mixed load, every answer checked against NumPy.

Owns the load and the report; `demo_cases` has the requests and the right answers. Starts no server. Runs in the
command's own process, with one thread per connection.
"""

from __future__ import annotations

import secrets
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape
from rich.text import Text

import tilewire
from tilewire._cli.session import reported
from tilewire._cli.tables import table_lines
from tilewire._transport.wire import parse_timings
from tilewire.service.cli.demo_cases import WEIGHT_DTYPES, Case, K, N, make_cases, random_array

# More would measure this process: one Python client spends about 2 ms of its single interpreter on a request.
_CONNECTIONS = 4
_REPEATS = 25
_TIMEOUT_S = 60.0
_REFUSALS = (429, 503)
# Metrics that this key may not read, or that have a port apart.
_NO_METRICS = (401, 403, 404)
_MAX_TRIES = 5

Totals = dict[tuple[str, ...], float]


@dataclass
class Outcome:
    """Results of one case's requests.

    Attributes:
        stages_ms: Time of each stage of an answered request, from `Server-Timing`.
        worst_error: Largest error over the allowed one.
    """

    case: Case
    latencies_ms: list[float] = field(default_factory=list)
    stages_ms: list[dict[str, float]] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    worst_error: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(
    base_url: str,
    *,
    key: str | None = None,
    transport: httpx.BaseTransport | None = None,
    console: Console | None = None,
) -> int:
    """Puts a running server through every format, op and a choice of dtypes, and prints what came of it.

    Args:
        base_url: Address of the server.
        key: API key.
        transport: Transport of requests; None for the network.
        console: Where to print.

    Returns:
        The exit status: 0 if every answer was right, 1 if not.

    Raises:
        typer.Exit: An address or a key that cannot be; what is wrong was printed.
    """
    console = console or Console()
    # First, for it says what is wrong with an address or a key.
    with reported():
        client = tilewire.Client(base_url, api_key=key, timeout=_TIMEOUT_S, transport=transport)
    headers = {} if key is None else {"X-Api-Key": key}
    http = httpx.Client(base_url=base_url, timeout=_TIMEOUT_S, transport=transport, headers=headers)
    with http, client:
        try:
            if not client.ready():
                raise tilewire.Unavailable(
                    f"{base_url}: no server takes requests there; start one with `tilewire serve`"
                )
            before = _totals(http)
            with _resident_weights(client) as cases:
                outcomes = _load(http, cases)
            after = _totals(http)
        except (tilewire.TilewireError, httpx.HTTPError) as error:
            console.print(f"[bold red]✗ {escape(str(error))}[/]", soft_wrap=True)
            return 1
    _print_outcomes(outcomes, console)
    if before is None or after is None:
        reason = "another port has them (--metrics-port), or this key may not read them"
        console.print(f"\nno table of metrics: {escape(base_url)}/metrics is not to be had; {reason}\n", soft_wrap=True)
    else:
        _print_totals({key: value - before.get(key, 0.0) for key, value in after.items()}, console)
    return _verdict(outcomes, console)


@contextmanager
def _resident_weights(client: tilewire.Client) -> Iterator[Sequence[Case]]:
    """Uploads the weights under names of this run and removes them whatever happens."""
    random = np.random.default_rng(1)
    prefix = f"demo-{secrets.token_hex(4)}"
    weights = {dtype: random_array(random, (K, N), dtype) for dtype in WEIGHT_DTYPES}
    names = {dtype: f"{prefix}/weight-{dtype}" for dtype in weights}
    stored: list[str] = []
    try:
        for dtype, weight in weights.items():
            client.put(names[dtype], weight)
            stored.append(names[dtype])
        yield make_cases(weights, names)
    finally:
        for name in stored:
            client.delete(name)


def _load(http: httpx.Client, cases: Sequence[Case]) -> list[Outcome]:
    """Sends all cases, interleaved, from several connections at once; answers are checked when all have come."""
    bodies = [case.body() for case in cases]
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        rounds = [[pool.submit(_ask, http, *pair) for pair in zip(cases, bodies, strict=True)] for _ in range(_REPEATS)]
        outcomes = [Outcome(case) for case in cases]
        for futures in rounds:
            for outcome, future in zip(outcomes, futures, strict=True):
                _check(outcome, *future.result())
    return outcomes


def _ask(http: httpx.Client, case: Case, body: bytes) -> tuple[httpx.Response | None, float, str]:
    """Sends one request; returns the response, its latency in milliseconds and, without a response, what went wrong."""
    headers = {"Content-Type": case.content_type, "Accept": case.content_type, "Accept-Encoding": "identity"}
    for _ in range(_MAX_TRIES):
        began = time.perf_counter()
        try:
            response = http.post(f"/v1/{case.op}", content=body, params=case.query, headers=headers)
        except httpx.HTTPError as error:
            return None, 0.0, f"{type(error).__name__}: {error}"
        latency_ms = (time.perf_counter() - began) * 1e3
        if response.status_code not in _REFUSALS:
            break
        time.sleep(float(response.headers.get("retry-after", "1")))
    return response, latency_ms, ""


def _check(outcome: Outcome, response: httpx.Response | None, latency_ms: float, failure: str) -> None:
    if response is None or response.status_code != 200:
        outcome.failures.append(
            failure if response is None else f"status {response.status_code}: {response.text[:200]}"
        )
        return
    try:
        error = outcome.case.error_of(response.content)
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as unreadable:
        outcome.failures.append(f"unreadable answer: {unreadable}")
        return
    if error > 1:
        outcome.failures.append(f"wrong result: {error:.3g} times the allowed error")
    outcome.worst_error = max(outcome.worst_error, error)
    outcome.latencies_ms.append(latency_ms)
    outcome.stages_ms.append(parse_timings(response.headers.get("server-timing", "")))
    outcome.batch_sizes.append(int(response.headers.get("x-batch-size", "1")))


def _totals(http: httpx.Client) -> Totals | None:
    """Counters of `/metrics` by name and by their op, dtype and code; None where they are not to be had."""
    response = http.get("/metrics", headers={"Accept": "text/plain"})
    if response.status_code in _NO_METRICS:
        return None
    response.raise_for_status()
    wanted = {"tilewire_flops_total", "tilewire_kernel_seconds_total", "tilewire_requests_total"}
    totals: Totals = {}
    try:
        families = list(text_string_to_metric_families(response.text))
    except ValueError:
        # A page of a proxy.
        return None
    for family in families:
        for sample in family.samples:
            if sample.name in wanted:
                labels = sample.labels
                key = (sample.name, labels.get("op", ""), labels.get("dtype") or labels.get("code", ""))
                totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def _print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    titles = ("format", "op", "dtype", "p50", "p99", "queue", "kernel", "batch", "error", "")
    heading, *lines = table_lines(titles, [_row_of(outcome) for outcome in outcomes], left=("format", "op", "dtype"))
    console.print(
        f"{_CONNECTIONS} connections, {_REPEATS} answers each; ms, and error over the allowed", soft_wrap=True
    )
    console.print(Text(heading, style="bold"), soft_wrap=True)
    for line, outcome in zip(lines, outcomes, strict=True):
        console.print(Text(line, style="red" if outcome.failures else ""), soft_wrap=True)


def _row_of(outcome: Outcome) -> list[str]:
    case = outcome.case
    p50, p99 = np.percentile(outcome.latencies_ms, [50, 99]) if outcome.latencies_ms else (np.nan, np.nan)
    stages = [_mean([stages[name] for stages in outcome.stages_ms if name in stages]) for name in ("queue", "kernel")]
    figures = [f"{p50:.2f}", f"{p99:.2f}", *stages, _mean(outcome.batch_sizes, 1), f"{outcome.worst_error:.2f}"]
    mark = "✗" if outcome.failures else "✓"
    return [case.format, case.op, case.dtype, *figures, mark]


def _mean(values: Sequence[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f}" if values else "–"


def _print_totals(totals: Totals, console: Console) -> None:
    rows = []
    for (name, op, dtype), flops in sorted(totals.items()):
        seconds = totals.get(("tilewire_kernel_seconds_total", op, dtype), 0.0)
        if name == "tilewire_flops_total" and seconds > 0:
            rows.append((op, dtype, f"{seconds * 1e3:.3f}", f"{flops / seconds / 1e12:.3g}"))
    heading, *lines = table_lines(("op", "dtype", "kernel time ms", "TFLOP/s while busy"), rows, left=("op", "dtype"))
    console.print("\nwhat /metrics counted meanwhile", soft_wrap=True)
    console.print(Text(heading, style="bold"), *map(Text, lines), sep="\n", soft_wrap=True)
    requests = {key: value for key, value in totals.items() if key[0] == "tilewire_requests_total" and value > 0}
    counts = ", ".join(f"{value:.0f} × {op} {code}" for (_, op, code), value in sorted(requests.items()))
    console.print(f"{counts}\n", soft_wrap=True)


def _verdict(outcomes: Sequence[Outcome], console: Console) -> int:
    answers = sum(len(outcome.latencies_ms) for outcome in outcomes)
    failures = sum(len(outcome.failures) for outcome in outcomes)
    for outcome in outcomes:
        for text in dict.fromkeys(outcome.failures):
            case = outcome.case
            console.print(f"[red]✗ {case.format} {case.op} {case.dtype}: {escape(text)}[/]", soft_wrap=True)
    if failures or not answers:
        console.print(f"[bold red]✗ {failures} of {len(outcomes) * _REPEATS} requests failed[/]")
        return 1
    console.print(f"[bold green]✓ {answers} answers, all within tolerance[/]")
    return 0
