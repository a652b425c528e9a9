"""`tilewire tune`: what a person sees of a tuning. Owns progress and report; the work is `kernels.autotune`'s.

Imports torch and Triton: the command line imports it by name, when the command runs.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewire.kernels.autotune.run import OPS, Options, Tuned, TuneError, tune
from tilewire.kernels.autotune.session import Step
from tilewire.kernels.autotune.workloads import Workload, WorkloadError, parse

EXIT_FAILED = 1
EXIT_USAGE = 2
_SHOWN_REASONS = 5


def run(
    device: int, ops: Sequence[str], budget_s: float, shapes: Path | None, out: Path | None, *, restart: bool
) -> int:
    """Tune and report; the exit status."""
    console = Console(stderr=True)
    logging.basicConfig(format="tune: %(message)s")
    unknown = [name for name in ops if name not in OPS]
    if unknown:
        console.print(f"tune: --ops: {unknown[0]!r} is none of {', '.join(OPS)}", markup=False)
        return EXIT_USAGE
    try:
        workloads = read(shapes) if shapes else ()
    except (OSError, WorkloadError) as error:
        console.print(f"tune: --shapes: {error}", markup=False)
        return EXIT_USAGE
    # For the table, which travels: what was tuned for, not where files lie on this machine.
    command = f"tilewire tune --ops {','.join(ops)} --budget-s {budget_s:g}"
    command += f" --shapes {shapes.name}" if shapes else ""
    options = Options(tuple(ops), budget_s, workloads, out, restart, command)
    before = signal.signal(signal.SIGINT, _interrupt_once)
    try:
        with Shown(console) as shown:
            tuned = tune(device, options, shown.step)
    except TuneError as error:
        console.print(f"tune: {error}", markup=False)
        return EXIT_FAILED
    except RuntimeError as error:
        text = f"tune: the device failed; the same command goes on without the shape that it failed at: {error}"
        console.print(text, markup=False)
        return EXIT_FAILED
    except KeyboardInterrupt:
        console.print("tune: interrupted; the same command goes on from here", markup=False)
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGINT, before)
    report(Console(), tuned)
    return 0


def _interrupt_once(_signal: int, _frame: object) -> None:
    """The first Ctrl-C ends the tuning; those that follow must not keep it from noting where it was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def read(path: Path) -> tuple[Workload, ...]:
    """The workloads of a file, at least one.

    Raises:
        OSError: it cannot be read.
        WorkloadError: a line is no workload, or none is there.
    """
    found = tuple(parse(path.read_text(), str(path)))
    if not found:
        raise WorkloadError(f"{path}: holds no shape")
    # Every shape of the registry that can be measured is one.
    return cast("tuple[Workload, ...]", found)


class Shown:
    """Progress on the terminal: a bar for each part and stage. A context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._at: tuple[str, str] | None = None
        self._bar = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: Step) -> None:
        """Show how far it is."""
        if (step.part, step.stage) != self._at:
            self._at = (step.part, step.stage)
            self._progress.reset(self._bar)
        text = step.part if step.part == step.stage else f"{step.part}: {step.stage}"
        self._progress.update(self._bar, description=text, completed=step.done, total=step.total)


def report(console: Console, tuned: Tuned) -> None:
    """What it gained, and where the table is."""
    table = Table("op", "shapes", "changed", "geomean", "least", "most", title="Gain over what was chosen before")
    for each in tuned.summaries:
        figures = (f"{value:.3f}" for value in (each.geomean, each.least, each.most))
        table.add_row(each.op, str(each.num_workloads), str(each.num_changed), *figures)
    console.print(table)
    if tuned.learned:
        console.print(learned_table(tuned))
    before, after = tuned.num_variants
    console.print(f"{tuned.path}: {after} binaries in the catalogue, {before} before", soft_wrap=True)
    console.print(f"{len(tuned.discarded)} candidates did not compile, did not fit or spilled")
    for name, reason in tuned.discarded[:_SHOWN_REASONS]:
        console.print(f"  {reason}: {name}", markup=False, highlight=False)
    if tuned.was_cut_short:
        console.print("The budget ended before the candidates did: the same command goes on from what was measured.")


def learned_table(tuned: Tuned) -> Table:
    """What was learned for requests of other shapes than were tuned for."""
    columns = ("requests", "shapes", "by the table", "as learned", "within 10 %")
    table = Table(*columns, title="Choices for other shapes: their time over the fastest's")
    for kind, held_out in tuned.learned.items():
        figures = (f"{held_out[name]:.3f}" for name in ("by_table", "geomean"))
        table.add_row(kind, f"{held_out['workloads']:.0f}", *figures, f"{100 * held_out['within_10_percent']:.0f} %")
    return table
