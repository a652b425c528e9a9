"""Compiling every binary of a target into Triton's disk cache, in parallel and without the device. Launches nothing.

Workers are fresh processes: LLVM keeps one AMD architecture a process, a crash of the compiler takes a worker and not its
caller, and a process that holds a GPU is never forked.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.runtime.cache import triton_key

from kernels.catalogue import variants
from kernels.loading import on_compile
from kernels.targets import KNOWN, Target

Progress = Callable[[int, int], None]

# Progress is told this often, whether or not there is any.
PATIENCE_S = 0.5


class CompileError(Exception):
    """Binaries that would not compile, by name."""


@dataclass(frozen=True)
class Compiled:
    """What a run of `precompile` did.

    Attributes:
        num_variants: Binaries of the target.
        compiled: Of them, those that were not in the cache, by op.
        cache: The folder that holds them.
    """

    num_variants: int
    compiled: Counter[str]
    cache: Path

    @property
    def num_compiled(self) -> int:
        """Binaries that were not in the cache."""
        return self.compiled.total()


def parse_target(text: str) -> Target:
    """Reads `cuda:90` or `hip:gfx942`, or the name of a known device.

    Raises:
        ValueError: It names no device that there are configurations for.
    """
    for target in KNOWN.values():
        if text in (target.name, f"{target.backend}:{target.arch}"):
            return target
    known = ", ".join(f"{target.backend}:{target.arch}" for target in KNOWN.values())
    raise ValueError(f"target: {text!r} is not one of {known}")


def precompile(target: Target, *, num_workers: int = 0, on_progress: Progress | None = None) -> Compiled:
    """Compile every variant of `target` that the cache (`TRITON_CACHE_DIR`) lacks, and mark the set as complete.

    Args:
        target: need not be present.
        num_workers: processes; 0 for one on each core that this process may use.
        on_progress: called with (done, total), now and then.

    Raises:
        CompileError: some would not compile; the others are in the cache.
    """
    total = len(variants(target))
    workers = min(num_workers or len(os.sched_getaffinity(0)), total)
    failures: list[str] = []
    compiled: Counter[str] = Counter()
    # Spread out, so that the slow ones, which are neighbours, do not meet in one worker at the end.
    waiting = [list(range(total))[first :: workers * 8] for first in range(workers * 8)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        pending: set[Future[tuple[Counter[str], list[str]]]] = {
            pool.submit(_compile_some, target, part) for part in waiting if part
        }
        sizes = len(pending)
        try:
            while pending:
                finished, pending = wait(pending, PATIENCE_S, FIRST_COMPLETED)
                for future in finished:
                    fresh, failed = future.result()
                    compiled += fresh
                    failures += failed
                done = total - total * len(pending) // sizes
                if on_progress is not None:
                    on_progress(done, total)
        except BrokenProcessPool as error:
            raise CompileError("the compiler ended a process; the kernel is in the last lines of its output") from error
        except BaseException:
            # Whoever asked wants no more of it; Python 3.14 has a public call for this.
            for process in list(pool._processes.values()):
                process.kill()
            raise
    if failures:
        raise CompileError("\n".join(failures))
    _mark(target, total)
    return Compiled(total, compiled, Path(knobs.cache.dir))


def is_complete(target: Target) -> bool:
    """Whether the cache says that it holds every variant of `target`, made by this Triton from these sources."""
    return _marker(target).is_file()


def _mark(target: Target, total: int) -> None:
    marker = _marker(target)
    marker.parent.mkdir(parents=True, exist_ok=True)
    part = marker.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"target": asdict(target), "variants": total}))
    part.replace(marker)


def _marker(target: Target) -> Path:
    return Path(knobs.cache.dir) / f"tilewire-{target.name}-{fingerprint(target)[:16]}.json"


def fingerprint(target: Target) -> str:
    """A hash of all that decides what the binaries are: Triton, kernels, configurations, device."""
    digest = hashlib.sha256(f"{triton.__version__} {triton_key()} {target}".encode())
    for variant in variants(target):
        digest.update(f"{variant.kernel.cache_key} {variant.described()}\n".encode())
    return digest.hexdigest()


def _end_with_parent() -> None:
    """In a worker: not to compile on when whoever asked is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "This is a bug."

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()


def _compile_some(target: Target, numbers: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """In a worker: what was compiled anew, by op, and what failed."""
    fresh: Counter[str] = Counter()
    failures = []
    on_compile(lambda op: fresh.update([op]))
    for number in numbers:
        variant = variants(target)[number]
        try:
            compiled = variant.compile(target)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is reported with the variant's name
            failures.append(f"{variant.described()}: {type(error).__name__}: {str(error)[:500]}")
            continue
        if compiled.metadata.shared > target.shared_bytes:
            failures.append(f"{variant.described()}: {compiled.metadata.shared} bytes of shared memory")
    return fresh, failures
