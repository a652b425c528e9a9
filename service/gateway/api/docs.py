"""Serves `/docs`: Swagger UI over `/openapi.json`, from packaged files, without any other host.

The page and its script are relative to `/docs`, so that a path prefix of a proxy works. The policy allows this server alone.
Swagger UI needs inline styles.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter

from tilewire.service.gateway.api.assets import Asset, assets_router, make_asset

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Swagger UI as the package `fastapi-swagger` ships it.
PACKAGED = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
PATHS = ("/docs", "/docs/start.js", *(f"/docs/{name}" for name in PACKAGED))

PAGE = """<!doctype html>
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
START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  tryItOutEnabled: true,
  presets: [SwaggerUIBundle.presets.apis],
});
"""


def load_assets() -> dict[str, Asset]:
    """Reads the files, by the path that each is served at."""
    folder = resources.files("fastapi_swagger.resources")
    assets = {f"/docs/{name}": make_asset(name, folder.joinpath(name).read_bytes(), POLICY) for name in PACKAGED}
    assets["/docs/start.js"] = make_asset("start.js", START.encode(), POLICY)
    assets["/docs"] = make_asset("docs.html", PAGE.encode(), POLICY)
    return assets


def router() -> APIRouter:
    """Makes the routes of the page."""
    return assets_router(load_assets())
