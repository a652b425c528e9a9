"""The meter of AMD devices, on a library that stands in for AMD SMI: what it reports, and a device that is gone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tilewire.service.engine.device_metrics.contract import Address, Meter, NoMeter, Reading

MODULE = "tilewire.service.engine.device_metrics.amd_smi"
ADDRESS = Address("1f-2e", (0, 0xC1, 0))


class AmdSmiException(Exception):
    """The library's own."""


class Library(ModuleType):
    """Stands in for AMD SMI.

    Attributes:
        reports: Answer of each call; one without an answer fails.
    """

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.reports: dict[str, Any] = {
            "amdsmi_init": None,
            "amdsmi_get_processor_handle_from_bdf": object(),
            "amdsmi_get_gpu_device_uuid": "1f-2e",
        }
        self.AmdSmiException = AmdSmiException
        self.AmdSmiTemperatureType = SimpleNamespace(JUNCTION=1)
        self.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("amdsmi_"):
            raise AttributeError(name)

        def call(*_arguments: object) -> Any:
            if name not in self.reports:
                raise AmdSmiException(f"{name}: no such device")
            return self.reports[name]

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = Library()
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield library
    sys.modules.pop(MODULE, None)


def opened() -> Meter:
    meter: Meter = importlib.import_module(MODULE).AmdSmiMeter(ADDRESS)
    return meter


def test_it_reads_what_the_device_reports(library: Library) -> None:
    library.reports |= {
        "amdsmi_get_gpu_vram_usage": {"vram_used": 2, "vram_total": 16},
        "amdsmi_get_power_info": {"average_socket_power": "N/A", "current_socket_power": 300},
        "amdsmi_get_gpu_activity": {"gfx_activity": 50},
        "amdsmi_get_temp_metric": 61,
    }
    assert opened().read() == Reading(2 * 2**20, 16 * 2**20, 300.0, 61.0, 0.5)


def test_what_the_device_does_not_report_is_none(library: Library) -> None:
    library.reports["amdsmi_get_power_info"] = {"average_socket_power": 250}
    assert opened().read() == Reading(power_watts=250.0)


def test_a_device_that_reports_nothing_cannot_be_read(library: Library) -> None:
    library.reports["amdsmi_get_temp_metric"] = 61
    meter = opened()
    assert meter.read() == Reading(temperature_celsius=61.0)
    del library.reports["amdsmi_get_temp_metric"]
    with pytest.raises(NoMeter, match="no such device"):
        meter.read()


def test_a_device_that_is_not_there_has_no_meter(library: Library) -> None:
    del library.reports["amdsmi_get_processor_handle_from_bdf"]
    with pytest.raises(NoMeter, match="no such device"):
        opened()
