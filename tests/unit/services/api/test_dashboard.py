"""The dashboard as a file, and the two addresses that operators look at; the page at work is tested in e2e."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import httpx
import pytest

from core.errors import FarsightError
from core.messages.placement import PlacementView, PrefixView, ReasonCount, RecentPlacement, ReplicaView
from services.api.pages.dashboard import PAGES, operator_page
from tests.unit.services.api.api_support import METRICS, ScriptedBackend

REFERENCE = re.compile(r"""(?:\b(?:src|href|action|srcset)=|@import|url\()\s*["']?([^"'\s>)]*)""")


@pytest.mark.parametrize(("address", "page"), PAGES.items())
async def test_a_page_is_served(client: httpx.AsyncClient, address: str, page: str) -> None:
    reply = await client.get(address)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.text == operator_page(page)
    assert reply.text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in reply.text  # of the style that both share


@pytest.mark.parametrize("page", PAGES.values())
def test_a_page_loads_nothing(page: str) -> None:
    text = operator_page(page)
    assert not re.search(r"^ *(/\* [a-z/]+\.css \*/|<!-- [a-z/]+\.html -->|// [a-z/]+\.js)$", text, re.MULTILINE)
    references = [each for each in REFERENCE.findall(text.replace("https://github.com/leeoniya/uPlot", "")) if each]
    assert references
    assert all(reference.startswith(("#", "data:", "`")) for reference in references)
    assert len(re.findall("<script", text)) == len(re.findall("</script", text)) == 1


@pytest.mark.parametrize("page", [*PAGES.values(), "race/race"])
def test_a_page_declares_each_name_once(page: str) -> None:
    """Its shared files become one script: with a name declared twice none of it would run."""
    script = operator_page(page).partition("<script>")[2]
    names = []
    for kind, rest in re.findall(r"^(?:async )?(const|let|class|function)\*? (.+)$", script, re.MULTILINE):
        names += re.findall(r"(?:^|, )(\w+) = ", rest) if kind in ("const", "let") else re.findall(r"^\w+", rest)
    assert len(names) > 20
    assert sorted(set(names)) == sorted(names)


async def test_dashboard_finds_what_it_reads(client: httpx.AsyncClient) -> None:
    """Every field of a row that the page names is in the reply."""
    status = (await client.get("/status")).json()
    (row,) = status["actors"]
    assert set(re.findall(r"\brow\.(\w+)", operator_page("dashboard"))) <= row.keys()
    assert set(re.findall(r"\bkv\.(\w+)", operator_page("dashboard"))) == status["kv"].keys()
    (version,) = status["learnt"]
    assert set(re.findall(r"\bversion\.(\w+)", operator_page("dashboard"))) <= version.keys()
    assert (row["restarts"], row["http_port"]) == (1, 4321)


async def test_placement_is_told(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.placements = view = PlacementView(
        "e2",
        by_prefixes=True,
        replicas=(ReplicaView("0", True, 3, 120.0, 1.5, 0.5, 640, 1280),),
        prefixes=(PrefixView(0, 64, 64, 5, 2, ("0",)),),
        reasons=(ReasonCount("exploit", 4),),
        recent=(RecentPlacement(1_700_000_000.0, "0", "exploit", 90, 64),),
    )
    reply = (await client.get("/placement")).json()
    assert reply == _plain(dataclasses.asdict(view))
    named = {*reply, *reply["replicas"][0], *reply["prefixes"][0], *reply["reasons"][0], *reply["recent"][0]}
    shown = set(re.findall(r"\b(?:view|each|prefix)\.(\w+)", operator_page("placement")))
    assert shown == named


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


async def test_placement_that_cannot_be_told_is_an_error(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.placements = FarsightError("the Router does not answer")
    reply = await client.get("/placement")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the Router does not answer"


async def test_metrics(client: httpx.AsyncClient) -> None:
    reply = await client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text == METRICS
    accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"}
    reply = await client.get("/metrics", headers=accept)
    assert reply.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"


async def test_metrics_that_fail_are_an_error(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    async def fail(*, open_metrics: bool) -> str:
        raise FarsightError("no process answers")

    backend.metrics = fail  # type: ignore[method-assign]
    reply = await client.get("/metrics")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"


async def test_openapi_names_them(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]
    assert "text/html" in paths["/dashboard"]["get"]["responses"]["200"]["content"]
