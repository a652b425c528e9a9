"""Resident tensors between connections, gateways and requests that use them while they change."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.float64_oracle import random_array
from tests.support.live_server import LiveServer
from tests.support.raw_http import Answer, RawConnection, head, post
from tests.support.tensor_bodies import Array, from_safetensors, to_npy, to_npz, to_safetensors


def put(connection: RawConnection, name: str, array: Array) -> Answer:
    body = to_npy(array)
    connection.send(head("PUT", f"/v1/tensors/{name}", content_length=str(len(body))) + body)
    return connection.answer()


def out_of(answer: Answer) -> Array:
    assert answer.status == 200, answer.body
    (array,) = from_safetensors(answer.body).values()
    return array


def on_each_gateway(server: LiveServer) -> list[RawConnection]:
    return [RawConnection(server.connect_to(pid)) for pid in server.gateways()]


def test_what_one_gateway_takes_the_others_serve_at_once(server: LiveServer) -> None:
    first, second = on_each_gateway(server)
    x = np.eye(4, dtype=np.float32)
    with first, second:
        for value in range(1, 21):
            writer, reader = (first, second) if value % 2 else (second, first)
            assert put(writer, "shared/now", np.full((4, 4), value, np.float32)).status in (200, 201)
            reader.send(post("/v1/matmul?b=@shared/now", to_safetensors({"a": x})))
            np.testing.assert_array_equal(out_of(reader.answer()), np.full((4, 4), value, np.float32))
            reader.send(head("GET", "/v1/tensors/shared/now"))
            np.testing.assert_array_equal(out_of(reader.answer()), np.full((4, 4), value, np.float32))


def test_a_replacement_of_another_shape_or_dtype_is_seen_at_once(server: LiveServer) -> None:
    first, second = on_each_gateway(server)
    with first, second:
        for size, dtype in ((4, "float32"), (7, "float32"), (3, "float16"), (9, "float16"), (2, "float32")):
            array = np.full((size, 2), size, dtype)
            assert put(first, "shared/shape", array).status in (200, 201)
            for reader in (second, first):
                reader.send(post("/v1/matmul?b=@shared/shape", to_safetensors({"a": np.ones((1, size), dtype)})))
                np.testing.assert_array_equal(out_of(reader.answer()), np.full((1, 2), size * size, dtype))
                reader.send(post("/v1/softmax?x=@shared/shape", b""))
                assert out_of(reader.answer()).shape == (size, 2)


def test_a_program_that_another_gateway_replaced_or_deleted_is_not_run(server: LiveServer) -> None:
    """Not even for inputs that only the new one, or only the old one, takes."""
    first, second = on_each_gateway(server)
    step = {"op": "reduce", "inputs": {"x": "x"}, "options": {"kind": "sum"}, "as": "out"}
    with first, second:
        for dtype in ("float32", "float16", "float32"):
            program = {"inputs": {"x": {"dtype": dtype, "shape": [-1, 2]}}, "steps": [step], "outputs": ["out"]}
            body = json.dumps(program).encode()
            first.send(head("PUT", "/v1/programs/shared", content_length=str(len(body))) + body)
            assert first.answer().status in (200, 201)
            second.send(post("/v1/programs/shared", to_safetensors({"x": np.ones((1, 2), dtype)})))
            assert out_of(second.answer()).dtype == dtype
            second.send(head("GET", "/v1/programs"))
            (listed,) = [one for one in second.answer().json() if one["name"] == "shared"]
            assert listed["inputs"]["x"]["dtype"] == dtype
        first.send(head("DELETE", "/v1/programs/shared"))
        assert first.answer().status == 204
        second.send(post("/v1/programs/shared", to_safetensors({"x": np.ones((1, 2), "float16")})))
        assert second.answer().status == 404


def test_a_deletion_is_seen_at_once(server: LiveServer) -> None:
    first, second = on_each_gateway(server)
    with first, second:
        for _ in range(5):
            assert put(first, "shared/gone", np.ones((2, 2), np.float32)).status == 201
            second.send(post("/v1/softmax?x=@shared/gone", b""))
            assert second.answer().status == 200
            first.send(head("DELETE", "/v1/tensors/shared/gone"))
            assert first.answer().status == 204
            for reader in (second, first):
                reader.send(post("/v1/softmax?x=@shared/gone", b""))
                answer = reader.answer()
                assert answer.status == 404
                assert answer.json()["detail"].startswith("x:")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 3)])
def test_arrays_in_either_order(server: LiveServer, shape: tuple[int, ...], order: str) -> None:
    array = np.asarray(random_array("float32", shape), order="F" if order == "F" else "C")
    with server.client() as client:
        for body in (to_npy(array), to_npz({"w": array})):
            assert client.put("/v1/tensors/order", content=body).status_code in (200, 201)
            (got,) = from_safetensors(client.get("/v1/tensors/order").content).values()
            np.testing.assert_array_equal(got, array)


def test_a_zero_rank_array_that_says_it_is_in_fortran_order(server: LiveServer) -> None:
    body = to_npy(np.array(3, np.float32)).replace(b"'fortran_order': False", b"'fortran_order': True ")
    with server.client() as client:
        assert client.put("/v1/tensors/scalar", content=body).status_code in (200, 201)
        (got,) = from_safetensors(client.get("/v1/tensors/scalar").content).values()
        assert got == np.float32(3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "float64"])
def test_every_dtype_can_stay(server: LiveServer, dtype: str) -> None:
    array = random_array(dtype, (3, 5))
    with server.client() as client:
        assert client.put("/v1/tensors/dtype", content=to_safetensors({"w": array})).status_code in (200, 201)
        (got,) = from_safetensors(client.get("/v1/tensors/dtype").content).values()
        assert got.tobytes() == array.tobytes()


def test_replacement_under_load_gives_old_or_new_and_never_a_mixture(server: LiveServer) -> None:
    size = 256
    ones = to_safetensors({"a": np.ones((4, size), np.float32)})
    stop = threading.Event()

    def replace() -> int:
        with server.client() as client:
            value = 0
            while not stop.is_set() and value < 200:
                value += 1
                client.put("/v1/tensors/load", content=to_npy(np.full((size, size), value, np.float32)))
            return value

    def use(_number: int) -> list[float]:
        seen = []
        with server.client() as client:
            for _ in range(25):
                response = client.post("/v1/matmul?b=@load", content=ones)
                assert response.status_code == 200, response.text
                (out,) = from_safetensors(response.content).values()
                assert np.all(out == out[0, 0]), "a mixture of two values"
                seen.append(float(out[0, 0]) / size)
        return seen

    with server.client() as client:
        client.put("/v1/tensors/load", content=to_npy(np.zeros((size, size), np.float32)))
    with ThreadPoolExecutor(5) as pool:
        replacing = pool.submit(replace)
        used = list(pool.map(use, range(4)))
        stop.set()
        assert replacing.result() >= 1
    for seen in used:
        assert seen == sorted(seen), "an older value came back"
        assert all(value == int(value) for value in seen)


def test_deletion_while_in_use(server: LiveServer) -> None:
    size = 256
    ones = to_safetensors({"a": np.ones((4, size), np.float32)})
    weight = to_npy(np.ones((size, size), np.float32))
    stop = threading.Event()

    def toggle() -> None:
        with server.client() as client:
            for _ in range(200):
                if stop.is_set():
                    return
                assert client.delete("/v1/tensors/toggled").status_code == 204
                assert client.put("/v1/tensors/toggled", content=weight).status_code == 201

    def use(_number: int) -> set[int]:
        statuses = set()
        with server.client() as client:
            for _ in range(25):
                response = client.post("/v1/matmul?b=@toggled", content=ones)
                statuses.add(response.status_code)
                if response.status_code == 200:
                    (out,) = from_safetensors(response.content).values()
                    assert np.all(out == size)
        return statuses

    with server.client() as client:
        client.put("/v1/tensors/toggled", content=weight)
    with ThreadPoolExecutor(5) as pool:
        toggling = pool.submit(toggle)
        statuses = set().union(*pool.map(use, range(4)))
        stop.set()
        toggling.result()
    assert statuses <= {200, 404}
    assert 200 in statuses


def test_resident_metrics(client: httpx.Client) -> None:
    before = scrape(client)

    def adds(count: int, nbytes: int) -> bool:
        wanted = {"tilewire_resident_tensors": count, "tilewire_resident_bytes": nbytes}
        return settles(
            client, lambda now: all(total(now, name) - total(before, name) == wanted[name] for name in wanted)
        )

    assert client.put("/v1/tensors/metered/a", content=to_npy(np.zeros(100, np.float32))).status_code == 201
    assert client.put("/v1/tensors/metered/b", content=to_npy(np.zeros(50, np.float32))).status_code == 201
    assert client.put("/v1/tensors/metered/b", content=to_npy(np.zeros(25, np.float32))).status_code == 200
    assert adds(2, 500)
    client.delete("/v1/tensors/metered/a")
    assert adds(1, 100)
    client.delete("/v1/tensors/metered/b")
    assert adds(0, 0)
    assert settles(client, is_idle)


def test_distinct_contents_on_many_connections_are_never_confused(server: LiveServer) -> None:
    # add in float32 is exact: what NumPy gives is what must come, byte for byte.
    def ask(number: int) -> None:
        with server.client() as client:
            for turn in range(6):
                a = random_array("float32", (64 + number, 33), 1000 * number + turn)
                b = np.full((33,), number, np.float32)
                response = client.post(
                    "/v1/add", content=to_safetensors({"a": a, "b": b}), headers={"x-request-id": f"{number}-{turn}"}
                )
                assert response.headers["x-request-id"] == f"{number}-{turn}"
                (out,) = from_safetensors(response.content).values()
                assert out.tobytes() == (a + b).tobytes()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(32)))
    with server.client() as client:
        assert settles(client, is_idle)
