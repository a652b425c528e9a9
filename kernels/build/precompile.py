"""Compiling every binary of a target into Triton's disk cache, in parallel and without the device. Launches nothing.

Workers are processes forked from one that has imported their needs and nothing else, for three reasons:

- LLVM keeps one AMD architecture a process.
- A crash of the compiler takes a worker and not its caller.
- A process that holds a GPU is never forked.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from tilewire.kernels.build.workers import end_with_parent, fork_server
from tilewire.kernels.runtime.launch import Variant, key_of, on_compile
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.catalogue import op_named, variants
from tilewire.kernels.selection.tables import write_atomically

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

# Progress is reported this often, whether or not there is any.
PROGRESS_PERIOD_S = 0.5
PARTS_OF_WORKER = 32
# Memory of a worker from which on it frees what compilations leave: 1.3 MB each. A sixteenth of a catalogue stays below.
MAX_WORKER_BYTES = 768 * 2**20


class CompileError(Exception):
    """Binaries that would not compile, by name."""


@dataclass(frozen=True)
class Compiled:
    """Result of a run of `precompile`.

    Attributes:
        num_variants: Binaries of the target.
        compiled: Number of binaries that were not in the cache, by op.
        cache: The folder that holds them.
    """

    num_variants: int
    compiled: Counter[str]
    cache: Path


@dataclass(frozen=True)
class Image:
    """One binary in the cache.

    Attributes:
        file: its path in the folder of the cache.
        metadata: what of Triton's metadata loading and launching need.
    """

    file: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Result of a worker: binaries compiled anew, by op; failures, in words; images by number of their variant."""

    fresh: Counter[str]
    failures: list[str]
    images: dict[int, Image]


_IMAGES = {".cubin", ".hsaco"}
_METADATA = (
    *("name", "shared", "num_warps", "num_ctas", "global_scratch_size", "profile_scratch_size"),
    *("tensordesc_meta", "launch_cooperative_grid", "launch_pdl"),
)


def precompile(
    target: Target, *, num_workers: int = 0, begin: float = 0.0, on_progress: Progress | None = None
) -> Compiled:
    """Compile every variant of `target` that the cache (`TRITON_CACHE_DIR`) lacks, and mark the set as complete.

    Args:
        target: need not be present.
        num_workers: processes; 0 for one on each core that this process may use.
        begin: place in the list to begin at, from 0 to 1. Engines that start at a time with the same cache share the work
            where each has its own: what one has compiled the other finds.
        on_progress: called with (done, total), now and then.

    Raises:
        CompileError: some would not compile; the others are in the cache.
    """
    total = len(variants(target))
    workers = min(num_workers or len(os.sched_getaffinity(0)), total)
    failures: list[str] = []
    compiled: Counter[str] = Counter()
    images: dict[int, Image] = {}
    waiting = deal_out(total, workers * PARTS_OF_WORKER, begin)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with fork_server(), ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        pending: set[Future[Part]] = {pool.submit(_compile_some, target, part) for part in waiting}
        sizes = len(pending)
        try:
            while pending:
                finished, pending = wait(pending, PROGRESS_PERIOD_S, FIRST_COMPLETED)
                for future in finished:
                    part = future.result()
                    compiled += part.fresh
                    failures += part.failures
                    images |= part.images
                done = total - total * len(pending) // sizes
                if on_progress is not None:
                    on_progress(done, total)
        except BrokenProcessPool as error:
            raise CompileError("the compiler ended a process; the kernel is in the last lines of its output") from error
        except BaseException:
            # The caller needs no more of it; Python 3.14 has a public call for this.
            for process in list(pool._processes.values()):
                process.kill()
            raise
    if failures:
        raise CompileError("\n".join(failures))
    _mark(target, [images[number] for number in range(total)])
    return Compiled(total, compiled, Path(knobs.cache.dir))


def deal_out(total: int, num_parts: int, begin: float) -> list[list[int]]:
    """The numbers below `total` in parts, in the order in which they are compiled."""
    # Spread out, so that the slow ones, which are neighbours, do not meet in one worker. Few at a time, so that none is
    # left with many when the others are done.
    parts = [part for first in range(num_parts) if (part := list(range(first, total, num_parts)))]
    place = int(begin * len(parts))
    return parts[place:] + parts[:place]


def images_of(target: Target) -> dict[Variant, Image] | None:
    """The binary of every variant of `target`, where the cache has them all, made by this Triton from these sources.

    None where it does not say so, or says what cannot be right.
    """
    marker = _marker(target)
    try:
        entries = json.loads(marker.read_text())["images"]
        images = [Image(entry["file"], entry["metadata"]) for entry in entries]
        return dict(zip(variants(target), images, strict=True))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s is ignored: %s", marker, error)
        return None


def _mark(target: Target, images: Sequence[Image]) -> None:
    marker = _marker(target)
    marker.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"target": asdict(target), "images": [asdict(image) for image in images]})
    write_atomically(marker, text)


def _marker(target: Target) -> Path:
    return Path(knobs.cache.dir) / f"tilewire-{target.chip}-{fingerprint(target)[:16]}.json"


def fingerprint(target: Target) -> str:
    """A hash of all that decides what the binaries are: Triton, kernels, configurations, device."""
    facts = (target.backend, target.arch, target.warp_size, target.num_sms, target.shared_bytes)
    digest = hashlib.sha256(f"{triton.__version__} {facts}\n".encode())
    digest.update(_triton_files())
    for variant in variants(target):
        digest.update(f"{key_of(variant.kernel)} {variant.described()}\n".encode())
    return digest.hexdigest()


def _triton_files() -> bytes:
    """Which build of Triton this is, by the sizes of its files: hashing them, as its own cache does, takes half a second."""
    root = Path(triton.__file__).parent
    files = sorted(path for pattern in ("*.py", "*.so") for path in root.rglob(pattern))
    return "\n".join(f"{path.relative_to(root)} {path.stat().st_size}" for path in files).encode()


def _begin_worker() -> None:
    end_with_parent()
    # Looking for garbage, and freeing the compiler's contexts, is a seventh of all work.
    gc.freeze()
    gc.disable()


def _resident_bytes() -> int:
    """Memory of this process."""
    _size, pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _compile_some(target: Target, numbers: Sequence[int]) -> Part:
    """In a worker."""
    if not gc.isenabled() and _resident_bytes() > MAX_WORKER_BYTES:
        # What there is stays until the end: freeing it late takes longer than at once.
        gc.freeze()
        gc.enable()
    part = Part(Counter(), [], {})
    on_compile(lambda kernel: part.fresh.update([op_named(kernel)]))
    for number in numbers:
        variant = variants(target)[number]
        try:
            compiled = variant.compile(target)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is reported with the variant's name
            part.failures.append(f"{variant.described()}: {type(error).__name__}: {str(error)[:500]}")
            continue
        if compiled.metadata.shared > target.shared_bytes:
            part.failures.append(f"{variant.described()}: {compiled.metadata.shared} bytes of shared memory")
        part.images[number] = _image_of(compiled)
    return part


def _image_of(compiled: Any) -> Image:
    path = next(path for path in map(Path, compiled.metadata_group.values()) if path.suffix in _IMAGES)
    metadata = {name: getattr(compiled.metadata, name, None) for name in _METADATA}
    return Image(str(path.relative_to(knobs.cache.dir)), metadata)
