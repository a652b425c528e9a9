"""The console's files: how they are served, and that they hold to the policy that they are served with."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tilewire.service.gateway.api.pages import CONSOLE_PATHS as PATHS
from tilewire.service.ops.registry import OPS

FOLDER = Path(__file__).parents[2] / "service" / "gateway" / "console"
MAX_LINES = 400
MAX_BYTES = 130_000


def test_every_file_of_the_folder_is_named() -> None:
    assert sorted(PATHS.values()) == sorted(
        path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"
    )


def test_there_are_colours_and_marks_for_every_op_and_some_more() -> None:
    script, style = (FOLDER / "ops.js").read_text(), (FOLDER / "console.css").read_text()
    num_colours, marks = re.search(r"NUM_COLOURS = (\d+);", script), re.search(r"MARKS = \[(.*)\];", script)
    assert num_colours is not None
    assert marks is not None
    assert len(set(re.findall(r"CIRCLE|\[.*?\]", marks[1]))) == int(num_colours[1]) > len(OPS)
    # Of the light scheme and of the dark one.
    for scheme in style.split("@media", 2)[:2]:
        colours = dict(re.findall(r"--op-(\d+): (#\w+);", scheme))
        assert list(colours) == [str(place) for place in range(int(num_colours[1]))]
        assert len(set(colours.values())) == len(colours)


@pytest.mark.parametrize(("path", "name"), PATHS.items())
def test_each_file_is_served_as_it_is(client: httpx.Client, path: str, name: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[
        name.rpartition(".")[2]
    ]
    assert response.headers["content-type"].startswith(kind)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-content-type-options"] == "nosniff"
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == response.headers["etag"]


def test_what_the_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    etag = client.get("/").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        response = client.get("/", headers={"if-none-match": known})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_the_policy_allows_this_server_alone(client: httpx.Client) -> None:
    policy = dict(part.split(" ", 1) for part in client.get("/").headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in str(policy)


def test_there_is_nothing_else_under_it(client: httpx.Client) -> None:
    for path in ("/console", "/console/", "/console/index.html", "/console/../settings.py", "/console/%2e%2e/app.py"):
        assert client.get(path).status_code == 404, path
    assert client.post("/").status_code == 405


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<[^>]+\s(?:style|on\w+)\s*=", page)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style", page)
    assert not re.search(r'(?:src|href)="/', page), "a proxy may serve it under a prefix"
    for name in PATHS.values():
        text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import|innerHTML\s*=|eval\(", text), name


def test_every_module_that_is_imported_is_there() -> None:
    for name in PATHS.values():
        for found in re.findall(r'from "\./([\w.]+)"', (FOLDER / name).read_text(encoding="utf-8")):
            assert found in PATHS.values()
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    for path in re.findall(r'(?:src|href)="console/([\w.]+)"', page):
        assert path in PATHS.values()


def test_it_stays_small() -> None:
    assert sum((FOLDER / name).stat().st_size for name in PATHS.values()) < MAX_BYTES
    for name in PATHS.values():
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES, name


def test_ids_that_scripts_use_are_in_the_page() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    for name in PATHS.values():
        for used in re.findall(r'byId\("([\w-]+)"\)', (FOLDER / name).read_text(encoding="utf-8")):
            assert used in ids, f"{name}: {used}"


def test_the_documents_say_how_many_requests_a_console_costs_its_key() -> None:
    script = (FOLDER / "main.js").read_text(encoding="utf-8").replace("KERNELS_MS,", "300000,")
    periods_ms = {name: int(period) for period, name in re.findall(r"\bevery\((\d+), (\w+)", script)}
    # Readiness needs no key.
    del periods_ms["readReadiness"]
    assert len(periods_ms) == 6
    per_minute = round(sum(60_000 / period_ms for period_ms in periods_ms.values()))
    # Metrics that are 404 here are asked once a minute.
    with_metrics_apart = per_minute - round(60_000 / periods_ms["readMetrics"]) + 1
    words = f"{per_minute} requests a minute(?: of its key's quota)?, or {with_metrics_apart} with `--metrics-port`"
    for page in ("monitoring", "security"):
        assert re.search(words, (FOLDER.parents[2] / "docs" / "operations" / f"{page}.md").read_text(encoding="utf-8"))
