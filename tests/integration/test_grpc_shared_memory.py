"""Tensors in shared memory over gRPC, end to end: the protocol's own client and real objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from ml_dtypes import bfloat16
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

from tests.support.live_server import LiveServer
from tests.support.shared_objects import PREFIX, shared_object
from tests.support.tensor_bodies import Array, to_npy
from tests.support.triton_regions import DATATYPES, A, B, read
from tests.support.triton_ways import WAYS


@pytest.fixture
def client(grpc_server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(grpc_server.grpc_address) as client:
        yield client
        client.unregister_system_shared_memory()


class Regions:
    """Objects and the regions made of them."""

    def __init__(self, client: triton.InferenceServerClient, stack: contextlib.ExitStack) -> None:
        self.client = client
        self._stack = stack

    def add(self, name: str, content: bytes | int, offset: int = 0) -> Path:
        path = self._stack.enter_context(shared_object(content))
        self.client.register_system_shared_memory(name, f"/{path.name}", path.stat().st_size - offset, offset)
        return path


@pytest.fixture
def regions(client: triton.InferenceServerClient) -> Iterator[Regions]:
    with contextlib.ExitStack() as stack:
        yield Regions(client, stack)


def given(name: str, array: Array, region: str | None = None, offset: int = 0) -> triton.InferInput:
    datatype = DATATYPES.get(array.dtype) or np_to_triton_dtype(array.dtype)
    one = triton.InferInput(name, list(array.shape), datatype)
    if region is None:
        return one.set_data_from_numpy(array)
    return one.set_shared_memory(region, array.nbytes, offset)


def wanted(region: str, byte_size: int, offset: int = 0, name: str = "out") -> triton.InferRequestedOutput:
    out = triton.InferRequestedOutput(name)
    out.set_shared_memory(region, byte_size, offset)
    return out


def infer(
    client: triton.InferenceServerClient,
    model: str,
    inputs: Sequence[triton.InferInput],
    *out: triton.InferRequestedOutput,
) -> triton.InferResult:
    return client.infer(model, inputs, outputs=out or None)


def refused(status: str, text: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(InferenceServerException, match=rf"^\[StatusCode.{status}\] .*{text}")


def test_a_life_of_a_region(client: triton.InferenceServerClient) -> None:
    with shared_object(4096) as path:
        assert not client.get_system_shared_memory_status().regions
        client.register_system_shared_memory("r", f"/{path.name}", 100, 1000)
        for status in (client.get_system_shared_memory_status(), client.get_system_shared_memory_status("r")):
            (one,) = status.regions.values()
            assert (one.name, one.key, one.offset, one.byte_size) == ("r", f"/{path.name}", 1000, 100)
        with refused("ALREADY_EXISTS", "registered already"):
            client.register_system_shared_memory("r", path.name, 1)
        client.unregister_system_shared_memory("r")
        client.unregister_system_shared_memory("r")
        with refused("NOT_FOUND", "r"):
            client.get_system_shared_memory_status("r")


@pytest.mark.parametrize(
    ("key", "byte_size", "offset"),
    [
        ("{}", 4097, 0),
        ("{}", 1, 4096),
        ("{}", 0, 0),
        ("{}", 2**64 - 1, 1),
        ("{}absent", 1, 0),
        ("", 1, 0),
        ("/../x", 1, 0),
    ],
)
def test_what_cannot_be_right(client: triton.InferenceServerClient, key: str, byte_size: int, offset: int) -> None:
    with shared_object(4096) as path, refused("INVALID_ARGUMENT", ""):
        client.register_system_shared_memory("r", key.format(path.name), byte_size, offset)
    assert not client.get_system_shared_memory_status().regions


def test_operands_and_result_in_regions(regions: Regions) -> None:
    regions.add("in", A.tobytes() + B.tobytes())
    out = regions.add("out", 60)
    for _ in range(3):
        result = infer(
            regions.client, "matmul", [given("a", A, "in"), given("b", B, "in", A.nbytes)], wanted("out", 60)
        )
        (described,) = result.get_response().outputs
        assert (described.name, described.datatype, list(described.shape)) == ("out", "FP32", [3, 5])
        assert described.parameters["shared_memory_region"].string_param == "out"
        assert list(result.get_response().raw_output_contents) == [b""]
        np.testing.assert_array_equal(read(out, A @ B), A @ B)
        out.write_bytes(bytes(60))


def test_the_clients_own_shared_memory(client: triton.InferenceServerClient) -> None:
    key = f"/{PREFIX}{os.getpid()}-grpc"
    handle = shm.create_shared_memory_region("own", key, A.nbytes + B.nbytes + 60)
    try:
        shm.set_shared_memory_region(handle, [A, B])
        client.register_system_shared_memory("own", key, A.nbytes + B.nbytes + 60)
        inputs = [given("a", A, "own"), given("b", B, "own", A.nbytes)]
        infer(client, "matmul", inputs, wanted("own", 60, A.nbytes + B.nbytes))
        got = shm.get_contents_as_numpy(handle, np.float32, [3, 5], A.nbytes + B.nbytes)
        np.testing.assert_array_equal(got, A @ B)
        client.unregister_system_shared_memory("own")
        del got
    finally:
        shm.destroy_shared_memory_region(handle)


def test_inputs_alone_and_beside_others(regions: Regions) -> None:
    regions.add("in", A.tobytes())
    result = infer(regions.client, "matmul", [given("a", A, "in"), given("b", B)])
    np.testing.assert_array_equal(result.as_numpy("out"), A @ B)
    regions.add("other", B.tobytes())
    result = infer(regions.client, "matmul", [given("a", A), given("b", B, "other")])
    np.testing.assert_array_equal(result.as_numpy("out"), A @ B)


def test_a_result_alone_and_one_of_two(regions: Regions) -> None:
    out = regions.add("out", b"\xff" * 100)
    infer(regions.client, "matmul", [given("a", A), given("b", B)], wanted("out", 80, 13))
    np.testing.assert_array_equal(read(out, A @ B, 13), A @ B)
    assert (out.read_bytes()[:13], out.read_bytes()[73:]) == (b"\xff" * 13, b"\xff" * 27)
    outputs = [wanted("out", 24, name="values"), triton.InferRequestedOutput("indices")]
    result = regions.client.infer("topk", [given("x", A)], outputs=outputs, parameters={"k": 2})
    np.testing.assert_array_equal(read(out, A[:, 3:1:-1]), A[:, 3:1:-1])
    np.testing.assert_array_equal(result.as_numpy("indices"), [[3, 2]] * 3)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.int8])
@pytest.mark.parametrize("offset", [0, 1, 7, 64, 4095])
def test_any_dtype_at_any_offset(regions: Regions, dtype: type, offset: int) -> None:
    a: Array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    b: Array = np.arange(-4, 4).reshape(4, 2).astype(dtype)
    expected: Array = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.int32 if dtype is np.int8 else dtype)
    path = regions.add("r", bytes(5 + offset) + a.tobytes() + b.tobytes() + bytes(expected.nbytes), 5)
    place = offset + a.nbytes + b.nbytes
    inputs = [given("a", a, "r", offset), given("b", b, "r", offset + a.nbytes)]
    infer(regions.client, "matmul", inputs, wanted("r", expected.nbytes, place))
    np.testing.assert_array_equal(read(path, expected, 5 + place), expected)


def test_in_place(regions: Regions) -> None:
    path = regions.add("r", A.tobytes())
    for power in range(1, 6):
        infer(regions.client, "add", [given("a", A, "r"), given("b", A, "r")], wanted("r", A.nbytes))
        np.testing.assert_array_equal(read(path, A), A * 2**power)


def test_a_resident_weight_and_a_region(grpc_server: LiveServer, regions: Regions) -> None:
    with grpc_server.client() as http:
        http.put("/v1/tensors/shm/w", content=to_npy(B)).raise_for_status()
        out = regions.add("r", A.tobytes() + bytes(60))
        for _ in range(2):
            regions.client.infer(
                "matmul", [given("a", A, "r")], outputs=[wanted("r", 60, A.nbytes)], parameters={"b": "@shm/w"}
            )
        http.delete("/v1/tensors/shm/w").raise_for_status()
    np.testing.assert_array_equal(read(out, A @ B, A.nbytes), A @ B)


def test_nothing_of_nothing(regions: Regions) -> None:
    regions.add("r", 16)
    empty: Array = np.zeros((0, 4), np.float32)
    result = infer(regions.client, "add", [given("a", empty, "r", 16), given("b", empty, "r")], wanted("r", 0, 16))
    assert list(result.get_response().outputs[0].shape) == [0, 4]


def test_what_is_wrong_with_sizes_and_regions(regions: Regions) -> None:
    out = regions.add("r", A.tobytes())
    for size in (A.nbytes - 1, A.nbytes + 1, 0):
        wrong = triton.InferInput("x", [3, 4], "FP32").set_shared_memory("r", size)
        with refused("INVALID_ARGUMENT", "shared_memory_byte_size"):
            infer(regions.client, "softmax", [wrong])
    with refused("INVALID_ARGUMENT", "shared_memory_byte_size"):
        infer(regions.client, "softmax", [given("x", A)], wanted("r", A.nbytes - 1))
    for offset in (1, 48, 2**63 - 48, 2**63 - 1):
        with refused("INVALID_ARGUMENT", "x"):
            infer(regions.client, "softmax", [given("x", A, "r", offset)])
    with refused("NOT_FOUND", "'none'"):
        infer(regions.client, "softmax", [given("x", A, "none")])
    with refused("NOT_FOUND", "'none'"):
        infer(regions.client, "softmax", [given("x", A)], wanted("none", A.nbytes))
    assert out.read_bytes() == A.tobytes()


def test_regions_are_those_of_http(grpc_server: LiveServer, regions: Regions) -> None:
    regions.add("shared", A.tobytes())
    with grpc_server.client() as http:
        assert [one["name"] for one in http.get("/v2/systemsharedmemory/status").json()] == ["shared"]
        http.post("/v2/systemsharedmemory/region/shared/unregister").raise_for_status()
    assert not regions.client.get_system_shared_memory_status().regions


def test_the_quota(client: triton.InferenceServerClient) -> None:
    with shared_object(2**20) as first, shared_object(2**20) as second:
        client.register_system_shared_memory("first", first.name, 2**20)
        with refused("INVALID_ARGUMENT", "bytes"):
            client.register_system_shared_memory("second", second.name, 1)


@pytest.mark.parametrize("way", WAYS)
def test_regions_by_every_way(grpc_server: LiveServer, regions: Regions, way: str) -> None:
    regions.add("in", A.tobytes() + B.tobytes())
    out = regions.add("out", 60)
    inputs = [given("a", A, "in"), given("b", B, "in", A.nbytes)]
    result = WAYS[way](grpc_server.grpc_address, "matmul", inputs, outputs=[wanted("out", 60)])
    assert list(result.get_response().raw_output_contents) == [b""]
    np.testing.assert_array_equal(read(out, A @ B), A @ B)
    with pytest.raises(InferenceServerException, match="no shared memory region 'absent'"):
        WAYS[way](grpc_server.grpc_address, "softmax", [given("x", A, "absent")])


def test_it_is_the_same_memory_as_over_http(grpc_server: LiveServer, regions: Regions) -> None:
    path = regions.add("both", A.tobytes() + bytes(A.nbytes))
    parameters = {"shared_memory_region": "both", "shared_memory_byte_size": A.nbytes}
    request = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "parameters": parameters}],
        "outputs": [{"name": "out", "parameters": {**parameters, "shared_memory_offset": A.nbytes}}],
    }
    with httpx.Client(base_url=grpc_server.url, trust_env=False) as http:
        http.post("/v2/models/softmax/infer", json=request).raise_for_status()
    by_http = read(path, A, A.nbytes).copy()
    infer(regions.client, "softmax", [given("x", A, "both")], wanted("both", A.nbytes, A.nbytes))
    np.testing.assert_array_equal(read(path, A, A.nbytes), by_http)
