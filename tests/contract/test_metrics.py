"""`/metrics`: the names, types and labels of the contract, and that they count what happened."""

from __future__ import annotations

import importlib.metadata
import time
from itertools import pairwise

import httpx
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import StartServer
from tests.support.exposition import Scrape, scrape, settles, total
from tests.support.live_server import BACKEND, DEVICE, LiveServer
from tests.support.raw_http import RawConnection, post
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.errors import BY_CODE
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS
from tilewire.service.telemetry.counters import SECONDS_BUCKETS

ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
ROW = to_safetensors({"x": np.ones((4, 4), np.float32)})

# Family, type, labels.
METRICS = {
    "tilewire_requests": ("counter", {"op", "code"}),
    "tilewire_request_duration_seconds": ("histogram", {"op"}),
    "tilewire_stage_duration_seconds": ("histogram", {"op", "stage"}),
    "tilewire_request_bytes": ("counter", {"op"}),
    "tilewire_response_bytes": ("counter", {"op"}),
    "tilewire_batch_requests": ("histogram", {"op"}),
    "tilewire_kernel_tflops": ("histogram", {"dtype"}),
    "tilewire_kernel_bandwidth_bytes_per_second": ("histogram", {"op"}),
    "tilewire_flops": ("counter", {"op", "dtype"}),
    "tilewire_kernel_seconds": ("counter", {"op", "dtype"}),
    "tilewire_kernel_compiles": ("counter", {"op", "phase"}),
    "tilewire_kernel_bytes": ("counter", {"op", "dtype"}),
    "tilewire_in_flight_requests": ("gauge", set()),
    "tilewire_queue_depth": ("gauge", set()),
    "tilewire_queue_bytes": ("gauge", set()),
    "tilewire_arena_bytes": ("gauge", {"state"}),
    "tilewire_resident_bytes": ("gauge", set()),
    "tilewire_resident_tensors": ("gauge", set()),
    "tilewire_resident_placement_bytes": ("gauge", {"device", "placement"}),
    "tilewire_rejected": ("counter", {"reason"}),
    "tilewire_engine_up": ("gauge", {"device"}),
    "tilewire_engine_restarts": ("counter", {"device"}),
    "tilewire_process_deaths": ("counter", {"process"}),
    "tilewire_build_info": ("gauge", {"version", "torch", "triton", "device_name", "backend"}),
}


@pytest.fixture(scope="module")
def _one_of_everything(server: LiveServer) -> None:
    with server.client() as client:
        do_one_of_everything(client)


@pytest.fixture
def used(_one_of_everything: None, client: httpx.Client) -> httpx.Client:
    """A client of a server that has done one of everything."""
    return client


def do_one_of_everything(client: httpx.Client) -> None:
    for _ in range(3):
        assert client.post("/v1/matmul", content=ONES).status_code == 200
    assert client.post("/v1/add", content=ONES).status_code == 200
    assert client.post("/v1/softmax", content=ROW).status_code == 200
    assert client.post("/v1/softmax?nonsense=1", content=ROW).status_code == 400
    assert client.put("/v1/tensors/metrics", content=to_npy(np.ones(3))).status_code in (200, 201)
    # What is counted at an answer's end may come after the client has the answer.
    assert settles(client, lambda now: total(now, "tilewire_requests_total", op="softmax", code="400") > 0)
    for op in ("matmul", "add", "softmax"):
        assert settles(client, lambda now, op=op: total(now, "tilewire_batch_requests_sum", op=op) > 0)  # type: ignore[misc]


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_its_type_and_labels(used: httpx.Client, name: str) -> None:
    kind, labels = METRICS[name]
    families = {family.name: family for family in text_string_to_metric_families(used.get("/metrics").text)}
    family = families[name]
    assert family.type == kind
    assert family.documentation
    found = {label for sample in family.samples for label in sample.labels} - {"le"}
    assert found == labels


def test_labels_are_closed_sets(used: httpx.Client) -> None:
    used.post("/v1/conv", content=ONES)
    values: dict[str, set[str]] = {}
    for _name, labels in scrape(used):
        for label, value in labels:
            values.setdefault(label, set()).add(value)
    assert values["op"] <= {*OPS, PROGRAM}
    assert values["stage"] <= {"receive", "queue", "h2d", "kernel", "d2h", "send"}
    assert all(code.isdecimal() and len(code) == 3 for code in values["code"])
    assert "pid" not in values


def test_text_for_a_scraper_that_refuses_openmetrics(client: httpx.Client) -> None:
    response = client.get("/metrics", headers={"accept": "application/openmetrics-text;q=0, */*"})
    assert response.headers["content-type"].startswith("text/plain")


def test_openmetrics_for_a_scraper_that_takes_it(used: httpx.Client) -> None:
    response = used.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert METRICS.keys() <= {family.name for family in openmetrics_families(response.text)}


def test_no_histogram_begins_with_a_request(start_server: StartServer) -> None:
    """From 0, so that a rate sees the first request."""

    def series(client: httpx.Client) -> set[str]:
        return {line.rpartition(" ")[0] for line in client.get("/metrics").text.splitlines() if "_bucket{" in line}

    server = start_server("--gateways", "1")
    with server.client() as client:
        before = series(client)
        for op, body in (("matmul", ONES), ("add", ONES), ("softmax", ROW)):
            assert client.post(f"/v1/{op}", content=body).status_code == 200
        for op in ("matmul", "add", "softmax"):
            assert settles(client, lambda now, op=op: total(now, "tilewire_batch_requests_sum", op=op) > 0)  # type: ignore[misc]
        assert settles(client, lambda now: total(now, "tilewire_request_duration_seconds_count") >= 3)
        assert any('op="softmax"' in line for line in before)
        assert series(client) == before


def test_they_count_what_happened(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", "16MiB")
    matmul = to_safetensors({"a": np.ones((8, 16), np.float16), "b": np.ones((16, 4), np.float16)})
    with server.client() as client:
        sizes = 0
        for _ in range(5):
            response = client.post("/v1/matmul", content=matmul, headers={"connection": "close"})
            sizes += len(response.content)
        client.post("/v1/matmul?nonsense=1", content=matmul)
        assert settles(client, lambda now: total(now, "tilewire_requests_total", op="matmul") == 6)
        assert settles(client, lambda now: total(now, "tilewire_batch_requests_sum", op="matmul") == 5)
        now = scrape(client)
    assert total(now, "tilewire_requests_total", op="matmul", code="200") == 5
    assert total(now, "tilewire_requests_total", op="matmul", code="400") == 1
    assert total(now, "tilewire_rejected_total") == 0
    assert total(now, "tilewire_request_duration_seconds_count", op="matmul") == 6
    assert total(now, "tilewire_flops_total", op="matmul", dtype="float16") == 5 * 2 * 8 * 16 * 4
    assert total(now, "tilewire_kernel_seconds_total", op="matmul", dtype="float16") > 0
    assert total(now, "tilewire_kernel_bytes_total", op="matmul", dtype="float16") == 5 * 2 * (8 * 16 + 16 * 4 + 8 * 4)
    assert total(now, "tilewire_batch_requests_sum", op="matmul") == 5
    assert total(now, "tilewire_request_bytes_total", op="matmul") >= 5 * len(matmul)
    assert total(now, "tilewire_response_bytes_total", op="matmul") >= sizes
    assert total(now, "tilewire_stage_duration_seconds_count", op="matmul", stage="kernel") == 5
    assert total(now, "tilewire_stage_duration_seconds_count", op="matmul", stage="send") == 5
    assert total(now, "tilewire_arena_bytes") == 16 * 2**20
    triton = "none" if BACKEND == "cpu" else importlib.metadata.version("triton")
    assert total(now, "tilewire_engine_up", device=DEVICE) == 1
    assert total(now, "tilewire_build_info", backend=BACKEND, triton=triton) == 1


def test_durations_have_buckets_from_20_us_to_over_a_minute(used: httpx.Client) -> None:
    bounds = sorted(
        {
            float(dict(labels)["le"])
            for name, labels in scrape(used)
            if name == "tilewire_request_duration_seconds_bucket"
        }
    )
    assert bounds == [*SECONDS_BUCKETS, float("inf")]
    assert bounds[0] == 20e-6
    assert bounds[-2] >= 60
    assert all(1.59 < after / before < 1.61 for before, after in pairwise(bounds[:-1]))


def test_refusals_are_counted_and_mistakes_are_not(used: httpx.Client) -> None:
    before = scrape(used)
    assert {labels for name, labels in before if name == "tilewire_rejected_total"} == {
        frozenset({("reason", code)}) for code, error in BY_CODE.items() if error.is_refusal
    }
    assert used.post("/v1/matmul?nonsense=1", content=ONES).status_code == 400
    assert used.get("/nothing").status_code == 404
    assert used.post("/v1/matmul", content=bytes(17 * 2**20)).status_code == 413

    def refused(now: Scrape, reason: str) -> float:
        return total(now, "tilewire_rejected_total", reason=reason) - total(
            before, "tilewire_rejected_total", reason=reason
        )

    assert settles(used, lambda now: refused(now, "body_too_large") == 1)
    assert total(scrape(used), "tilewire_rejected_total") - total(before, "tilewire_rejected_total") == 1


def test_exemplars_lead_from_a_bucket_to_its_request(server: LiveServer, used: httpx.Client) -> None:
    accept = {"accept": "application/openmetrics-text"}
    # Two that are in no exemplar, for one would have to be quoted and one is too long; then one through each gateway.
    ids = ['qu"oted\\', "x" * 128, "first", "second"]
    for gateway, request_id in zip(server.gateways() * 2, ids, strict=False):
        with RawConnection(server.connect_to(gateway)) as raw:
            raw.send(post("/v1/add", ONES, x_request_id=request_id))
            assert raw.answer().status == 200

    def exemplars() -> dict[str, tuple[float, float, float]]:
        families = {family.name: family for family in openmetrics_families(used.get("/metrics", headers=accept).text)}
        samples = families["tilewire_request_duration_seconds"].samples
        return {
            sample.exemplar.labels["request_id"]: (float(sample.labels["le"]), sample.exemplar.value, sample.value)
            for sample in samples
            if sample.exemplar is not None and sample.labels["op"] == "add"
        }

    end_s = time.monotonic() + 20
    bounds = [0.0, *SECONDS_BUCKETS, float("inf")]
    while not {"second"} <= (found := exemplars()).keys():
        assert time.monotonic() < end_s, found
        time.sleep(0.1)
    assert not found.keys() & set(ids[:2])
    for bound, value, count in found.values():
        assert bounds[bounds.index(bound) - 1] < value <= bound
        assert count > 0
    assert "# {" not in used.get("/metrics", headers={"accept": "text/plain"}).text


def test_compiles_are_counted_from_nought(client: httpx.Client) -> None:
    shown = client.get("/metrics", headers={"accept": "text/plain"}).text
    for op in OPS:
        for phase in ("startup", "serving"):
            assert f'tilewire_kernel_compiles_total{{op="{op}",phase="{phase}"}} 0.0' in shown
