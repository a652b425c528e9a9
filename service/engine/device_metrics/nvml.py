"""Reads an NVIDIA device through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pynvml

from tilewire.service.engine.device_metrics.contract import Address, NoMeter, Reading

ValueT = TypeVar("ValueT")


class NvmlMeter:
    """One device; see `contract.Meter`.

    Raises:
        NoMeter: No driver, or no such device.
    """

    def __init__(self, address: Address) -> None:
        try:
            pynvml.nvmlInit()
            self._handle = _find(address)
            self.uuid = str(pynvml.nvmlDeviceGetUUID(self._handle))
        except pynvml.NVMLError as error:
            raise NoMeter(f"NVML: {error}") from None

    def read(self) -> Reading:
        try:
            memory = _value_or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(self._handle))
            power_mw = _value_or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle))
            celsius = _value_or_none(lambda: pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU))
            percent = _value_or_none(lambda: pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except pynvml.NVMLError as error:
            raise NoMeter(f"NVML: {error}") from None
        return Reading(
            memory_used_bytes=int(memory.used) if memory is not None else None,
            memory_total_bytes=int(memory.total) if memory is not None else None,
            power_watts=power_mw / 1e3 if power_mw is not None else None,
            temperature_celsius=float(celsius) if celsius is not None else None,
            utilization_ratio=percent / 100 if percent is not None else None,
        )


def _find(address: Address) -> object:
    """By UUID; a part of a device (MIG) has another prefix, and then the bus names its whole."""
    for prefix in ("GPU-", "MIG-"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"{prefix}{address.uuid}")
        except pynvml.NVMLError:
            continue
    return pynvml.nvmlDeviceGetHandleByPciBusId(address.bus_id)


def _value_or_none(read: Callable[[], ValueT]) -> ValueT | None:
    """The answer, or None where this device does not report it."""
    try:
        return read()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return None
