"""The pages for operators: each is one file without outside resources, which asks for its figures by itself."""

from __future__ import annotations

from functools import cache
from importlib import resources

DASHBOARD_HEADERS = {
    # A page kept from an earlier release would read a /status that it does not know.
    "Cache-Control": "no-cache",
    # Names and nodes come from outside this page: whatever they are, nothing is loaded from and sent to elsewhere.
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
