"""`--batch-invariant`: a request's bits do not depend on who else is there; and without it, they stay within the bound."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support import float64_oracle as oracle
from tests.support.float64_oracle import assert_close, random_array
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import TYPES, Array, encode, from_safetensors, to_npy, to_safetensors

ROWS = (1, 3, 16, 33)
WIDTH = 257
CLIENTS = 8


# Each with one input that travels; residents are those of `upload`.
CALLS = {
    "matmul": "matmul?b=@w",
    "softmax": "softmax",
    "search": "search?b=@items&k=5",
    "topk": "topk?k=5",
    "sum": "reduce?kind=sum",
    "norm": "reduce?kind=norm",
    "normalize": "normalize?kind=layer",
    "pointwise": "pointwise?fn=gelu",
}


def upload(server: LiveServer) -> Array:
    weight = random_array("float32", (WIDTH, 61), 1)
    with server.client() as client:
        for name, array in (("w", weight), ("items", np.ascontiguousarray(weight.T))):
            sent = client.put(f"/v1/tensors/{name}", content=to_npy(array), headers={"content-type": TYPES["npy"]})
            assert sent.status_code in (200, 201)
    return weight


def ask(client: httpx.Client, call: str, x: Array) -> tuple[httpx.Response, int]:
    headers = {"content-type": TYPES["npy"], "accept": TYPES["safetensors"]}
    response = client.post(f"/v1/{CALLS[call]}", content=to_npy(x), headers=headers)
    assert response.status_code == 200, response.text
    return response, int(response.headers["x-batch-size"])


def padded(body: bytes, num_spaces: int) -> bytes:
    """A safetensors body whose header is longer, so that its tensors begin later."""
    end = 8 + int.from_bytes(body[:8], "little")
    num_spaces += -end % 4
    return (end - 8 + num_spaces).to_bytes(8, "little") + body[8:end] + b" " * num_spaces + body[end:]


def ask_together(server: LiveServer, call: str, inputs: list[Array]) -> list[tuple[int, httpx.Response, int]]:
    """All inputs from several clients at once, over and over: (rows, answer, size of its batch)."""

    def one(number: int) -> list[tuple[int, httpx.Response, int]]:
        with server.client() as client:
            return [
                (len(x), *ask(client, call, x)) for _ in range(6) for x in inputs[number % 2 :] + inputs[: number % 2]
            ]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [answer for answers in pool.map(one, range(CLIENTS)) for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_the_bits_are_those_of_a_request_alone(shared_server: StartServer, call: str) -> None:
    server = shared_server("--batch-invariant")
    upload(server)
    inputs = [random_array("float32", (rows, WIDTH), rows) for rows in ROWS]
    with server.client() as client:
        alone = {len(x): ask(client, call, x)[0].content for x in inputs}
    assert len(set(alone.values())) == len(inputs)
    for rows, answer, _ in ask_together(server, call, inputs):
        assert answer.content == alone[rows]


@pytest.mark.parametrize("call", ["matmul?transpose_b=true", "search?k=5"])
def test_the_bits_do_not_depend_on_where_an_operand_begins(shared_server: StartServer, call: str) -> None:
    """Formats differ in that, and so do headers of one format."""
    arrays = {"a": random_array("float32", (31, WIDTH), 1), "b": random_array("float32", (5, WIDTH), 2)}
    bodies = [encode(form, arrays) for form in ("npz", "json")]
    bodies += [(padded(to_safetensors(arrays), 4 * number), {}) for number in range(16)]
    with shared_server("--batch-invariant").client() as client:
        answers = set()
        for body, headers in bodies:
            response = client.post(f"/v1/{call}", content=body, headers={**headers, "accept": TYPES["safetensors"]})
            assert response.status_code == 200, response.text
            answers.add(b"".join(out.tobytes() for out in from_safetensors(response.content).values()))
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        ("pointwise?fn=gelu", {"x": (54, 45)}),
        ("pointwise?fn=silu", {"x": (29, 54)}),
        ("matmul?activation=gelu", {"a": (6, 2), "b": (2, 21), "bias": (21,)}),
        ("softmax?axis=0", {"x": (54, 45)}),
    ],
)
def test_the_bits_do_not_depend_on_the_order_of_elements(
    shared_server: StartServer, call: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """NumPy's arrays may lie in Fortran order, and their bodies do then."""
    arrays = {name: random_array("float32", shape, 1) for name, shape in shapes.items()}
    bodies = [encode("npz", given) for given in (arrays, {k: np.asfortranarray(v) for k, v in arrays.items()})]
    with shared_server("--batch-invariant").client() as client:
        answers = [client.post(f"/v1/{call}", content=body, headers=headers) for body, headers in bodies]
    assert bodies[0] != bodies[1]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content


@pytest.mark.slow
def test_a_batch_changes_nothing_beyond_the_bound(start_server: StartServer) -> None:
    server = start_server("--max-queue-delay-us", "20000")
    weight = upload(server)
    inputs = [random_array("float32", (rows, WIDTH), rows) for rows in ROWS]
    expected = {x.shape[0]: oracle.matmul({"a": x, "b": weight}, {}) for x in inputs}
    answers = ask_together(server, "matmul", inputs)
    assert max(size for _, _, size in answers) > 1, "no batch formed"
    for rows, answer, _ in answers:
        (result,) = from_safetensors(answer.content).values()
        assert_close(result, *expected[rows])
        assert result.dtype == np.float32
