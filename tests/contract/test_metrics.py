"""`/metrics`: the names, types and labels of the contract, and that they count what happened."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import StartServer
from tests.exposition import scrape, settles, total
from tests.tensor_bodies import to_npy, to_safetensors

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
    "tilewire_kernel_bytes": ("counter", {"op", "dtype"}),
    "tilewire_in_flight_requests": ("gauge", set()),
    "tilewire_queue_depth": ("gauge", set()),
    "tilewire_queue_bytes": ("gauge", set()),
    "tilewire_arena_bytes": ("gauge", {"state"}),
    "tilewire_resident_bytes": ("gauge", set()),
    "tilewire_resident_tensors": ("gauge", set()),
    "tilewire_rejected": ("counter", {"reason"}),
    "tilewire_engine_up": ("gauge", {"device"}),
    "tilewire_engine_restarts": ("counter", {"device"}),
    "tilewire_build_info": ("gauge", {"version", "torch", "triton", "device_name", "backend"}),
}


@pytest.fixture
def used(client: httpx.Client) -> httpx.Client:
    """A client of a server that has done one of everything."""
    assert client.post("/v1/matmul", content=ONES).status_code == 200
    assert client.post("/v1/add", content=ONES).status_code == 200
    assert client.post("/v1/softmax", content=ROW).status_code == 200
    assert client.post("/v1/softmax?nonsense=1", content=ROW).status_code == 400
    assert client.put("/v1/tensors/metrics", content=to_npy(np.ones(3))).status_code in (200, 201)
    # What is counted at an answer's end may come after the client has the answer.
    assert settles(client, lambda now: total(now, "tilewire_requests_total", op="softmax", code="400") > 0)
    for op in ("matmul", "add", "softmax"):
        assert settles(client, lambda now, op=op: total(now, "tilewire_batch_requests_sum", op=op) > 0)  # type: ignore[misc]
    return client


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
    assert values["op"] <= {"matmul", "softmax", "add"}
    assert values["stage"] <= {"receive", "queue", "h2d", "kernel", "d2h", "send"}
    assert all(code.isdecimal() and len(code) == 3 for code in values["code"])
    assert "pid" not in values


def test_openmetrics_for_a_scraper_that_takes_it(used: httpx.Client) -> None:
    response = used.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert METRICS.keys() <= {family.name for family in openmetrics_families(response.text)}


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
    assert total(now, "tilewire_rejected_total", reason="invalid_request") == 1
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
    assert total(now, "tilewire_engine_up", device="cpu") == 1
    assert total(now, "tilewire_build_info", backend="cpu", triton="none") == 1
