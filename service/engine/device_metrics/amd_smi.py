"""Reads an AMD device through AMD SMI, which comes with ROCm."""

from __future__ import annotations

from collections.abc import Callable

import amdsmi

from tilewire.service.engine.device_metrics.contract import Address, NoMeter, Reading

MEGABYTE = 2**20


class AmdSmiMeter:
    """One device; see `contract.Meter`.

    Raises:
        NoMeter: No driver, or no such device.
    """

    def __init__(self, address: Address) -> None:
        try:
            amdsmi.amdsmi_init()
            self._handle = amdsmi.amdsmi_get_processor_handle_from_bdf(address.bus_id)
            self.uuid = str(amdsmi.amdsmi_get_gpu_device_uuid(self._handle))
        except amdsmi.AmdSmiException as error:
            raise NoMeter(f"AMD SMI: {error}") from None

    def read(self) -> Reading:
        errors: list[Exception] = []

        def value_or_none(read: Callable[[], object]) -> float | None:
            """The answer, or None where this device does not report it: it says "N/A" then, or fails."""
            try:
                value = read()
            except (amdsmi.AmdSmiException, KeyError) as error:
                errors.append(error)
                return None
            return float(value) if isinstance(value, int | float) else None

        used = value_or_none(lambda: amdsmi.amdsmi_get_gpu_vram_usage(self._handle)["vram_used"])
        total = value_or_none(lambda: amdsmi.amdsmi_get_gpu_vram_usage(self._handle)["vram_total"])
        watts = value_or_none(lambda: amdsmi.amdsmi_get_power_info(self._handle)["average_socket_power"])
        if watts is None:
            watts = value_or_none(lambda: amdsmi.amdsmi_get_power_info(self._handle)["current_socket_power"])
        percent = value_or_none(lambda: amdsmi.amdsmi_get_gpu_activity(self._handle)["gfx_activity"])
        reading = Reading(
            memory_used_bytes=int(used * MEGABYTE) if used is not None else None,
            memory_total_bytes=int(total * MEGABYTE) if total is not None else None,
            power_watts=watts,
            temperature_celsius=value_or_none(self._celsius),
            utilization_ratio=percent / 100 if percent is not None else None,
        )
        # Releases number their errors differently. A device that reports something is there; one that reports nothing is not.
        if reading == Reading() and errors:
            raise NoMeter(f"AMD SMI: {errors[-1]}")
        return reading

    def _celsius(self) -> object:
        return amdsmi.amdsmi_get_temp_metric(
            self._handle, amdsmi.AmdSmiTemperatureType.JUNCTION, amdsmi.AmdSmiTemperatureMetric.CURRENT
        )
