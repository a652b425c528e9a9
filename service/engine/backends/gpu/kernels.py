"""Which kernels the GPU backend has: bringing them onto the device before it serves, and describing them.

Owns the stages compile, load and run. Runs in the engine's loop thread, with helpers while it loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from triton import knobs

from tilewire.kernels.build.loading import load_all
from tilewire.kernels.build.precompile import CompileError, images_of, precompile
from tilewire.kernels.build.report import described, roofline, tuned
from tilewire.kernels.build.selftest import self_tests, wrong
from tilewire.kernels.build.tried import keep, note_of, place_of
from tilewire.kernels.matmul.configs import OUT_DTYPES
from tilewire.kernels.matmul.members import is_supported
from tilewire.kernels.op import SelfTest
from tilewire.kernels.registry import KERNEL_OPS
from tilewire.kernels.runtime.launch import Loaded, Variant, on_compile
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.selection.catalogue import op_named, variants
from tilewire.kernels.selection.learned import Learned, install
from tilewire.kernels.selection.racing import GraphTimer, Racer, choices_of, open_on, reader_for
from tilewire.kernels.selection.tables import table_name
from tilewire.service.engine.backends.contract import CannotStart, Identity, LaunchSpec, Preparation, Report, device_of
from tilewire.service.engine.backends.host import dtype_name
from tilewire.service.engine.ops.registry import ENGINE_OPS, check_registries
from tilewire.service.errors import InvalidRequest

logger = logging.getLogger(__name__)

# Self-tests between two reports.
FEW = 64


class DeviceKernels:
    """The catalogue of one device."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None, "This is a bug."
        self._device = device
        self._index = device.index
        self._loaded: Mapping[Variant, Loaded] = {}
        # Thousands, which do not change once they are loaded.
        self._variants: msgspec.Raw | None = None
        self._learned = Learned()
        self._racer: Racer | None = None
        self._refused = frozenset(dtype for dtype in OUT_DTYPES if not is_supported(dtype, self.target))

    def check(self, launch: LaunchSpec) -> None:
        """Refuses what the device has no kernel for.

        Raises:
            InvalidRequest: A product of a dtype that it cannot multiply.
        """
        if not self._refused or not ENGINE_OPS[launch.op.name].multiplies:
            return
        name = launch.op.required[0]
        sources = launch.concatenated.get(name)
        dtype = sources[0][0].type.dtype if sources else dtype_name(launch.resident[name].dtype)
        if dtype in self._refused:
            raise InvalidRequest(f"{name}: {dtype} is not multiplied by {torch.cuda.get_device_name(self._device)}")

    @property
    def target(self) -> Target:
        """Target that the kernels are compiled for."""
        return current(self._index)

    def warm_up(
        self, how: Preparation, stream: torch.cuda.Stream, report: Report, on_each: Callable[[str], None]
    ) -> None:
        """Compiles, loads and tries every kernel, on this stream; see `Backend.warm_up`.

        Raises:
            CannotStart: Why not.
        """
        torch.cuda.set_device(self._device)
        on_compile(lambda kernel: on_each(op_named(kernel)))
        if how.warmup == "none":
            return
        try:
            check_registries({op.name for op in KERNEL_OPS})
            self._compile(report, on_each)
            self._loaded = load_all(self.target, self._index, partial(report, "load"))
            if how.warmup == "run":
                self._try_once(stream, report)
            if how.is_tuned_online:
                self._learn(with_vendor=how.with_vendor)
        except (CompileError, RuntimeError) as error:
            raise CannotStart(str(error)) from error

    def _compile(self, report: Report, on_each: Callable[[str], None]) -> None:
        """In processes of their own, on all cores, unless the cache says that it has everything."""
        if images_of(self.target) is not None:
            return
        begin = (self._device.index or 0) / torch.cuda.device_count()
        done = precompile(self.target, begin=begin, on_progress=partial(report, "compile"))
        for op in done.compiled.elements():
            on_each(op)

    def _try_once(self, stream: torch.cuda.Stream, report: Report) -> None:
        """Tries the kernels, unless this device has passed these bytes before."""
        place = place_of(self._index)
        note = None if place is None else note_of(place, self._loaded, variants(self.target))
        if note is not None and note.exists():
            logger.info("kernels were tried before on this device: %s", note)
            return
        self._try(stream, report)
        if place is not None and note is not None:
            keep(note, place, len(self._loaded))

    def _try(self, stream: torch.cuda.Stream, report: Report) -> None:
        total = len(variants(self.target))
        tried: list[SelfTest] = []
        with torch.cuda.stream(stream):
            for number, trial in enumerate(self_tests(self.target, self._device)):
                tried.append(trial)
                if number % FEW == 0:
                    report("run", number, total)
            failed = wrong(tried)
        report("run", total, total)
        if failed:
            names = "; ".join(variant.described() for variant in failed[:3])
            raise CannotStart(f"{len(failed)} kernels gave a wrong result, among them {names}")

    def _learn(self, *, with_vendor: bool) -> None:
        """Takes over what was learned before, and counts launches from now on."""
        if with_vendor:
            # Sums in float32 for all, as our kernels have them. The first product brings the library.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            torch.mm(*(torch.zeros((16, 16), device=self._device) for _ in range(2)))
        self._learned = learned = Learned(Path(knobs.cache.dir) / f"tilewire-learned-{self.target.chip}.json")
        num_kept = learned.load(reader_for(self.target, with_vendor=with_vendor))
        logger.info("online tuning begins with %d choices", num_kept)
        install(self.target, learned)
        self._racer = Racer(learned, self.target, GraphTimer(), open_on(self._device), with_vendor=with_vendor)

    @property
    def num_learned(self) -> int:
        """Number of choices that were learned since the start."""
        return self._learned.version

    @property
    def is_tuned_online(self) -> bool:
        """Whether `tune` has anything to do."""
        return self._racer is not None

    def tune(self) -> bool:
        """Takes a turn of a race on the current stream. Returns whether there may be more to do."""
        return self._racer is not None and self._racer.step()

    def give_up_race(self) -> None:
        """Frees the memory of the race under way."""
        if self._racer is not None:
            self._racer.give_up()

    def described(self, identity: Identity) -> dict[str, object]:
        """The device's part of `/v1/kernels`."""
        target = self.target
        if self._variants is None:
            self._variants = msgspec.Raw(msgspec.json.encode(described(target, self._loaded)))
        return {
            **device_of(identity),
            "target": f"{target.backend}:{target.arch}",
            "table": table_name(target) or None,
            "roofline": roofline(target),
            "variants": self._variants,
            "tuned": [msgspec.to_builtins(each) for each in tuned(target)],
            "learned": choices_of(self._learned),
        }
