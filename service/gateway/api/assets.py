"""Serves packaged files to browsers: entity tags, cache rules and a content security policy."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True)
class Asset:
    """One packaged file.

    Attributes:
        body: Bytes of the file.
        headers: Headers of every answer that carries it.
    """

    body: bytes
    headers: dict[str, str]

    def answer(self, if_none_match: str) -> Response:
        """Returns the file, or 304 when the browser has it."""
        known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        if self.headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def make_asset(name: str, body: bytes, policy: str) -> Asset:
    """Describes one file.

    Args:
        name: File name; its suffix gives the content type.
        body: Bytes of the file.
        policy: Content security policy that the browser applies.
    """
    return Asset(
        body,
        {
            "content-type": CONTENT_TYPES[name[name.rfind(".") :]],
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            # Kept, but checked each time: a new version shows at the next load.
            "cache-control": "no-cache",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        },
    )


def assets_router(assets: Mapping[str, Asset]) -> APIRouter:
    """Makes one route of each path."""
    routes = APIRouter(include_in_schema=False, default_response_class=Response)
    for path, asset in assets.items():
        routes.add_api_route(path, _endpoint(asset))
    return routes


def _endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return asset.answer(request.headers.get("if-none-match", ""))

    return endpoint
