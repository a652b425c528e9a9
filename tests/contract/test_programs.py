"""Programs over HTTP, as the second edition of the contract has them: kept, run, replaced, refused, and as models of `/v2`."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import Scrape, scrape, settles, total
from tests.support.live_server import COMMAND, DEVICE, LiveServer
from tests.support.problems import check_error, check_problem
from tests.support.tensor_bodies import Array, from_safetensors, to_npy, to_safetensors

RNG = np.random.default_rng(5)
W1 = RNG.standard_normal((8, 16), dtype=np.float32)
B1 = RNG.standard_normal(16, dtype=np.float32)
W2 = RNG.standard_normal((16, 12), dtype=np.float32)
X = RNG.standard_normal((3, 8), dtype=np.float32)
MLP: dict[str, Any] = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}},
    "steps": [
        {
            "op": "matmul",
            "inputs": {"a": "x", "b": "@mlp/w1", "bias": "@mlp/b1"},
            "options": {"activation": "relu"},
            "as": "h",
        },
        {"op": "matmul", "inputs": {"a": "h", "b": "@mlp/w2"}, "as": "logits"},
        {"op": "softmax", "inputs": {"x": "logits"}, "as": "p"},
        {"op": "topk", "inputs": {"x": "p"}, "options": {"k": 5}, "as": ["values", "indices"]},
    ],
    "outputs": ["values", "indices"],
}


def expected(x: Array) -> tuple[Array, Array]:
    logits = np.maximum(x @ W1 + B1, 0) @ W2
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    indices = np.argsort(-p, axis=-1, kind="stable")[:, :5]
    return np.take_along_axis(p, indices, -1), indices


@pytest.fixture
def mlp(client: httpx.Client) -> Iterator[str]:
    for name, array in (("w1", W1), ("b1", B1), ("w2", W2)):
        client.put(f"/v1/tensors/mlp/{name}", content=to_npy(array)).raise_for_status()
    response = client.put("/v1/programs/mlp", json=MLP)
    assert response.status_code == 201, response.text
    yield "mlp"
    client.delete("/v1/programs/mlp")


def check(values: Array, indices: Array, x: Array = X) -> None:
    want_values, want_indices = expected(x)
    np.testing.assert_allclose(values, want_values, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(indices, want_indices)


def test_operations_are_counted_under_the_ops_of_the_steps(client: httpx.Client, mlp: str) -> None:
    before = scrape(client)
    client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X})).raise_for_status()
    products = 2 * len(X) * (W1.size + W2.size)

    def is_counted(now: Scrape) -> bool:
        def gained(name: str, **labels: str) -> float:
            return total(now, name, **labels) - total(before, name, **labels)

        # The activation of the first product counts as well.
        return (
            products <= gained("tilewire_flops_total", op="matmul", dtype="float32") < 1.5 * products
            and gained("tilewire_flops_total", op="softmax", dtype="float32") > 0
            and gained("tilewire_kernel_seconds_total", op="topk", dtype="float32") > 0
            and gained("tilewire_flops_total", op="program") == 0
            and gained("tilewire_requests_total", op="program") == 1
        )

    assert settles(client, is_counted), scrape(client)


def test_a_kept_program_has_statistics(client: httpx.Client) -> None:
    client.put("/v1/programs/counted", json=SOFTMAX).raise_for_status()
    try:
        ran = [client.post("/v1/programs/counted", content=to_safetensors({"x": X})).status_code for _ in range(3)]
        assert ran == [200] * 3
        assert client.post("/v1/programs/counted", content=to_safetensors({"y": X})).status_code == 400
        end_s = time.monotonic() + 10
        while True:
            (found,) = client.get("/v2/models/counted/stats").json()["model_stats"]
            stats = found["inference_stats"]
            if (found["inference_count"], stats["success"]["count"], stats["fail"]["count"]) == (3, 3, 1):
                break
            assert time.monotonic() < end_s, found
            time.sleep(0.02)
        every = client.get("/v2/models/stats").json()["model_stats"]
        assert "counted" in {one["name"] for one in every}
    finally:
        client.delete("/v1/programs/counted").raise_for_status()
    assert client.get("/v2/models/counted/stats").status_code == 404


def test_a_kept_program_answers_its_outputs_by_name(client: httpx.Client, mlp: str) -> None:
    for _ in range(3):
        response = client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X}))
        assert response.status_code == 200, response.text
        tensors = from_safetensors(response.content)
        check(tensors["values"], tensors["indices"])
        assert tensors["indices"].dtype == np.int64
        assert int(response.headers["x-batch-size"]) >= 1
        assert "kernel" in response.headers["server-timing"]


def test_any_number_of_rows(client: httpx.Client, mlp: str) -> None:
    for rows in (1, 7, 64):
        x = RNG.standard_normal((rows, 8), dtype=np.float32)
        tensors = from_safetensors(client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": x})).content)
        check(tensors["values"], tensors["indices"], x)


@pytest.mark.parametrize("shape", [[3, 8], [-1, 8], [3, -1]])
def test_a_program_may_take_one_shape_only(client: httpx.Client, shape: list[int]) -> None:
    steps = [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}]
    text = {"inputs": {"x": {"dtype": "float32", "shape": shape}}, "steps": steps, "outputs": ["p"]}
    client.put("/v1/programs/shaped", json=text).raise_for_status()
    for _ in range(2):
        response = client.post("/v1/programs/shaped", content=to_npy(X))
        np.testing.assert_allclose(np.load(io.BytesIO(response.content)).sum(-1), np.ones(3), rtol=1e-6)


def test_a_program_may_read_residents_alone(client: httpx.Client) -> None:
    client.put("/v1/tensors/alone", content=to_npy(X)).raise_for_status()
    steps = [{"op": "softmax", "inputs": {"x": "@alone"}, "as": "p"}]
    text = {"inputs": {}, "steps": steps, "outputs": ["p"]}
    client.put("/v1/programs/alone", json=text).raise_for_status()
    for answer in (
        client.post("/v1/programs/alone", headers={"accept": "application/json"}),
        client.post("/v1/run", json={"program": text}),
    ):
        np.testing.assert_allclose(np.sum(answer.raise_for_status().json()["p"], -1), np.ones(3), rtol=1e-6)
    inferred = client.post("/v2/models/alone/infer", json={"inputs": []}).raise_for_status().json()
    assert inferred["outputs"][0]["shape"] == [3, 8]


def test_rows_of_other_requests_stay_out_of_a_sum_over_rows(client: httpx.Client, server: LiveServer) -> None:
    steps = [
        {"op": "reduce", "inputs": {"x": "x"}, "options": {"kind": "sum"}, "as": "s"},
        {"op": "softmax", "inputs": {"x": "s"}, "as": "p"},
    ]
    text = {"inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}}, "steps": steps, "outputs": ["p"]}
    client.put("/v1/programs/over_rows", json=text).raise_for_status()

    def run(number: int) -> Array:
        body = to_npy(np.full((2, 8), number, np.float32))
        response = httpx.post(f"{server.url}/v1/programs/over_rows", content=body)
        answer: Array = np.load(io.BytesIO(response.content))
        return answer

    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(run, range(40)):
            np.testing.assert_array_equal(answer, [0.5, 0.5])


def test_every_format(client: httpx.Client, mlp: str) -> None:
    path = f"/v1/programs/{mlp}"
    npz = io.BytesIO()
    np.savez(npz, x=X)
    with np.load(io.BytesIO(client.post(path, content=npz.getvalue()).raise_for_status().content)) as answer:
        check(answer["values"], answer["indices"])
    npy = client.post(path, content=to_npy(X), headers={"accept": "application/x-safetensors"})
    tensors = from_safetensors(npy.raise_for_status().content)
    check(tensors["values"], tensors["indices"])
    document = client.post(path, json={"x": X.tolist(), "dtype": "float32"}).raise_for_status().json()
    check(np.array(document["values"]), np.array(document["indices"]))
    assert document["dtype"] == {"values": "float32", "indices": "int64"}
    assert document["shape"] == {"values": [3, 5], "indices": [3, 5]}
    two = client.post(path, content=to_safetensors({"x": X}), headers={"accept": "application/x-npy"})
    check_problem(two, 415, "npy")


def test_residents_stand_for_inputs(client: httpx.Client, mlp: str) -> None:
    client.put("/v1/tensors/mlp/x", content=to_npy(X)).raise_for_status()
    response = client.post(f"/v1/programs/{mlp}?x=@mlp/x", headers={"accept": "application/x-safetensors"})
    tensors = from_safetensors(response.raise_for_status().content)
    check(tensors["values"], tensors["indices"])
    check_problem(client.post(f"/v1/programs/{mlp}?y=@mlp/x"), 400, "y")
    check_problem(client.post(f"/v1/programs/{mlp}?x=@mlp/none"), 404, "x")
    check_problem(client.post(f"/v1/programs/{mlp}?k=5", content=to_safetensors({"x": X})), 400, "k")


def test_programs_are_listed_fetched_replaced_and_deleted(client: httpx.Client, mlp: str) -> None:
    (entry,) = [one for one in client.get("/v1/programs").raise_for_status().json() if one["name"] == mlp]
    assert entry["outputs"] == ["values", "indices"]
    fetched = client.get(f"/v1/programs/{mlp}").raise_for_status()
    assert fetched.json() == MLP
    assert client.head(f"/v1/programs/{mlp}").status_code == 200
    assert all(not one["name"].startswith("program") for one in client.get("/v1/tensors").json())
    shorter = {**MLP, "steps": MLP["steps"][:3], "outputs": ["p"]}
    assert client.put(f"/v1/programs/{mlp}", json=shorter).status_code == 200
    for _ in range(8):
        answer = client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X}))
        assert from_safetensors(answer.raise_for_status().content).keys() == {"p"}
    assert client.delete(f"/v1/programs/{mlp}").status_code == 204
    for response in (
        client.delete(f"/v1/programs/{mlp}"),
        client.get(f"/v1/programs/{mlp}"),
        client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X})),
    ):
        check_problem(response, 404, "program")


def test_a_program_travels_with_its_inputs(client: httpx.Client, mlp: str) -> None:
    text = json.dumps({"program": json.dumps(MLP)})
    body = to_safetensors({"x": X})
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length]) | {"__metadata__": json.loads(text)}
    encoded = json.dumps(header).encode()
    whole = len(encoded).to_bytes(8, "little") + encoded + body[8 + length :]
    for _ in range(2):
        tensors = from_safetensors(client.post("/v1/run", content=whole).raise_for_status().content)
        check(tensors["values"], tensors["indices"])
    document = client.post("/v1/run", json={"program": MLP, "x": X.tolist()}).raise_for_status().json()
    check(np.array(document["values"]), np.array(document["indices"]))
    check_problem(client.post("/v1/run", content=body), 400, "program")
    check_problem(client.post("/v1/run", json={"program": {"steps": 1}, "x": X.tolist()}), 400, "program")
    for wrong in ([1] * 40_000, {"steps": [1] * 40_000}, {**MLP, "outputs": [{"a": [1] * 40_000}]}):
        check_problem(client.post("/v1/run", json={"program": wrong, "x": X.tolist()}), 400, "program")


def test_a_resident_that_is_not_there_is_named_with_its_step(client: httpx.Client, mlp: str) -> None:
    steps = [
        {"op": "softmax", "inputs": {"x": "x"}, "as": "p"},
        {"op": "matmul", "inputs": {"a": "p", "b": "@mlp/later"}, "as": "y"},
    ]
    text = {"inputs": MLP["inputs"], "steps": steps, "outputs": ["y"]}
    client.put("/v1/programs/early", json=text).raise_for_status()
    for response in (
        client.post("/v1/programs/early", content=to_npy(X)),
        client.post("/v1/run", json={"program": text, "x": X.tolist()}),
        client.post("/v1/programs/early", content=to_npy(X), headers={"if-match": "*"}),
    ):
        check_problem(response, 404, "step 2: b: no resident tensor 'mlp/later'")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": [{"op": "conv", "inputs": {}, "as": "y"}], "outputs": ["y"]}, "step 1"),
        ({"steps": [{"op": "softmax", "inputs": {"x": "z"}, "as": "y"}], "outputs": ["y"]}, "step 1"),
        (
            {
                "steps": [
                    {"op": "softmax", "inputs": {"x": "x"}, "as": "y"},
                    {"op": "matmul", "inputs": {"a": "y", "b": "@mlp/w2"}, "as": "z"},
                ],
                "outputs": ["z"],
            },
            "step 2",
        ),
        ({"outputs": []}, "outputs"),
        ({"steps": []}, "steps"),
    ],
)
def test_what_cannot_work_is_refused_at_the_upload(
    client: httpx.Client, mlp: str, changes: dict[str, Any], said: str
) -> None:
    check_problem(client.put("/v1/programs/other", json={**MLP, **changes}), 400, said)
    assert client.get("/v1/programs/other").status_code == 404


def test_names_and_inputs_that_cannot_be_right(client: httpx.Client, mlp: str) -> None:
    for name in ("matmul", "stats"):
        check_problem(client.put(f"/v1/programs/{name}", json=MLP), 400, "name")
    for name in ("", "a%20b", "a/b", "a%2Fb"):
        check_problem(client.put(f"/v1/programs/{name}", json=MLP), 400, "name")
        check_problem(client.get(f"/v1/programs/{name}"), 400, "name")
        check_problem(client.post(f"/v1/programs/{name}", content=to_safetensors({"x": X})), 400, "name")
        check_problem(client.delete(f"/v1/programs/{name}"), 400, "name")
    check_problem(client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X[:, :7]})), 400, "x")
    check_problem(client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X.astype(np.float16)})), 400, "x")
    for name in ("y", "program", "@mlp/w2"):
        for arrays in ({name: X}, {"x": X, name: X}):
            problem = check_problem(client.post(f"/v1/programs/{mlp}", content=to_safetensors(arrays)), 400)
            assert problem["detail"] == f"{name}: program has no such input; it has x"
    problem = check_problem(client.post(f"/v1/programs/{mlp}"), 400)
    assert problem["detail"] == "x: program needs this input; got none"
    for name in ("", "y", "program", "@mlp/w2"):
        answer = client.post(f"/v1/programs/{mlp}?{name}=@mlp/w1", content=to_safetensors({"x": X}))
        check_problem(answer, 400, f"{name}: program has no such input; it has x")
    for text in (b"{", b'{"a": "\xff"}', b'{"inputs": {}, "inputs": {}}'):
        check_problem(client.put("/v1/programs/other", content=text), 400, "program")


def test_a_kept_program_is_a_model(client: httpx.Client, mlp: str) -> None:
    metadata = client.get(f"/v2/models/{mlp}").raise_for_status().json()
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert metadata["outputs"] == [
        {"name": "values", "datatype": "FP32", "shape": [-1, 5]},
        {"name": "indices", "datatype": "INT64", "shape": [-1, 5]},
    ]
    assert client.get(f"/v2/models/{mlp}/ready").json()["ready"] is True
    assert client.get(f"/v2/models/{mlp}/config").raise_for_status().json()["input"][0]["name"] == "x"
    assert mlp in {one["name"] for one in client.post("/v2/repository/index").json()}
    for response in (client.get(f"/v2/models/{mlp}/versions/9"), client.post(f"/v2/models/{mlp}/versions/9/infer")):
        check_error(response, 404, "mlp has no version '9'; it has 1")
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 8], "data": X.ravel().tolist()}]}
    answer = client.post(f"/v2/models/{mlp}/infer", json=request).raise_for_status().json()
    assert answer["model_name"] == mlp
    outputs = {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer["outputs"]}
    check(outputs["values"], outputs["indices"])
    # The program's own residents, and the program itself, are not a request's to choose.
    for name in ("@mlp/w2", "program"):
        resident = {"name": name, "parameters": {"resident": "mlp/w1"}}
        refused = client.post(f"/v2/models/{mlp}/infer", json={"inputs": [*request["inputs"], resident]})
        check_error(refused, 400, f"{name!r}; it has x")
        refused = client.post(f"/v2/models/{mlp}/infer", json={**request, "parameters": {name: "@mlp/w1"}})
        check_error(refused, 400, name)
    refused = client.post(f"/v2/models/{mlp}/infer", json={**request, "parameters": {"text": "x"}})
    assert refused.status_code == 400
    assert "text" in refused.json()["error"]
    nobody = client.post("/v2/models/nobody/infer", json=request)
    assert nobody.status_code == 404
    assert "nobody" in nobody.json()["error"]


@pytest.mark.parametrize("path", ["mlp/w2", "mlp/w2?placement=shard"])
def test_a_program_whose_resident_fits_no_more_stays_a_model(client: httpx.Client, mlp: str, path: str) -> None:
    client.put(f"/v1/tensors/{path}", content=to_npy(np.ones((3, 4), np.float32))).raise_for_status()
    metadata = client.get(f"/v2/models/{mlp}").raise_for_status().json()
    assert [one["name"] for one in metadata["inputs"] + metadata["outputs"]] == ["x", "values", "indices"]
    assert client.get(f"/v2/models/{mlp}/ready").status_code == 200
    check_problem(client.post(f"/v1/programs/{mlp}", content=to_safetensors({"x": X})), 400, "step 2: b")


SOFTMAX: dict[str, Any] = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}},
    "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}],
    "outputs": ["p"],
}


@pytest.fixture(scope="module")
def preloaded(shared_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """One program from a file."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "soft.json").write_text(json.dumps(SOFTMAX))
    return shared_server("--gateways", "1", "--arena-bytes", "32MiB", "--programs-dir", str(folder))


def test_a_folder_of_programs_is_kept_before_ready(preloaded: LiveServer) -> None:
    server = preloaded
    with server.client() as client:
        assert [one["name"] for one in client.get("/v1/programs").raise_for_status().json()] == ["soft"]
        answer = client.post("/v1/programs/soft", content=to_safetensors({"x": X})).raise_for_status()
        np.testing.assert_allclose(from_safetensors(answer.content)["p"].sum(-1), 1, rtol=1e-5)


def test_a_file_that_is_no_program_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    flags = ["--port", "0", "--device", DEVICE, "--gateways", "1", "--programs-dir", str(tmp_path)]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "--programs-dir: 'wrong.json'" in done.stderr + done.stdout


def test_programs_outlive_the_engine(preloaded: LiveServer) -> None:
    server = preloaded
    with server.client() as client:
        client.put("/v1/programs/kept", json=SOFTMAX).raise_for_status()
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        end_s = time.monotonic() + 30
        while server.engines() in ([], [engine]):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        (gateway,) = server.gateways()
        server.wait_ready(gateway)
        answer = client.post("/v1/programs/kept", content=to_safetensors({"x": X})).raise_for_status()
        np.testing.assert_allclose(from_safetensors(answer.content)["p"].sum(-1), 1, rtol=1e-5)
        client.delete("/v1/programs/kept").raise_for_status()
