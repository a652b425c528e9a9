"""Tensors in shared memory, end to end: the protocol's own client and real objects."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from ml_dtypes import bfloat16
from tritonclient.utils import shared_memory as shm

from tests.support.live_server import LiveServer
from tests.support.shared_objects import PREFIX
from tests.support.tensor_bodies import Array, to_npy
from tests.support.triton_regions import A, B, Regions, given, infer, read, refused, wanted


def test_operands_and_result_in_regions(regions: Regions) -> None:
    regions.add("in", A.tobytes() + B.tobytes())
    out = regions.add("out", 60)
    result = infer(regions.client, "matmul", [given("a", A, "in"), given("b", B, "in", A.nbytes)], wanted("out", 60))
    assert result.get_response()["outputs"] == [{"name": "out", "datatype": "FP32", "shape": [3, 5]}]
    np.testing.assert_array_equal(read(out, A @ B), A @ B)


def test_the_clients_own_shared_memory(sharing_client: triton.InferenceServerClient) -> None:
    key = f"/{PREFIX}{os.getpid()}-own"
    handle = shm.create_shared_memory_region("own", key, A.nbytes + B.nbytes + 60)
    try:
        shm.set_shared_memory_region(handle, [A, B])
        sharing_client.register_system_shared_memory("own", key, A.nbytes + B.nbytes + 60)
        inputs = [given("a", A, "own"), given("b", B, "own", A.nbytes)]
        infer(sharing_client, "matmul", inputs, wanted("own", 60, A.nbytes + B.nbytes))
        got = shm.get_contents_as_numpy(handle, np.float32, [3, 5], A.nbytes + B.nbytes)
        np.testing.assert_array_equal(got, A @ B)
        (status,) = sharing_client.get_system_shared_memory_status("own")
        assert status == {"name": "own", "key": key, "offset": 0, "byte_size": A.nbytes + B.nbytes + 60}
        sharing_client.unregister_system_shared_memory("own")
        assert sharing_client.get_system_shared_memory_status() == []
        del got
    finally:
        shm.destroy_shared_memory_region(handle)


def test_inputs_alone_and_beside_others(regions: Regions) -> None:
    regions.add("in", A.tobytes())
    for b in (given("b", B), triton.InferInput("b", [4, 5], "FP32").set_data_from_numpy(B, binary_data=False)):
        result = infer(regions.client, "matmul", [given("a", A, "in"), b])
        np.testing.assert_array_equal(result.as_numpy("out"), A @ B)
    text = triton.InferRequestedOutput("out", binary_data=False)
    result = infer(regions.client, "softmax", [given("x", np.zeros((3, 4), np.float32), "in")], text)
    np.testing.assert_allclose(result.as_numpy("out").sum(-1), 1, rtol=1e-6)


def test_a_result_alone(regions: Regions) -> None:
    out = regions.add("out", b"\xff" * 100)
    infer(regions.client, "matmul", [given("a", A), given("b", B)], wanted("out", 80, 13))
    np.testing.assert_array_equal(read(out, A @ B, 13), A @ B)
    assert (out.read_bytes()[:13], out.read_bytes()[73:]) == (b"\xff" * 13, b"\xff" * 27)


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


def test_two_outputs_at_one_place_are_refused(regions: Regions) -> None:
    x: Array = np.arange(12, dtype=np.float32).reshape(3, 4)
    # Three values of four bytes, and three indices of eight.
    path = regions.add("r", b"\xff" * 64)

    def top(values_at: int, indices_at: int) -> triton.InferResult:
        outputs = [wanted("r", 12, values_at, "values"), wanted("r", 24, indices_at, "indices")]
        return regions.client.infer("topk", [given("x", x)], outputs=outputs, parameters={"k": 1})

    for values_at, indices_at in ((0, 0), (0, 8), (23, 0)):
        with refused(400, "outputs: .* overlap in region 'r'"):
            top(values_at, indices_at)
    assert path.read_bytes() == b"\xff" * 64
    top(24, 0)
    assert np.frombuffer(path.read_bytes()[24:36], np.float32).tolist() == [3, 7, 11]
    assert np.frombuffer(path.read_bytes()[:24], np.int64).tolist() == [3, 3, 3]


def test_two_regions_of_one_object(regions: Regions) -> None:
    path = regions.add("whole", A.tobytes() * 2)
    regions.client.register_system_shared_memory("half", path.name, A.nbytes, A.nbytes)
    infer(regions.client, "add", [given("a", A, "whole"), given("b", A, "half")], wanted("half", A.nbytes))
    np.testing.assert_array_equal(read(path, A, A.nbytes), A * 2)
    np.testing.assert_array_equal(read(path, A), A)


def test_a_resident_weight_and_a_region(sharing: LiveServer, regions: Regions) -> None:
    with sharing.client() as http:
        assert http.put("/v1/tensors/shm/w", content=to_npy(B)).status_code in (200, 201)
        out = regions.add("r", A.tobytes() + bytes(60))
        parameters = {"shared_memory_region": "r", "shared_memory_byte_size": A.nbytes}
        room = {"shared_memory_region": "r", "shared_memory_byte_size": 60, "shared_memory_offset": A.nbytes}
        request = {
            "inputs": [
                {"name": "a", "datatype": "FP32", "shape": [3, 4], "parameters": parameters},
                {"name": "b", "datatype": "FP32", "shape": [4, 5], "parameters": {"resident": "shm/w"}},
            ],
            "outputs": [{"name": "out", "parameters": room}],
        }
        answer = http.post("/v2/models/matmul/infer", json=request)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"] == [{"name": "out", "datatype": "FP32", "shape": [3, 5]}]
        assert http.delete("/v1/tensors/shm/w").status_code == 204
    np.testing.assert_array_equal(read(out, A @ B, A.nbytes), A @ B)


def test_nothing_of_nothing(regions: Regions) -> None:
    regions.add("r", 16)
    empty: Array = np.zeros((0, 4), np.float32)
    result = infer(regions.client, "add", [given("a", empty, "r", 16), given("b", empty, "r")], wanted("r", 0, 16))
    assert result.get_response()["outputs"][0]["shape"] == [0, 4]
    inner: Array = np.zeros((2, 0), np.float32)
    out = regions.add("out", b"\xff" * 16)
    infer(regions.client, "matmul", [given("a", inner, "r"), given("b", inner.T, "r")], wanted("out", 16))
    assert out.read_bytes() == bytes(16)


def test_what_is_wrong_with_sizes_is_400(regions: Regions) -> None:
    out = regions.add("r", A.tobytes())
    for size in (A.nbytes - 1, A.nbytes + 1, 0, 2**63 - 1):
        wrong = triton.InferInput("x", [3, 4], "FP32").set_shared_memory("r", size)
        with refused(400, "shared_memory_byte_size"):
            infer(regions.client, "softmax", [wrong])
    for room in (0, A.nbytes - 1):
        with refused(400, "shared_memory_byte_size"):
            infer(regions.client, "softmax", [given("x", A)], wanted("r", room))
    assert out.read_bytes() == A.tobytes()


@pytest.mark.parametrize(
    "offset", [1, 48, 2**31, 2**32 - 47, 2**63 - 48, 2**63 - 1, 2**64 - 47, 2**64 - 1, 2**64, 2**100]
)
def test_an_offset_that_wraps_is_400(regions: Regions, offset: int) -> None:
    regions.add("r", A.tobytes())
    with refused(400, "x"):
        infer(regions.client, "softmax", [given("x", A, "r", offset)])
    with refused(400, "out"):
        infer(regions.client, "softmax", [given("x", A)], wanted("r", A.nbytes, offset))


def test_a_region_ends_where_it_was_said_to(regions: Regions) -> None:
    path = regions.add("whole", 4096)
    regions.client.register_system_shared_memory("part", path.name, 100, 1000)
    infer(regions.client, "softmax", [given("x", A, "part", 52)])
    for offset in (53, 100, 2000):
        with refused(400, "do not lie inside"):
            infer(regions.client, "softmax", [given("x", A, "part", offset)])


def test_an_unknown_region_is_404(sharing: LiveServer, regions: Regions) -> None:
    regions.add("r", A.tobytes())
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "parameters": {}}]}
    request["inputs"][0]["parameters"] = {"shared_memory_region": "none", "shared_memory_byte_size": 48}
    with sharing.client() as http:
        answer = http.post("/v2/models/softmax/infer", json=request)
        assert answer.status_code == 404
        assert "'none'" in answer.json()["error"]
        assert http.get("/v2").json()["extensions"][-1] == "system_shared_memory"
    with refused(404, "'none'"):
        infer(regions.client, "add", [given("a", A, "r"), given("b", A, "r")], wanted("none", 48))


def test_an_object_that_may_only_be_read(regions: Regions) -> None:
    path = regions.add("w", A.tobytes())
    path.chmod(0o444)
    regions.client.register_system_shared_memory("ro", path.name, A.nbytes)
    result = infer(regions.client, "add", [given("a", A, "ro"), given("b", A)])
    np.testing.assert_array_equal(result.as_numpy("out"), A * 2)
    with refused(400, "read-only"):
        infer(regions.client, "add", [given("a", A, "ro"), given("b", A)], wanted("ro", A.nbytes))
    assert path.read_bytes() == A.tobytes()


def test_an_object_that_was_cut_is_400_and_harms_nobody(sharing: LiveServer, regions: Regions) -> None:
    engines = sharing.engines()
    path = regions.add("r", 3 * 4096)
    for size in (4096 + 47, 4095, 1, 0):
        os.truncate(path, size)
        with refused(400, "was cut"):
            infer(regions.client, "softmax", [given("x", A, "r", 4096)])
        with refused(400, "was cut"):
            infer(regions.client, "softmax", [given("x", A)], wanted("r", A.nbytes, 4096))
        assert path.stat().st_size == size
    os.truncate(path, 3 * 4096)
    infer(regions.client, "softmax", [given("x", A, "r", 4096)], wanted("r", A.nbytes, 8192))
    assert sharing.engines() == engines


def test_a_name_means_what_was_registered_last(regions: Regions) -> None:
    for value in range(1, 6):
        array = np.full((2, 2), value, np.float32)
        out = regions.add("r", array.tobytes())
        infer(regions.client, "add", [given("a", array, "r"), given("b", array, "r")], wanted("r", array.nbytes))
        np.testing.assert_array_equal(read(out, array), array * 2)
        regions.client.unregister_system_shared_memory("r")
        with refused(404, "'r'"):
            infer(regions.client, "add", [given("a", array, "r"), given("b", array)])


def test_an_object_without_its_name_stays_registered(regions: Regions) -> None:
    path = regions.add("r", A.tobytes())
    with path.open("rb") as still:
        path.unlink()
        infer(regions.client, "add", [given("a", A, "r"), given("b", A)], wanted("r", A.nbytes))
        np.testing.assert_array_equal(np.frombuffer(still.read(), np.float32).reshape(3, 4), A * 2)


def test_without_the_flag_no_region_is_named(server: LiveServer) -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 48}
    tensor = {"name": "x", "datatype": "FP32", "shape": [3, 4]}
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for request in (
            {"inputs": [{**tensor, "parameters": parameters}]},
            {"inputs": [{**tensor, "data": [0] * 12}], "outputs": [{"name": "out", "parameters": parameters}]},
        ):
            answer = http.post("/v2/models/softmax/infer", json=request)
            assert answer.status_code == 400
            assert "--allow-shared-memory" in answer.json()["error"]
        assert "system_shared_memory" not in http.get("/v2").json()["extensions"]


def test_an_object_that_occupies_nothing_makes_the_engine_take_nothing(sharing: LiveServer, regions: Regions) -> None:
    """A sparse object is as large as its owner says. What would have to be copied is bounded like a body."""
    nbytes = 2**30
    key = f"/{PREFIX}{os.getpid()}-sparse"
    path = Path(f"/dev/shm{key}")
    (engine,) = sharing.engines()
    with path.open("xb") as file:
        os.truncate(file.fileno(), nbytes)
    try:
        regions.client.register_system_shared_memory("sparse", key, nbytes)
        before_kib = peak_kib(engine)
        a, b = (np.broadcast_to(np.float32(0), shape) for shape in ((1, nbytes // 4), (nbytes // 4, 1)))
        with refused(422, "a, b: .* bytes in shared memory"):
            infer(regions.client, "matmul", [given("a", a, "sparse"), given("b", b, "sparse")])
        assert peak_kib(engine) - before_kib < 100 * 1024
        regions.client.unregister_system_shared_memory("sparse")
    finally:
        path.unlink()


def peak_kib(pid: int) -> int:
    """Most memory that a process has held."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
