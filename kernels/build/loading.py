"""Loads every binary of a target onto the device before it is needed, from the cache that `precompile` fills.

Loaded binaries stay; a launch finds them there without Triton or the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace

import torch
from triton import knobs

from tilewire.kernels.build.precompile import Image, images_of
from tilewire.kernels.runtime.launch import Loaded, Variant, load, load_image
from tilewire.kernels.runtime.targets import Target, is_interpreting
from tilewire.kernels.selection.catalogue import variants

NUM_THREADS = 4


def load_all(
    target: Target, device_index: int, on_progress: Callable[[int, int], None] | None = None
) -> dict[Variant, Loaded]:
    """Load every variant of `target`. Where `precompile` has not been, each is looked up, or compiled, one after the other.

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
    images = images_of(target) if target.backend == "cuda" else None
    parts = [wanted[first : first + 16] for first in range(0, len(wanted), 16)]
    loaded: dict[Variant, Loaded] = {}
    # The driver's part of loading runs beside Python's of the next.
    with ThreadPoolExecutor(NUM_THREADS, initializer=_enter, initargs=(device_index,)) as pool:
        pending = [pool.submit(_load_some, part, images or {}, target, device_index) for part in parts]
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


def _load_some(
    part: tuple[Variant, ...], images: Mapping[Variant, Image], target: Target, device_index: int
) -> dict[Variant, Loaded]:
    return {variant: _load(variant, images.get(variant), target, device_index) for variant in part}


def _load(variant: Variant, image: Image | None, target: Target, device_index: int) -> Loaded:
    """From its file, which spares Triton's look-up; by Triton when that is gone."""
    if image is not None:
        try:
            cubin = (Path(knobs.cache.dir) / image.file).read_bytes()
        except OSError:
            return load(variant, target, device_index)
        return load_image(variant, target, device_index, cubin, SimpleNamespace(**image.metadata))
    return load(variant, target, device_index)
