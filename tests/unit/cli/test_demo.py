"""The demonstration is honest: right answers pass, one wrong answer of any kind fails it and is named."""

from __future__ import annotations

import io
import re
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.client.speaking_server import OPS, SpeakingServer, problem
from tests.unit.gateway.codecs.arena_room import NUMPY, decode
from tilewire.service.cli import demo
from tilewire.service.cli.app import app
from tilewire.service.cli.demo_cases import worst_error
from tilewire.service.gateway.codecs.negotiation import SNIFF_BYTES, codec_for_accept, codec_for_body
from tilewire.service.ops.op import TensorType

COUNTERS = (
    'tilewire_flops_total{{op="matmul",dtype="float32"}} {flops}\n'
    'tilewire_kernel_seconds_total{{op="matmul",dtype="float32"}} {seconds}\n'
    'tilewire_requests_total{{op="matmul",code="200"}} {requests}\n'
)
RESULTS = {"int8": "int32", "float8_e4m3fn": "bfloat16"}


class FormatServer(SpeakingServer):
    """Speaks every format by the gateway's own codecs; `lie` may change an answer before it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.lie: Any = lambda request, out: out

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            count = len(self.requests)
            return httpx.Response(200, text=COUNTERS.format(flops=count * 1e9, seconds=count * 1e-3, requests=count))
        return super().__call__(request)

    def op(self, request: httpx.Request, op: str) -> httpx.Response:
        query = dict(request.url.params)
        body_codec = codec_for_body(request.headers["content-type"], request.content[:SNIFF_BYTES])
        inputs = decode(body_codec, request.content)
        inputs = {name or {"softmax": "x"}.get(op, "a"): array for name, array in inputs.items()}
        inputs |= {name: self.tensors[query.pop(name)[1:]] for name in list(query) if name in ("a", "b", "x")}
        dtype = next(iter(inputs.values())).dtype.name
        dtype = RESULTS.get(dtype, dtype) if op == "matmul" else dtype
        doubles = inputs if op == "add" else {name: array.astype(np.float64) for name, array in inputs.items()}
        out = self.lie(request, OPS[op](doubles, query).astype(NUMPY[dtype]))
        kind = TensorType(out.dtype.name, out.shape)
        codec = codec_for_accept(request.headers["accept"], body_codec, [kind.dtype])
        payload = memoryview(bytearray(out.tobytes()))
        headers = {"Content-Type": codec.content_type, "Server-Timing": "queue;dur=0.5,kernel;dur=0.25"}
        return httpx.Response(200, content=b"".join(codec.encode({"out": kind}, [payload])), headers=headers)


def report(server: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    status = demo.run("http://tilewire.test", transport=httpx.MockTransport(server), console=console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_a_right_server_passes_and_is_left_as_it_was() -> None:
    server = FormatServer()
    status, text = report(server)
    assert status == 0, text
    assert "all within tolerance" in text
    assert server.tensors == {}
    for word in ("safetensors", "npy", "npz", "json", "matmul", "softmax", "add", "bfloat16", "float8_e4m3fn", "int8"):
        assert word in text
    assert re.search(r"matmul +float32 +\d+\.\d{3} +1\b", text)  # 1e9 operations in 1 ms are 1 TFLOP/s


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [401, 403, 404])
def test_metrics_that_are_not_to_be_had_are_left_out(refusal: int) -> None:
    server = FormatServer()
    status, text = report(lambda request: problem(refusal, "no") if request.url.path == "/metrics" else server(request))
    assert status == 0, text
    assert "all within tolerance" in text
    (line,) = [line for line in text.splitlines() if "metrics" in line]
    assert "--metrics-port" in line
    assert "http://tilewire.test/metrics" in line


def test_a_page_in_the_place_of_metrics_is_none() -> None:
    server = FormatServer()
    page = httpx.Response(200, html="<html><body>Sign in</body></html>")
    status, text = report(lambda request: page if request.url.path == "/metrics" else server(request))
    assert status == 0
    assert "no table of metrics: http://tilewire.test/metrics" in text


def off_by_a_little(request: httpx.Request, out: Any) -> Any:
    if request.headers["content-type"] == "application/x-npz" and request.url.path == "/v1/softmax":
        out[3, 4] *= 1.001
    return out


def with_a_nan(request: httpx.Request, out: Any) -> Any:
    if request.headers["content-type"] == "application/json" and request.url.path == "/v1/add":
        out[0, 0] = np.nan
    return out


def of_another_dtype(request: httpx.Request, out: Any) -> Any:
    return out.astype(np.float32) if out.dtype == ml_dtypes.bfloat16 else out


def of_another_shape(request: httpx.Request, out: Any) -> Any:
    return out[:1] if request.headers["content-type"] == "application/x-npy" else out


@pytest.mark.parametrize(
    "lie",
    [
        off_by_a_little,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (with_a_nan, of_another_dtype, of_another_shape)),
    ],
)
def test_a_wrong_answer_fails(lie: Any) -> None:
    server = FormatServer()
    server.lie = lie
    status, text = report(server)
    assert status == 1
    assert "wrong result" in text
    assert server.tensors == {}


def test_a_refused_op_fails() -> None:
    server = FormatServer()
    status, text = report(lambda request: problem(400, "x: no") if "softmax" in request.url.path else server(request))
    assert status == 1
    assert "status 400" in text


def test_a_body_that_is_no_archive_fails() -> None:
    server = FormatServer()

    def garbled(request: httpx.Request) -> httpx.Response:
        is_op = request.method == "POST"
        return httpx.Response(200, content=b"PK\3\4garbled") if is_op else server(request)

    status, text = report(garbled)
    assert status == 1
    assert "unreadable answer" in text


def test_no_server_fails_with_one_line() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    status, text = report(refuse)
    assert status == 1
    assert "tilewire serve" in text
    assert text.count("\n") == 1


def test_a_server_without_room_for_the_weights_fails() -> None:
    server = FormatServer()
    status, text = report(lambda request: problem(507, "quota") if request.method == "PUT" else server(request))
    assert (status, "quota" in text) == (1, True)


def test_errors_are_measured_against_the_dtype() -> None:
    one = np.ones(4)
    assert worst_error(one, one, "int32") == 0
    assert worst_error(one + 1, one, "int32") > 1
    assert worst_error(one * (1 + 2**-9), one, "bfloat16") < 1
    assert worst_error(one * (1 + 2**-5), one, "bfloat16") > 1
    assert worst_error(one * np.nan, one, "bfloat16") == np.inf


def test_an_address_that_is_none_fails_with_one_line() -> None:
    done = CliRunner().invoke(app, ["demo", "nonsense"])
    assert done.exit_code == 2
    assert done.stderr == "tilewire: 'nonsense' is no address of a server; type 'http://nonsense'\n"


def test_a_server_that_was_named_is_not_replaced() -> None:
    done = CliRunner().invoke(app, ["demo", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "http://127.0.0.1:9" in done.output
    assert "starting one" not in done.output
