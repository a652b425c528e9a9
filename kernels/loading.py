"""Bringing every binary of a target onto the device before it is needed, and hearing of those that were compiled. Knows no op.

What was loaded stays; a launch finds it there without asking Triton or the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from triton import knobs

from kernels.catalogue import op_named, variants
from kernels.launching import Loaded, Variant, load
from kernels.targets import Target, is_interpreting

NUM_THREADS = 4


def load_all(
    target: Target, device_index: int, on_progress: Callable[[int, int], None] | None = None
) -> dict[Variant, Loaded]:
    """Load every variant of `target`; what Triton's disk cache lacks is compiled on the way, one after the other.

    Args:
        target: of the device.
        device_index: the GPU.
        on_progress: called with (done, total) now and then, from the calling thread.

    Returns:
        All of them; empty where kernels are interpreted and there is nothing to load.

    Raises:
        RuntimeError: the driver refuses one.
    """
    if is_interpreting():
        return {}
    wanted = variants(target)
    parts = [wanted[first : first + 16] for first in range(0, len(wanted), 16)]
    loaded: dict[Variant, Loaded] = {}
    # The driver's part of loading runs beside Python's of the next.
    with ThreadPoolExecutor(NUM_THREADS, initializer=_enter, initargs=(device_index,)) as pool:
        pending = [pool.submit(_load_some, part, target, device_index) for part in parts]
        try:
            for future in as_completed(pending):
                loaded |= future.result()
                if on_progress is not None:
                    on_progress(len(loaded), len(wanted))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return loaded


def _enter(device_index: int) -> None:
    """Make the device's context this thread's."""
    torch.cuda.set_device(device_index)
    torch.cuda.synchronize()


def _load_some(part: tuple[Variant, ...], target: Target, device_index: int) -> dict[Variant, Loaded]:
    return {variant: load(variant, target, device_index) for variant in part}


def on_compile(hook: Callable[[str], None]) -> None:
    """Have `hook` called with the op of each binary that Triton compiles in this process from now on.

    Those that its disk cache has are not compiled. What `hook` raises reaches whoever asked for the binary.
    """

    def listen(*, src: Any, cache_hit: bool, **_rest: object) -> None:
        if not cache_hit:
            hook(op_named(src.name))

    knobs.compilation.listener = listen
