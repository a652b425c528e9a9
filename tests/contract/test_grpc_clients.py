"""NVIDIA's own Python client over gRPC, as it is installed: sync, asyncio, asynchronous calls and streams."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.contract.test_oip_clients import DTYPES, SHAPES, arrays_of, check
from tests.support.float64_oracle import assert_close, matmul, random_array, softmax
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import Array, to_npy
from tests.support.triton_ways import WAYS
from tilewire.service.ops.registry import OPS

CODINGS = (None, "gzip", "deflate")
WAIT_S = 30.0
PROGRAM = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 6]}},
    "steps": [
        {"op": "matmul", "inputs": {"a": "x", "b": "@grpc/w"}, "as": "h"},
        {"op": "topk", "inputs": {"x": "h"}, "options": {"k": 2}, "as": ["values", "indices"]},
    ],
    "outputs": ["values", "indices"],
}


@pytest.fixture(scope="module")
def sync_client(grpc_server: LiveServer) -> Iterator[Any]:
    with triton.InferenceServerClient(grpc_server.grpc_address) as client:
        yield client


@pytest.fixture
def http(grpc_server: LiveServer) -> Iterator[httpx.Client]:
    with grpc_server.client() as client:
        yield client


def inputs_of(arrays: dict[str, Array]) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        datatype = "BF16" if array.dtype == ml_dtypes.bfloat16 else np_to_triton_dtype(array.dtype)
        one = triton.InferInput(name, list(array.shape), datatype)
        one.set_data_from_numpy(array)
        inputs.append(one)
    return inputs


@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op, dtype in DTYPES])
def test_every_dtype_and_coding(sync_client: Any, op: str, dtype: str) -> None:
    arrays = arrays_of(op, dtype)
    for coding in CODINGS:
        for outputs in (None, [triton.InferRequestedOutput("out")]):
            result = sync_client.infer(
                op, inputs_of(arrays), outputs=outputs, request_id="7", model_version="1", compression_algorithm=coding
            )
            answer = result.get_response()
            assert (answer.id, answer.model_name, answer.model_version) == ("7", op, "1")
            check(op, arrays, result.as_numpy("out"))


@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op, dtype in DTYPES])
def test_asyncio(grpc_server: LiveServer, op: str, dtype: str) -> None:
    arrays = arrays_of(op, dtype)

    async def run() -> list[Any]:
        async with triton_aio.InferenceServerClient(grpc_server.grpc_address) as client:
            assert await client.is_model_ready(op)
            calls = [client.infer(op, inputs_of(arrays), compression_algorithm=coding) for coding in CODINGS]
            return await asyncio.gather(*calls)

    for result in asyncio.run(run()):
        check(op, arrays, result.as_numpy("out"))


@pytest.mark.parametrize("op", SHAPES)
def test_asynchronous_calls(sync_client: Any, op: str) -> None:
    sent = [{name: random_array("float32", shape, 10 * n) for name, shape in SHAPES[op].items()} for n in range(20)]
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for number, arrays in enumerate(sent):
        sync_client.async_infer(
            op, inputs_of(arrays), lambda result, error: answers.put((result, error)), request_id=str(number)
        )
    for _ in sent:
        result, error = answers.get(timeout=WAIT_S)
        assert error is None
        check(op, sent[int(result.get_response().id)], result.as_numpy("out"))


@pytest.mark.parametrize("op", SHAPES)
def test_a_stream_answers_each_request_in_order(grpc_server: LiveServer, op: str) -> None:
    sent = [{name: random_array("float32", shape, 10 * n) for name, shape in SHAPES[op].items()} for n in range(40)]
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(grpc_server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number, arrays in enumerate(sent):
            is_asked = number % 2 == 1
            client.async_stream_infer(
                op, inputs_of(arrays), request_id=str(number), enable_empty_final_response=is_asked
            )
            if number == 20:
                client.async_stream_infer("nonsense", inputs_of(arrays), request_id="wrong")
        for number, arrays in enumerate(sent):
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            assert result.get_response().id == str(number)
            check(op, arrays, result.as_numpy("out"))
            assert result.get_response().parameters["triton_final_response"].bool_param == (number % 2 == 1)
            if number == 20:
                _, error = answers.get(timeout=WAIT_S)
                assert "no model 'nonsense'" in str(error)
        client.stop_stream()


def test_an_asyncio_stream(grpc_server: LiveServer) -> None:
    arrays = arrays_of("matmul", "float32")

    async def requests() -> Any:
        for number in range(5):
            yield {"model_name": "matmul", "inputs": inputs_of(arrays), "request_id": str(number)}

    async def run() -> list[Any]:
        async with triton_aio.InferenceServerClient(grpc_server.grpc_address) as client:
            return [answer async for answer in client.stream_infer(requests())]

    answers = asyncio.run(run())
    assert [result.get_response().id for result, error in answers] == list("01234")
    for result, error in answers:
        assert error is None
        check("matmul", arrays, result.as_numpy("out"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op, dtype in DTYPES])
def test_every_dtype_by_every_way(grpc_server: LiveServer, op: str, dtype: str, way: str) -> None:
    arrays = arrays_of(op, dtype)
    result = WAYS[way](grpc_server.grpc_address, op, inputs_of(arrays), request_id="7")
    assert result.get_response().id == "7"
    check(op, arrays, result.as_numpy("out"))


@pytest.mark.parametrize("way", WAYS)
def test_a_resident_by_every_way(grpc_server: LiveServer, http: httpx.Client, way: str) -> None:
    arrays = {"a": random_array("float32", (4, 6), 1), "b": random_array("float32", (6, 5), 2)}
    http.put("/v1/tensors/grpc/way", content=to_npy(arrays["b"])).raise_for_status()

    def ask() -> Any:
        inputs = inputs_of({"a": arrays["a"]})
        return WAYS[way](grpc_server.grpc_address, "matmul", inputs, parameters={"b": "@grpc/way"})

    assert_close(ask().as_numpy("out"), *matmul(arrays, {}))
    http.delete("/v1/tensors/grpc/way").raise_for_status()
    with pytest.raises(InferenceServerException, match="no resident tensor 'grpc/way'"):
        ask()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", OPS)
def test_every_op_answers_as_over_http(grpc_server: LiveServer, http: httpx.Client, op: str, way: str) -> None:
    """The same request over HTTP and over gRPC has the same answer, to the bit."""
    example = {name: value for name, value in OPS[op].example.items() if name in OPS[op].inputs}
    arrays = {name: np.array(value, np.float32) for name, value in example.items()}
    answer = http.post(
        f"/v2/models/{op}/infer",
        json={
            "inputs": [
                {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.reshape(-1).tolist()}
                for name, array in arrays.items()
            ],
            "parameters": dict(OPS[op].example_options),
        },
    )
    result = WAYS[way](grpc_server.grpc_address, op, inputs_of(arrays), parameters=dict(OPS[op].example_options))
    assert answer.status_code == 200, answer.text
    for output in answer.json()["outputs"]:
        got = result.as_numpy(output["name"])
        assert list(got.shape) == output["shape"]
        np.testing.assert_array_equal(got.reshape(-1), np.array(output["data"], got.dtype))


def test_options_priority_and_timeout(sync_client: Any) -> None:
    arrays = {"a": random_array("bfloat16", (4, 6), 1), "b": random_array("bfloat16", (5, 6), 2)}
    options = {"transpose_b": True, "activation": "silu", "out_dtype": "FP32"}
    result = sync_client.infer("matmul", inputs_of(arrays), priority=1, timeout=10_000_000, parameters=options)
    assert result.get_output("out").datatype == "FP32"
    assert_close(result.as_numpy("out"), *matmul(arrays, options))
    x = random_array("float32", (3, 4, 5), 3)
    result = sync_client.infer("softmax", inputs_of({"x": x}), parameters={"axis": 0, "log": True})
    assert_close(result.as_numpy("out"), *softmax(x, 0, log=True))
    arrays = {name: random_array("int64", (3,), 4) for name in "ab"}
    result = sync_client.infer("add", inputs_of(arrays), parameters={"alpha": -2})
    np.testing.assert_array_equal(result.as_numpy("out"), arrays["a"] - 2 * arrays["b"])
    arrays = {name: random_array("float32", (3,), 4) for name in "ab"}
    result = sync_client.infer("add", inputs_of(arrays), parameters={"alpha": 0.5})
    np.testing.assert_allclose(result.as_numpy("out"), arrays["a"] + 0.5 * arrays["b"], rtol=1e-6)


def test_a_weight_that_stays(sync_client: Any, http: httpx.Client) -> None:
    arrays = {"a": random_array("float32", (4, 6), 1), "b": random_array("float32", (6, 5), 2)}
    http.put("/v1/tensors/grpc/w", content=to_npy(arrays["b"])).raise_for_status()
    for _ in range(3):
        result = sync_client.infer("matmul", inputs_of({"a": arrays["a"]}), parameters={"b": "@grpc/w"})
        assert_close(result.as_numpy("out"), *matmul(arrays, {}))
    other = {**arrays, "b": random_array("float32", (6, 3), 3)}
    http.put("/v1/tensors/grpc/w", content=to_npy(other["b"])).raise_for_status()
    result = sync_client.infer("matmul", inputs_of({"a": arrays["a"]}), parameters={"b": "@grpc/w"})
    assert_close(result.as_numpy("out"), *matmul(other, {}))
    http.delete("/v1/tensors/grpc/w").raise_for_status()
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*grpc/w"):
        sync_client.infer("matmul", inputs_of({"a": arrays["a"]}), parameters={"b": "@grpc/w"})


def test_a_program_is_a_model(sync_client: Any, http: httpx.Client) -> None:
    x, w = random_array("float32", (4, 6), 1), random_array("float32", (6, 5), 2)
    http.put("/v1/tensors/grpc/w", content=to_npy(w)).raise_for_status()
    http.put("/v1/programs/best2", json=PROGRAM).raise_for_status()
    try:
        for _ in range(2):
            result = sync_client.infer("best2", inputs_of({"x": x}))
            expected = -np.sort(-(x.astype(np.float64) @ w), axis=-1)[:, :2]
            np.testing.assert_allclose(result.as_numpy("values"), expected, rtol=1e-4)
            assert result.as_numpy("indices").dtype == np.int64
        (one,) = (
            sync_client.infer("best2", inputs_of({"x": x}), outputs=[triton.InferRequestedOutput("indices")])
            .get_response()
            .outputs
        )
        assert one.name == "indices"
        assert [one.name for one in sync_client.get_model_metadata("best2").outputs] == ["values", "indices"]
        assert sync_client.is_model_ready("best2")
        assert "best2" in [one.name for one in sync_client.get_model_repository_index().models]
        assert not sync_client.is_model_ready("best2", "2")
    finally:
        http.delete("/v1/programs/best2").raise_for_status()
        http.delete("/v1/tensors/grpc/w").raise_for_status()
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        sync_client.infer("best2", inputs_of({"x": x}))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_zero_sizes(sync_client: Any, shape: tuple[int, ...]) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name in "ab"}
    result = sync_client.infer("add", inputs_of(arrays))
    assert list(result.get_output("out").shape) == list(shape)
    assert result.as_numpy("out").size == 0


def test_what_the_client_asks_of_a_server(sync_client: Any) -> None:
    assert sync_client.is_server_live()
    assert sync_client.is_server_ready()
    metadata = sync_client.get_server_metadata()
    assert metadata.name == "tilewire"
    assert "system_shared_memory" in metadata.extensions
    for op in OPS:
        assert sync_client.is_model_ready(op)
        assert sync_client.is_model_ready(op, "1")
        described = sync_client.get_model_metadata(op, "1")
        assert (described.name, [one.name for one in described.inputs]) == (op, list(OPS[op].required))
        config = sync_client.get_model_config(op).config
        assert (config.name, config.max_batch_size, config.version_policy.latest.num_versions) == (op, 0, 1)
        assert [one.name for one in config.output] == list(OPS[op].outputs)
        assert sync_client.get_inference_statistics(op).model_stats[0].name == op
    assert not sync_client.is_model_ready("nonsense")
    assert not sync_client.is_model_ready("matmul", "2")
    assert [one.name for one in sync_client.get_model_repository_index().models] == list(OPS)
    assert len(sync_client.get_inference_statistics().model_stats) == len(OPS)


def test_statistics_count_what_came_over_grpc(sync_client: Any) -> None:
    def successes() -> int:
        return int(sync_client.get_inference_statistics("softmax").model_stats[0].inference_stats.success.count)

    before = successes()
    for _ in range(3):
        sync_client.infer("softmax", inputs_of(arrays_of("softmax", "float32")))
    end_s = time.monotonic() + WAIT_S
    while successes() < before + 3:
        assert time.monotonic() < end_s
    assert successes() == before + 3


def test_errors_reach_the_caller(sync_client: Any) -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 3), np.float32)}
    for status, text, call in (
        ("INVALID_ARGUMENT", "inner dimension", {"model_name": "matmul"}),
        ("NOT_FOUND", "no model 'nonsense'", {"model_name": "nonsense"}),
        ("NOT_FOUND", "no version '2'", {"model_name": "add", "model_version": "2"}),
        ("UNAVAILABLE", "deadline", {"model_name": "add", "timeout": 1}),
        ("INVALID_ARGUMENT", "reserved", {"model_name": "add", "sequence_id": 5, "sequence_start": True}),
        ("INVALID_ARGUMENT", "aplha", {"model_name": "add", "parameters": {"aplha": 2}}),
    ):
        with pytest.raises(InferenceServerException, match=text) as caught:
            sync_client.infer(inputs=inputs_of(arrays), **call)
        assert caught.value.status() == f"StatusCode.{status}"
    for ask in (sync_client.get_model_metadata, sync_client.get_model_config, sync_client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*nonsense"):
            ask("nonsense")
