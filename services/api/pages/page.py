"""HTML answers: each with a content security policy that allows the scripts and styles inside it, and no others."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache

from starlette.responses import HTMLResponse

_BLOCK = {kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.DOTALL) for kind in ("script", "style")}


def html_page(text: str) -> HTMLResponse:
    """The page, never kept by caches: a cached page of an earlier release might not understand this server."""
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
