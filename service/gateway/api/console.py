"""Serves the console at `/`: one page and the files that it loads.

The files are packaged under `service/gateway/console`. The policy allows this server alone: no inline script, no inline style.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter

from tilewire.service.gateway.api.assets import Asset, assets_router, make_asset
from tilewire.service.gateway.console import PATHS

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def load_assets() -> dict[str, Asset]:
    """Reads the packaged files, by the path that each is served at."""
    folder = resources.files("tilewire.service.gateway.console")
    return {path: make_asset(name, folder.joinpath(name).read_bytes(), POLICY) for path, name in PATHS.items()}


def router() -> APIRouter:
    """Makes the routes of the console: the page at `/`, its files under `/console/`."""
    return assets_router(load_assets())
