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
from tests.support.tensor_bodies import TYPES, Array, decode, encode, from_safetensors, to_npy, to_safetensors

ROWS = (1, 3, 16, 33)
WIDTH = 257
CLIENTS = 8


def upload(server: LiveServer) -> Array:
    weight = random_array("float32", (WIDTH, 61), 1)
    with server.client() as client:
        sent = client.put("/v1/tensors/w", content=to_npy(weight), headers={"content-type": "application/x-npy"})
        assert sent.status_code in (200, 201)
    return weight


def ask(client: httpx.Client, op: str, x: Array) -> tuple[Array, int]:
    query = {"b": "@w"} if op == "matmul" else {}
    response = client.post(f"/v1/{op}", params=query, content=to_npy(x), headers={"content-type": "application/x-npy"})
    assert response.status_code == 200, response.text
    return decode(response.headers["content-type"], response.content), int(response.headers["x-batch-size"])


def padded(body: bytes, num_spaces: int) -> bytes:
    """A safetensors body whose header is longer, so that its tensors begin later."""
    end = 8 + int.from_bytes(body[:8], "little")
    num_spaces += -end % 4
    return (end - 8 + num_spaces).to_bytes(8, "little") + body[8:end] + b" " * num_spaces + body[end:]


def ask_together(server: LiveServer, op: str, inputs: list[Array]) -> list[tuple[Array, int]]:
    """All inputs from several clients at once, over and over."""

    def one(number: int) -> list[tuple[Array, int]]:
        with server.client() as client:
            return [ask(client, op, x) for _ in range(6) for x in inputs[number % 2 :] + inputs[: number % 2]]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [answer for answers in pool.map(one, range(CLIENTS)) for answer in answers]


@pytest.mark.parametrize("op", ["matmul", "softmax"])
def test_the_bits_are_those_of_a_request_alone(shared_server: StartServer, op: str) -> None:
    server = shared_server("--batch-invariant")
    upload(server)
    inputs = [random_array("float32", (rows, WIDTH), rows) for rows in ROWS]
    with server.client() as client:
        alone = {x.shape[0]: ask(client, op, x)[0].tobytes() for x in inputs}
    for answer, _ in ask_together(server, op, inputs):
        assert answer.tobytes() == alone[answer.shape[0]]


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


@pytest.mark.slow
def test_a_batch_changes_nothing_beyond_the_bound(start_server: StartServer) -> None:
    server = start_server("--max-queue-delay-us", "20000")
    weight = upload(server)
    inputs = [random_array("float32", (rows, WIDTH), rows) for rows in ROWS]
    expected = {x.shape[0]: oracle.matmul({"a": x, "b": weight}, {}) for x in inputs}
    answers = ask_together(server, "matmul", inputs)
    assert max(size for _, size in answers) > 1, "no batch formed"
    for answer, _ in answers:
        assert_close(answer, *expected[answer.shape[0]])
        assert answer.dtype == np.float32
