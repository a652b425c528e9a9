"""API keys as clients meet them: who gets in, what a key allows, quotas over several gateways, and every other way round."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import tilewire
from tests.conftest import SMALL
from tests.support.api_keys import entry, keys_file
from tests.support.exposition import Scrape, scrape, settles, total
from tests.support.live_server import COMMAND, LiveServer, serving
from tests.support.oip_bodies import text_input
from tests.support.problems import check_error, check_problem
from tests.support.raw_http import RawConnection, head, post
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.gateway.api.pages import CONSOLE_PATHS as PATHS

ADMIN, READER, RUNNER, SLOW, DRAINED, WRITER = (
    f"tw_{name}" for name in ("admin", "reader", "runner", "slow", "drained", "writer")
)
ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
ROW = to_npy(np.ones((4, 4), np.float32))
ENTRIES = (
    entry("admin", ADMIN, 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'),
    entry("reader", READER, 'ops = ["matmul"]\nread = ["weights/*"]\nwrite = ["scratch/reader/*"]'),
    entry("runner", RUNNER, 'ops = ["softmax"]'),
    entry("slow", SLOW, 'ops = ["*"]\nrequests_per_s = 0.01\nbytes_per_s = "1MiB"'),
    entry("writer", WRITER, 'ops = ["program"]\nread = ["weights/*"]\nwrite = ["programs/*"]'),
    entry("drained", DRAINED, 'ops = ["*"]\nrequests_per_s = 0.01'),
)
REQUESTS = [
    ("POST", "/v1/matmul"),
    ("POST", "/v1/nonsense"),
    ("GET", "/v1/tensors"),
    ("GET", "/v1/tensors/weights/w"),
    ("PUT", "/v1/tensors/weights/w"),
    ("DELETE", "/v1/tensors/weights/w"),
    ("GET", "/v2"),
    ("GET", "/v2/models/matmul"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/models/matmul/infer"),
    ("POST", "/v2/models/matmul/versions/1/infer"),
    ("POST", "/v2/repository/index"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("OPTIONS", "/v1/matmul"),
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two gateways that ask for keys, and a resident that the keys disagree about."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = keys_file(folder, *ENTRIES)
    with serving(
        folder / "log", *SMALL, "--api-keys-file", str(keys), "--access-log", "--log-format", "json"
    ) as server:
        with holder(server, ADMIN) as client:
            for name in ("weights/w", "secret/w"):
                assert client.put(f"/v1/tensors/{name}", content=ROW).status_code == 201
        yield server


def holder(server: LiveServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def reader(guarded: LiveServer) -> Iterator[httpx.Client]:
    with holder(guarded, READER) as client:
        yield client


@pytest.fixture
def admin(guarded: LiveServer) -> Iterator[httpx.Client]:
    with holder(guarded, ADMIN) as client:
        yield client


# ── 401 ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "path"), REQUESTS)
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "tw_wrong"}, {"authorization": "Basic YTpi"}])
def test_without_a_known_key_nothing_is_told(guarded: LiveServer, method: str, path: str, headers: dict) -> None:
    with guarded.client() as client:
        response = client.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    if path.startswith("/v2"):
        assert response.json().keys() == {"error"}
    else:
        check_problem(response, 401, "key")


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/docs", "/openapi.json", *PATHS]
)
def test_health_and_what_is_keyless_is_open(guarded: LiveServer, path: str) -> None:
    with guarded.client() as client:
        assert client.get(path).status_code == 200


def test_the_openapi_document_asks_for_the_key(guarded: LiveServer) -> None:
    with guarded.client() as client:
        document = client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}]


@pytest.mark.parametrize(
    "target",
    [
        "//v1/matmul",
        "/v1//matmul",
        "/v1/matmul/",
        "/v1/%6datmul",
        "/%76%31/matmul",
        "/v1/./matmul",
        "/healthz/../v1/matmul",
        "/healthz%2f..%2fv1/matmul",
        "/healthz?/v1/matmul",
        "/healthz%3f/v1/matmul",
        "/v2/health/live/../../../v1/matmul",
        "/docs/../v1/matmul",
        "/V1/matmul",
        "http://tests/v1/matmul",
        "/v1/matmul%00",
        "/v1/tensors/../matmul",
        "//v2/models/matmul/infer",
        "/v2/models/%6datmul/infer",
        "/v2/models/matmul/infer/",
        "/v2/health/live/../../models/matmul/infer",
    ],
)
def test_no_other_spelling_of_a_path_gets_round_the_door(guarded: LiveServer, target: str) -> None:
    with RawConnection(guarded.connect()) as raw:
        raw.send(post(target, ONES, content_type="application/x-safetensors", connection="close"))
        answer = raw.answer()
    # Health is what a path that decodes to it is; it takes no POST. Everything else wants a key.
    assert answer.status in (400, 401, 405)
    assert b"out" not in answer.body


def test_the_body_is_not_read_without_a_key(guarded: LiveServer) -> None:
    with RawConnection(guarded.connect()) as raw:
        raw.send(head("POST", "/v1/matmul", content_length=str(2**24), expect="100-continue"))
        answer = raw.answer()
        assert answer.status == 401, "and no 100 Continue before"
    with RawConnection(guarded.connect()) as raw:
        raw.send(head("POST", "/v1/matmul", transfer_encoding="chunked"))
        assert raw.answer().status == 401


# ── 403 ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_runs_its_ops_and_no_other(guarded: LiveServer, reader: httpx.Client) -> None:
    assert reader.post("/v1/matmul", content=ONES).status_code == 200
    check_problem(reader.post("/v1/softmax", content=ROW), 403, "softmax")
    with holder(guarded, RUNNER) as runner:
        assert runner.post("/v1/softmax", content=ROW).status_code == 200
        check_problem(runner.post("/v1/matmul", content=ONES), 403, "matmul")


def test_a_forbidden_op_is_refused_before_its_body_is_read(guarded: LiveServer) -> None:
    with RawConnection(guarded.connect()) as raw:
        raw.send(head("POST", "/v1/softmax", content_length=str(2**24), expect="100-continue", x_api_key=READER))
        assert raw.answer().status == 403


def test_residents_are_read_as_granted(reader: httpx.Client) -> None:
    assert reader.get("/v1/tensors/weights/w").status_code == 200
    assert reader.head("/v1/tensors/weights/w").status_code == 200
    assert reader.post("/v1/matmul?b=@weights/w", content=ROW).status_code == 200
    for name in ("secret/w", "not/there"):
        check_problem(reader.get(f"/v1/tensors/{name}"), 403, name)
        assert reader.head(f"/v1/tensors/{name}").status_code == 403
        check_problem(reader.post(f"/v1/matmul?b=@{name}", content=ROW), 403, name)
    assert reader.get("/v1/tensors/weights/none").status_code == 404


def test_the_list_shows_what_the_key_may_read(reader: httpx.Client, admin: httpx.Client) -> None:
    assert {one["name"] for one in reader.get("/v1/tensors").json()} == {"weights/w"}
    assert {one["name"] for one in admin.get("/v1/tensors").json()} >= {"weights/w", "secret/w"}


def test_residents_are_written_as_granted(reader: httpx.Client, admin: httpx.Client) -> None:
    assert reader.put("/v1/tensors/scratch/reader/x", content=ROW).status_code == 201
    assert reader.post("/v1/matmul?store=@scratch/reader/y", content=ONES).status_code == 201
    assert reader.delete("/v1/tensors/scratch/reader/x").status_code == 204
    assert reader.delete("/v1/tensors/scratch/reader/y").status_code == 204
    for name in ("weights/w", "scratch/other", "scratch/readerx"):
        check_problem(reader.put(f"/v1/tensors/{name}", content=ROW), 403, name)
        check_problem(reader.post(f"/v1/matmul?store=@{name}", content=ONES), 403, name)
        check_problem(reader.delete(f"/v1/tensors/{name}"), 403, name)
    assert admin.get("/v1/tensors/weights/w").status_code == 200


@pytest.mark.parametrize(
    "name", ["scratch/reader/%2e%2e/%2e%2e/weights/w", "scratch/reader/..%2fw", "scratch/reader//w"]
)
def test_no_spelling_of_a_name_leaves_the_prefix(guarded: LiveServer, name: str) -> None:
    with RawConnection(guarded.connect()) as raw:
        raw.send(head("PUT", f"/v1/tensors/{name}", content_length=str(len(ROW)), x_api_key=READER), ROW)
        assert raw.answer().status == 400


@pytest.mark.parametrize("model", ["/v2/models/{}", "/v2/models/{}/versions/1"])
def test_infer_requests_are_bound_by_the_same_rights(guarded: LiveServer, reader: httpx.Client, model: str) -> None:
    a = np.ones((4, 4), np.float32)

    def infer(client: httpx.Client, op: str, resident: str | None = None, **members: object) -> httpx.Response:
        inputs = [text_input("a" if op == "matmul" else "x", a)]
        inputs += [{"name": "b", "parameters": {"resident": resident}}] if resident else []
        inputs += [text_input("b", a)] if op == "matmul" and not resident and not members else []
        return client.post(f"{model.format(op)}/infer", json={"inputs": inputs, **members})

    assert infer(reader, "matmul").status_code == 200
    assert infer(reader, "matmul", "weights/w").status_code == 200
    assert infer(reader, "matmul", parameters={"b": "@weights/w"}).status_code == 200
    for refused in (
        infer(reader, "matmul", "secret/w"),
        infer(reader, "matmul", "not/there"),
        infer(reader, "matmul", parameters={"b": "@secret/w"}),
        infer(reader, "softmax"),
    ):
        assert refused.status_code == 403, refused.text
        assert refused.json().keys() == {"error"}
    with RawConnection(guarded.connect()) as raw:
        target = f"{model.format('softmax')}/infer"
        raw.send(head("POST", target, content_length=str(2**20), expect="100-continue", x_api_key=READER))
        assert raw.answer().status == 403


def test_who_may_run_no_program_hears_of_none_under_v2(reader: httpx.Client, admin: httpx.Client) -> None:
    steps = [{"op": "softmax", "inputs": {"x": "@secret/w"}, "as": "p"}]
    admin.put("/v1/programs/hidden", json={"inputs": {}, "steps": steps, "outputs": ["p"]}).raise_for_status()
    check_problem(reader.get("/v1/programs/hidden"), 403, "program")
    for name in ("hidden", "none"):
        for call in ("", "/config", "/ready", "/stats", "/versions/1"):
            check_error(reader.get(f"/v2/models/{name}{call}"), 403, "program")
            assert admin.get(f"/v2/models/{name}{call}").status_code == (200 if name == "hidden" else 404)
    for client, hears in ((reader, False), (admin, True)):
        listed = client.get("/v2/models/stats").json()["model_stats"], client.post("/v2/repository/index").json()
        for models in listed:
            assert {"matmul", *(["hidden"] if hears else [])} <= {one["name"] for one in models}
            assert ("hidden" in {one["name"] for one in models}) == hears
    assert reader.get("/v2/models/softmax").status_code == 200
    assert admin.delete("/v1/programs/hidden").status_code == 204


def test_who_keeps_a_program_learns_nothing_of_residents_that_its_key_may_not_read(guarded: LiveServer) -> None:
    def told(client: httpx.Client, resident: str) -> tuple[int, list[int]]:
        step = {"op": "matmul", "inputs": {"a": "x", "b": f"@{resident}"}, "as": "y"}
        fitting, other = (
            {"inputs": {"x": {"dtype": "float32", "shape": [2, size]}}, "steps": [step], "outputs": ["y"]}
            for size in (4, 7)
        )
        client.put("/v1/programs/probe", json=fitting).raise_for_status()
        (output,) = client.get("/v2/models/probe").raise_for_status().json()["outputs"]
        return client.put("/v1/programs/probe", json=other).status_code, output["shape"]

    with holder(guarded, WRITER) as writer:
        assert told(writer, "weights/w") == (400, [2, 4])
        assert told(writer, "secret/w") == told(writer, "secret/none") == (200, [-1])
        check_problem(writer.post("/v1/programs/probe", content=ROW), 403, "secret/none")
        assert writer.delete("/v1/programs/probe").status_code == 204


# ── 429 ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_quota_holds_over_all_gateways(guarded: LiveServer) -> None:
    statuses = []
    for gateway in guarded.gateways() * 2:
        with RawConnection(guarded.connect_to(gateway)) as raw:
            raw.send(post("/v1/matmul", ONES, x_api_key=SLOW))
            answer = raw.answer()
            statuses.append(answer.status)
    assert statuses == [200, 429, 429, 429]
    assert 1 <= int(answer.headers["retry-after"]) <= 100
    assert answer.json()["type"].endswith("over_quota")


def test_an_op_over_quota_is_a_request_of_the_op_and_any_call_one_of_the_key(
    guarded: LiveServer, admin: httpx.Client
) -> None:
    """The alert on refusals divides by these: `tilewire_rejected_total` alone has both calls."""

    def counted(now: Scrape) -> tuple[float, ...]:
        return (
            total(now, "tilewire_requests_total", op="matmul", code="429"),
            total(now, "tilewire_key_requests_total", key="drained", code="429"),
            total(now, "tilewire_rejected_total", reason="over_quota"),
        )

    with guarded.client() as client:
        client.headers["x-api-key"] = DRAINED
        assert client.post("/v1/matmul", content=ONES).status_code == 200
        assert settles(admin, lambda now: total(now, "tilewire_key_requests_total", key="drained", code="200") == 1)
        ops, of_key, refused = counted(scrape(admin))
        assert client.post("/v1/matmul", content=ONES).status_code == 429
        assert client.get("/v1/tensors").status_code == 429
    assert of_key == 0
    assert settles(admin, lambda now: counted(now) == (ops + 1, 2, refused + 2))


# ── what is told ──────────────────────────────────────────────────────────────────────────────────


def test_the_log_and_the_metrics_name_the_key_and_never_show_it(guarded: LiveServer, admin: httpx.Client) -> None:
    sent = {"x-request-id": "who-was-it"}
    assert admin.post("/v1/matmul", content=ONES, headers=sent).status_code == 200
    before = total(scrape(admin), "tilewire_rejected_total", reason="unauthorized")
    with guarded.client() as nobody:
        nobody.post("/v1/matmul", content=ONES)
    assert settles(admin, lambda now: total(now, "tilewire_rejected_total", reason="unauthorized") == before + 1)
    assert settles(admin, lambda now: total(now, "tilewire_key_requests_total", key="admin", code="200") >= 1)
    assert settles(admin, lambda now: total(now, "tilewire_key_bytes_total", key="admin") >= len(ONES))
    lines = [json.loads(line) for line in guarded.log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "who-was-it"]
    assert line["key"] == "admin"
    text = guarded.log.read_text() + admin.get("/metrics").text
    for secret in (ADMIN, READER, SLOW, "tw_wrong"):
        assert secret not in text


def test_the_client_sends_its_key(guarded: LiveServer) -> None:
    a = np.ones((4, 4), np.float32)
    with tilewire.Client(guarded.url, api_key=READER) as client:
        np.testing.assert_array_equal(client.matmul(a, "@weights/w"), a @ a)
        with pytest.raises(tilewire.Forbidden, match="secret/w"):
            client.matmul(a, "@secret/w")
    with tilewire.Client(guarded.url) as client, pytest.raises(tilewire.Unauthorized):
        client.matmul(a, a)


# ── the file, and the settings beside it ──────────────────────────────────────────────────────────


def test_a_key_that_is_taken_out_stops_working(start_server: Callable[..., LiveServer], tmp_path: Path) -> None:
    path = keys_file(tmp_path, *ENTRIES)
    server = start_server(
        "--gateways", "1", "--arena-bytes", "16MiB", "--api-keys-file", str(path), "--keyless", "metrics"
    )
    with holder(server, READER) as client:
        assert client.post("/v1/matmul", content=ONES).status_code == 200
        for page in ("/docs", *PATHS):
            assert client.get(page, headers={"authorization": ""}).status_code == 401
        assert client.get("/metrics", headers={"authorization": ""}).status_code == 200
        keys_file(tmp_path, ENTRIES[0])
        end_s = time.monotonic() + 30
        while client.post("/v1/matmul", content=ONES).status_code != 401:
            assert time.monotonic() < end_s
            time.sleep(0.05)


def test_a_server_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    path = keys_file(tmp_path, '[[keys]]\nname = "one"\n')
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--api-keys-file", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--api-keys-file" in done.stderr
    assert "sha256" in done.stderr


def test_where_shared_memory_is_off_any_key_may_unregister_nothing(guarded: LiveServer) -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 32}
    from_region = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": parameters}]}
    with holder(guarded, RUNNER) as runner:
        assert runner.post("/v2/systemsharedmemory/unregister").status_code == 200
        assert runner.get("/v2/systemsharedmemory/status").json() == []
        check_error(runner.post("/v2/models/softmax/infer", json=from_region), 400, "shared memory is off")
