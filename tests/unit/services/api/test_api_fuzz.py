"""Requests made from the app's own OpenAPI schema, right and wrong ones, over a real engine: never a 5xx.

The cases are the same in every run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from farsight.engine.checkpoint.encoder_config import abilities_of
from farsight.services.api.admin import Administration
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MODEL, whole_app
from tests.unit.services.api.engine_backend import EngineBackend

TOKEN = "secret"
VOLUME = int(os.environ.get("FUZZ_VOLUME", "4"))
"""By night: 2,000 requests in all; ``make test-attack`` takes 20. By day each address gets ``FEW``."""

FEW = 3

SETTINGS = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))

CASES = {
    "/admin/drain": 3 * VOLUME,
    "/tokenize": 7 * VOLUME,
    "/detokenize": 3 * VOLUME,
    "/v1/completions": 73 * VOLUME,
    "/v1/embeddings": 3 * VOLUME,
    "/v1/score": 3 * VOLUME,
    "/v1/rerank": 3 * VOLUME,
    "/v1/chat/completions": 77 * VOLUME,
    "/v1/messages": 20 * VOLUME,
    "/v1/messages/count_tokens": 7 * VOLUME,
    "/v1/responses": 20 * VOLUME,
    "/api/chat": 8 * VOLUME,
    "/api/generate": 7 * VOLUME,
    "/api/embed": 3 * VOLUME,
    "/api/embeddings": 1 * VOLUME,
    "/api/show": 2 * VOLUME,
    "/admin/scale": 7 * VOLUME,
    "/admin/upgrade": 3 * VOLUME,
}
"""Good ones and as many bad ones, by address."""


class House:
    """The app on an event loop of its own.

    Attributes:
        statuses: How many answers had which.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.statuses: dict[int, int] = {}
        self._loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {TOKEN}"}
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    def send(self, case: Any) -> httpx.Response:
        sent = case.as_transport_kwargs(base_url="http://test")
        content = json.dumps(sent["json"]).encode() if "json" in sent else sent.get("data") or b""
        headers = {"content-type": "application/json"} | dict(sent["headers"] or {})
        request = self._client.post(case.path, content=content, headers=headers, params=sent.get("params"))
        answer = self._loop.run_until_complete(request)
        self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
        return answer

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def house(checkpoint: Path) -> Iterator[House]:
    backend = EngineBackend(checkpoint)
    backend.model = dataclasses.replace(backend.model, benchmark_mode=True, abilities=abilities_of(checkpoint))
    house = House(whole_app(backend, PromptEncoder(checkpoint), administration=Administration(TOKEN)))
    yield house
    house.close()


def operation(app: FastAPI, path: str, mode: GenerationMode) -> Any:
    """Its schema, but with the name of the served model, and good requests small: else few would come far."""
    document = json.loads(json.dumps(app.openapi()))
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [MODEL]}
    if mode is GenerationMode.POSITIVE:
        bound(schemas)
    return schemathesis.openapi.from_dict(document)[path]["POST"]


def bound(schema: Any) -> None:
    """Limits every integer, and every map from token ids, to what the tiny model can take; nothing is empty."""
    if isinstance(schema, list):
        for item in schema:
            bound(item)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "integer":
        schema.setdefault("maximum", 40)
        schema["maximum"] = min(schema["maximum"], 40)
    for kind, least in (("string", "minLength"), ("array", "minItems")):
        if schema.get("type") == kind:
            schema.setdefault(least, 1)
    if schema.get("additionalProperties") == {"type": "number"}:
        schema["additionalProperties"] = {"type": "number", "minimum": -100, "maximum": 100}
        schema["propertyNames"] = {"pattern": "^[1-9]{1,2}$"}
    for item in schema.values():
        bound(item)


def test_every_address_that_takes_a_post_is_fuzzed(house: House) -> None:
    assert CASES.keys() == {
        path for path, methods in house.app.openapi()["paths"].items() if "post" in methods and "{" not in path
    }
    assert 2 * sum(CASES.values()) == 500 * VOLUME


@pytest.mark.attack
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["few", "whole"])
def test_no_request_makes_the_server_fail(house: House, path: str, mode: GenerationMode, is_whole: bool) -> None:
    house.statuses.clear()
    number = CASES[path] if is_whole else FEW

    @settings(SETTINGS, max_examples=number)
    @given(operation(house.app, path, mode).as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = house.send(case)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error if path.startswith("/api/") else error["message"]

    check()
    if is_whole and mode is GenerationMode.POSITIVE:
        assert house.statuses.get(200, 0) > CASES[path] / 10, house.statuses
