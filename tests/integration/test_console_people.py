"""The console for people: keyboard, screen readers, small screens and reduced motion."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.support.browser import DESKTOP, PHONE
from tests.support.console_page import KERNELS, WARMING, choose, compute, fill, result
from tests.support.live_server import LiveServer

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("scheme", "viewport"),
    [
        pytest.param("light", DESKTOP, id="light-desktop"),
        pytest.param("dark", PHONE, id="dark-phone"),
        pytest.param("light", PHONE, id="light-phone", marks=pytest.mark.slow),
        pytest.param("dark", DESKTOP, id="dark-desktop", marks=pytest.mark.slow),
    ],
)
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
        expect(box.locator("tbody tr")).not_to_have_count(0)  # rows that come later make the table wider
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
