"""The pages: of operators, the playground, the one that links the others, and the list of routes.

Each is one answer without outside resources, with a content security policy that allows the scripts and styles inside
it, and no others. Those that show the service poll it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Collection
from functools import cache, lru_cache
from importlib import resources

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from farsight.services.api.access.roles import ROLES

_BLOCK = {kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.DOTALL) for kind in ("script", "style")}


def html_page(text: str) -> HTMLResponse:
    """Returns the page, never kept by caches: a cached page of an earlier release might not understand this server."""
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": security_policy(text),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "SAMEORIGIN",
    }
    return HTMLResponse(text, headers=headers)


@lru_cache(maxsize=16)
def security_policy(text: str) -> str:
    """Allows ``<script>`` and ``<style>`` elements by their hashes, and requests to this server alone.

    Names and nodes come from outside the pages; without a hash, no script that one of them might bring would run.
    """
    scripts, styles = (" ".join(map(_hashed, pattern.findall(text))) or "'none'" for pattern in _BLOCK.values())
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


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
    """Returns a page with the shared files that it names, such as ``// key.js``; read once.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _whole(f"{name}.html")


def page_routes() -> APIRouter:
    """Returns one route for each page. The pages hold no data; what they show, they ask for with a key."""
    router = APIRouter(tags=["operation"])
    for address, name in PAGES.items():
        _add_page(router, address, name)
    return router


def _add_page(router: APIRouter, address: str, name: str) -> None:
    @router.get(address, response_class=HTMLResponse, name=f"{name}_page")
    async def page() -> Response:
        return html_page(operator_page(name))


def _whole(name: str) -> str:
    text = resources.files("farsight.services.api.pages").joinpath("static", *name.split("/")).read_text("utf-8")
    return _SHARED.sub(lambda found: _whole(found[1] or found[2] or found[3]).rstrip(), text)


LINKS = {
    "/play": "Playground: ask the model",
    "/dashboard": "Dashboard: what the service does now",
    "/dashboard/placement": "Placement: which replica gets which prompt",
    "/docs": "Routes of the API",
    "/openapi.json": "Schema of the API",
}
"""Pages by path; those that the application has are shown."""


def home_routes(paths: Collection[str]) -> APIRouter:
    """Returns ``GET /``, a page that links the others.

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


def docs_routes(app: FastAPI) -> APIRouter:
    """Returns ``GET /docs``. Its page lists the routes of the schema, which ``/openapi.json`` holds in full."""
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
