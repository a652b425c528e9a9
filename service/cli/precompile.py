"""`tilewire precompile`: what a person sees while the kernels of devices that are not here are compiled into a cache.

Owns the printing. `kernels.build.precompile` owns the list and the compilation. It is imported by the command only,
since a machine that serves on the CPU alone need not have Triton.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilewire.service.cli.missing import needs_triton


class Failed(Exception):
    """Some kernels would not compile; the others are in the cache."""


def run(targets: list[str], cache: Path | None, num_workers: int, console: Console) -> None:
    """Compiles every kernel of each target, such as `cuda:90`, into a cache: by default that which a server of this user reads.

    Without a number of processes, there is one on each core.

    Raises:
        ValueError: A target that there are no kernels for, no Triton, or a cache that is no folder.
        Failed: See there.
    """
    if cache is not None:
        if cache.exists() and not cache.is_dir():
            raise ValueError(f"--cache: {cache} is not a folder")
        # Triton reads it when it is imported.
        os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
    from tilewire.kernels.runtime.targets import parse_target  # noqa: PLC0415

    wanted = [parse_target(text) for text in targets]
    try:
        from tilewire.kernels.build.precompile import CompileError, precompile  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(needs_triton("precompile")) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for target in wanted:
            name = f"{target.backend}:{target.arch}"
            task = progress.add_task(name, total=None)

            def show(done: int, total: int, task: int = task) -> None:
                progress.update(task, completed=done, total=total)  # type: ignore[arg-type]

            try:
                done = precompile(target, num_workers=num_workers, on_progress=show)
            except CompileError as error:
                raise Failed(str(error)) from error
            progress.console.print(
                f"{name}: {done.num_variants} kernels, {done.compiled.total()} compiled now, in {done.cache}"
            )
