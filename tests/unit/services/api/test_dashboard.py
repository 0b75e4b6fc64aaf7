"""The dashboard as a file, and the two addresses that operators look at; the page at work is tested in e2e."""

from __future__ import annotations

import re

import httpx
from api_support import METRICS, ScriptedBackend

from core.errors import FarsightError
from services.api.dashboard import dashboard_page

REFERENCE = re.compile(r"""(?:\b(?:src|href|action|srcset)=|@import|url\()\s*["']?([^"'\s>)]*)""")


async def test_dashboard_is_served(client: httpx.AsyncClient) -> None:
    reply = await client.get("/dashboard")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.text == dashboard_page()
    assert reply.text.startswith("<!DOCTYPE html>")


def test_dashboard_loads_nothing() -> None:
    references = REFERENCE.findall(dashboard_page())
    assert references
    assert all(reference.startswith(("#", "data:")) for reference in references)


async def test_dashboard_finds_what_it_reads(client: httpx.AsyncClient) -> None:
    """Every field of a row that the page names is in the reply."""
    status = (await client.get("/status")).json()
    (row,) = status["actors"]
    assert set(re.findall(r"\brow\.(\w+)", dashboard_page())) <= row.keys()
    assert set(re.findall(r"\bkv\.(\w+)", dashboard_page())) == status["kv"].keys()
    (version,) = status["learnt"]
    assert set(re.findall(r"\bversion\.(\w+)", dashboard_page())) <= version.keys()
    assert (row["restarts"], row["http_port"]) == (1, 4321)


async def test_metrics(client: httpx.AsyncClient) -> None:
    reply = await client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text == METRICS


async def test_metrics_that_fail_are_an_error(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    async def fail() -> str:
        raise FarsightError("no process answers")

    backend.metrics = fail  # type: ignore[method-assign]
    reply = await client.get("/metrics")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"


async def test_openapi_names_them(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]
    assert "text/html" in paths["/dashboard"]["get"]["responses"]["200"]["content"]
