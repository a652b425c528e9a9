"""Builds the site of the documents: `python deploy/make_site.py [--out build/site]`.

The pages lie at the top level, in docs/ and in examples/, where people read them in the repository. They are copied to
one folder, with their links changed to match; links to sources lose their link. Zensical then builds, and fails on a link
or an anchor that leads nowhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "deploy" / "site.toml"
# Pages outside docs/, by their place in the site.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
# What pages show or offer, besides pages.
ASSETS = ("docs/*.png", "benchmarks/results/*", "examples/*.py", "examples/*.ipynb", "LICENSE")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Builds; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder of pages and site")
    out: Path = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    copy_pages(out / "pages")
    shutil.copy(CONFIGURATION, out / "zensical.toml")
    command = [sys.executable, "-P", "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=out, check=False)
    if done.returncode == 0:
        print(f"{out / 'html' / 'index.html'}")
    return done.returncode


def copy_pages(folder: Path) -> None:
    """Copies pages and assets, with the links of the site."""
    places = places_of_files()
    for source, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            target.write_text(relinked((ROOT / source).read_text(encoding="utf-8"), source, places), encoding="utf-8")
        else:
            shutil.copy(ROOT / source, target)


def places_of_files() -> dict[str, str]:
    """The place in the site of every file that it has, by its path in the repository."""
    places = dict(PAGES)
    for page in sorted(ROOT.glob("docs/**/*.md")):
        path = page.relative_to(ROOT).as_posix()
        places[path] = path.removeprefix("docs/")
    for pattern in ASSETS:
        for asset in sorted(ROOT.glob(pattern)):
            path = asset.relative_to(ROOT).as_posix()
            places[path] = path.removeprefix("docs/")
    return places


def relinked(text: str, source: str, places: dict[str, str]) -> str:
    """Changes the relative links of a page to the places of the site.

    Args:
        text: The page.
        source: Its path in the repository.
        places: See `places_of_files`.
    """
    fences: list[str] = []

    def keep(found: re.Match[str]) -> str:
        fences.append(found[0])
        return f"\0{len(fences) - 1}\0"

    def change(found: re.Match[str]) -> str:
        mark, words, link = found.groups()
        if re.match(r"[a-z]+:|#", link):
            return found[0]
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))  # noqa: PTH118, PTH120  (paths of links)
        place = places.get(target) or places.get(f"{target}/README.md")
        if place is None:
            return words
        relative = os.path.relpath(place, os.path.dirname(places[source]) or ".")  # noqa: PTH120  (paths of links)
        return f"{mark}[{words}]({relative}{'#' + anchor if anchor else ''})"

    changed = _LINK.sub(change, _FENCE.sub(keep, text))
    return re.sub("\0(\\d+)\0", lambda found: fences[int(found[1])], changed)


if __name__ == "__main__":
    sys.exit(main())
