"""Spans as a collector gets them: the stages of a request, in its caller's trace, at their times; and without a collector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.collector import Collector, attributes_of
from tests.support.live_server import COMMAND, LiveServer, serving
from tests.support.tensor_bodies import to_npy, to_safetensors

ONES = to_safetensors({"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)})
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FLAGS = ("--gateways", "1", "--arena-bytes", "64MiB", "--access-log", "--log-format", "json")


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Traces what its callers trace, and nothing else."""
    with serving(
        tmp_path_factory.mktemp("traced") / "log", *FLAGS, "--otlp-endpoint", collector.url, "--trace-ratio", "0"
    ) as server:
        yield server


def traceparent(flags: str = "01") -> str:
    return f"00-{TRACE}-{PARENT}-{flags}"


def logged(server: LiveServer, request_id: str) -> dict[str, Any]:
    """The line of the access log about a request."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        for line in server.log.read_text().splitlines():
            if line.startswith("{") and (found := json.loads(line)).get("request_id") == request_id:
                return dict(found)
        time.sleep(0.02)
    raise AssertionError(f"nothing about {request_id}")


@pytest.mark.slow
def test_the_stages_of_a_request_are_children_of_its_span(traced: LiveServer, collector: Collector) -> None:
    before_ns = time.time_ns()
    with traced.client() as client:
        response = client.post(
            "/v1/matmul", content=ONES, headers={"x-request-id": "staged", "traceparent": traceparent()}
        )
    after_ns = time.time_ns()
    assert response.status_code == 200
    root, *stages = collector.trace("staged")
    assert collector.paths == {"/v1/traces"}
    assert root.name == "POST /v1/matmul"
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert root.kind == root.SPAN_KIND_SERVER
    attributes = attributes_of(root)
    assert attributes["http.response.status_code"] == 200
    assert attributes["http.request.body.size"] == len(ONES)
    assert (attributes["tilewire.op"], attributes["tilewire.batch_size"]) == ("matmul", 1)
    assert [span.name for span in stages] == ["receive", "queue", "kernel", "send"]
    slack_ns = 50_000_000
    assert before_ns - slack_ns < root.start_time_unix_nano < root.end_time_unix_nano < after_ns + slack_ns
    for span in stages:
        assert span.trace_id.hex() == TRACE
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    for before, after in pairwise(stages):
        assert before.end_time_unix_nano <= after.start_time_unix_nano + 1000
    # The spans, the header and the log tell one story.
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    line = logged(traced, "staged")
    for span in stages[:-1]:
        spent_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert spent_ms == pytest.approx(float(timing[span.name]), abs=0.01)
        assert spent_ms == pytest.approx(line[f"{span.name}_ms"], abs=0.01)


def test_the_resource_names_the_service(traced: LiveServer, collector: Collector) -> None:
    with traced.client() as client:
        client.post("/v1/matmul", content=ONES, headers={"x-request-id": "named", "traceparent": traceparent()})
    collector.trace("named")
    resource = collector.spans[-1][1]
    assert resource["service.name"] == "tilewire"
    assert resource["service.instance.id"] == "gateway-0"


def test_names_of_tensors_are_not_names_of_spans(traced: LiveServer, collector: Collector) -> None:
    headers = {"x-request-id": "upload", "traceparent": traceparent()}
    with traced.client() as client:
        client.put("/v1/tensors/weights/w1", content=to_npy(np.ones(3)), headers=headers)
    root, *_stages = collector.trace("upload")
    assert root.name == "PUT /v1/tensors/{name}"
    assert attributes_of(root)["url.path"] == "/v1/tensors/weights/w1"


def test_a_broken_tracestate_costs_nothing_and_is_not_logged(traced: LiveServer, collector: Collector) -> None:
    headers = {"x-request-id": "state", "traceparent": traceparent(), "tracestate": "=== what,is this"}
    with traced.client() as client:
        assert client.post("/v1/matmul", content=ONES, headers=headers).status_code == 200
    assert collector.trace("state")[0].trace_id.hex() == TRACE
    assert "is this" not in traced.log.read_text()


def test_who_does_not_trace_is_not_traced(traced: LiveServer, collector: Collector) -> None:
    unwanted = {"untraced": traceparent("00"), "alone": "", "broken": "00-xyz-01"}
    with traced.client() as client:
        for name, parent in unwanted.items():
            client.post("/v1/matmul", content=ONES, headers={"x-request-id": name, "traceparent": parent})
        client.post("/v1/matmul", content=ONES, headers={"x-request-id": "last", "traceparent": traceparent()})
    collector.trace("last")
    assert not {attributes_of(span).get("tilewire.request_id") for span, _ in collector.spans} & unwanted.keys()
    assert logged(traced, "untraced")["trace_id"] == TRACE
    assert "trace_id" not in logged(traced, "broken")


def test_a_failed_request_is_an_error_only_when_it_is_ours(traced: LiveServer, collector: Collector) -> None:
    with traced.client() as client:
        client.post("/v1/matmul?x=1", content=ONES, headers={"x-request-id": "wrong", "traceparent": traceparent()})
    root, *stages = collector.trace("wrong")
    assert attributes_of(root)["http.response.status_code"] == 400
    assert root.status.code == root.status.STATUS_CODE_UNSET
    assert stages == []


@pytest.mark.slow
def test_a_trace_that_begins_here_is_logged_and_in_exemplars(start_server: StartServer, collector: Collector) -> None:
    server = start_server(*FLAGS, "--otlp-endpoint", f"{collector.url}/")
    with server.client() as client:
        assert client.post("/v1/matmul", content=ONES, headers={"x-request-id": "begun"}).status_code == 200
        root, *_ = collector.trace("begun")
        assert root.parent_span_id == b""
        assert logged(server, "begun")["trace_id"] == root.trace_id.hex()
        end_s = time.monotonic() + 10
        while f'trace_id="{root.trace_id.hex()}"' not in openmetrics(client):
            assert time.monotonic() < end_s
            time.sleep(0.1)


def openmetrics(client: httpx.Client) -> str:
    return client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "max_queue_size"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "9" * 40, "too large"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-4", "must be a non-negative integer"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody", "'nobody' not found"),
    ],
)
def test_a_variable_that_cannot_be_is_refused_at_the_start(variable: str, value: str, reason: str) -> None:
    variables = {**os.environ, variable: value, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hidden"}
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--device", "cpu", "--otlp-endpoint", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=variables,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("--otlp-endpoint: ")
    assert reason in line
    assert variable in line
    assert "hidden" not in line


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_endpoint_of_the_environment_has_to_be_a_url(endpoint: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("OTEL_EXPORTER_OTLP_ENDPOINT: no spans can be sent: expected a URL")


@pytest.mark.slow
def test_a_collector_that_is_gone_costs_no_request_and_no_clean_end(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        server = start_server(*FLAGS, "--otlp-endpoint", f"http://127.0.0.1:{door.getsockname()[1]}")
        with server.client() as client:
            for _ in range(50):
                assert client.post("/v1/matmul", content=ONES).status_code == 200
            door.settimeout(30)
            # The exporter has tried once; from now on nothing listens, and it goes on trying.
            door.accept()[0].close()
            door.close()
            assert client.post("/v1/matmul", content=ONES).status_code == 200
    began_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began_s < 15
    # Each attempt is a line of the packages.
    assert server.log.read_text().count("spans batch") == 1


@pytest.mark.slow
def test_a_collector_that_never_answers_costs_no_request(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = start_server(*FLAGS, "--otlp-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with server.client() as client:
            for _ in range(20):
                assert client.post("/v1/matmul", content=ONES).status_code == 200
        assert server.stop() == 0
