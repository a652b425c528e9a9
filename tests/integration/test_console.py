"""The console in a real browser, before a real server: figures, form, keyboard, small screens, and when things stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

from tests.support.browser import DESKTOP, PHONE, Complaints, chromium
from tests.support.console_load import load, prepare
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import to_npy, to_safetensors

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


def fill(page: Page, a: str, b: str) -> None:
    page.get_by_label("a M × K").fill(a)
    page.get_by_label("b K × N").fill(b)


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
        expect(used.locator("td").nth(3)).to_have_text(A_FIGURE, timeout=20_000)


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
        const tensor = m.fromSafetensors(Uint8Array.from(body).buffer);
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
    fill(page, "1 2 3\n4 5 6", "7, 8\n9, 10\n11, -1e2")
    page.get_by_role("button", name="Multiply").click()
    assert result(page) == [["58", "-272"], ["139", "-518"]]
    answer = page.locator("#answer")
    expect(answer).to_contain_text("float32 [2, 2]")
    expect(answer).to_contain_text(re.compile(r"kernel [\d.]+\sms"))
    expect(answer).to_contain_text("alone in its launch")
    page.get_by_label("dtype").select_option("bfloat16")
    page.get_by_label("activation").select_option("relu")
    page.get_by_role("button", name="Multiply").click()
    expect(answer).to_contain_text("bfloat16 [2, 2]")
    assert result(page) == [["58", "0"], ["139", "0"]]


def test_special_values_come_back(page: Page) -> None:
    fill(page, "inf nan", "1 0\n0 1")
    page.get_by_role("button", name="Multiply").click()
    assert result(page) == [["NaN", "NaN"]]
    fill(page, "-inf", "1")
    page.get_by_role("button", name="Multiply").click()
    expect(page.locator("#answer table.result")).to_have_text("-∞")


def test_what_the_server_refuses_is_shown_with_its_detail(page: Page) -> None:
    fill(page, "1 2", "1\n2\n3")
    page.get_by_role("button", name="Multiply").click()
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("400 Invalid request")
    expect(problem).to_contain_text("b: its inner dimension is 3, but that of a is 2")
    expect(problem.locator("code")).to_have_text(re.compile(r"^[0-9a-f]{32}$"))
    expect(page.locator("#answer")).to_be_empty()


@pytest.mark.parametrize(
    ("a", "said"),
    [
        ("1 two", "a, row 1: “two” is not a number"),
        ("1 2\n3", "a, row 2 has 1 numbers, but row 1 has 2"),
        (" ", "a is empty"),
    ],
)
def test_what_is_no_matrix_is_not_sent(page: Page, a: str, said: str) -> None:
    fill(page, a, "1\n2")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    page.get_by_role("button", name="Multiply").click()
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_label("a M × K")).to_have_attribute("aria-invalid", "true")
    assert "POST" not in sent


def test_a_file_with_both_operands(page: Page) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((12, 5)).astype(np.float16), rng.standard_normal((5, 3)).astype(np.float16)
    page.get_by_label("A file").check()
    files = {
        "name": "ab.safetensors",
        "mimeType": "application/octet-stream",
        "buffer": to_safetensors({"a": a, "b": b}),
    }
    page.get_by_label(re.compile("^File")).set_input_files(files)  # type: ignore[arg-type]
    page.get_by_role("button", name="Multiply").click()
    shown = np.array(result(page), dtype=np.float64)
    expect(page.locator("#answer")).to_contain_text("float16 [12, 3]")
    expect(page.locator("#answer")).to_contain_text("The first 8 × 3 of it.")
    np.testing.assert_allclose(shown, (a.astype(np.float64) @ b.astype(np.float64))[:8], rtol=1e-2, atol=1e-2)
    with page.expect_download() as download:
        page.get_by_role("link", name="save as safetensors").click()
    assert download.value.suggested_filename == "out.safetensors"


def test_a_file_against_a_resident(page: Page, server: LiveServer) -> None:
    prepare(server.url)
    page.get_by_label("A file").check()
    buffer = to_npy(np.ones((2, 512), np.float32))
    page.get_by_label(re.compile("^File")).set_input_files({"name": "a.npy", "mimeType": "", "buffer": buffer})
    page.get_by_label(re.compile("^b from a resident")).fill("head/vocabulary")
    page.get_by_role("button", name="Multiply").click()
    expect(page.locator("#answer")).to_contain_text("float32 [2, 2048]")
    page.get_by_label(re.compile("^b from a resident")).fill("nothing/there")
    page.get_by_role("button", name="Multiply").click()
    expect(page.get_by_role("alert")).to_contain_text("404")


def test_a_file_that_is_none(page: Page) -> None:
    page.get_by_label("A file").check()
    page.get_by_role("button", name="Multiply").click()
    expect(page.get_by_role("alert")).to_contain_text("Choose a file first")
    page.get_by_label(re.compile("^File")).set_input_files({"name": "x.npy", "mimeType": "", "buffer": b"no array"})
    page.get_by_role("button", name="Multiply").click()
    expect(page.get_by_role("alert")).to_contain_text("400")


# ── people ────────────────────────────────────────────────────────────────────────────────────────


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))


def test_by_keyboard_alone(page: Page) -> None:
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the figures"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    order = []
    for _ in range(30):
        page.keyboard.press("Tab")
        order.append(focused(page))
        if order[-1] == "a":
            break
    assert order[:3] == ["API", "Metrics", "key-toggle"]
    page.keyboard.press("Control+A")
    page.keyboard.type("2 0\n0 2")
    page.keyboard.press("Tab")
    assert focused(page) == "b"
    page.keyboard.press("Control+A")
    page.keyboard.type("1 2\n3 4")
    for _ in range(3):
        page.keyboard.press("Tab")
    assert focused(page) == "send"
    page.keyboard.press("Enter")
    assert result(page) == [["2", "4"], ["6", "8"]]
    expect(page.get_by_role("button", name="Multiply")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(browser: Browser, server: LiveServer, scheme: str, viewport: ViewportSize) -> None:
    with browser.new_context(viewport=viewport, color_scheme=scheme) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.route("**/v1/kernels", lambda route: route.fulfill(json=KERNELS))
        page.goto(server.url)
        page.get_by_role("button", name="Multiply").click()
        assert result(page) == [["58", "64"], ["139", "154"]]
        fill(page, "1", "1\n2")
        page.get_by_role("button", name="Multiply").click()
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
    assert titles[0] == "Roofline"
    assert len(titles) == len(set(titles)) == 9
    for chart in page.locator("figure svg").all():
        assert chart.get_attribute("aria-label")


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
    page.get_by_role("button", name="Multiply").click()
    expect(page.get_by_role("alert")).to_contain_text("could not be reached")
    page.context.set_offline(False)
    expect(page.locator("#state-text")).to_have_text("Ready", timeout=15_000)
    expect(page.locator("#notice")).to_be_hidden(timeout=15_000)
    expect(page.locator("body")).not_to_have_class(re.compile("is-stale"))


def test_metrics_elsewhere_leave_the_form(page: Page) -> None:
    page.route("**/metrics", lambda route: route.fulfill(status=404, body=""))
    page.reload()
    expect(page.locator("#notice")).to_contain_text("does not offer its metrics here")
    page.get_by_role("button", name="Multiply").click()
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
    page.get_by_role("button", name="Multiply").click()
    expect(page.get_by_role("alert")).to_contain_text("401 Unauthorized — a key is needed")
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_label("API key", exact=True)).to_be_focused()
    page.keyboard.type("secret-key")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_be_hidden(timeout=10_000)
    page.get_by_role("button", name="Multiply").click()
    assert result(page) == [["58", "64"], ["139", "154"]]
    assert "secret-key" not in page.content()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#notice")).to_contain_text("asks for an API key", timeout=10_000)
    assert page.evaluate("sessionStorage.length") == 0
