"""The operators' pages: each is one file without outside resources that polls the server for its figures."""

from __future__ import annotations

from functools import cache
from importlib import resources

DASHBOARD_HEADERS = {
    # A cached page of an earlier release might not understand this server's /status.
    "Cache-Control": "no-cache",
    # Names and nodes come from outside this page; the policy stops them from loading or sending anything elsewhere.
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
}


@cache
def operator_page(name: str) -> str:
    """``dashboard`` or ``placement``, with the style that they share; read once.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _read(f"{name}.html").replace("/* style.css */", _read("style.css"))


def _read(name: str) -> str:
    return resources.files("services.api.pages").joinpath(name).read_text(encoding="utf-8")
