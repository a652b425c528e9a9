"""The page at `/`: which files it has and where each is served. Owns the names; `routes/console.py` reads and serves them."""

from __future__ import annotations

PAGE = "index.html"
FILES = (
    PAGE,
    "charts.js",
    "console.css",
    "draw.js",
    "exposition.js",
    "figures.js",
    "format.js",
    "icon.svg",
    "main.js",
    "ops.js",
    "page.js",
    "panels.js",
    "poll.js",
    "residents.js",
    "roofline.js",
    "snippets.js",
    "tensors.js",
    "trouble.js",
    "workbench.js",
)
# A browser asks for these before anybody could have typed in a key: whoever guards paths leaves them open together.
PATHS = {("/" if name == PAGE else f"/console/{name}"): name for name in FILES}
