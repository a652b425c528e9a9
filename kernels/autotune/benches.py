"""Timing configurations of any op on this GPU: operands for a workload, launchers for its configurations.

Implements `kernels.autotune.racing.Bench`. Knows what is asked, not why. For one thread, on the current device.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from tilewire.kernels.add.configs import Config as AddConfig
from tilewire.kernels.add.op import prepare as prepare_add
from tilewire.kernels.autotune.measuring import Call, measure, sets_beyond_l2
from tilewire.kernels.autotune.testing import random_operand
from tilewire.kernels.autotune.workloads import Config, Product, Rows, Sum, Workload
from tilewire.kernels.matmul.configs import Config as MatmulConfig
from tilewire.kernels.matmul.plan import Epilogue
from tilewire.kernels.matmul.plan import prepare as prepare_matmul
from tilewire.kernels.matmul.view import Extent
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig
from tilewire.kernels.softmax.op import prepare as prepare_softmax

_MAX_SETS = 16
_logger = logging.getLogger(__name__)
_Prepare: TypeAlias = Callable[[Config | None], Call]


class GpuBench:
    """Times configurations on the current GPU, over enough operand sets that reads come from memory."""

    def __init__(self) -> None:
        # Operands of the last workload only: they may fill much of the device.
        self._of = functools.lru_cache(maxsize=1)(_rotating)
        # One for everything: scratch memory stays with a stream.
        self._stream = torch.cuda.Stream()

    def once_us(self, workload: Workload, configs: Sequence[Config]) -> list[float]:
        """As `Bench` says: the second of two calls, between events."""
        subject = self._of(workload)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            events = [_once(subject.call(config), subject.num_sets) for config in configs]
        torch.cuda.synchronize()
        return [pair[0].elapsed_time(pair[1]) * 1000 if pair else math.inf for pair in events]

    def in_turns_us(self, workload: Workload, configs: Sequence[Config], rounds: int) -> list[float]:
        """As `Bench` says: medians over graphs of many calls."""
        subject = self._of(workload)
        calls = {str(number): subject.call(config) for number, config in enumerate(configs)}
        running = {name: call for name, call in calls.items() if call is not None}
        timings = measure(running, subject.num_sets, rounds, self._stream) if running else {}
        return [timings[name].p50_us if name in timings else math.inf for name in calls]

    def hot_us(self, workload: Workload, config: Config) -> float:
        """As `Bench` says: over one operand set."""
        call = _Subject(workload, 1).call(config)
        return math.inf if call is None else measure({"it": call}, rounds=7, stream=self._stream)["it"].p50_us


def _once(call: Call | None, num_sets: int) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if call is None:
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        call(0)
    except RuntimeError as error:
        # Programs that must all run at once may not fit; nothing was launched then.
        _logger.warning("a launch failed: %s", error)
        return None
    begin.record()
    call(1 % num_sets)
    end.record()
    return begin, end


class _Subject:
    """A workload on the device: its operand sets, and what was prepared for its configurations."""

    def __init__(self, workload: Workload, num_sets: int) -> None:
        self.num_sets = num_sets
        self._prepare = prepare(workload, num_sets)
        self._calls: dict[Config, Call | None] = {}

    def call(self, config: Config) -> Call | None:
        """What launches `config` on a set; None when it cannot be."""
        if config not in self._calls:
            try:
                self._calls[config] = self._prepare(config)
            except Exception as error:  # noqa: BLE001 - whatever it is only costs this configuration
                _logger.warning("%s cannot be launched: %s", config, error)
                self._calls[config] = None
        return self._calls[config]


def _rotating(workload: Workload) -> _Subject:
    return _Subject(workload, sets_beyond_l2(workload.num_bytes, _MAX_SETS))


def prepare(workload: Workload, num_sets: int, device: str = "cuda") -> _Prepare:
    """Operand sets for `workload`; what gives a launcher over them, for a configuration or for what `choose` gives."""
    generator = torch.Generator(device).manual_seed(1)
    if isinstance(workload, Product):
        return _product(workload, num_sets, generator)
    if isinstance(workload, Rows):
        return _rows(workload, num_sets, generator)
    return _sum(workload, num_sets, generator)


def _placed(extent: Extent, dtype: str, generator: torch.Generator) -> torch.Tensor:
    values = random_operand(extent.shape, getattr(torch, dtype), generator)
    return _empty(extent, dtype, generator).copy_(values)


def _empty(extent: Extent, dtype: str, generator: torch.Generator) -> torch.Tensor:
    return torch.empty_strided(extent.shape, extent.strides, dtype=getattr(torch, dtype), device=generator.device)


def _product(workload: Product, num_sets: int, generator: torch.Generator) -> _Prepare:
    of_a, of_b, of_out = workload.extents
    sets = [
        (
            _placed(of_a, workload.dtype, generator),
            _placed(of_b, workload.dtype, generator),
            _empty(of_out, workload.stored_dtype, generator),
        )
        for _ in range(num_sets)
    ]
    epilogue = Epilogue()
    if not workload.is_plain:
        bias_dtype = torch.int32 if workload.stored_dtype == "int32" else torch.float32
        bias = torch.ones(workload.n, dtype=bias_dtype, device=generator.device)
        epilogue = Epilogue(bias, activation=workload.activation)

    def make(config: Config | None) -> Call:
        assert config is None or isinstance(config, MatmulConfig), "This is a bug."
        prepared = prepare_matmul(*sets[0], epilogue, workload.precision, config)
        assert prepared is not None, "This is a bug."
        return lambda index: prepared(*sets[index], epilogue.bias, None, None)

    return make


def _rows(workload: Rows, num_sets: int, generator: torch.Generator) -> _Prepare:
    sets = [
        (
            _placed(workload.extent, workload.dtype, generator),
            _empty(workload.extent, workload.stored_dtype, generator),
        )
        for _ in range(num_sets)
    ]

    def make(config: Config | None) -> Call:
        assert config is None or isinstance(config, SoftmaxConfig), "This is a bug."
        prepared = prepare_softmax(*sets[0], config=config)
        assert prepared is not None, "This is a bug."
        return lambda index: prepared(*sets[index])

    return make


def _sum(workload: Sum, num_sets: int, generator: torch.Generator) -> _Prepare:
    dtype = getattr(torch, workload.dtype)
    shape = (workload.rows, workload.n)
    b_shape = shape if workload.b_shape == "full" else (workload.n,)

    def values(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).mul_(100).to(dtype)

    sets = [(values(shape), values(b_shape), values(shape)) for _ in range(num_sets)]

    def make(config: Config | None) -> Call:
        assert config is None or isinstance(config, AddConfig), "This is a bug."
        prepared = prepare_add(*sets[0], config=config)
        assert prepared is not None, "This is a bug."
        return lambda index: prepared(*sets[index])

    return make
