"""Times every plausible configuration of random shapes on this GPU, and writes one line a shape, as it goes.

`python -m tilewire.kernels.autotune.collect --out FOLDER [--seconds 460] [--seed 1] [--scale 1.0] [--ops matmul,softmax]
[--groups unaligned,ieee] [--online-tuning]`

Candidates are compiled first, on all cores, each in a process that may crash. A process of its own then measures. So a
launch that breaks the device's context costs one shape, and the next process goes on after it.
`kernels.autotune.fitting` reads the file; fitting needs no device. Imports no op by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import multiprocessing
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import triton

from tilewire.kernels.autotune.benches import GpuBench
from tilewire.kernels.autotune.compiling import Facts, facts_of_variants
from tilewire.kernels.autotune.crew import Crew, Failure
from tilewire.kernels.autotune.halving import Rounds, race
from tilewire.kernels.autotune.online import Race, race_online
from tilewire.kernels.autotune.workloads import as_line, parse_line
from tilewire.kernels.op import Config, Shape, Tuning, config_text
from tilewire.kernels.registry import kernel_op, measured_ops, tuned_ops
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target, current

# File in the folder, with a line a shape.
FILE = "measured.jsonl"
# Of the time, for compiling.
_COMPILE_SHARE = 0.4
# A shape takes about a second.
_STALLED_S = 40.0
_ROUNDS = Rounds(near=1.5, slack_us=2.0, rounds=3, finalists=6, final_rounds=9)
# Errors (Frobenius) above these are worth a look; by dtype of the shape.
_TOLERANCE = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 2e-3, "int8": 1e-6}


class Recipe(NamedTuple):
    """Binaries of one configuration for one shape, which a worker compiles."""

    line: str
    config: Config
    target: Target


def compile_one(recipe: Recipe) -> Facts:
    """Compiles, into Triton's disk cache; what the binaries need."""
    shape = parse_line(recipe.line)
    return facts_of_variants(_binaries(shape, recipe.config, recipe.target), recipe.target)


def _binaries(shape: Shape, config: Config, target: Target) -> tuple[Variant, ...]:
    found = kernel_op(shape.op).binaries
    assert found is not None, "This is a bug."
    return found(shape, config, target)


def tuning_of(shape: Shape) -> Tuning:
    """Returns the tuning interface of the op of `shape`."""
    found = kernel_op(shape.op).tuning
    assert found is not None, "This is a bug."
    return found


def is_supported(shape: Shape, target: Target) -> bool:
    """Whether the target has kernels for a shape."""
    tuning = kernel_op(shape.op).tuning
    return tuning is None or tuning.is_supported(shape, target)


def drawn(seed: int, scale: float, ops: Sequence[str]) -> dict[Shape, str]:
    """Random shapes and the name of the group of each, in an order in which every part has all groups."""
    generator = random.Random(seed)  # noqa: S311 - shapes, no secrets
    places: dict[Shape, float] = {}
    groups: dict[Shape, str] = {}
    for op in measured_ops():
        if op.name in ops:
            for group in op.groups:
                count = math.ceil(group.count * scale)
                for number in range(count):
                    shape = group.draw(generator)
                    places.setdefault(shape, (number + generator.random()) / count)
                    groups.setdefault(shape, group.name)
    return {shape: groups[shape] for shape in sorted(places, key=places.__getitem__)}


def draw(seed: int, scale: float, ops: Sequence[str]) -> list[Shape]:
    """Random shapes of every group of the ops."""
    return list(drawn(seed, scale, ops))


def candidates(shape: Shape, target: Target, *, has_space: bool = True) -> list[Config]:
    """Every configuration worth measuring for `shape`, dispatch's own choice first; else the catalogue's alone."""
    tuning = kernel_op(shape.op).tuning
    found = tuning.space(shape, target) if tuning is not None and has_space else shape.candidates(target)
    return list(dict.fromkeys((shape.chosen(target), *found)))


class Candidates:
    """Configurations worth measuring for shapes, and which of them compile.

    Args:
        wanted: Configurations to measure, by shape.
        target: The device.
        say: Prints a line of progress.
    """

    def __init__(self, wanted: Mapping[Shape, Sequence[Config]], target: Target, say: Callable[[str], None]) -> None:
        self._target = target
        self._say = say
        self._wanted = {
            shape: {each: _binaries(shape, each, target) for each in configs}
            for shape, configs in wanted.items()
            if configs
        }
        self._facts: dict[tuple[Variant, ...], Facts] = {}

    def compile(self, until_s: float, workers: int) -> None:
        """Compile until the clock says `until_s`."""
        recipes: dict[tuple[Variant, ...], Recipe] = {}
        for shape, configs in self._wanted.items():
            for config, binaries in configs.items():
                recipes.setdefault(binaries, Recipe(as_line(shape), config, self._target))
        keys = list(recipes)
        failures: dict[str, int] = defaultdict(int)
        self._say(f"{len(self._wanted)} shapes, {len(keys)} sets of binaries to compile")

        def on_done(number: int, outcome: Facts | Failure) -> None:
            if isinstance(outcome, Facts) and not outcome.objection(self._target):
                self._facts[keys[number]] = outcome
            else:
                reason = outcome.reason if isinstance(outcome, Failure) else "does not fit, or spills"
                failures[reason[:80]] += 1
            if (len(self._facts) + 1) % 200 == 0:
                self._say(f"compiled {len(self._facts) + 1}")

        with Crew(compile_one, num_workers=workers, timeout_s=60.0) as crew:
            crew.run(list(recipes.values()), on_done, lambda: time.monotonic() >= until_s)
        self._say(f"{len(self._facts)} of {len(keys)} are able; left out: {dict(failures)}")

    def able(self) -> list[tuple[str, dict[Config, Facts]]]:
        """For each shape, as a line, the configurations that compiled, fit and spill nothing."""
        return [
            (as_line(shape), {each: self._facts[key] for each, key in configs.items() if key in self._facts})
            for shape, configs in self._wanted.items()
        ]


def measure_shape(
    bench: Any, shape: Shape, able: dict[Config, Facts], target: Target, online: Mapping[str, Config] | None = None
) -> dict[str, Any]:
    """Races the candidates of one shape and what others have for it; one line of the file.

    Args:
        bench: Has the operands.
        shape: The shape.
        able: Its candidates.
        target: The device.
        online: Choices of online tuning, by the kernels that took part.
    """
    own = shape.chosen(target)
    vendors = bench.vendors(shape)
    must = [each for each in dict.fromkeys((own, *(online or {}).values())) if each in able]
    times = race(bench, shape, able, must=[*vendors, *must], rounds=_ROUNDS)
    errors = bench.errors(shape, list(able))
    dtype = getattr(shape, "dtype", "float32")
    bad = {config_text(config): error for config, error in errors.items() if not error <= _TOLERANCE.get(dtype, 0.05)}
    return {
        "shape": json.loads(as_line(shape)),
        "own": config_text(own),
        "us": {config_text(config): round(us, 3) for config, us in times.items() if not isinstance(config, str)},
        "vendors": {name: round(us, 3) for name, us in times.items() if isinstance(name, str)},
        "programs_per_sm": {config_text(config): facts.programs_per_sm(target) for config, facts in able.items()},
        "bad": bad,
    }


def measure(
    lines: Sequence[tuple[str, dict[Config, Facts]]], out: Path, until_s: float, *, has_online: bool = False
) -> None:
    """In a process of its own: measures what the file does not name yet, until the clock says `until_s`."""
    torch.cuda.set_device(0)
    bench, target = GpuBench(), current(0)
    begun, finished = progress_of(out)
    with out.open("a") as file:
        for line, able in lines:
            if time.monotonic() >= until_s:
                return
            if line in begun or line in finished:
                continue
            _put(file, {"begun": line})
            shape = parse_line(line)
            raced = _raced_online(shape, target) if has_online else {}
            found = measure_shape(bench, shape, able, target, {name: each.config for name, each in raced.items()})
            if raced:
                found["online"] = {name: config_text(each.config) for name, each in raced.items()}
                found["turns_ms"] = {name: [round(ms, 3) for ms in each.turns_ms] for name, each in raced.items()}
            _put(file, {"line": line} | found)


def _raced_online(shape: Shape, target: Target) -> dict[str, Race]:
    """Races as `--online-tuning` runs them, by the value of `--kernels`; none for an op that has none."""
    device = torch.device("cuda", 0)
    # As a service has it: the shape before has left another.
    torch.backends.cuda.preferred_blas_library("default")
    raced = {name: race_online(shape, target, device, with_vendor=name == "fastest") for name in ("triton", "fastest")}
    return {name: each for name, each in raced.items() if each is not None}


def watch(
    lines: Sequence[tuple[str, dict[Config, Facts]]],
    out: Path,
    end_s: float,
    say: Callable[[str], None],
    *,
    has_online: bool = False,
) -> int | None:
    """Runs `measure` in a process; its status. One that finishes no shape for a while is ended."""
    process = multiprocessing.get_context("spawn").Process(
        target=measure, args=(lines, out, end_s), kwargs={"has_online": has_online}
    )
    process.start()
    last, last_s = -1, time.monotonic()
    while process.is_alive():
        process.join(10)
        done, now_s = len(progress_of(out)[1]), time.monotonic()
        last, last_s = (done, now_s) if done != last else (last, last_s)
        say(f"measured {done} of {len(lines)}")
        if now_s - last_s > _STALLED_S or now_s > end_s + _STALLED_S:
            process.kill()
            process.join()
    return process.exitcode


def progress_of(path: Path) -> tuple[set[str], set[str]]:
    """The shapes that a file says were begun, and those that were finished."""
    begun, finished = set(), set()
    for entry in entries_of(path):
        if "begun" in entry:
            begun.add(entry["begun"])
        elif "line" in entry:
            finished.add(entry["line"])
    return begun, finished


def entries_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are whole. It may be compressed by gzip."""
    if not path.is_file():
        return
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for text in file:
            try:
                yield json.loads(text)
            except ValueError:
                continue


def _put(file: TextIO, entry: dict[str, Any]) -> None:
    file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    file.flush()


def device_of(target: Target) -> dict[str, Any]:
    """Returns the first line of the file: the device and the versions."""
    properties = torch.cuda.get_device_properties(0)
    names = ("name", "multi_processor_count", "L2_cache_size", "clock_rate", "memory_clock_rate", "memory_bus_width")
    return {
        "device": {name: getattr(properties, name, None) for name in names},
        "target": dataclasses.asdict(target),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gbs": _copy_gbs(),
    }


def _copy_gbs() -> float:
    """Bytes read and written by a device-to-device copy of 2 GiB, GB/s."""
    source = torch.empty(1 << 30, dtype=torch.int16, device="cuda").random_()
    destination = torch.empty_like(source)
    best_ms = math.inf
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        destination.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return round(2 * source.nbytes / best_ms / 1e6, 1)


def collect(
    wanted: Mapping[Shape, Sequence[Config]],
    target: Target,
    out: Path,
    seconds: float,
    workers: int,
    *,
    has_online: bool = False,
) -> None:
    """Measures configurations of shapes, and writes a line for each shape.

    Args:
        wanted: Configurations to measure, by shape.
        target: The device.
        out: File; lines are added to those that it has.
        seconds: For compiling and measuring together.
        workers: Compiling processes; 0 for one on each core.
        has_online: Whether online tuning chooses for each shape, too.
    """
    begin_s = time.monotonic()
    end_s = begin_s + seconds

    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - begin_s:6.1f} s] {text}\n")
        sys.stdout.flush()

    if not out.is_file():
        with out.open("w") as file:
            _put(file, device_of(target))
    subject = Candidates(wanted, target, say)
    subject.compile(begin_s + _COMPILE_SHARE * seconds, workers)
    lines = subject.able()
    while time.monotonic() < end_s and watch(lines, out, end_s, say, has_online=has_online) != 0:
        say("the measuring process ended early; going on after the shape that it was at")
    finished = [entry for entry in entries_of(out) if "line" in entry]
    bad = {(entry["line"], key): error for entry in finished for key, error in entry["bad"].items()}
    say(f"{len(finished)} shapes in {out} ({out.stat().st_size} bytes); {len(bad)} results look wrong")
    for (line, key), error in list(bad.items())[:20]:
        say(f"wrong: {line} {key} {error:.3g}")


def main(argv: Sequence[str] | None = None) -> int:
    """Collects; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for measured.jsonl")
    parser.add_argument("--seconds", type=float, default=460.0, help="for compiling and measuring together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of shapes")
    parser.add_argument("--ops", default=",".join(op.name for op in tuned_ops()))
    parser.add_argument("--groups", default="", help="only these groups of shapes")
    parser.add_argument("--catalogue", action="store_true", help="only what the catalogue has")
    parser.add_argument("--online-tuning", action="store_true", help="let online tuning choose, too, and measure that")
    parser.add_argument("--workers", type=int, default=0, help="compiling processes; 0 for one on each core")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = current(0)
    groups = arguments.groups.split(",") if arguments.groups else None
    wanted = {
        shape: candidates(shape, target, has_space=not arguments.catalogue)
        for shape, group in drawn(arguments.seed, arguments.scale, arguments.ops.split(",")).items()
        if is_supported(shape, target) and (groups is None or group in groups)
    }
    collect(
        wanted, target, arguments.out / FILE, arguments.seconds, arguments.workers, has_online=arguments.online_tuning
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
