"""Scores servers by the cases of HTTP/1.1 that the tests play: this one, and uvicorn alone with httptools and with h11.

    python -m benchmarks.bench_http11 --out benchmarks/results/http11.json

A case passes, warns (the standard allows it, a careful server avoids it) or fails. The rules are in
`tests/support/http11_cases.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.machine import describe
from tests.support.http11_cases import CASES, Target
from tests.support.http11_probe import FAILS, PASSES, WARNS, Observation, judge, play_all
from tests.support.live_server import serving
from tests.support.programs import free_port, running

Score = dict[str, object]
PARSERS = ("httptools", "h11")


def main(argv: list[str]) -> int:
    """Runs; prints a line for each server and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        scores = {"Tilewire": _score_of_ours(Path(folder, "log"))}
        for name in PARSERS:
            scores[f"uvicorn, {name}"] = _score_of_uvicorn(name, Path(folder, name))
    for name, score in scores.items():
        print(f"{name}: {score[PASSES]} pass, {score[WARNS]} warn, {score[FAILS]} fail of {len(CASES)}")
    if arguments.out is not None:
        about = describe({}, "benchmarks.bench_http11", argv)
        about["versions"] = {**about["versions"], "h11": importlib.metadata.version("h11")}  # type: ignore[dict-item]
        arguments.out.write_text(json.dumps({"about": about, "cases": len(CASES), "scores": scores}, indent=1) + "\n")
    return 0


def _score_of_ours(log: Path) -> Score:
    with serving(log, "--gateways", "1", "--arena-bytes", "64MiB") as server:
        target = Target(f"{server.host}:{server.port}", "/healthz", "/v1/softmax", "/v2/repository/index")
        return _score(play_all(CASES.values(), (server.host, server.port), target))


def _score_of_uvicorn(parser: str, log: Path) -> Score:
    port = free_port()
    words = ["benchmarks.echo_app:app", "--port", str(port), "--http", parser, "--log-level", "critical"]
    process: AbstractContextManager[object] = running([sys.executable, "-m", "uvicorn", *words], log, port)
    with process:
        target = Target(f"127.0.0.1:{port}", "/", "/", "/")
        return _score(play_all(CASES.values(), ("127.0.0.1", port), target))


def _score(observations: Mapping[str, Observation]) -> Score:
    verdicts = {name: judge(CASES[name], seen) for name, seen in observations.items()}
    counts = Counter(verdicts.values())
    score: Score = {verdict: counts[verdict] for verdict in (PASSES, WARNS, FAILS)}
    return score | {f"which {verdict[:-1]}": _which(verdicts, observations, verdict) for verdict in (WARNS, FAILS)}


def _which(verdicts: Mapping[str, str], observations: Mapping[str, Observation], wanted: str) -> dict[str, str]:
    return {name: str(observations[name]) for name, verdict in verdicts.items() if verdict == wanted}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
