"""What a device says of itself, as a scraper and as a load generator read it in the real exposition."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.local_totals import LocalTotals
from tilewire.service.engine.device_metrics.contract import Address, NoMeter, Reading
from tilewire.service.engine.device_metrics.nvml import NvmlMeter
from tilewire.service.engine.device_metrics.opening import open_meter
from tilewire.service.engine.device_metrics.sampler import Sampler
from tilewire.service.telemetry.exposition import Exposition, plain_aliases

UUID = "GPU-8d1c3ad4-0a2e-4f57-9d43-0123456789ab"
PERIOD_S = 0.01
TIMEOUT_S = 30.0
GIB = 2**30
READING = {
    "memory_used_bytes": 8 * GIB,
    "memory_total_bytes": 80 * GIB,
    "power_watts": 71.25,
    "temperature_celsius": 34.0,
    "utilization_ratio": 0.05,
}
# How the protocol's load generator finds a value: a line that begins with the name, one label, digits and perhaps a point.
AS_PARSED = r"\n{name}\{{gpu_uuid=\"([^\"]+)\"\}} (\d+\.?\d*)(?=\n)"


class ScriptedMeter:
    """Gives its readings one after the other, then the last one for ever. A reading of None is a failure."""

    uuid = UUID

    def __init__(self, readings: Sequence[dict[str, float] | None]) -> None:
        self._readings = list(readings)
        self.is_shown = threading.Event()
        self._num_last = 0

    def read(self) -> Reading:
        reading = self._readings[0]
        if len(self._readings) > 1:
            del self._readings[0]
        else:
            # Read again: the first time it has been shown.
            self._num_last += 1
            if self._num_last > 1:
                self.is_shown.set()
        if reading is None:
            raise NoMeter("the device fell off the bus")
        return Reading(**reading)  # type: ignore[arg-type]


def shown(*readings: dict[str, float] | None) -> str:
    """The exposition of a device with these readings."""
    sink, meter = LocalTotals(), ScriptedMeter(readings)
    sampler = Sampler(sink, "cuda:3", meter, PERIOD_S)
    sampler.start()
    assert meter.is_shown.wait(TIMEOUT_S)
    sampler.stop()
    body, _content_type = asyncio.run(Exposition(sink.totals).read(openmetrics=False))
    return body.decode()


def samples(exposition: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def test_a_device_in_the_exposition() -> None:
    exposition = shown(READING)
    found = samples(exposition)
    uuid = f"gpu_uuid={UUID}"
    assert found == {
        ("tilewire_device_memory_bytes", "device=cuda:3,state=used"): 8 * GIB,
        ("tilewire_device_memory_bytes", "device=cuda:3,state=free"): 72 * GIB,
        ("tilewire_device_power_watts", "device=cuda:3"): 71.25,
        ("tilewire_device_temperature_celsius", "device=cuda:3"): 34,
        ("tilewire_device_utilization_ratio", "device=cuda:3"): 0.05,
        ("nv_gpu_utilization", uuid): 0.05,
        ("nv_gpu_memory_total_bytes", uuid): 80 * GIB,
        ("nv_gpu_memory_used_bytes", uuid): 8 * GIB,
        ("nv_gpu_power_usage", uuid): 71.25,
    }


def test_a_load_generator_finds_the_aliases() -> None:
    exposition = shown(READING)
    for name, expected in (
        ("nv_gpu_utilization", 0.05),
        ("nv_gpu_memory_total_bytes", 80 * GIB),
        ("nv_gpu_memory_used_bytes", 8 * GIB),
        ("nv_gpu_power_usage", 71.25),
    ):
        (found,) = re.findall(AS_PARSED.format(name=name), "\n" + exposition)
        assert (found[0], float(found[1])) == (UUID, expected)


def test_what_a_device_does_not_tell_is_absent() -> None:
    exposition = shown({"temperature_celsius": 40.0})
    assert samples(exposition) == {("tilewire_device_temperature_celsius", "device=cuda:3"): 40}


def test_a_device_that_tells_no_more_keeps_no_old_figures() -> None:
    exposition = shown(READING, None)
    found = samples(exposition)
    assert len(found) == 9
    assert all(math.isnan(value) for value in found.values())


def test_a_device_that_comes_back_is_shown_again() -> None:
    exposition = shown(READING, None, READING)
    assert samples(exposition)[("tilewire_device_power_watts", "device=cuda:3")] == 71.25


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        (
            b'nv_gpu_memory_used_bytes{gpu_uuid="x"} 8.589934592e+10',
            b'nv_gpu_memory_used_bytes{gpu_uuid="x"} 85899345920',
        ),
        (b'nv_gpu_memory_used_bytes{gpu_uuid="x"} 1e+06', b'nv_gpu_memory_used_bytes{gpu_uuid="x"} 1000000'),
        (b'nv_gpu_utilization{gpu_uuid="x"} 5e-05', b'nv_gpu_utilization{gpu_uuid="x"} 0.00005'),
        (b'nv_gpu_utilization{gpu_uuid="x"} 0.5', b'nv_gpu_utilization{gpu_uuid="x"} 0.5'),
        (b'nv_gpu_power_usage{gpu_uuid="x"} NaN', b'nv_gpu_power_usage{gpu_uuid="x"} NaN'),
        (b'other{gpu_uuid="x"} 1e+06', b'other{gpu_uuid="x"} 1e+06'),
    ],
)
def test_only_aliases_are_written_without_exponent(line: bytes, plain: bytes) -> None:
    around = b"# HELP nv_gpu_x 1e+06\n%b\n# EOF\n"
    assert plain_aliases(around % line) == around % plain


def test_no_meter_says_why() -> None:
    with pytest.raises(NoMeter, match="cpu has no meter"):
        open_meter("cpu")


def test_an_address_as_drivers_write_it() -> None:
    assert Address("x", (0, 0xC1, 0)).bus_id == "0000:c1:00.0"


def test_no_driver_is_no_meter() -> None:
    # No machine has this device; one without a driver says so first.
    with pytest.raises(NoMeter, match="NVML"):
        NvmlMeter(Address("00000000-0000-0000-0000-000000000000", (0xFFFF, 0xFF, 0x1F)))
