"""A flood of one API key, or of one address, costs itself: others are admitted, find room, and are computed."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_overload
from tests.conftest import StartServer
from tests.support.api_keys import entry, keys_file
from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.live_server import LiveServer
from tests.support.raw_http import RawConnection, head, post
from tests.support.tensor_bodies import TYPES, to_npy, to_safetensors

SMALL = to_npy(np.ones((2, 2), np.float32))
RIGHTS = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]\n'


def connect_from(server: LiveServer, address: str) -> RawConnection:
    return RawConnection(socket.create_connection((server.host, server.port), 30, source_address=(address, 0)))


def status(connection: RawConnection, **headers: str) -> int:
    connection.send(post("/v1/softmax", SMALL, content_type=TYPES["npy"], **headers))
    return connection.answer().status


@pytest.mark.slow
@pytest.mark.parametrize("by", ["key", "address"])
def test_a_flood_that_holds_every_place_leaves_some_to_others(
    start_server: StartServer, tmp_path: Path, by: str
) -> None:
    keys = keys_file(tmp_path, entry("flood", "tw_flood", RIGHTS), entry("quiet", "tw_quiet", RIGHTS))
    flags = ["--gateways", "1", "--arena-bytes", "64MiB", "--max-in-flight", "16"]
    server = start_server(*flags, *(["--api-keys-file", str(keys)] if by == "key" else []))
    sender = {"flood": {"x_api_key": "tw_flood"}, "quiet": {"x_api_key": "tw_quiet"}}
    address = {"flood": "127.0.0.1", "quiet": "127.0.0.1" if by == "key" else "127.0.0.2"}
    with contextlib.ExitStack() as stack, server.client() as client:
        client.headers["x-api-key"] = "tw_quiet"
        for _ in range(14):
            stalled = stack.enter_context(connect_from(server, address["flood"]))
            stalled.send(head("POST", "/v1/softmax", content_length="100", **sender["flood"]) + b"x")
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 14)
        flood = stack.enter_context(connect_from(server, address["flood"]))
        quiet = stack.enter_context(connect_from(server, address["quiet"]))
        for _ in range(20):
            flood.send(post("/v1/softmax", SMALL, content_type=TYPES["npy"], **sender["flood"]))
            answer = flood.answer()
            assert answer.status == 429
            assert "14 of them of this client" in answer.json()["detail"]
            assert status(quiet, **sender["quiet"]) == 200
    with server.client() as client:
        client.headers["x-api-key"] = "tw_quiet"
        assert settles(client, is_idle)


@pytest.mark.slow
def test_room_in_the_arena_goes_to_whoever_holds_least(start_server: StartServer, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, entry("flood", "tw_flood", RIGHTS), entry("quiet", "tw_quiet", RIGHTS))
    flags = ("--gateways", "1", "--arena-bytes", "64MiB", "--room-timeout-s", "60", "--api-keys-file", str(keys))
    server = start_server(*flags, "--min-body-bytes-per-s", "1", "--max-body-s", "600")
    large = np.ones((2, 2**20), np.float32)
    body = to_npy(large)
    with contextlib.ExitStack() as stack, server.client() as client:
        client.headers["x-api-key"] = "tw_quiet"
        slow = [stack.enter_context(RawConnection(server.connect())) for _ in range(20)]
        for connection in slow:
            connection.send(
                head("POST", "/v1/softmax", content_length=str(len(body)), x_api_key="tw_flood") + body[:1000]
            )
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 20)
        quiet = stack.enter_context(RawConnection(server.connect()))
        sent = post("/v1/softmax", body, content_type=TYPES["npy"], x_api_key="tw_quiet")
        quiet.send(sent[:1000])
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 21)
        # One of those that hold a slot leaves; twelve and more of the flood came before.
        slow[0].sock.close()
        quiet.send(sent[1000:])
        assert quiet.answer().status == 200


@pytest.mark.slow
def test_a_client_that_reads_slowly_waits_for_itself(start_server: StartServer) -> None:
    """Small bodies whose results are large, and which nobody reads, would take all of the arena."""
    server = start_server("--gateways", "1", "--arena-bytes", "64MiB", "--room-timeout-s", "0.5")
    side = 2200
    outer = to_safetensors({"a": np.ones((side, 1), np.float32), "b": np.ones((1, side), np.float32)})
    megabyte = to_npy(np.ones((4, 2**16), np.float32))
    with contextlib.ExitStack() as stack, server.client() as client:
        slow = []
        for _ in range(6):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(30)
            sock.bind(("127.0.0.2", 0))
            sock.connect((server.host, server.port))
            slow.append(stack.enter_context(RawConnection(sock)))
            slow[-1].send(post("/v1/add", outer, content_type=TYPES["safetensors"]))
        # Half of the arena has room for one of them; the others are refused.
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
        assert total(scrape(client), "tilewire_arena_bytes", state="used") < 32 * 2**20
        for _ in range(5):
            quiet = client.post("/v1/softmax", content=megabyte, headers={"content-type": TYPES["npy"]})
            assert quiet.status_code == 200, quiet.text
        statuses = sorted(connection.answer().status for connection in slow)
        assert statuses == [200, 429, 429, 429, 429, 429]
    with server.client() as client:
        assert settles(client, is_idle)


@pytest.mark.slow
@pytest.mark.alone
def test_at_four_times_the_peak_the_quiet_key_s_requests_are_all_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--seconds", "3", "--out", str(tmp_path)]
    assert bench_overload.run(arguments) == 0
    report = json.loads((tmp_path / "overload.json").read_text())
    with capsys.disabled():
        print(f"\ngoodput {report['goodput']} of the peak; flood {report['flood']}; quiet {report['quiet']}")
    assert set(report["quiet"]["statuses"]) == {"200"}
    assert set(report["flood"]["statuses"]) == {"200", "429"}
    assert report["flood"]["statuses"]["429"] > report["flood"]["statuses"]["200"]
