"""The overview page for operators: one file without outside resources, which asks ``/status`` by itself."""

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
def dashboard_page() -> str:
    """The page, read once.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return resources.files("services.api").joinpath("dashboard.html").read_text(encoding="utf-8")
