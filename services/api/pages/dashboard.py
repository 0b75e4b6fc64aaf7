"""The pages: the chat, those of operators, and the list of routes.

Each is one answer without outside resources, with a content security policy that allows the scripts and styles inside
it, and no others. Those that show the service poll it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache, lru_cache
from importlib import resources

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from farsight.policies.presets import PRESETS
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
    "/": "chat",
    "/play": "chat",
    "/dashboard": "dashboard",
    "/dashboard/requests": "requests",
    "/dashboard/requests/{response_id}": "request",
    "/dashboard/sessions": "sessions",
    "/dashboard/scheduler": "scheduler",
    "/dashboard/placement": "placement",
    "/dashboard/services": "services",
    "/dashboard/forecasts": "forecasts",
}
"""Each address and its page; a page whose address holds an id reads the id from the browser's address."""

_SHARED = re.compile(r"^ *(?:/\* ([a-z/]+\.css) \*/|<!-- ([a-z/]+\.html) -->|// ([a-z/]+\.js))$", re.MULTILINE)
"""A line that stands for a shared file of that name."""


@cache
def operator_page(name: str) -> str:
    """Returns a page with the shared files that it names, such as ``// key.js``; read once.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    options = "".join(f'<option value="{name}">{name}</option>' for name in map(html.escape, PRESETS))
    return _whole(f"{name}.html").replace("<!-- presets -->", options)


def page_routes(*, of_operators: bool) -> APIRouter:
    """Returns one route for each page. The pages hold no data; what they show, they ask for with a key.

    Args:
        of_operators: Whether there are pages for operators; else only the chat.
    """
    router = APIRouter(tags=["operation"])
    for address, name in PAGES.items():
        if of_operators or name == "chat":
            _add_page(router, address, name, linked=of_operators)
    return router


def _add_page(router: APIRouter, address: str, name: str, *, linked: bool) -> None:
    @router.get(address, response_class=HTMLResponse, name=f"{name}_page", include_in_schema=address != "/")
    async def page() -> Response:
        text = operator_page(name)
        return html_page(text if linked else _OPERATORS_LINK.sub("", text))


_OPERATORS_LINK = re.compile(r'^ *<a data-page="dashboard.*\n', re.MULTILINE)


def _whole(name: str) -> str:
    text = resources.files("farsight.services.api.pages").joinpath("static", *name.split("/")).read_text("utf-8")
    return _SHARED.sub(lambda found: _whole(found[1] or found[2] or found[3]).rstrip(), text)


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
