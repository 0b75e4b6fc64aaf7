"""``GET /``: a page that links the others."""

from __future__ import annotations

import html
from collections.abc import Collection

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from services.api.pages.dashboard import operator_page
from services.api.pages.page import html_page

LINKS = {
    "/play": "Playground: ask the model",
    "/dashboard": "Dashboard: what the service does now",
    "/dashboard/placement": "Placement: which replica gets which prompt",
    "/docs": "Routes of the API",
    "/openapi.json": "Schema of the API",
}
"""Pages by path; those that the application has are shown."""


def home_routes(paths: Collection[str]) -> APIRouter:
    """The route.

    Args:
        paths: Those of the application's routes.
    """
    router = APIRouter(include_in_schema=False)
    links = [
        f'    <li><a href="{html.escape(path[1:])}">{html.escape(text)}</a></li>'
        for path, text in LINKS.items()
        if path in paths or path == "/openapi.json"
    ]
    page = operator_page("home").replace("<!-- links -->", "\n".join(links))

    @router.get("/", response_class=HTMLResponse)
    async def home() -> Response:
        return html_page(page)

    return router
