"""The site of the documents: it builds with strict links, has every page, and loads nothing from other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.make_site import CONFIGURATION, ROOT, copy_pages, places_of_files, relinked

BUILD = [sys.executable, "-P", "-m", "zensical", "build", "--strict"]


def nav_pages(entries: list[dict[str, object]]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        for value in entry.values():
            found += nav_pages(value) if isinstance(value, list) else [str(value)]
    return found


def test_every_page_is_in_the_navigation() -> None:
    listed = nav_pages(tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))["project"]["nav"])
    pages = {place for place in places_of_files().values() if place.endswith(".md")}
    decisions = {page for page in pages if page.startswith("adr/")}
    assert len(listed) == len(set(listed))
    assert set(listed) == (pages - decisions) | {"adr/README.md"}


def test_links_lead_to_the_places_of_the_site() -> None:
    pages = {"README.md": "index.md", "docs/api.md": "api.md", "docs/adr/1.md": "adr/1.md"}
    text = "[a](docs/api.md#x) [b](service/x.py) [c](https://x/y)"
    assert relinked(text, "README.md", pages) == "[a](api.md#x) b [c](https://x/y)"
    text = "![a](../api.md) [b](../../README.md)"
    assert relinked(text, "docs/adr/1.md", pages) == "![a](../api.md) [b](../index.md)"
    text = "[one](adr/1.md)\n```text\n[a](b.md)\n```"
    assert relinked(text, "docs/api.md", pages) == text


@pytest.mark.slow
def test_it_builds_and_needs_no_other_host(tmp_path: Path) -> None:
    if find_spec("zensical") is None:
        pytest.skip("zensical is not installed")
    command = [sys.executable, str(ROOT / "deploy" / "make_site.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    html = tmp_path / "site" / "html"
    for page in places_of_files().values():
        if page.endswith(".md"):
            text = (html / page.replace("README.md", "index.html").replace(".md", ".html")).read_text(encoding="utf-8")
            loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(https?:[^" >]+)', text)
            assert loaded == [], page
            assert not re.search(r'href="[^"]*\.md["#]', text), page


@pytest.mark.slow
@pytest.mark.parametrize("link", ["nothing.md", "api.md#no-such-heading"])
def test_a_link_that_leads_nowhere_fails(tmp_path: Path, link: str) -> None:
    if find_spec("zensical") is None:
        pytest.skip("zensical is not installed")
    copy_pages(tmp_path / "pages")
    shutil.copy(CONFIGURATION, tmp_path / "zensical.toml")
    page = tmp_path / "pages" / "faq.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n[broken]({link})\n", encoding="utf-8")
    done = subprocess.run(BUILD, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "faq.md" in done.stdout + done.stderr
