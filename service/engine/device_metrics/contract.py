"""Defines the interface of a meter: power, memory, temperature and utilisation of a device of any vendor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class NoMeter(Exception):
    """The device cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Which device it is, however many are hidden and in whatever order they are counted.

    Attributes:
        uuid: As the driver prints it, without a prefix.
        pci: Domain, bus and device on the PCI bus.
    """

    uuid: str
    pci: tuple[int, int, int]

    @property
    def bus_id(self) -> str:
        """As drivers write it: `0000:c1:00.0`."""
        domain, bus, device = self.pci
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment. None is what this device does not report.

    Attributes:
        memory_used_bytes: Bytes of device memory in use, by any process.
        memory_total_bytes: All of it.
        utilization_ratio: Part of the last moment in which a kernel ran, 0 to 1.
    """

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    utilization_ratio: float | None = None


class Meter(Protocol):
    """Reads one device; a test may put its own here. One thread calls it."""

    @property
    def uuid(self) -> str:
        """Identifier of the device in its vendor's tools."""
        ...

    def read(self) -> Reading:
        """The device now.

        Raises:
            NoMeter: It cannot be read any more.
        """
        ...
