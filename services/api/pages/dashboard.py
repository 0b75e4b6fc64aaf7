"""The operators' pages and the playground: each is one answer without outside resources that polls the server."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from services.api.pages.page import html_page

PAGES = {
    "/dashboard": "dashboard",
    "/dashboard/requests": "requests",
    "/dashboard/scheduler": "scheduler",
    "/dashboard/placement": "placement",
    "/dashboard/services": "services",
    "/dashboard/forecasts": "forecasts",
    "/play": "play",
}
"""Each address and its page."""

_SHARED = re.compile(r"^ *(?:/\* ([a-z/]+\.css) \*/|<!-- ([a-z/]+\.html) -->|// ([a-z/]+\.js))$", re.MULTILINE)
"""A line that stands for a shared file of that name."""


@cache
def operator_page(name: str) -> str:
    """A page with the shared files that it names, such as ``// key.js``; read once.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _whole(f"{name}.html")


def page_routes() -> APIRouter:
    """One route for each page. The pages hold no data; what they show, they ask for with a key."""
    router = APIRouter(tags=["operation"])
    for address, name in PAGES.items():
        _add_page(router, address, name)
    return router


def _add_page(router: APIRouter, address: str, name: str) -> None:
    @router.get(address, response_class=HTMLResponse, name=f"{name}_page")
    async def page() -> Response:
        return html_page(operator_page(name))


def _whole(name: str) -> str:
    return _SHARED.sub(lambda found: _whole(found[1] or found[2] or found[3]).rstrip(), _read(name))


def _read(name: str) -> str:
    return resources.files("services.api.pages").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
