"""`/openapi.json`: what generators make of it works, and what the server sends stands in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.float64_oracle import random_array
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.errors import BY_CODE
from tilewire.service.ops.registry import OPS

Document = dict[str, Any]
A = random_array("float32", (4, 3), 1)
B = random_array("float32", (3, 5), 2)
PROGRAM = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 3]}},
    "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}],
    "outputs": ["p"],
}
INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def document(server: LiveServer) -> Document:
    return httpx.get(f"{server.url}/openapi.json", trust_env=False).json()  # type: ignore[no-any-return]


@pytest.fixture
def kept(client: httpx.Client) -> Iterator[None]:
    """A tensor and a program on the shared server."""
    client.put("/v1/tensors/openapi/x", content=to_npy(A)).raise_for_status()
    client.put("/v1/programs/openapi", json=PROGRAM).raise_for_status()
    yield
    client.delete("/v1/programs/openapi")
    client.delete("/v1/tensors/openapi/x")


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            yield method.upper(), path, call


def operation_at(document: Document, method: str, path: str) -> Document:
    """The operation that a path is of: the one with the fewest parameters that matches."""
    path = path.partition("?")[0]
    matching = []
    for verb, template, call in operations(document):
        pattern = re.sub(
            r"\\{(\w+)\\}", lambda found: ".+" if found[1] in ("name", "region") else "[^/]+", re.escape(template)
        )
        if verb == method and re.fullmatch(pattern, path):
            matching.append((template.count("{"), call))
    return min(matching, key=lambda one: one[0])[1]


def check_described(document: Document, response: httpx.Response, method: str, path: str) -> None:
    """Status, headers, content type and JSON of an answer are as the document says."""
    described = operation_at(document, method, path)["responses"]
    assert str(response.status_code) in described, f"{method} {path}: {response.status_code} {response.text[:200]}"
    answer = described[str(response.status_code)]
    assert all(name in response.headers for name in answer.get("headers", ())), f"{method} {path}: {response.headers}"
    if "content" not in answer:
        assert not response.content
        return
    content_type = response.headers["content-type"].partition(";")[0]
    assert content_type in answer["content"], f"{method} {path}: {content_type}"
    if method == "HEAD":
        assert not response.content
    elif content_type.endswith("json"):
        schema = {**answer["content"][content_type]["schema"], "components": document["components"]}
        jsonschema.validate(response.json(), schema, jsonschema.Draft202012Validator)


def test_every_operation_has_a_short_name(document: Document) -> None:
    names = [call["operationId"] for _, _, call in operations(document)]
    assert set(OPS) < set(names)
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name) for name in names)


def test_every_status_is_one_of_the_contract(document: Document) -> None:
    known = {"200", "201", "204", "304", *(str(error.status) for error in BY_CODE.values())}
    for method, path, call in operations(document):
        assert set(call["responses"]) <= known, f"{method} {path}"
        assert "500" in call["responses"]


def test_every_body_can_be_sent_as_octets(document: Document) -> None:
    binary = [call for _, _, call in operations(document) if "application/x-npy" in str(call.get("requestBody"))]
    assert len(binary) == len(OPS) + 3
    for call in binary:
        assert "application/octet-stream" in call["requestBody"]["content"]


def test_options_without_a_default_are_required(document: Document) -> None:
    for op in OPS.values():
        parameters = document["paths"][f"/v1/{op.name}"]["post"]["parameters"]
        assert {one["name"] for one in parameters if one["required"]} == set(op.needs)


@pytest.mark.parametrize("has_options", [False, True])
def test_every_example_is_answered_as_it_is_sent(
    document: Document, client: httpx.Client, *, has_options: bool
) -> None:
    """With the defaults of all options that have one, and with what the document offers to fill in."""
    sent = set()
    for method, template, call in operations(document):
        body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        if body is None:
            continue
        options = {
            one["name"]: one["example"]
            for one in call["parameters"]
            if "example" in one and (has_options or one["required"])
        }
        path = template.format(name="openapi-example", model="matmul", version="1")
        response = client.request(method, path, json=body, params=options)
        assert response.is_success, f"{method} {path}: {response.text}"
        check_described(document, response, method, path)
        sent.add(call["operationId"])
    client.delete("/v1/programs/openapi-example")
    assert sent == {*OPS, "run", "put_program", "infer", "infer_of_version"}


GOOD: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/matmul", {"json": {"a": [[1, 2]], "b": [[3], [4]]}}),
    ("POST", "/v1/matmul", {"content": to_safetensors({"a": A, "b": B})}),
    ("POST", "/v1/add", {"json": {"a": 1, "b": {"data": [2], "dtype": "float32", "shape": [1]}}}),
    ("POST", "/v1/topk?k=1", {"json": {"x": [[1, 2]]}}),
    ("POST", "/v1/softmax?x=@openapi/x&store=@openapi/y&durable=true", {}),
    ("DELETE", "/v1/tensors/openapi/y", {}),
    ("GET", "/v1/tensors", {}),
    ("PUT", "/v1/tensors/openapi/z", {"content": to_npy(A)}),
    ("PUT", "/v1/tensors/openapi/z", {"json": {"z": [1, 2]}}),
    ("GET", "/v1/tensors/openapi/x", {}),
    ("GET", "/v1/tensors/openapi/x", {"headers": {"accept": "application/json"}}),
    ("HEAD", "/v1/tensors/openapi/x", {}),
    ("HEAD", "/v1/tensors/openapi/x", {"headers": {"accept": "application/x-npy"}}),
    ("DELETE", "/v1/tensors/openapi/z", {}),
    ("GET", "/v1/programs", {}),
    ("PUT", "/v1/programs/openapi", {"json": PROGRAM}),
    ("GET", "/v1/programs/openapi", {}),
    ("POST", "/v1/programs/openapi", {"json": {"x": [[1, 2, 3]]}}),
    ("POST", "/v1/run", {"json": {"program": PROGRAM, "x": [[1, 2, 3]]}}),
    ("GET", "/v1/kernels", {}),
    ("GET", "/v1/history", {}),
    ("GET", "/v2", {}),
    ("POST", "/v2/repository/index", {}),
    ("POST", "/v2/repository/index", {"json": {"ready": True}}),
    ("GET", "/v2/models/stats", {}),
    ("GET", "/v2/models/openapi", {}),
    ("GET", "/v2/models/matmul/versions/1", {}),
    ("GET", "/v2/models/matmul/config", {}),
    ("GET", "/v2/models/matmul/stats", {}),
    ("GET", "/v2/models/matmul/ready", {}),
    ("POST", "/v2/models/softmax/infer", {"json": INFER}),
    ("POST", "/v2/models/softmax/versions/1/infer", {"json": {**INFER, "parameters": {"binary_data_output": True}}}),
    ("GET", "/v2/systemsharedmemory/status", {}),
    ("POST", "/v2/systemsharedmemory/unregister", {}),
    ("POST", "/v2/systemsharedmemory/region/r/unregister", {}),
    ("GET", "/v2/cudasharedmemory/status", {}),
    ("POST", "/v2/cudasharedmemory/unregister", {}),
    ("GET", "/healthz", {}),
    ("GET", "/readyz", {}),
    ("GET", "/v2/health/live", {}),
    ("GET", "/v2/health/ready", {}),
    ("GET", "/metrics", {}),
    ("GET", "/metrics", {"headers": {"accept": "application/openmetrics-text"}}),
]
TWO_KEYS: dict[str, Any] = {"headers": [("x-api-key", "one"), ("x-api-key", "two")]}
CODED: dict[str, Any] = {"headers": {"transfer-encoding": "gzip, chunked"}}
BAD: list[tuple[str, str, int, dict[str, Any]]] = [
    ("POST", "/v1/matmul?activation=rleu", 400, {"json": {"a": [[1]], "b": [[1]]}}),
    ("POST", "/v1/matmul?b=@nothing", 404, {"json": {"a": [[1]]}}),
    ("POST", "/v1/matmul", 415, {"content": b"words", "headers": {"content-type": "text/plain"}}),
    ("POST", "/v1/matmul", 413, {"content": bytes(17 * 2**20)}),
    ("POST", "/v1/add", 422, {"json": {"a": [[[[[[[[[1]]]]]]]]], "b": 1}}),
    ("PUT", "/v1/tensors/..", 404, {"content": to_npy(A)}),
    ("PUT", "/v1/tensors/a b", 400, {"content": to_npy(A)}),
    ("PUT", "/v1/tensors/x", 400, {"content": to_safetensors({"a": A, "b": B})}),
    ("GET", "/v1/tensors/nothing", 404, {}),
    ("GET", "/v1/tensors/openapi/x", 415, {"headers": {"accept": "text/html"}}),
    ("HEAD", "/v1/tensors/nothing", 404, {}),
    ("DELETE", "/v1/tensors/nothing", 404, {}),
    ("PUT", "/v1/programs/openapi", 400, {"json": {"steps": []}}),
    ("GET", "/v1/programs/nothing", 404, {}),
    ("DELETE", "/v1/programs/nothing", 404, {}),
    ("POST", "/v1/programs/nothing", 404, {"json": {"x": 1}}),
    ("POST", "/v1/run", 400, {"json": {"x": 1}}),
    ("GET", "/v2/models/nothing", 404, {}),
    ("POST", "/v2/models/matmul/infer", 400, {"json": {}}),
    ("POST", "/v2/systemsharedmemory/region/r/register", 400, {"json": {"key": "k", "byte_size": 1}}),
    ("GET", "/v2/systemsharedmemory/region/r/status", 404, {}),
    ("GET", "/v1/tensors", 400, TWO_KEYS),
    ("GET", "/healthz", 400, TWO_KEYS),
    ("GET", "/v2", 400, TWO_KEYS),
    ("GET", "/metrics", 400, TWO_KEYS),
]


@pytest.mark.usefixtures("kept")
def test_answers_are_as_described(document: Document, client: httpx.Client) -> None:
    covered = set()
    for method, path, options in GOOD:
        response = client.request(method, path, **options)
        assert response.is_success, f"{method} {path}: {response.text}"
        check_described(document, response, method, path)
        covered.add(operation_at(document, method, path)["operationId"])
    named = {call["operationId"] for _, _, call in operations(document)}
    left = {name for name in named - covered if not name.endswith("_of_version")}
    assert left <= {*OPS, "delete_program", "register_shared_memory", "shared_memory_region_status"}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("method", "path", "status", "options"), BAD)
def test_refusals_are_as_described(
    document: Document, client: httpx.Client, method: str, path: str, status: int, options: dict[str, Any]
) -> None:
    response = client.request(method, path, **options)
    assert response.status_code == status, response.text
    if path != "/v1/tensors/..":  # the client takes that for another path
        check_described(document, response, method, path)


# ── generated clients ─────────────────────────────────────────────────────────────────────────────

USE_PYTHON = """
import sys
from io import BytesIO
from generated.client import Client
from generated.api.ops import matmul, softmax, topk
from generated.api.tensors import delete_tensor, get_tensor, list_tensors, put_tensor
from generated.api.programs import delete_program, put_program, run_program
from generated.api.open_inference_protocol import infer, server_metadata
from generated.models import (
    InferRequest, MatmulActivation, MatmulInputs, Problem, Program, ProgramBody, SoftmaxInputs, TopkInputs,
)
from generated.types import File

with Client(base_url=sys.argv[1]) as client:
    out = matmul.sync(client=client, body=MatmulInputs(a=[[1, -2]], b=[[3], [4]]), activation=MatmulActivation.RELU)
    assert out.out == [[0.0]] and out.dtype == "float32" and out.shape == [1, 1], out
    wrong = matmul.sync(client=client, body=MatmulInputs(a=[[1, 2]], b=[[3]]))
    assert isinstance(wrong, Problem) and wrong.status == 400 and "inner dimension" in wrong.detail, wrong
    npy = open(sys.argv[2], "rb").read()
    kept = put_tensor.sync("generated/x", client=client, body=File(payload=BytesIO(npy)))
    assert kept.shape == [2, 2], kept
    back = get_tensor.sync_detailed("generated/x", client=client)
    assert back.status_code == 200 and back.content.endswith(npy[-16:])
    stored = softmax.sync(client=client, x="@generated/x", store="@generated/y")
    assert stored.name == "generated/y", stored
    assert {"generated/x", "generated/y"} <= {one.name for one in list_tensors.sync(client=client)}
    best = topk.sync(client=client, body=TopkInputs(x=[[1, 3, 2]]), k=2)
    assert best.values == [[3.0, 2.0]] and best.indices == [[1, 2]] and best.dtype.indices == "int64", best
    program = {"inputs": {"x": {"dtype": "float32", "shape": [-1, 2]}},
               "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}], "outputs": ["p"]}
    assert put_program.sync("generated", client=client, body=Program.from_dict(program)).steps == 1
    ran = run_program.sync("generated", client=client, body=ProgramBody.from_dict({"x": [[1, 1]]}))
    assert ran.additional_properties["p"] == [[0.5, 0.5]], ran
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 1]}]}
    answered = infer.sync("softmax", client=client, body=InferRequest.from_dict(request))
    assert answered.outputs[0].data == [0.5, 0.5], answered
    assert server_metadata.sync(client=client).name == "tilewire"
    assert delete_program.sync_detailed("generated", client=client).status_code == 204
    for name in ("generated/x", "generated/y"):
        assert delete_tensor.sync_detailed(name, client=client).status_code == 204
"""

USE_TYPESCRIPT = """
import type { components, operations } from "./generated";
type Inputs = components["schemas"]["MatmulInputs"];
type Query = NonNullable<operations["matmul"]["parameters"]["query"]>;
type Outputs = operations["matmul"]["responses"][200]["content"]["application/json"];

async function matmul(url: string, query: Query, body: Inputs): Promise<Outputs> {
  const asked = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)]));
  const headers = { "content-type": "application/json" };
  const answer = await fetch(`${url}/v1/matmul?${asked}`, { method: "POST", headers, body: JSON.stringify(body) });
  return (await answer.json()) as Outputs;
}

matmul("SERVER", { activation: "relu" }, { a: [[1, 2]], b: [[3], [4]], dtype: "float32" }).then((answer) => {
  const shape: number[] = answer.shape;
  console.log(JSON.stringify({ out: answer.out, shape }));
});
"""


@pytest.mark.slow
def test_openapi_python_client_makes_a_working_client(document: Document, server: LiveServer, tmp_path: Path) -> None:
    if find_spec("openapi_python_client") is None:
        pytest.skip("openapi-python-client is not installed")
    (tmp_path / "openapi.json").write_bytes(httpx.get(f"{server.url}/openapi.json", trust_env=False).content)
    (tmp_path / "x.npy").write_bytes(to_npy(random_array("float32", (2, 2), 3)))
    command = [sys.executable, "-P", "-m", "openapi_python_client", "generate", "--path", "openapi.json"]
    command += ["--output-path", "generated", "--meta", "none"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    # What it has no words for are the content types of the formats, for which it has octets.
    complaints = re.findall(r"^(?:Unable|Unsupported|Cannot|Attempted).*$", made.stdout + made.stderr, re.MULTILINE)
    assert {one for one in complaints if not one.startswith("Unsupported content type application/x-")} == set()
    command = [sys.executable, "-c", USE_PYTHON, server.url, "x.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_openapi_typescript_makes_a_working_client(server: LiveServer, tmp_path: Path) -> None:
    for program in ("node", "openapi-typescript", "tsc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    (tmp_path / "openapi.json").write_bytes(httpx.get(f"{server.url}/openapi.json", trust_env=False).content)
    (tmp_path / "client.ts").write_text(USE_TYPESCRIPT.replace("SERVER", server.url))
    for command in (
        ["openapi-typescript", "openapi.json", "-o", "generated.ts"],
        [
            "tsc",
            "--strict",
            "--target",
            "es2022",
            "--module",
            "commonjs",
            "--lib",
            "es2022,dom",
            "client.ts",
        ],
        ["node", "client.js"],
    ):
        env = {**os.environ, "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == '{"out":[[11]],"shape":[1,1]}'
