"""Requests that are refused before anything reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from core.errors import CapacityError
from services.api.readiness import Readiness
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import ScriptedBackend, whole_app

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 10_000


class Overload:
    """Refuses while it is said to."""

    def __init__(self) -> None:
        self.full = True
        self.num_asked = 0

    def __call__(self) -> CapacityError | None:
        self.num_asked += 1
        return CapacityError("predicted queue delay: 9 s, limit 2 s; retry in 7 s", 7.0) if self.full else None


@pytest.fixture
def overload() -> Overload:
    return Overload()


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
def client(encoder: PromptEncoder, overload: Overload, readiness: Readiness) -> httpx.AsyncClient:
    app = whole_app(ScriptedBackend(), encoder, MAX_BODY_BYTES, readiness=readiness, shed=overload)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"{}", b"not JSON", b"", b" " * 2 * MAX_BODY_BYTES])
async def test_a_full_service_refuses_whatever_the_body_holds(
    client: httpx.AsyncClient, overload: Overload, path: str, body: bytes
) -> None:
    reply = await client.post(path, content=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert reply.headers["x-farsight-retry-after-s"] == "7.000"
    overload.full = False
    assert (await client.post(path, content=body)).status_code in (400, 413, 415)


async def test_a_body_beyond_all_bounds_is_not_read_to_its_end(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += MAX_BODY_BYTES
            yield b" " * MAX_BODY_BYTES

    reply = await client.post(PATHS[0], content=endless())
    assert (reply.status_code, reply.headers["connection"]) == (429, "close")
    assert sent <= 5 * MAX_BODY_BYTES
    assert "connection" not in (await client.post(PATHS[0], content=b"{}")).headers


async def test_a_service_that_is_not_full_answers(client: httpx.AsyncClient, overload: Overload) -> None:
    overload.full = False
    reply = await client.post(PATHS[0], json={"model": "tiny", "prompt": "x", "max_tokens": 2})
    assert reply.status_code == 200
    assert overload.num_asked == 1


async def test_looks_and_other_paths_are_not_refused(client: httpx.AsyncClient, overload: Overload) -> None:
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.get("/status")).status_code == 200
    assert (await client.post("/scale", json={})).status_code != 429
    assert (await client.post("/v1/nothing", json={})).status_code == 404
    assert overload.num_asked == 0


async def test_a_service_that_drains_says_so(client: httpx.AsyncClient, readiness: Readiness) -> None:
    readiness.is_draining = True
    assert (await client.post(PATHS[0], json={})).status_code == 503
