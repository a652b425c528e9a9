"""Serves packaged pages to browsers: the console at `/`, and Swagger UI over `/openapi.json` at `/docs`.

Owns their paths, entity tags, cache rules and content security policies, which allow this server alone. The page of `/docs` and
its script are relative to it, so that a path prefix of a proxy works.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

from tilewire.service.match import is_known

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_CONSOLE = resources.files("tilewire.service.gateway.console")
_NAMES = sorted(file.name for file in _CONSOLE.iterdir() if PurePath(file.name).suffix in CONTENT_TYPES)
# Swagger UI as the package `fastapi-swagger` ships it.
_SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
# A browser requests these before anybody could have typed in a key. So they are open or closed together.
CONSOLE_PATHS = {("/" if name == "index.html" else f"/console/{name}"): name for name in _NAMES}
DOCS_PATHS = ("/docs", "/docs/start.js", *(f"/docs/{name}" for name in _SWAGGER))

# No inline script, no inline style.
CONSOLE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# Swagger UI needs inline styles.
DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tilewire API</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
DOCS_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  tryItOutEnabled: true,
  presets: [SwaggerUIBundle.presets.apis],
});
"""


@dataclass(frozen=True)
class Asset:
    """The bytes of one packaged file, and the headers of every answer that carries it."""

    body: bytes
    headers: dict[str, str]


def _asset(name: str, body: bytes, policy: str) -> Asset:
    return Asset(
        body,
        {
            "content-type": CONTENT_TYPES[PurePath(name).suffix],
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            # Kept, but checked each time: a new version shows at the next load.
            "cache-control": "no-cache",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        },
    )


def console_assets() -> dict[str, Asset]:
    """Reads the console's files, by the path that each is served at."""
    return {path: _asset(name, (_CONSOLE / name).read_bytes(), CONSOLE_POLICY) for path, name in CONSOLE_PATHS.items()}


def docs_assets() -> dict[str, Asset]:
    """Reads the files of Swagger UI, by the path that each is served at."""
    folder = resources.files("fastapi_swagger.resources")
    return {
        "/docs": _asset("docs.html", DOCS_PAGE.encode(), DOCS_POLICY),
        "/docs/start.js": _asset("start.js", DOCS_START.encode(), DOCS_POLICY),
        **{f"/docs/{name}": _asset(name, (folder / name).read_bytes(), DOCS_POLICY) for name in _SWAGGER},
    }


def router(assets: Mapping[str, Asset]) -> APIRouter:
    """Makes one route of each path."""
    routes = APIRouter(include_in_schema=False, default_response_class=Response)
    for path, asset in assets.items():
        routes.add_api_route(path, _endpoint(asset))
    return routes


def _endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        """Answers the file, or 304 when the browser has it."""
        if is_known(request.headers.get("if-none-match"), asset.headers["etag"]):
            return Response(status_code=304, headers=asset.headers)
        return Response(asset.body, headers=asset.headers)

    return endpoint
