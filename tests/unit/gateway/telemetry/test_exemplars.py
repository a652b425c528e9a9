"""Exemplars of several gateways, merged onto the buckets that their requests fell into."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, values
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tilewire.service.gateway.telemetry.exemplars import Exemplars, path_in
from tilewire.service.gateway.telemetry.metrics import DURATION, expose

BOUNDS = (1.0, 2.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of figures in which this process has observed 0.5, 1.5 and 9."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr("prometheus_client.metrics.values.ValueClass", values.MultiProcessValue(os.getpid))
    histogram = Histogram(DURATION, "t", ("op",), buckets=BOUNDS, registry=CollectorRegistry())
    for value in (0.5, 1.5, 9):
        histogram.labels("add").observe(value)
    return tmp_path


def exposed(folder: Path) -> dict[float, tuple[dict[str, str], float]]:
    body, content_type = asyncio.run(expose(str(folder), "application/openmetrics-text"))
    assert content_type.startswith("application/openmetrics-text")
    (family,) = text_string_to_metric_families(body.decode())
    return {
        float(sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_the_newest_of_all_gateways_is_shown(folder: Path) -> None:
    one, other = (Exemplars(path_in(folder, index), BOUNDS) for index in (0, 1))
    one.observe("add", 0.5, "old", None)
    one.observe("add", 1.5, "middle", "f" * 32)
    other.observe("add", 0.6, "new", None)
    other.observe("add", 9, "beyond", None)
    other.write()
    one.write()
    assert exposed(folder) == {
        1.0: ({"request_id": "new"}, 0.6),
        2.0: ({"request_id": "middle", "trace_id": "f" * 32}, 1.5),
        float("inf"): ({"request_id": "beyond"}, 9),
    }


def test_a_value_on_a_bound_stays_in_its_bucket(folder: Path) -> None:
    one = Exemplars(path_in(folder, 0), BOUNDS)
    one.observe("add", 1.0, "edge", None)
    one.write()
    assert exposed(folder) == {1.0: ({"request_id": "edge"}, 1.0)}


def test_labels_that_do_not_fit_are_left_out(folder: Path) -> None:
    one = Exemplars(path_in(folder, 0), BOUNDS)
    one.observe("add", 0.5, "i" * 119, None)
    one.observe("add", 1.5, "i" * 118, "f" * 32)
    one.observe("add", 9, 'qu"oted', None)
    one.write()
    assert exposed(folder) == {2.0: ({"request_id": "i" * 118}, 1.5)}


def test_a_gateway_that_starts_again_takes_its_file_over(folder: Path) -> None:
    before = Exemplars(path_in(folder, 0), BOUNDS)
    before.observe("add", 0.5, "before", None)
    before.write()
    after = Exemplars(path_in(folder, 0), BOUNDS)
    after.observe("add", 1.5, "after", None)
    after.write()
    assert exposed(folder) == {2.0: ({"request_id": "after"}, 1.5)}
    assert [path.name for path in folder.glob("exemplars-*")] == ["exemplars-0.json"]


def test_without_exemplars_nothing_is_missing(folder: Path) -> None:
    assert exposed(folder) == {}
