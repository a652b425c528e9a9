"""NVIDIA's own Python client against a running server, as it is installed: sync, asyncio and asynchronous calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.float64_oracle import assert_close, matmul, random_array, softmax
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import Array, to_npy
from tilewire.service.ops.registry import OPS

CODINGS = (None, "gzip", "deflate")
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul": {"a": (5, 7), "b": (7, 3)},
    "softmax": {"x": (4, 33)},
    "add": {"a": (4, 5), "b": (5,)},
}
# Those that the client has a name for: it has none for float8.
DTYPES = [(OPS[op], dtype) for op in SHAPES for dtype in OPS[op].dtypes if not dtype.startswith("float8")]


@pytest.fixture(scope="module")
def sync_client(server: LiveServer) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as client:
        yield client


def arrays_of(op: str, dtype: str) -> dict[str, Array]:
    return {name: random_array(dtype, shape, seed) for seed, (name, shape) in enumerate(SHAPES[op].items())}


def inputs_of(arrays: dict[str, Array], *, is_binary: bool = True) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        one = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        # The client itself refuses bfloat16 as text.
        one.set_data_from_numpy(array, binary_data=is_binary or array.dtype.name == "bfloat16")
        inputs.append(one)
    return inputs


def check(op: str, arrays: dict[str, Array], out: Array) -> None:
    if op == "matmul":
        assert_close(out, *matmul(arrays, {}))
    elif op == "softmax":
        assert_close(out, *softmax(arrays["x"]))
    else:
        expected = arrays["a"].astype(np.float64) + arrays["b"].astype(np.float64)
        assert_close(out, expected, 2**-22 * np.abs(expected))
        assert out.dtype == arrays["a"].dtype


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op, dtype in DTYPES])
def test_every_dtype_and_coding(sync_client: Any, op: str, dtype: str, is_binary: bool) -> None:
    arrays = arrays_of(op, dtype)
    for coding in CODINGS:
        for answer_coding in CODINGS:
            result = sync_client.infer(
                op,
                inputs_of(arrays, is_binary=is_binary),
                outputs=[triton.InferRequestedOutput("out", binary_data=is_binary)],
                request_id="7",
                request_compression_algorithm=coding,
                response_compression_algorithm=answer_coding,
            )
            answer = result.get_response()
            assert (answer["id"], answer["model_name"], answer["model_version"]) == ("7", op, "1")
            check(op, arrays, result.as_numpy("out"))


@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op, dtype in DTYPES])
def test_without_naming_outputs(sync_client: Any, op: str, dtype: str) -> None:
    arrays = arrays_of(op, dtype)
    result = sync_client.infer(op, inputs_of(arrays), model_version="1")
    assert "binary_data_size" in result.get_output("out")["parameters"]
    check(op, arrays, result.as_numpy("out"))


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op, dtype in DTYPES])
def test_asyncio(server: LiveServer, op: str, dtype: str, is_binary: bool) -> None:
    arrays = arrays_of(op, dtype)

    async def run() -> list[Any]:
        async with triton_aio.InferenceServerClient(server.url.removeprefix("http://")) as client:
            assert await client.is_model_ready(op)
            calls = [
                client.infer(
                    op,
                    inputs_of(arrays, is_binary=is_binary),
                    outputs=[triton_aio.InferRequestedOutput("out", binary_data=is_binary)],
                    request_compression_algorithm=coding,
                    response_compression_algorithm=answer_coding,
                )
                for coding in CODINGS
                for answer_coding in CODINGS
            ]
            return await asyncio.gather(*calls)

    for result in asyncio.run(run()):
        check(op, arrays, result.as_numpy("out"))


@pytest.mark.parametrize("op", SHAPES)
def test_asynchronous_calls(sync_client: Any, op: str) -> None:
    sent = [{name: random_array("float32", shape, 10 * n) for name, shape in SHAPES[op].items()} for n in range(20)]
    waiting = [sync_client.async_infer(op, inputs_of(arrays), request_id=str(n)) for n, arrays in enumerate(sent)]
    for number, (arrays, request) in enumerate(zip(sent, waiting, strict=True)):
        result = request.get_result()
        assert result.get_response()["id"] == str(number)
        check(op, arrays, result.as_numpy("out"))


def test_options_priority_and_timeout(sync_client: Any) -> None:
    arrays = {"a": random_array("bfloat16", (4, 6), 1), "b": random_array("bfloat16", (5, 6), 2)}
    options = {"transpose_b": True, "activation": "silu", "out_dtype": "FP32"}
    result = sync_client.infer("matmul", inputs_of(arrays), priority=1, timeout=10_000_000, parameters=options)
    assert result.get_output("out")["datatype"] == "FP32"
    assert_close(result.as_numpy("out"), *matmul(arrays, options))
    x = random_array("float32", (3, 4, 5), 3)
    result = sync_client.infer("softmax", inputs_of({"x": x}), parameters={"axis": 0, "log": True})
    assert_close(result.as_numpy("out"), *softmax(x, 0, log=True))
    arrays = {name: random_array("int64", (3,), 4) for name in "ab"}
    result = sync_client.infer("add", inputs_of(arrays), parameters={"alpha": -2})
    np.testing.assert_array_equal(result.as_numpy("out"), arrays["a"] - 2 * arrays["b"])


def test_a_weight_that_stays(sync_client: Any, client: httpx.Client) -> None:
    arrays = {"a": random_array("float32", (4, 6), 1), "b": random_array("float32", (6, 5), 2)}
    client.put("/v1/tensors/triton/w", content=to_npy(arrays["b"])).raise_for_status()
    result = sync_client.infer("matmul", inputs_of({"a": arrays["a"]}), parameters={"b": "@triton/w"})
    assert_close(result.as_numpy("out"), *matmul(arrays, {}))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("is_binary", [True, False])
def test_zero_sizes(sync_client: Any, shape: tuple[int, ...], is_binary: bool) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name in "ab"}
    outputs = [triton.InferRequestedOutput("out", binary_data=is_binary)]
    result = sync_client.infer("add", inputs_of(arrays, is_binary=is_binary), outputs=outputs)
    assert result.as_numpy("out").shape == shape


def test_nan_and_infinity_in_json(sync_client: Any) -> None:
    x = np.array([[np.nan, 1], [np.inf, 1], [-np.inf, 1], [-np.inf, -np.inf]], np.float32)
    arrays = {"a": x, "b": np.zeros_like(x)}
    outputs = [triton.InferRequestedOutput("out", binary_data=False)]
    result = sync_client.infer("add", inputs_of(arrays, is_binary=False), outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("out"), x)


def test_what_the_client_asks_of_a_server(sync_client: Any) -> None:
    assert sync_client.is_server_live()
    assert sync_client.is_server_ready()
    assert sync_client.get_server_metadata()["name"] == "tilewire"
    for op in OPS:
        assert sync_client.is_model_ready(op)
        assert sync_client.is_model_ready(op, "1")
        assert sync_client.get_model_metadata(op, "1")["name"] == op
        assert sync_client.get_model_config(op)["max_batch_size"] == 0
        assert sync_client.get_inference_statistics(op)["model_stats"][0]["name"] == op
    assert not sync_client.is_model_ready("nonsense")
    assert not sync_client.is_model_ready("matmul", "2")
    assert [one["name"] for one in sync_client.get_model_repository_index()] == list(OPS)
    assert len(sync_client.get_inference_statistics()["model_stats"]) == len(OPS)


def test_errors_reach_the_caller(sync_client: Any) -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 3), np.float32)}
    with pytest.raises(InferenceServerException, match="inner dimension") as caught:
        sync_client.infer("matmul", inputs_of(arrays))
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="no model 'nonsense'"):
        sync_client.infer("nonsense", inputs_of(arrays))
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        sync_client.infer("add", inputs_of(arrays), timeout=1)
    assert caught.value.status() == "504"
    with pytest.raises(InferenceServerException, match="reserved"):
        sync_client.infer("add", inputs_of(arrays), sequence_id=5, sequence_start=True)
    with pytest.raises(InferenceServerException, match="aplha"):
        sync_client.infer("add", inputs_of(arrays), parameters={"aplha": 2})


def test_a_body_made_and_read_by_the_clients_own_functions(server: LiveServer, client: httpx.Client) -> None:
    arrays = arrays_of("matmul", "float32")
    body, header_bytes = triton.InferenceServerClient.generate_request_body(inputs_of(arrays))
    headers = {"Inference-Header-Content-Length": str(header_bytes), "accept-encoding": "identity"}
    response = client.post("/v2/models/matmul/infer", content=body, headers=headers)
    result = triton.InferenceServerClient.parse_response_body(
        response.content, header_length=int(response.headers["Inference-Header-Content-Length"])
    )
    check("matmul", arrays, result.as_numpy("out"))
