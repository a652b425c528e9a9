"""The console in a real browser, before a real server: figures, trouble, and when things stop."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from tests.support.console_load import load
from tests.support.console_page import KERNELS, WARMING, compute, result
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import to_safetensors
from tilewire.service.ops.registry import OPS

# A figure of the strip that is a number other than nought.
A_FIGURE = re.compile(r"[1-9]")


def test_it_says_what_serves(page: Page) -> None:
    expect(page.locator("#state-text")).to_have_text("Ready")
    expect(page.locator("#identity")).to_contain_text("PyTorch on the CPU")
    expect(page.locator("#engines")).to_contain_text("ready · 0 restarts")
    expect(page.locator("#notice")).to_be_hidden()


def test_figures_move_under_load(page: Page, server: LiveServer) -> None:
    with load(server.url, num_clients=4, pause_s=0.005):
        for name in ("rate", "p50", "p99", "flops", "busy", "batch"):
            expect(page.locator(f"#f-{name} .number")).to_have_text(A_FIGURE)
        first = page.locator("#f-rate .number").inner_text()
        expect(page.locator("#f-rate .number")).not_to_have_text(first)
        points = page.locator("#points tbody")
        for name in ("bfloat16", "float16", "float32"):
            expect(points).to_contain_text(f"matmul{name}")
        expect(points).to_contain_text("softmaxfloat32")
        expect(page.locator("#roofline .point.latest.matmul").first).to_be_attached()
        expect(page.locator("#rates path.line.matmul")).to_be_attached()
        expect(page.locator("#latency path.line.p99")).to_have_attribute("d", re.compile("L"))
        expect(page.locator("#batches rect.column.matmul").first).to_be_attached()
        expect(page.locator("#stages tbody tr", has_text="kernel")).to_contain_text("s")
        used = page.locator("#residents tbody tr", has_text="mlp/up")
        expect(used).to_contain_text("[1024, 512]")
        expect(used.locator("td").nth(4)).to_have_text(A_FIGURE)


def test_its_arithmetic_is_that_of_the_metrics(page: Page) -> None:
    """Parser, increases and quantiles, on a text whose answer is known."""
    then = 'd_bucket{op="a",le="1.0"} 0.0\nd_bucket{op="a",le="2.0"} 0.0\nd_bucket{op="a",le="+Inf"} 0.0\nn_total 5.0\n'
    now = 'd_bucket{op="a",le="1.0"} 5.0\nd_bucket{op="a",le="2.0"} 9.0\nd_bucket{op="a",le="+Inf"} 10.0\nn_total 8.0\n'
    script = """async ([then, now]) => {
        const m = await import("/console/exposition.js");
        const [at, from] = [m.parse(now), m.parse(then)];
        const histogram = m.buckets(at, from, "d");
        return [m.increase(at, from, "n_total"), m.quantile(0.25, histogram), m.quantile(0.7, histogram),
                m.quantile(1, histogram), m.labelsOf('{a="x\\\\"y\\\\\\\\z",b="2"}')];
    }"""
    increase, low, middle, high, labels = page.evaluate(script, [then, now])
    assert increase == 3
    assert (low, middle, high) == (0.5, 1.5, 2.0)
    assert labels == {"a": 'x"y\\z', "b": "2"}


def test_an_op_has_the_colour_and_the_mark_of_its_place(page: Page) -> None:
    """Those of the server in its order, then one that the page has only met in the metrics, and programs."""
    script = """async () => {
        const m = await import("/console/ops.js");
        m.learn([...m.OPS, "another"]);
        return m.OPS.map((op) => {
            const shown = document.body.appendChild(document.createElement("span"));
            shown.className = op;
            return [op, getComputedStyle(shown).getPropertyValue("--op"), m.mark(op, 0, 0, 5).outerHTML];
        });
    }"""
    expect(page.locator("#op option").first).to_be_attached()
    names, colours, marks = zip(*page.evaluate(script), strict=True)
    assert names == (*OPS, "another", "program")
    assert len(set(colours)) == len(names)
    assert colours[0] == page.evaluate("getComputedStyle(document.body).getPropertyValue('--op-0')")
    # The first is a circle, as programs are.
    assert len(set(marks)) == len(names) - 1


def test_a_list_of_ops_that_failed_is_asked_for_again_at_once(page: Page, server: LiveServer) -> None:
    """Else the page would have no op to offer for a quarter of a minute."""
    refusals = iter((500, 500))

    def answer(route: Route) -> None:
        status = next(refusals, None)
        route.continue_() if status is None else route.fulfill(status=status)

    # What the page of before asks for meanwhile must not count.
    page.goto("about:blank")
    page.route("**/openapi.json", answer)
    page.goto(server.url)
    expect(page.locator("#op option").first).to_be_attached(timeout=10_000)
    assert next(refusals, None) is None


def test_ops_are_met_in_the_metrics_where_there_is_no_list(page: Page, client: httpx.Client) -> None:
    page.route("**/openapi.json", lambda route: route.fulfill(json={"paths": {}}))
    page.reload()
    client.post("/v1/softmax", json={"x": [[1, 2]]}).raise_for_status()
    expect(page.locator("#latency-table tbody tr", has_text="softmax")).to_be_visible()


@pytest.mark.slow
def test_every_float16_is_read_as_numpy_reads_it(page: Page) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    script = """async (body) => {
        const m = await import("/console/tensors.js");
        const [tensor] = m.fromSafetensors(Uint8Array.from(body).buffer);
        return Array.from({length: tensor.count}, (_, i) => tensor.at(i))
            .map((x) => Number.isFinite(x) ? x : String(x));
    }"""
    read = np.array([float(x) for x in page.evaluate(script, list(to_safetensors({"out": halves})))])
    np.testing.assert_array_equal(read, halves.astype(np.float64))


def test_ceilings_and_kernels_are_drawn_when_they_are_offered(page: Page) -> None:
    page.route("**/v1/kernels", lambda route: route.fulfill(json=KERNELS))
    page.reload()
    expect(page.locator("#roofline-note")).to_have_text("NVIDIA H100 80GB HBM3")
    expect(page.locator("#roofline path.roof")).to_have_count(4)
    expect(page.locator("#roofline .roofname")).to_have_text(["bf16 790 T", "f16 785 T", "f32 60 T"])
    expect(page.locator("#kernels-note")).to_contain_text("2 loaded · 2 tuned · no spills")
    expect(page.locator("#kernels tbody tr")).to_have_count(2)
    page.get_by_label("Show only").fill("softmax")
    expect(page.locator("#kernels tbody tr")).to_have_count(1)


def test_without_a_list_of_kernels_the_rest_works(page: Page) -> None:
    page.route("**/v1/kernels", lambda route: route.fulfill(status=404, body="{}"))
    page.reload()
    expect(page.locator("#kernels-note")).to_have_text("not offered by this server")
    expect(page.locator("#state-text")).to_have_text("Ready")


# ── trouble ───────────────────────────────────────────────────────────────────────────────────────


def test_trouble_is_shown_with_request_ids(page: Page, client: httpx.Client) -> None:
    request_id = "console-trouble-1"
    wrong = {"a": [[1, 2]], "b": [[1, 2]]}
    headers = {"x-request-id": request_id}
    assert client.post("/v1/matmul", json=wrong, headers=headers).status_code == 400
    assert client.get("/v1/tensors/console/none", headers=headers).status_code == 404
    failures = page.locator("#failures tbody tr", has_text=request_id)
    expect(failures).to_have_count(2)
    expect(failures.filter(has_text="400")).to_contain_text("invalid request")
    expect(failures.filter(has_text="404")).to_contain_text("GET /v1/tensors/{name}")
    expect(page.locator("#trouble")).to_have_attribute("data-level", re.compile("warn|bad"))
    expect(page.locator("#trouble-note")).to_contain_text("refused or failed in the last")
    expect(page.locator("#statuses")).to_contain_text("status 400")


def ten_minutes() -> dict[str, Any]:
    return {
        "period_s": 5.0,
        "intervals": [
            {
                "end": time.time() - 5 * number,
                "seconds": 5.0,
                "requests": {"search": 50, "matmul": 5},
                "latency": {"p50": 0.001, "p90": 0.002, "p99": 0.004},
                **(
                    {"statuses": {"503": 3, "429": 1}, "refused": {"unavailable": 3, "too_busy": 1}}
                    if number == 4
                    else {}
                ),
            }
            for number in range(119, 0, -1)
        ],
        "failures": [],
    }


def test_the_history_of_the_server_is_there_at_once(page: Page) -> None:
    page.route("**/v1/history", lambda route: route.fulfill(json=ten_minutes()))
    page.reload()
    expect(page.locator("#trouble")).to_have_attribute("data-level", "bad")
    expect(page.locator("#trouble-note")).to_have_text(
        "4 of 6,545 requests to ops refused or failed in the last 10 minutes"
    )
    expect(page.locator("#statuses tbody tr")).to_have_count(4)
    drawn = page.locator("#rates path.line.search").first
    expect(drawn).to_have_attribute("d", re.compile("(L[^L]*){5}"))
    short = len(str(drawn.get_attribute("d")))
    page.get_by_label("Show", exact=True).select_option("600")
    expect(page.locator("#rates")).to_contain_text("10 min")
    assert len(str(drawn.get_attribute("d"))) > 3 * short
    assert page.url.endswith("#range=10")
    page.reload()
    expect(page.locator("#latency")).to_contain_text("10 min")


def test_without_trouble_it_says_so(page: Page) -> None:
    page.route("**/v1/history", lambda route: route.fulfill(json={"period_s": 5.0, "intervals": [], "failures": []}))
    page.reload()
    expect(page.locator("#trouble")).to_have_attribute("data-level", "good")
    expect(page.locator("#trouble-note")).to_have_text("No request to an op was refused or failed in the last minute.")
    expect(page.locator("#statuses")).to_be_hidden()
    expect(page.locator("#failures-box")).to_be_hidden()


METRICS = """tilewire_requests_total{op="matmul",code="200"} %(count)d.0
tilewire_key_requests_total{key="search-team",code="200"} %(count)d.0
tilewire_key_requests_total{key="search-team",code="429"} %(bad)d.0
tilewire_key_bytes_total{key="search-team"} %(count)d000.0
tilewire_engine_up{device="cuda:0"} 1.0
tilewire_engine_up{device="cuda:1"} 0.0
tilewire_engine_restarts_total{device="cuda:1"} 2.0
tilewire_in_flight_requests 1.0
tilewire_queue_depth 1.0
"""


def test_keys_engines_and_plurals(page: Page) -> None:
    began_s = time.monotonic()

    def metrics(route: Route) -> None:
        passed = int(10 * (time.monotonic() - began_s))
        route.fulfill(content_type="text/plain", body=METRICS % {"count": passed, "bad": passed // 2})

    page.route("**/metrics", metrics)
    page.reload()
    expect(page.locator("#keys")).to_contain_text("search-team")
    expect(page.locator("#keys .warn")).to_contain_text(A_FIGURE)
    engines = page.locator("#engines .engine")
    expect(engines.filter(has_text="cuda:0")).to_contain_text("ready")
    expect(engines.filter(has_text="cuda:1")).to_contain_text("not ready · 2 restarts")
    boxes = [engine.bounding_box() for engine in engines.all()[-2:]]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"
    expect(page.locator("#m-queue")).to_have_text("1 request")
    expect(page.locator("#f-load-sub")).to_have_text("1 waiting in engines")


# ── when things stop ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_it_says_when_the_server_is_silent_and_recovers(page: Page) -> None:
    expect(page.locator("#reading")).to_contain_text("Figures of")
    page.context.set_offline(True)
    expect(page.locator("#state-text")).to_have_text("No answer")
    expect(page.locator("#notice")).to_contain_text("The figures are those of")
    expect(page.locator("body")).to_have_class(re.compile("is-stale"))
    expect(page.get_by_role("status").first).to_contain_text("does not answer")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("could not be reached")
    page.context.set_offline(False)
    expect(page.locator("#state-text")).to_have_text("Ready")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("body")).not_to_have_class(re.compile("is-stale"))


def test_metrics_elsewhere_leave_the_form(page: Page) -> None:
    page.route("**/metrics", lambda route: route.fulfill(status=404, body=""))
    page.reload()
    expect(page.locator("#notice")).to_contain_text("does not offer its metrics here")
    compute(page)
    assert result(page) == [["58", "64"], ["139", "154"]]


def test_warm_up_is_shown(page: Page) -> None:
    page.route("**/v2/health/ready", lambda route: route.fulfill(status=503, json=WARMING))
    page.route("**/metrics", lambda route: route.fulfill(body=""))
    page.reload()
    expect(page.locator("#state-text")).to_have_text("Warming up · cuda:0 · load · 12 of 340")
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "12")


def test_a_key_is_asked_for_sent_and_forgotten(page: Page) -> None:
    seen: list[str] = []

    def guarded(route: Route) -> None:
        seen.append(route.request.headers.get("authorization", ""))
        if seen[-1] == "Bearer secret-key":
            route.continue_()
        else:
            route.fulfill(status=401, json={"title": "Unauthorized", "status": 401, "detail": "a key is needed"})

    page.route("**/metrics", guarded)
    page.route("**/v1/matmul*", guarded)
    page.reload()
    expect(page.locator("#notice")).to_contain_text("asks for an API key")
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("401 Unauthorized — a key is needed")
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_label("API key", exact=True)).to_be_focused()
    page.keyboard.type("secret-key")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_be_hidden()
    compute(page)
    assert result(page) == [["58", "64"], ["139", "154"]]
    assert "secret-key" not in page.content()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#notice")).to_contain_text("asks for an API key")
    assert page.evaluate("sessionStorage.length") == 0
