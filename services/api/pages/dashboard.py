"""The operators' pages: each is one file without outside resources that polls the server for its figures."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def operator_page(name: str) -> str:
    """``dashboard``, ``placement`` or ``routes``, with what they share; read once.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    page = _read(f"{name}.html")
    for place, shared in (("/* style.css */", "style.css"), ("<!-- key.html -->", "key.html"), ("// key.js", "key.js")):
        page = page.replace(place, _read(shared).rstrip())
    return page


def _read(name: str) -> str:
    return resources.files("services.api.pages").joinpath(name).read_text(encoding="utf-8")
