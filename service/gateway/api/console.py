"""The console at `/`: one page and the files that it loads. Verbs only; the page asks the public endpoints for its figures.

Owns the packaged files under `service/gateway/console`, read once when the routes are made, and the policy that the browser
holds the page to: everything from this server, no inline script, no inline style.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request, Response

from tilewire.service.gateway.console import PATHS

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True)
class Asset:
    """One file of the page.

    Attributes:
        body: Its bytes.
        headers: Those of every answer with it.
    """

    body: bytes
    headers: dict[str, str]

    def answer(self, if_none_match: str) -> Response:
        """The file, or 304 when the browser has it."""
        known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        if self.headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def load_assets() -> dict[str, Asset]:
    """Reads the packaged files, by the path that each is served at."""
    folder = resources.files("tilewire.service.gateway.console")
    return {
        path: _asset(folder.joinpath(name).read_bytes(), CONTENT_TYPES[name[name.rfind(".") :]])
        for path, name in PATHS.items()
    }


def _asset(body: bytes, content_type: str) -> Asset:
    return Asset(
        body,
        {
            "content-type": content_type,
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            # Kept, but asked for again each time: a new version shows at the next load.
            "cache-control": "no-cache",
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        },
    )


def router() -> APIRouter:
    """The routes of the console: the page at `/`, its files under `/console/`."""
    routes = APIRouter(include_in_schema=False)
    for path, asset in load_assets().items():
        routes.add_api_route(path, _endpoint(asset), methods=["GET", "HEAD"], response_class=Response)
    return routes


def _endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return asset.answer(request.headers.get("if-none-match", ""))

    return endpoint
