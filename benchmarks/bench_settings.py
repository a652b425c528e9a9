"""What settings of the service and of the system change: each alone, beside the service as it is, in one run on one machine.

    python -m benchmarks.bench_settings --device cuda:0 --out benchmarks/results

Owns the settings that are tried, and the report; questions and loads are those of `bench_http`. The first one is measured
again at the end: what differs between its two measurements is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from benchmarks.bench_batching import safetensors_of
from benchmarks.bench_http import QUESTIONS, Question, Row, measure, weight_of
from benchmarks.command import out_folder
from benchmarks.contenders import Contender, Failure, tilewire
from benchmarks.machine import describe

AS_IS, AGAIN = "as it is", "as it is, again"


@dataclass(frozen=True)
class Setting:
    """One thing to try.

    Attributes:
        name: For the table.
        flags: Of `tilewire serve`; they win over those of all settings.
        env: Further variables of its environment.
        pin: Given the number of gateways and the cores there are, the cores of the engine and of each gateway.
    """

    name: str
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pin: Callable[[int, list[int]], list[list[int]]] | None = None


def engine_alone(gateways: int, cores: list[int]) -> list[list[int]]:
    """A core for the engine, the others for all gateways."""
    return [cores[:1], *([cores[1:]] * gateways)]


def core_each(gateways: int, cores: list[int]) -> list[list[int]]:
    """A core for the engine and one for each gateway."""
    return [[core] for core in cores[: gateways + 1]]


SETTINGS = (
    Setting(AS_IS),
    Setting("half the gateways", ["--gateways", "{half}"]),
    Setting("half as many gateways again", ["--gateways", "{more}"]),
    Setting("malloc: one arena", env={"MALLOC_ARENA_MAX": "1"}),
    Setting(
        "malloc: keeps what it has",
        env={"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)},
    ),
    Setting("huge pages", ["--huge-pages"]),
    Setting("engine alone on a core", pin=engine_alone),
    Setting("a core for each process", pin=core_each),
    Setting(AGAIN),
)


def run(argv: list[str]) -> int:
    """Measures every setting that can be tried here; prints rows and ratios, writes JSON.

    Returns:
        0; 1 when something could not be measured.
    """
    arguments = _parse(argv)
    weight = weight_of(arguments.size)
    rows: list[Row] = []
    failures: list[Failure] = []
    identity: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weight.safetensors")
        file.write_bytes(safetensors_of(w=weight))
        for setting in SETTINGS:
            if arguments.only and setting.name not in arguments.only:
                continue
            one = _contender(setting, file, arguments, identity)
            if one is not None:
                rows += measure(one, weight, arguments.seconds, arguments.warm_up, failures)
    report(rows, arguments.size)
    if arguments.out is not None:
        content = {
            "question": "what settings change",
            **describe(identity, "benchmarks.bench_settings", argv),
            "rows": [asdict(row) for row in rows],
            "failures": [asdict(one) for one in failures],
        }
        path = arguments.out / "bench_settings.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}")
    return 1 if failures else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="bench settings", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gateways", type=int, default=max(1, min(8, cores // 2)))
    parser.add_argument("--seconds", type=int, default=3, help="of each load; whole seconds")
    parser.add_argument("--warm-up", type=int, default=1, help="seconds before each load; 0 for none")
    parser.add_argument("--size", type=int, default=4096, help="of the square weight")
    parser.add_argument("--arena-bytes", type=int, default=4 * 2**30)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="; ".join(one.name for one in SETTINGS))
    parser.add_argument("--out", type=out_folder)
    return parser.parse_args(argv)


def _contender(
    setting: Setting, weight: Path, arguments: argparse.Namespace, identity: dict[str, object]
) -> Contender | None:
    """The service with one setting changed, or None where there are too few cores for it."""
    cores = sorted(os.sched_getaffinity(0))
    if setting.pin is not None and len(cores) < arguments.gateways + 2:
        print(f"{setting.name}: left out, {len(cores)} cores are too few for {arguments.gateways} gateways")
        return None
    counts = {"half": max(1, arguments.gateways // 2), "more": arguments.gateways + max(1, arguments.gateways // 2)}
    general = ["--device", arguments.device, "--arena-bytes", str(arguments.arena_bytes)]
    flags = [*general, "--gateways", str(arguments.gateways), *(flag.format(**counts) for flag in setting.flags)]
    one = tilewire(weight, flags, setting.name, setting.env)

    @contextmanager
    def start() -> Iterator[str]:
        with one.start() as url:
            identity.update(httpx.get(f"{url}/v2").json())
            if setting.pin is not None:
                pin(setting.pin(arguments.gateways, cores))
            yield url

    return dataclasses.replace(one, start=start)


def pin(cores: Sequence[Sequence[int]]) -> None:
    """Puts every thread of the engine, and of each gateway, on cores of its own."""
    processes = [*_children("tilewire.service.engine"), *_children("tilewire.service.gateway")]
    assert len(processes) == len(cores), "This is a bug: one engine, and as many gateways as were asked for."
    for pid, allowed in zip(processes, cores, strict=True):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), allowed)


def _children(module: str) -> list[int]:
    """Processes that run a module for a server that we started."""
    parents: dict[int, int] = {}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name in parentheses may hold spaces.
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if module.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return sorted(pid for pid in found if parents.get(parents.get(pid, 0)) == os.getpid())


def report(rows: Sequence[Row], size: int) -> None:
    """Prints how many times better than the service as it is each setting is; over 1 is better."""
    found = {(row.variant, row.question): row for row in rows}
    names = [question.name(size) for question in QUESTIONS]
    print("\n| setting |", " | ".join(names), "|\n|---|" + "---|" * len(names))
    for variant in dict.fromkeys(row.variant for row in rows):
        cells = [
            _cell(question, found.get((variant, name)), found.get((AS_IS, name)))
            for question, name in zip(QUESTIONS, names, strict=True)
        ]
        print(f"| {variant} |", " | ".join(cells), "|")


def _cell(question: Question, row: Row | None, base: Row | None) -> str:
    if row is None or base is None:
        return "not measured"
    if question.measure == "p50_us":
        return f"{base.p50_us / max(1, row.p50_us):.2f}× (p50 {row.p50_us / 1e3:.2f} ms)"
    return f"{row.per_s / max(1e-9, base.per_s):.2f}× ({row.per_s:,.0f}/s, p99 {row.p99_us / 1e3:.1f} ms)"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
