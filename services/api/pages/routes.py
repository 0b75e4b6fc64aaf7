"""``GET /docs``: all routes on one page, without scripts and without outside resources."""

from __future__ import annotations

import html

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from services.api.access.roles import ROLES
from services.api.pages.dashboard import operator_page
from services.api.pages.page import html_page


def docs_routes(app: FastAPI) -> APIRouter:
    """The route. Its page lists the routes of the schema, which ``/openapi.json`` holds in full."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs", response_class=HTMLResponse)
    async def docs() -> Response:
        return html_page(operator_page("routes").replace("<!-- rows -->", _rows(app)))

    return router


def _rows(app: FastAPI) -> str:
    rows = []
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            role = ROLES.get(path) or ROLES.get(path.replace("{model_id}", "{model_id:path}"))
            cells = (method.upper(), path, "" if role is None else role.value, operation.get("summary", ""))
            rows.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    return "\n".join(rows)
