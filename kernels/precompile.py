"""Compiling every binary of a target into Triton's disk cache, in parallel and without the device. Launches nothing.

Workers are fresh processes: LLVM keeps one AMD architecture a process, a crash of the compiler takes a worker and not its
caller, and a process that holds a GPU is never forked.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.runtime.cache import triton_key

from kernels.catalogue import variants
from kernels.targets import KNOWN, Target

Progress = Callable[[int, int], None]


class CompileError(Exception):
    """Binaries that would not compile, by name."""


@dataclass(frozen=True)
class Compiled:
    """What a run of `precompile` did.

    Attributes:
        num_variants: Binaries of the target.
        num_compiled: Of them, those that were not in the cache.
        cache: The folder that holds them.
    """

    num_variants: int
    num_compiled: int
    cache: Path


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
        on_progress: called with (done, total) as binaries are done.

    Raises:
        CompileError: some would not compile; the others are in the cache.
    """
    total = len(variants(target))
    workers = min(num_workers or len(os.sched_getaffinity(0)), total)
    done, failures, num_compiled = 0, [], 0
    # Spread out, so that the slow ones, which are neighbours, do not meet in one worker at the end.
    waiting = [list(range(total))[first :: workers * 8] for first in range(workers * 8)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending: set[Future[tuple[int, list[str]]]] = {
            pool.submit(_compile_some, target, part) for part in waiting if part
        }
        sizes = len(pending)
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    fresh, failed = future.result()
                    num_compiled += fresh
                    failures += failed
                done = total - total * len(pending) // sizes
                if on_progress is not None:
                    on_progress(done, total)
        except BrokenProcessPool as error:
            raise CompileError("the compiler ended a process; the kernel is in the last lines of its output") from error
    if failures:
        raise CompileError("\n".join(failures))
    _marker(target).parent.mkdir(parents=True, exist_ok=True)
    _marker(target).write_text(json.dumps({"target": asdict(target), "variants": total}))
    return Compiled(total, num_compiled, Path(knobs.cache.dir))


def is_complete(target: Target) -> bool:
    """Whether the cache says that it holds every variant of `target`, made by this Triton from these sources."""
    return _marker(target).is_file()


def _marker(target: Target) -> Path:
    return Path(knobs.cache.dir) / f"tilewire-{target.name}-{fingerprint(target)[:16]}.json"


def fingerprint(target: Target) -> str:
    """A hash of all that decides what the binaries are: Triton, kernels, configurations, device."""
    digest = hashlib.sha256(f"{triton.__version__} {triton_key()} {target}".encode())
    for variant in variants(target):
        digest.update(f"{variant.kernel.cache_key} {variant.described()}\n".encode())
    return digest.hexdigest()


def _compile_some(target: Target, numbers: Sequence[int]) -> tuple[int, list[str]]:
    """In a worker: how many were compiled anew, and what failed."""
    fresh = 0
    failures = []

    def listen(*, cache_hit: bool, **_rest: object) -> None:
        nonlocal fresh
        fresh += not cache_hit

    knobs.compilation.listener = listen
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
