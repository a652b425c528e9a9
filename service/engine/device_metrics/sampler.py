"""Samples a meter about once a second and shows what it reads in `/metrics`, also under the names that Triton gives it.

A thread of its own in the engine process: reading a device can take milliseconds, which no job should wait for.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from operator import attrgetter

from tilewire.service.engine.device_metrics.contract import Meter, NoMeter, Reading
from tilewire.service.telemetry.counters import Gauge, Labels, MetricSet, Sink

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class DeviceGauges:
    """The gauges of one device.

    Its UUID is the only label of those with Triton's names, for load generators that parse them by that.
    """

    def __init__(self, sink: Sink, device: str, uuid: str) -> None:
        self._metrics = metrics = MetricSet(sink)

        def gauge(name: str, text: str, label: str = "device", *more: str) -> Gauge:
            # One engine reports a device: the largest value among live ones is its own.
            return metrics.gauge(name, text, (label, *more), merge="max")

        memory = gauge("tilewire_device_memory_bytes", "Memory of the device.", "device", "state")
        power = gauge("tilewire_device_power_watts", "Power that the device draws.")
        temperature = gauge("tilewire_device_temperature_celsius", "Temperature of the device.")
        utilization = gauge("tilewire_device_utilization_ratio", "Part of the time in which a kernel ran.")
        self._series: list[tuple[Gauge, Labels, Callable[[Reading], float | None]]] = [
            (memory, (device, "used"), attrgetter("memory_used_bytes")),
            (memory, (device, "free"), _free_bytes),
            (power, (device,), attrgetter("power_watts")),
            (temperature, (device,), attrgetter("temperature_celsius")),
            (utilization, (device,), attrgetter("utilization_ratio")),
        ]
        for name, text, field in (
            ("nv_gpu_utilization", "Part of the time in which a kernel ran.", "utilization_ratio"),
            ("nv_gpu_memory_total_bytes", "Memory of the device.", "memory_total_bytes"),
            ("nv_gpu_memory_used_bytes", "Memory of the device that is in use.", "memory_used_bytes"),
            ("nv_gpu_power_usage", "Power that the device draws, in watts.", "power_watts"),
        ):
            self._series.append((gauge(name, text, "gpu_uuid"), (uuid,), attrgetter(field)))
        self._shown: set[tuple[Gauge, Labels]] = set()

    def show(self, reading: Reading) -> None:
        """Sets the gauges; a value that the device never reported does not appear, one that it no longer reports is NaN."""
        for gauge, labels, value_of in self._series:
            value = value_of(reading)
            if value is not None:
                self._shown.add((gauge, labels))
            elif (gauge, labels) not in self._shown:
                continue
            gauge.set(labels, math.nan if value is None else value)
        self._metrics.flush()


def _free_bytes(reading: Reading) -> float | None:
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    return None if total is None or used is None else total - used


class Sampler:
    """Reads a meter until it is stopped; the sink is called by its own thread."""

    def __init__(self, sink: Sink, device: str, meter: Meter, period_s: float = PERIOD_S) -> None:
        self._meter = meter
        self._gauges = DeviceGauges(sink, device, meter.uuid)
        self._period_s = period_s
        self._stopping = threading.Event()
        # A driver that hangs must not hold up the engine's end.
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the reading under way."""
        self._stopping.set()
        self._thread.join(self._period_s)

    def _run(self) -> None:
        is_readable = True
        while True:
            try:
                self._gauges.show(self._meter.read())
                is_readable = True
            except NoMeter as error:
                self._gauges.show(Reading())
                if is_readable:
                    logger.warning("the device's metrics cannot be read: %s", error)
                is_readable = False
            if self._stopping.wait(self._period_s):
                return
