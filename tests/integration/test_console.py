"""The console in a real browser, before a real server: figures, form, keyboard, small screens, and when things stop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

from tests.support.browser import DESKTOP, PHONE, Complaints, chromium
from tests.support.console_load import load, prepare
from tests.support.live_server import ROOT, LiveServer, path_with
from tests.support.programs import find_program
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors
from tilewire.service.ops.registry import OPS

KERNELS = {
    "devices": [
        {
            "device": "cuda:0",
            "device_name": "NVIDIA H100 80GB HBM3",
            "backend": "gpu",
            "target": "cuda:90",
            "table": "nvidia_h100",
            "roofline": {
                "bandwidth_bytes_per_second": 3e12,
                "tflops": {"bfloat16": 790.0, "float16": 785.0, "float32": 60.0},
            },
            "variants": [
                {
                    "op": op,
                    "kernel": kernel,
                    "config": {"BLOCK_M": 128, "num_warps": 8},
                    "source": "tuned",
                    "registers": 168,
                    "spills": 0,
                    "shared_bytes": 196608,
                }
                for op, kernel in (("matmul", "matmul_tma"), ("softmax", "softmax_rows"))
            ],
            "tuned": [],
        }
    ]
}
WARMING = {
    "ready": False,
    "engines": [{"device": "cuda:0", "state": "warming", "stage": "load", "done": 12, "total": 340}],
}

# A figure of the strip that is a number other than nought.
A_FIGURE = re.compile(r"[1-9]")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The console on a desktop; it must not complain, and must ask nobody but its server."""
    with browser.new_context(viewport=DESKTOP) as context:
        page = context.new_page()
        complaints = Complaints()
        complaints.watch(page)
        page.goto(server.url)
        yield page
        page.close()
    assert complaints.errors == []
    assert complaints.origins - {"blob://"} <= {server.url}


def fill(page: Page, **operands: str) -> None:
    for name, text in operands.items():
        page.locator(f"#in-{name}").fill(text)


def choose(page: Page, name: str) -> None:
    """Chooses an op, as soon as the page has the list."""
    expect(page.locator(f"#op option[value='{name}']")).to_be_attached(timeout=20_000)
    page.get_by_label("Operation").select_option(name)


def compute(page: Page) -> None:
    expect(page.locator("#op option").first).to_be_attached()
    page.get_by_role("button", name="Compute").click()


def result(page: Page) -> list[list[str]]:
    rows = page.locator("#answer table.result tr")
    expect(rows.first).to_be_visible()
    return [row.locator("td").all_inner_texts() for row in rows.all()]


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def test_it_says_what_serves(page: Page) -> None:
    expect(page.locator("#state-text")).to_have_text("Ready")
    expect(page.locator("#identity")).to_contain_text("PyTorch on the CPU")
    expect(page.locator("#engines")).to_contain_text("ready · 0 restarts")
    expect(page.locator("#notice")).to_be_hidden()


def test_figures_move_under_load(page: Page, server: LiveServer) -> None:
    with load(server.url, num_clients=4, pause_s=0.005):
        for name in ("rate", "p50", "p99", "flops", "busy", "batch"):
            expect(page.locator(f"#f-{name} .number")).to_have_text(A_FIGURE, timeout=20_000)
        first = page.locator("#f-rate .number").inner_text()
        expect(page.locator("#f-rate .number")).not_to_have_text(first, timeout=20_000)
        points = page.locator("#points tbody")
        for name in ("bfloat16", "float16", "float32"):
            expect(points).to_contain_text(f"matmul{name}", timeout=20_000)
        expect(points).to_contain_text("softmaxfloat32", timeout=20_000)
        expect(page.locator("#roofline .point.latest.matmul").first).to_be_attached()
        expect(page.locator("#rates path.line.matmul")).to_be_attached()
        expect(page.locator("#latency path.line.p99")).to_have_attribute("d", re.compile("L"), timeout=20_000)
        expect(page.locator("#batches rect.column.matmul").first).to_be_attached()
        expect(page.locator("#stages tbody tr", has_text="kernel")).to_contain_text("s")
        used = page.locator("#residents tbody tr", has_text="mlp/up")
        expect(used).to_contain_text("[1024, 512]", timeout=20_000)
        expect(used.locator("td").nth(4)).to_have_text(A_FIGURE, timeout=20_000)


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


# ── the form ──────────────────────────────────────────────────────────────────────────────────────


def test_two_matrices(page: Page) -> None:
    choose(page, "matmul")
    fill(page, a="1 2 3\n4 5 6", b="7, 8\n9, 10\n11, -1e2")
    compute(page)
    assert result(page) == [["58", "-272"], ["139", "-518"]]
    answer = page.locator("#answer")
    expect(answer).to_contain_text("float32 [2, 2]")
    expect(answer).to_contain_text(re.compile(r"kernel [\d.]+\sms"))
    expect(answer).to_contain_text("alone in its launch")
    page.get_by_label("dtype", exact=True).select_option("bfloat16")
    page.get_by_label("activation").select_option("relu")
    compute(page)
    expect(answer).to_contain_text("bfloat16 [2, 2]")
    assert result(page) == [["58", "0"], ["139", "0"]]


@pytest.mark.parametrize(
    ("op", "operands", "options", "expected"),
    [
        ("softmax", {"x": "0 0"}, {}, [["0.5", "0.5"]]),
        ("add", {"a": "1 2", "b": "10\n20"}, {"alpha": "0.5"}, [["6", "7"], ["11", "12"]]),
        ("normalize", {"x": "3 4", "weight": "10 10"}, {"kind": "l2"}, [["6", "8"]]),
        ("reduce", {"x": "1 5 3"}, {"kind": "max", "keepdims": "true"}, [["5"]]),
        ("pointwise", {"x": "1 2", "y": "3 4"}, {"fn": "mul", "shift": "1"}, [["4", "9"]]),
        ("topk", {"x": "1 3 2"}, {"k": "2"}, [["3", "2"]]),
        ("search", {"a": "1 0", "b": "1 0\n0 1\n2 0"}, {"k": "2", "metric": "l2"}, [["0", "1"]]),
    ],
)
def test_every_op_is_in_the_form(
    page: Page, op: str, operands: dict[str, str], options: dict[str, str], expected: list[list[str]]
) -> None:
    choose(page, op)
    if operands.keys() - {"a", "b", "x"}:
        page.get_by_text("Optional inputs").click()
    fill(page, **operands)
    for name, value in options.items():
        field = page.locator(f"#opt-{name}")
        if field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    compute(page)
    boxes = page.locator("#answer .scroll")
    expect(boxes.first).to_be_visible()
    rows = [row.locator("td").all_inner_texts() for row in boxes.first.locator("tr").all()]
    assert rows == expected
    if op in ("topk", "search"):
        expect(page.locator("#answer")).to_contain_text("indices int64 [1, 2]")


def test_the_form_has_all_ops_and_their_examples_run(page: Page) -> None:
    choose(page, "matmul")
    assert page.locator("#op option").evaluate_all("all => all.map((one) => one.value)")[: len(OPS)] == list(OPS)
    for op in OPS:
        choose(page, op)
        compute(page)
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#answer table.result").first).to_be_visible()
        expect(page.get_by_role("alert")).to_be_empty()


def test_a_kept_program_runs(page: Page, client: httpx.Client) -> None:
    program = {
        "inputs": {"x": {"dtype": "float16", "shape": [-1, 2]}, "shift": {"dtype": "float16", "shape": [2]}},
        "steps": [
            {"op": "add", "inputs": {"a": "x", "b": "shift"}, "as": "moved"},
            {"op": "softmax", "inputs": {"x": "moved"}, "as": "p"},
        ],
        "outputs": ["moved", "p"],
    }
    client.put("/v1/programs/console-try", json=program).raise_for_status()
    try:
        page.reload()
        choose(page, "program:console-try")
        expect(page.locator("#try-note")).to_have_text("2 steps; answers moved, p.")
        fill(page, x="1 2\n3 4", shift="1 0")
        compute(page)
        answer = page.locator("#answer")
        expect(answer).to_contain_text("moved float16 [2, 2]")
        assert result(page)[:2] == [["2", "2"], ["4", "4"]]
        expect(answer.get_by_label("Result p")).to_contain_text("0.5")
    finally:
        client.delete("/v1/programs/console-try").raise_for_status()


def test_special_values_come_back(page: Page) -> None:
    choose(page, "matmul")
    fill(page, a="inf nan", b="1 0\n0 1")
    compute(page)
    assert result(page) == [["NaN", "NaN"]]
    fill(page, a="-inf", b="1")
    compute(page)
    expect(page.locator("#answer table.result")).to_have_text("-∞")


def test_what_the_server_refuses_is_shown_with_its_detail(page: Page) -> None:
    choose(page, "matmul")
    fill(page, a="1 2", b="1\n2\n3")
    compute(page)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("400 Invalid request")
    expect(problem).to_contain_text("b: its inner dimension is 3, but that of a is 2")
    expect(problem.locator("code")).to_have_text(re.compile(r"^[0-9a-f]{32}$"))
    expect(page.locator("#answer")).to_be_empty()


@pytest.mark.parametrize(
    ("a", "said"),
    [
        ("1 two", "a, row 1: “two” is not a number"),
        ("1 2\n3", "a, row 2 has 1 number, but row 1 has 2"),
        (" ", "a is empty"),
    ],
)
def test_what_is_no_matrix_is_not_sent(page: Page, a: str, said: str) -> None:
    choose(page, "matmul")
    fill(page, a=a, b="1\n2")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.locator("#in-a")).to_have_attribute("aria-invalid", "true")
    assert "POST" not in sent


def test_a_file_with_both_operands(page: Page) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((12, 5)).astype(np.float16), rng.standard_normal((5, 3)).astype(np.float16)
    choose(page, "matmul")
    page.get_by_label("A file").check()
    fill(page, a="", b="")
    files = {
        "name": "ab.safetensors",
        "mimeType": "application/octet-stream",
        "buffer": to_safetensors({"a": a, "b": b}),
    }
    page.locator("#file").set_input_files(files)  # type: ignore[arg-type]
    compute(page)
    shown = np.array(result(page), dtype=np.float64)
    expect(page.locator("#answer")).to_contain_text("float16 [12, 3]")
    expect(page.locator("#answer")).to_contain_text("The first 8 × 3 of it.")
    np.testing.assert_allclose(shown, (a.astype(np.float64) @ b.astype(np.float64))[:8], rtol=1e-2, atol=1e-2)
    with page.expect_download() as download:
        page.get_by_role("button", name="save as safetensors").click()
    assert download.value.suggested_filename == "out.safetensors"


def test_a_file_against_a_resident(page: Page, server: LiveServer) -> None:
    prepare(server.url)
    choose(page, "matmul")
    page.get_by_label("A file").check()
    buffer = to_npy(np.ones((2, 512), np.float32))
    page.locator("#file").set_input_files({"name": "a.npy", "mimeType": "", "buffer": buffer})
    fill(page, a="", b="@head/vocabulary")
    compute(page)
    expect(page.locator("#answer")).to_contain_text("float32 [2, 2048]")
    fill(page, b="@nothing/there")
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("404")


def test_a_file_that_is_none(page: Page) -> None:
    choose(page, "softmax")
    page.get_by_label("A file").check()
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("Choose a file first")
    page.locator("#file").set_input_files({"name": "x.npy", "mimeType": "", "buffer": b"no array"})
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("400")


@pytest.mark.parametrize(
    ("op", "operands", "dtype"),
    [
        ("matmul", {"a": "1 2", "b": "3\n4"}, "float32"),
        ("softmax", {"x": "1 -inf"}, "bfloat16"),
        ("search", {"a": "1 0", "b": "1 0\n0 1"}, "float16"),
    ],
)
def test_the_request_runs_as_curl_and_in_python(page: Page, op: str, operands: dict[str, str], dtype: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(page, op)
    fill(page, **operands)
    page.get_by_label("dtype", exact=True).select_option(dtype)
    compute(page)
    shown = result(page)[0][0]
    texts = {}
    for title in ("The same with curl", "The same in Python"):
        snippet = page.locator("details.snippet", has_text=title)
        snippet.locator("summary").click()
        snippet.get_by_role("button").click()
        expect(snippet.get_by_role("button")).to_have_text("copied")
        texts[title] = page.evaluate("navigator.clipboard.readText()")
        assert texts[title] == snippet.locator("pre").inner_text()
    find_program("curl")
    text = texts["The same with curl"]
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30, check=True)
    assert float(np.ravel(next(iter(json.loads(done.stdout).values())))[0]) == float(shown)
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    command = [sys.executable, "-c", texts["The same in Python"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"\b{float(shown):g}\b", done.stdout)


# ── resident tensors ──────────────────────────────────────────────────────────────────────────────


def test_a_tensor_is_uploaded_used_saved_and_deleted(page: Page, client: httpx.Client) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    page.locator("#upload-file").set_input_files({"name": "x.npy", "mimeType": "", "buffer": to_npy(array)})
    page.get_by_label("under the name").fill("console/uploaded")
    page.get_by_role("button", name="Upload", exact=True).click()
    said = page.locator("#residents-said")
    expect(said).to_have_text("console/uploaded is resident.")
    row = page.locator("#residents tbody tr", has_text="console/uploaded")
    expect(row).to_contain_text("[2, 3]")
    choose(page, "add")
    fill(page, a="@console/uploaded", b="@console/uploaded")
    page.get_by_label("Keep the result as").fill("console/sum")
    compute(page)
    expect(page.locator("#answer")).to_contain_text("@console/sum float32 [2, 3], resident")
    with page.expect_download() as download:
        page.get_by_role("button", name="save console/sum").click()
    saved = from_safetensors(download.value.path().read_bytes())
    np.testing.assert_array_equal(saved["console/sum"], 2 * array)
    for name in ("console/sum", "console/uploaded"):
        page.get_by_role("button", name=f"delete {name}").click()
        assert client.head(f"/v1/tensors/{name}").status_code == 200
        page.get_by_role("button", name=f"Really delete {name}?").click()
        expect(said).to_have_text(f"{name} was deleted.")
        assert client.head(f"/v1/tensors/{name}").status_code == 404


def test_an_upload_that_is_refused_says_why(page: Page) -> None:
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.locator("#residents-said")).to_have_text("Choose a file and type a name.")
    page.locator("#upload-file").set_input_files({"name": "x.npy", "mimeType": "", "buffer": b"none"})
    page.get_by_label("under the name").fill("a b")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.locator("#residents-said")).to_contain_text("400 Invalid request: name: ")


# ── trouble ───────────────────────────────────────────────────────────────────────────────────────


def test_trouble_is_shown_with_request_ids(page: Page, client: httpx.Client) -> None:
    request_id = "console-trouble-1"
    wrong = {"a": [[1, 2]], "b": [[1, 2]]}
    headers = {"x-request-id": request_id}
    assert client.post("/v1/matmul", json=wrong, headers=headers).status_code == 400
    assert client.get("/v1/tensors/console/none", headers=headers).status_code == 404
    failures = page.locator("#failures tbody tr", has_text=request_id)
    expect(failures).to_have_count(2, timeout=20_000)
    expect(failures.filter(has_text="400")).to_contain_text("invalid request")
    expect(failures.filter(has_text="404")).to_contain_text("GET /v1/tensors/{name}")
    expect(page.locator("#trouble")).to_have_attribute("data-level", re.compile("warn|bad"), timeout=20_000)
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
    expect(page.locator("#keys")).to_contain_text("search-team", timeout=10_000)
    expect(page.locator("#keys .warn")).to_contain_text(A_FIGURE, timeout=10_000)
    engines = page.locator("#engines .engine")
    expect(engines.filter(has_text="cuda:0")).to_contain_text("ready")
    expect(engines.filter(has_text="cuda:1")).to_contain_text("not ready · 2 restarts")
    boxes = [engine.bounding_box() for engine in engines.all()[-2:]]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"
    expect(page.locator("#m-queue")).to_have_text("1 request")
    expect(page.locator("#f-load-sub")).to_have_text("1 waiting in engines")


# ── people ────────────────────────────────────────────────────────────────────────────────────────


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))


def test_by_keyboard_alone(page: Page) -> None:
    choose(page, "matmul")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the figures"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    order = []
    for _ in range(60):
        page.keyboard.press("Tab")
        order.append(focused(page))
        if order[-1] == "in-a":
            break
    assert order[:4] == ["API", "History", "Metrics", "key-toggle"]
    assert order[-1] == "in-a"
    page.keyboard.press("Control+A")
    page.keyboard.type("2 0\n0 2")
    page.keyboard.press("Tab")
    assert focused(page) == "in-b"
    page.keyboard.press("Control+A")
    page.keyboard.type("1 2\n3 4")
    for _ in range(12):
        page.keyboard.press("Tab")
        if focused(page) == "send":
            break
    page.keyboard.press("Enter")
    assert result(page) == [["2", "4"], ["6", "8"]]
    expect(page.get_by_role("button", name="Compute")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(browser: Browser, server: LiveServer, scheme: str, viewport: ViewportSize) -> None:
    with browser.new_context(viewport=viewport, color_scheme=scheme) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.route("**/v1/kernels", lambda route: route.fulfill(json=KERNELS))
        page.goto(server.url)
        choose(page, "matmul")
        compute(page)
        assert result(page) == [["58", "64"], ["139", "154"]]
        fill(page, a="1", b="1\n2")
        compute(page)
        expect(page.get_by_role("alert")).to_contain_text("400")
        page.get_by_role("button", name="API key").click()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0
        red = page.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert red < 64 if scheme == "dark" else red > 192
        page.close()


def test_landmarks_headings_and_labels(page: Page) -> None:
    for role in ("banner", "navigation", "main", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_text("Tilewire")
    titles = page.get_by_role("heading", level=2).all_inner_texts()
    assert titles[0] == "Trouble"
    assert len(titles) == len(set(titles)) == 11
    for chart in page.locator("figure svg").all():
        assert chart.get_attribute("aria-label")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_explanations_open_and_close(browser: Browser, server: LiveServer, viewport: ViewportSize) -> None:
    with browser.new_context(viewport=viewport) as context:
        page = context.new_page()
        page.goto(server.url)
        button, text = page.get_by_role("button", name="What is kernels running?"), page.locator("#tip-busy")
        expect(text).to_be_hidden()
        button.focus()
        page.keyboard.press("Enter")
        expect(text).to_be_visible()
        box = text.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]
        page.keyboard.press("Escape")
        expect(text).to_be_hidden()
        page.close()


def test_tables_on_phones_show_that_they_scroll(browser: Browser, server: LiveServer) -> None:
    with browser.new_context(viewport=PHONE) as context:
        page = context.new_page()
        page.goto(server.url)
        box = page.get_by_label("List of resident tensors")
        expect(box).to_have_attribute("data-more", "behind")
        assert "gradient" in box.evaluate("one => getComputedStyle(one).maskImage")
        box.evaluate("one => one.scrollBy(1e4, 0)")
        expect(box).to_have_attribute("data-more", "before")
        page.set_viewport_size(DESKTOP)
        expect(box).to_have_attribute("data-more", "")
        page.close()


def test_nothing_moves_for_those_who_asked_for_that(browser: Browser, server: LiveServer) -> None:
    with browser.new_context(reduced_motion="reduce") as context:
        page = context.new_page()
        page.route("**/v2/health/ready", lambda route: route.fulfill(status=503, json=WARMING))
        page.goto(server.url)
        expect(page.locator("#state")).to_have_attribute("data-state", "warming")
        assert page.evaluate("getComputedStyle(document.querySelector('.dot')).animationName") == "none"
        page.close()


# ── when things stop ──────────────────────────────────────────────────────────────────────────────


def test_it_says_when_the_server_is_silent_and_recovers(page: Page) -> None:
    expect(page.locator("#reading")).to_contain_text("Figures of", timeout=10_000)
    page.context.set_offline(True)
    expect(page.locator("#state-text")).to_have_text("No answer", timeout=15_000)
    expect(page.locator("#notice")).to_contain_text("The figures are those of", timeout=15_000)
    expect(page.locator("body")).to_have_class(re.compile("is-stale"))
    expect(page.get_by_role("status").first).to_contain_text("does not answer")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("could not be reached")
    page.context.set_offline(False)
    expect(page.locator("#state-text")).to_have_text("Ready", timeout=15_000)
    expect(page.locator("#notice")).to_be_hidden(timeout=15_000)
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
    expect(page.locator("#notice")).to_be_hidden(timeout=10_000)
    compute(page)
    assert result(page) == [["58", "64"], ["139", "154"]]
    assert "secret-key" not in page.content()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#notice")).to_contain_text("asks for an API key", timeout=10_000)
    assert page.evaluate("sessionStorage.length") == 0
