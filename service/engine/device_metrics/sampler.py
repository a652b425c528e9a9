"""Samples a meter about once a second and shows what it reads in `/metrics`, also under the names that Triton gives it.

A thread of its own in the engine process: reading a device can take milliseconds, which no job should wait for.
"""

from __future__ import annotations

import logging
import math
import threading

from tilewire.service.engine.device_metrics.contract import Meter, NoMeter, Reading
from tilewire.service.telemetry.counters import Gauge, MetricSet, Sink

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class DeviceGauges:
    """The gauges of one device.

    Args:
        sink: Receiver of figures.
        device: As torch calls it.
        uuid: As its maker's tools call it; the only label of the aliases, for load generators that parse them by that.
    """

    def __init__(self, sink: Sink, device: str, uuid: str) -> None:
        self._device, self._uuid = device, uuid
        self._metrics = metrics = MetricSet(sink)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ("device",)) -> Gauge:
            # One engine reports a device: the largest value among live ones is its own.
            return metrics.gauge(name, text, labels, merge="max")

        self._memory = gauge("tilewire_device_memory_bytes", "Memory of the device.", ("device", "state"))
        self._power = gauge("tilewire_device_power_watts", "Power that the device draws.")
        self._temperature = gauge("tilewire_device_temperature_celsius", "Temperature of the device.")
        self._utilization = gauge("tilewire_device_utilization_ratio", "Part of the time in which a kernel ran.")
        self._aliases = {
            name: gauge(name, text, ("gpu_uuid",))
            for name, text in (
                ("nv_gpu_utilization", "Part of the time in which a kernel ran."),
                ("nv_gpu_memory_total_bytes", "Memory of the device."),
                ("nv_gpu_memory_used_bytes", "Memory of the device that is in use."),
                ("nv_gpu_power_usage", "Power that the device draws, in watts."),
            )
        }
        self._shown: set[tuple[Gauge, tuple[str, ...]]] = set()

    def show(self, reading: Reading) -> None:
        """Sets the gauges; a value that the device never reported does not appear, one that it no longer reports is NaN."""
        used, total = reading.memory_used_bytes, reading.memory_total_bytes
        self._set(self._memory, (self._device, "used"), used)
        self._set(
            self._memory, (self._device, "free"), total - used if total is not None and used is not None else None
        )
        self._set(self._power, (self._device,), reading.power_watts)
        self._set(self._temperature, (self._device,), reading.temperature_celsius)
        self._set(self._utilization, (self._device,), reading.utilization_ratio)
        for name, value in (
            ("nv_gpu_utilization", reading.utilization_ratio),
            ("nv_gpu_memory_total_bytes", total),
            ("nv_gpu_memory_used_bytes", used),
            ("nv_gpu_power_usage", reading.power_watts),
        ):
            self._set(self._aliases[name], (self._uuid,), value)
        self._metrics.flush()

    def _set(self, gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
        if value is not None:
            self._shown.add((gauge, labels))
        elif (gauge, labels) not in self._shown:
            return
        gauge.set(labels, math.nan if value is None else value)


class Sampler:
    """Reads a meter until it is stopped.

    Args:
        sink: Receiver of figures; called by the sampler's own thread.
        device: As torch calls it.
        meter: Meter of that device.
        period_s: From reading to reading.
    """

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
