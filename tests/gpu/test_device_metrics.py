"""What the GPU says of itself: the right one, figures that can be true, and the form that load generators parse."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tilewire.service.cli.launch import running_server
from tilewire.service.engine.device_metrics.opening import address_of, open_meter

LIBRARY = "amdsmi" if torch.version.hip else "pynvml"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(find_spec(LIBRARY) is None, reason=f"{LIBRARY} is not installed"),
]

SETTLE_S = 30.0
GIB = 2**30


@pytest.fixture(scope="module")
def exposition() -> Iterator[str]:
    """Of a server that has sampled its device."""
    with running_server("--device", "cuda:0", "--gateways", "1", "--arena-bytes", "64MiB") as url:
        end_s = time.monotonic() + SETTLE_S
        while "tilewire_device_memory_bytes" not in (text := httpx.get(f"{url}/metrics").text):
            assert time.monotonic() < end_s, text
            time.sleep(0.1)
        yield text


def samples(exposition: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def value(exposition: str, name: str, **labels: str) -> float:
    return samples(exposition)[(name, frozenset(labels.items()))]


def test_memory_is_that_of_the_device(exposition: str) -> None:
    used, free = (value(exposition, "tilewire_device_memory_bytes", device="cuda:0", state=s) for s in ("used", "free"))
    total = torch.cuda.get_device_properties(0).total_memory
    # The driver keeps some for itself, which torch does not count.
    assert total <= used + free <= total + 4 * GIB
    assert used > 0
    assert free > 0


def test_power_temperature_and_utilization_can_be_true(exposition: str) -> None:
    found = samples(exposition)
    bounds = {
        "tilewire_device_power_watts": (1, 3000),
        "tilewire_device_temperature_celsius": (1, 120),
        "tilewire_device_utilization_ratio": (0, 1),
    }
    for name, (least, most) in bounds.items():
        figure = found.get((name, frozenset({("device", "cuda:0")})))
        if figure is not None:  # parts of a device do not tell
            assert least <= figure <= most, name


def test_a_load_generator_finds_the_aliases(exposition: str) -> None:
    uuids = set()
    for name in ("nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes", "nv_gpu_power_usage"):
        found = re.findall(rf"\n{name}\{{gpu_uuid=\"([^\"]+)\"\}} (\d+\.?\d*)(?=\n)", exposition)
        assert len(found) <= 1
        uuids |= {uuid for uuid, _ in found}
    assert len(uuids) == 1
    memory = re.search(r"\nnv_gpu_memory_total_bytes\{[^}]*\} (\d+\.?\d*)\n", exposition)
    assert memory is not None
    assert float(memory[1]) >= torch.cuda.get_device_properties(0).total_memory


def test_the_meter_is_that_of_the_device() -> None:
    meter = open_meter("cuda:0")
    assert meter.read().memory_total_bytes is not None

    def used() -> int:
        nbytes = meter.read().memory_used_bytes
        assert nbytes is not None
        return nbytes

    def sees_a_gib() -> bool:
        torch.cuda.empty_cache()
        before = used()
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        after = used()
        del held
        return after - before >= GIB // 2

    # Other tests may give memory of the device back in the same moment.
    assert any(sees_a_gib() for _ in range(5))
    if torch.version.hip is None:
        assert meter.uuid.removeprefix("GPU-") == address_of("cuda:0").uuid


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_meter_follows_the_visible_devices() -> None:
    code = "from tilewire.service.engine.device_metrics.opening import open_meter; print(open_meter('cuda:0').uuid)"
    for index in range(torch.cuda.device_count()):
        shown = subprocess.run(
            [sys.executable, "-c", f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = '{index}'; {code}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert shown == open_meter(f"cuda:{index}").uuid


def test_reading_is_quick_enough_for_each_second() -> None:
    meter = open_meter("cuda:0")
    meter.read()
    began_s = time.perf_counter()
    reading = meter.read()
    assert time.perf_counter() - began_s < 0.5
    assert not math.isnan(reading.temperature_celsius or 0)
