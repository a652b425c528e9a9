"""Timing configurations of any op on this GPU. Implements `kernels.autotune.halving.Bench`; imports no op.

For one thread, on the current device.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence

import torch

from tilewire.kernels.autotune.measuring import measure, sets_beyond_l2
from tilewire.kernels.op import Call, Config, Operands, Shape
from tilewire.kernels.registry import kernel_op

_MAX_SETS = 16
# Filled before a single call, the device is busy for as long as the host needs to launch it.
_FILLER_BYTES = 512 << 20
_logger = logging.getLogger(__name__)


def operands_of(shape: Shape, num_sets: int, device: str = "cuda") -> Operands:
    """Operand sets for `shape`."""
    make = kernel_op(shape.op).operands
    assert make is not None, "This is a bug."
    return make(shape, num_sets, torch.Generator(device).manual_seed(1))


class GpuBench:
    """Times configurations on the current GPU, over enough operand sets that reads come from memory."""

    def __init__(self) -> None:
        # Operands of the last shape only: they may fill much of the device.
        self._of = functools.lru_cache(maxsize=1)(_rotating)
        # One for everything: scratch memory stays with a stream.
        self._stream = torch.cuda.Stream()
        self._filler = torch.empty(_FILLER_BYTES, dtype=torch.uint8, device="cuda")

    def once_us(self, shape: Shape, configs: Sequence[Config]) -> list[float]:
        """As `Bench` says: the second of two calls, between events, all queued while the device is busy."""
        subject = self._of(shape)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            events = [self._once(subject.call(config), subject.num_sets) for config in configs]
        torch.cuda.synchronize()
        return [pair[0].elapsed_time(pair[1]) * 1000 if pair else math.inf for pair in events]

    def _once(self, call: Call | None, num_sets: int) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if call is None:
            return None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            self._filler.zero_()
            call(0)
            begin.record()
            call(1 % num_sets)
            end.record()
        except RuntimeError as error:
            # Programs that must all run at once may not fit; nothing was launched then.
            _logger.warning("a launch failed: %s", error)
            return None
        return begin, end

    def in_turns_us(self, shape: Shape, configs: Sequence[Config], rounds: int) -> list[float]:
        """As `Bench` says: medians over graphs of many calls."""
        subject = self._of(shape)
        calls = {str(number): subject.call(config) for number, config in enumerate(configs)}
        running = {name: call for name, call in calls.items() if call is not None}
        timings = measure(running, subject.num_sets, rounds, self._stream) if running else {}
        return [timings[name].p50_us if name in timings else math.inf for name in calls]

    def vendors(self, shape: Shape) -> list[str]:
        """Names of what others have for `shape` and can run: contestants like configurations."""
        subject = self._of(shape)
        return [name for name in subject.others if subject.runs(name)]

    def errors(self, shape: Shape, configs: Sequence[Config]) -> dict[Config, float]:
        """Relative error of each configuration's output, over poisoned memory; nothing where something follows the op."""
        subject = self._of(shape)
        with torch.cuda.stream(self._stream):
            found = {config: error for config in configs if (error := subject.error(config)) is not None}
            values = torch.stack(list(found.values())).tolist() if found else []
        return dict(zip(found, values, strict=True))


class _Subject:
    """A shape on the device: its operand sets, and what was prepared for its configurations."""

    def __init__(self, shape: Shape, num_sets: int) -> None:
        self.num_sets = num_sets
        self._operands = operands_of(shape, num_sets)
        self._calls: dict[Config, Call | None] = {}
        self.others = self._operands.vendors()
        self._calls |= self.others

    def runs(self, name: str) -> bool:
        """Whether the function of another library takes the shape."""
        try:
            self.others[name](0)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever it is only costs this contestant
            _logger.warning("%s: %s", name, str(error).splitlines()[0])
            return False
        return True

    def error(self, config: Config) -> torch.Tensor | None:
        """Relative error of a configuration on the first set; on the device."""
        call = self.call(config)
        if call is None:
            return None
        self._operands.poison()
        call(0)
        return self._operands.error()

    def call(self, config: Config) -> Call | None:
        """Returns a call that launches `config` on a set; None when it cannot."""
        if config not in self._calls:
            try:
                self._calls[config] = self._operands.launcher(config)
            except Exception as error:  # noqa: BLE001 - whatever it is only costs this configuration
                _logger.warning("%s cannot be launched: %s", config, error)
                self._calls[config] = None
        return self._calls[config]


def _rotating(shape: Shape) -> _Subject:
    return _Subject(shape, sets_beyond_l2(shape.num_bytes, _MAX_SETS))
