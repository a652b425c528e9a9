"""Quotas in bytes, on a running server: what came and what is sent counts, once; what is refused for want of quota does not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.support.api_keys import entry, keys_file
from tests.support.live_server import LiveServer, serving
from tests.support.raw_http import Answer, RawConnection, head, post
from tests.support.tensor_bodies import TYPES, to_npy

FLAGS = ("--gateways", "1", "--arena-bytes", "128MiB", "--max-body-bytes", "32MiB", "--max-result-bytes", "32MiB")
RIGHTS = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]\n'
PER_S = {"uploads": "64KiB", "chunks": "64KiB", "stubborn": "1KiB", "fetching": "1MiB", "computing": "1MiB"}
BIG = np.zeros(2**21, np.float32)
SMALL = to_npy(np.ones((2, 2), np.float32))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("quotas")
    limited = [entry(name, f"tw_{name}", f'{RIGHTS}bytes_per_s = "{per_s}"') for name, per_s in PER_S.items()]
    keys = keys_file(folder, entry("admin", "tw_admin", RIGHTS), *limited)
    with serving(folder / "log", *FLAGS, "--api-keys-file", str(keys)) as server:
        with httpx.Client(base_url=server.url, trust_env=False, headers={"x-api-key": "tw_admin"}) as client:
            assert client.put("/v1/tensors/big", content=to_npy(BIG)).status_code == 201
        yield server


def ask(server: LiveServer, sent: bytes) -> Answer:
    with RawConnection(server.connect()) as connection:
        connection.send(sent)
        return connection.answer()


def softmax(key: str) -> bytes:
    return post("/v1/softmax", SMALL, content_type=TYPES["npy"], x_api_key=f"tw_{key}")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["uploads", "chunks"])
def test_an_upload_that_is_broken_off_costs_what_came(server: LiveServer, key: str) -> None:
    num_sent = 2**20
    framing = {"content_length": str(2**24)} if key == "uploads" else {"transfer_encoding": "chunked"}
    with RawConnection(server.connect()) as connection:
        connection.send(head("POST", "/v1/softmax", x_api_key=f"tw_{key}", **framing))
        connection.send(b"" if key == "uploads" else b"%x\r\n" % 2**24, bytes(num_sent))
    end_s = time.monotonic() + 10
    # The gateway notices a little later that nothing more comes.
    while (answer := ask(server, softmax(key))).status == 200 or int(answer.headers["retry-after"]) > 16:
        assert time.monotonic() < end_s, answer
    assert answer.status == 429
    # Sixteen times what a second brings, less what has passed meanwhile.
    assert int(answer.headers["retry-after"]) >= 16 - 10


def test_a_key_that_asks_on_is_not_locked_out(server: LiveServer) -> None:
    with RawConnection(server.connect()) as connection:
        waits_s: list[int] = []
        while len(waits_s) < 200:
            connection.send(softmax("stubborn"))
            answer = connection.answer()
            if answer.status == 429:
                waits_s.append(int(answer.headers["retry-after"]))
            else:
                # What is admitted may cost; what is refused may not.
                assert answer.status == 200
                waits_s.clear()
    assert max(waits_s) == waits_s[0]


@pytest.mark.parametrize(
    "sent",
    [
        head("GET", "/v1/tensors/big", x_api_key="tw_fetching"),
        post("/v1/softmax?x=@big", b"", x_api_key="tw_computing"),
    ],
    ids=["fetched", "computed"],
)
def test_answers_that_are_made_at_once_do_not_each_take_the_whole_quota(server: LiveServer, sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(RawConnection(server.connect())) for _ in range(4)]
        for connection in connections:
            # Nobody reads: an answer of this size cannot leave before the next one is asked for.
            connection.send(sent)
        answers = [connection.answer() for connection in connections]
    assert sorted(answer.status for answer in answers) == [200, 429, 429, 429]
    (answer,) = [answer for answer in answers if answer.status == 200]
    assert len(answer.body) > BIG.nbytes
    assert all(int(one.headers["retry-after"]) in range(1, 10) for one in answers if one.status == 429)
