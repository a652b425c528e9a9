"""The log as a machine reads it: one line for each request when asked, the fields of the documents, ids that lead on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.live_server import ROOT, LiveServer, serving
from tests.support.raw_http import RawConnection, head
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.gateway.telemetry.metrics import FLUSH_S

ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
OPERATIONS = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
COMMON = {"event", "level", "logger", "process", "timestamp"}


@pytest.fixture(scope="module")
def logging_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--gateways", "1", "--arena-bytes", "16MiB", "--access-log", "--log-format", "json")
    with serving(tmp_path_factory.mktemp("logs") / "log", *flags) as server:
        yield server


def line_of(server: LiveServer, request_id: str) -> dict[str, Any]:
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        found = [line for line in lines if line.get("request_id") == request_id]
        if found:
            (line,) = found
            return dict(line)
        time.sleep(0.02)
    raise AssertionError(f"nothing about {request_id}")


def test_an_op_is_told_with_its_stages(logging_server: LiveServer) -> None:
    with logging_server.client() as client:
        response = client.post("/v1/matmul", content=ONES, headers={"x-request-id": "op"})
    line = line_of(logging_server, "op")
    assert line["event"] == "request"
    assert line["process"] == "gateway-0"
    assert (line["method"], line["path"], line["op"], line["status"]) == ("POST", "/v1/matmul", "matmul", 200)
    assert (line["received_bytes"], line["sent_bytes"]) == (len(ONES), len(response.content))
    assert line["batch_size"] == 1
    stages = [line[f"{stage}_ms"] for stage in ("receive", "queue", "kernel", "send")]
    assert all(spent > 0 for spent in stages)
    assert sum(stages) <= line["ms"] + 0.1
    documented = {
        name
        for cell in OPERATIONS.partition("| field | what |")[2].partition("\n\n")[0].splitlines()
        for name in cell.partition(" | ")[0].replace("|", "").replace("`", "").split()
    }
    assert line.keys() - COMMON <= documented


def test_what_does_not_apply_is_left_out(logging_server: LiveServer) -> None:
    with logging_server.client() as client:
        client.get("/nothing", headers={"x-request-id": "lost"})
        client.put("/v1/tensors/x", content=to_npy(np.ones(3)), headers={"x-request-id": "upload"})
    lost = line_of(logging_server, "lost")
    assert lost["status"] == 404
    assert not lost.keys() & {"op", "batch_size", "kernel_ms", "send_ms", "key", "trace_id"}
    upload = line_of(logging_server, "upload")
    assert upload["status"] == 201
    assert "op" not in upload


@pytest.mark.parametrize(("num_characters", "is_cut"), [(1024, False), (1025, True), (60_000, True)])
def test_a_long_path_is_cut(logging_server: LiveServer, num_characters: int, is_cut: bool) -> None:
    path, request_id = "/" + (num_characters - 1) * "p", f"long-{num_characters}"
    with logging_server.client() as client:
        assert client.get(path, headers={"x-request-id": request_id}).status_code == 404
    assert line_of(logging_server, request_id)["path"] == path[:1024] + ("..." if is_cut else "")


def test_a_client_that_leaves_is_499(logging_server: LiveServer) -> None:
    with RawConnection(logging_server.connect()) as raw:
        raw.send(head("POST", "/v1/matmul", content_length="1000000", x_request_id="gone"), bytes(1000))
    assert line_of(logging_server, "gone")["status"] == 499


def test_what_is_no_request_is_told_and_counted_under_the_id_of_its_answer(logging_server: LiveServer) -> None:
    broken = {
        "brew": (b"BREW /v1/matmul HTTP/1.1\r\nX-Request-Id: brew\r\n\r\n", "", None),
        "twice": (
            head("POST", "/v1/matmul", content_length="1", x_request_id="twice", transfer_encoding="chunked"),
            "POST",
            "matmul",
        ),
    }
    for request_id, (sent, method, op) in broken.items():
        with RawConnection(logging_server.connect()) as raw:
            raw.send(sent)
            answer = raw.answer()
        assert answer.status == 400
        assert answer.json()["request_id"] == request_id
        line = line_of(logging_server, request_id)
        assert (line["event"], line["method"], line["status"], line.get("op")) == ("request", method, 400, op)
        assert line["sent_bytes"] == len(answer.body)
    with logging_server.client() as client:
        time.sleep(2 * FLUSH_S)
        failures = {one["request_id"]: one for one in client.get("/v1/history").json()["failures"]}
        assert failures["brew"]["reason"] == failures["twice"]["reason"] == "invalid_request"
        assert 'tilewire_requests_total{code="400",op="matmul"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/softmax"), ("PUT", "/v1/tensors/broken")])
def test_a_body_that_breaks_the_protocol_is_told_as_it_was_answered(
    logging_server: LiveServer, method: str, path: str
) -> None:
    request_id = f"broken-{method}"
    with RawConnection(logging_server.connect()) as raw:
        raw.send(head(method, path, transfer_encoding="chunked", x_request_id=request_id), b"5\r\n01234\r\nZZ\r\n")
        answer = raw.answer()
    assert answer.status == 400
    line = line_of(logging_server, request_id)
    assert (line["method"], line["path"], line["status"], line["sent_bytes"]) == (method, path, 400, len(answer.body))


def test_the_callers_trace_is_logged(logging_server: LiveServer) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "called", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    with logging_server.client() as client:
        client.get("/v2", headers=headers)
    assert line_of(logging_server, "called")["trace_id"] == trace


def test_records_carry_the_request_that_is_worked_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import logging\n"
        "from tilewire.service.telemetry import log\n"
        "from tilewire.service.config.process import LogSettings\n"
        "log.configure(LogSettings(format='json'), process='p')\n"
        "logging.getLogger('x').warning('outside')\n"
        "log.request_id.set('current')\n"
        "logging.getLogger('x').warning('inside')\n"
        "logging.getLogger('x').warning('named', extra={'request_ids': ['a', 'b'], 'color': 'red'})\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, cwd=ROOT)
    outside, inside, named = (json.loads(line) for line in done.stderr.splitlines())
    assert "request_id" not in outside
    assert inside["request_id"] == "current"
    assert named["request_ids"] == ["a", "b"]
    assert "color" not in named
