"""Debian's Prometheus scrapes a running Tilewire with the rules of `deploy/`; every expression of rules and dashboard has data.

A second target, written with prometheus_client, shows what only a GPU has: exactly the names of `expressions.GPU_ONLY`, and
what the roofs' rules join. An expression that reads none of those must have data from the real server.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app

from tests.conftest import SMALL
from tests.support.api_keys import entry, keys_file
from tests.support.expressions import (
    DEPLOY,
    GPU_ONLY,
    GPU_ONLY_RECORDS,
    dashboard_expressions,
    names_in,
    needs_gpu,
    records,
    rules,
)
from tests.support.live_server import LiveServer, serving
from tests.support.programs import find_program, free_port, running
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.config.settings import Settings

SETTLE_S = 60.0
POLL_S = 0.25
JOB = "tilewire"
ONES = to_safetensors({"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)})
ROW = to_safetensors({"x": np.ones((4, 64), np.float32)})

Query = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def tilewire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that the holder of a key keeps using; the scraper needs none."""
    folder = tmp_path_factory.mktemp("tilewire")
    keys = keys_file(folder, entry("client", "tw_client", 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'))
    with (
        serving(folder / "log", *SMALL, "--api-keys-file", str(keys), "--keyless", "metrics") as server,
        server.client() as client,
    ):
        client.headers["x-api-key"] = "tw_client"
        with under_load(client):
            yield server


@contextlib.contextmanager
def under_load(client: httpx.Client) -> Iterator[None]:
    """Sends some of everything, now and then, until the end."""
    ending = threading.Event()
    troubles: list[str] = []

    def send() -> None:
        while not ending.wait(0.2):
            statuses = [
                client.put("/v1/tensors/w", content=to_npy(np.ones((64, 64), np.float32))).status_code,
                client.post("/v1/matmul", content=ONES).status_code,
                client.post("/v1/add", content=ONES).status_code,
                client.post("/v1/softmax", content=ROW).status_code,
                client.post("/v1/softmax?nonsense=1", content=ROW).status_code,
            ]
            if statuses[0] not in (200, 201) or statuses[1:] != [200, 200, 200, 400]:
                troubles.append(str(statuses))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    assert not troubles, troubles


@pytest.fixture(scope="module")
def gpu_target() -> Iterator[str]:
    """An exposition with the metrics that need a GPU, growing like a device at work; its address."""
    registry = CollectorRegistry()
    growing = gpu_metrics(registry)

    class Quiet(WSGIRequestHandler):
        def log_message(self, *_: object) -> None:
            for grow in growing:
                grow()

    with make_server("127.0.0.1", 0, make_wsgi_app(registry), handler_class=Quiet) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def gpu_metrics(registry: CollectorRegistry) -> list[Callable[[], None]]:
    """Makes the metrics; returns what lets the counters grow."""
    growing: list[Callable[[], None]] = []
    for name, labels in GPU_ONLY.items():
        if name.endswith("_total"):
            counter = Counter(name, "As on a GPU.", labels.keys(), registry=registry)
            growing.append(counter.labels(**labels).inc)
        else:
            Gauge(name, "As on a GPU.", labels.keys(), registry=registry).labels(**labels).set(42)
    info = Gauge("tilewire_build_info", "As on a GPU.", ("device_name",), registry=registry)
    info.labels("NVIDIA H100 80GB HBM3").set(1)
    Gauge("tilewire_engine_up", "As on a GPU.", ("device",), registry=registry).labels("cuda:0").set(1)
    work = [
        Counter(name, "As on a GPU.", ("op", "dtype"), registry=registry).labels("matmul", "bfloat16")
        for name in ("tilewire_flops_total", "tilewire_kernel_seconds_total", "tilewire_kernel_bytes_total")
    ]
    return [*growing, lambda: work[0].inc(4e11), lambda: work[1].inc(1e-3), lambda: work[2].inc(1e9)]


@pytest.fixture(scope="module")
def query(tilewire: LiveServer, gpu_target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Query]:
    """Asks a Prometheus that scrapes both targets, with the project's configuration: its interval and its targets apart."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    assert job["job_name"] == JOB
    job["static_configs"] = [{"targets": [live_instance(tilewire), gpu_target]}]
    shutil.copytree(DEPLOY / "prometheus" / "rules", folder / "rules")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [
        find_program("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (
        running(command, folder / "log", port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        # It listens before it has read its data, and answers no question until then.
        end_s = time.monotonic() + SETTLE_S
        while client.get("/-/ready").status_code != 200:
            assert time.monotonic() < end_s, (folder / "log").read_text()
            time.sleep(POLL_S)
        yield lambda expression: ask(client, expression)


def ask(client: httpx.Client, expression: str) -> list[Any]:
    answer = client.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, answer.text
    result: list[Any] = answer.json()["data"]["result"]
    return result


def live_instance(server: LiveServer) -> str:
    return f"{server.host}:{server.port}"


def has_data(query: Query, expression: str) -> bool:
    """Whether it comes to have a sample that is a number."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        if any(sample["value"][1] != "NaN" for sample in query(expression)):
            return True
        time.sleep(POLL_S)
    return False


@pytest.mark.slow
def test_it_scrapes_tilewire(query: Query, tilewire: LiveServer) -> None:
    assert has_data(query, f'up{{job="{JOB}",instance="{live_instance(tilewire)}"}} == 1')


@pytest.mark.slow
@pytest.mark.parametrize("expression", dashboard_expressions())
def test_every_expression_of_the_dashboard_has_data(
    query: Query, tilewire: LiveServer, gpu_target: str, expression: str
) -> None:
    instance = gpu_target if needs_gpu(expression) else live_instance(tilewire)
    asked = expression.replace("$__rate_interval", "1m").replace("$job", JOB).replace("$instance", instance)
    assert "$" not in asked
    assert has_data(query, asked), asked


@pytest.mark.parametrize("record", sorted(records()))
def test_every_record_has_data(query: Query, tilewire: LiveServer, gpu_target: str, record: str) -> None:
    instance = gpu_target if record in GPU_ONLY_RECORDS else live_instance(tilewire)
    by_instance = f'{record}{{instance="{instance}"}}'
    of_the_job = f'{record}{{instance="",job="{JOB}"}}'
    assert has_data(query, f"{by_instance} or {of_the_job}")


def test_every_metric_of_an_alert_is_shown(query: Query) -> None:
    named = {name for rule in rules() if "alert" in rule for name in names_in(rule["expr"])}
    for name in named - {"tilewire:arena_free:ratio"}:
        assert has_data(query, name), name


def test_the_adapter_asks_for_what_is_there(query: Query, tilewire: LiveServer) -> None:
    """The autoscaler's rule, filled in as the Prometheus adapter does, for a server in place of a pod."""
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]
    blanks = {"Series": rule["name"]["matches"], "GroupBy": "instance"}
    asked = rule["metricsQuery"].replace("<<.LabelMatchers>>", f'instance="{live_instance(tilewire)}"')
    for blank, value in blanks.items():
        asked = asked.replace(f"<<.{blank}>>", value)
    assert "<<" not in asked
    assert has_data(query, asked)


def test_no_alert_fires_on_a_server_that_is_well(query: Query, tilewire: LiveServer) -> None:
    assert has_data(query, "tilewire:arena_free:ratio")
    assert query(f'ALERTS{{instance="{live_instance(tilewire)}"}}') == []


def test_the_default_port_is_scraped() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.endswith(f":{Settings.model_fields['port'].default}")
