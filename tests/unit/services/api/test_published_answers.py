"""Answers of a published model through the HTTP layer follow schemas and tools that they are asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from farsight.services.api.backend import ModelInfo
from farsight.services.api.text.prompts import PromptEncoder
from tests.published import smollm2
from tests.unit.services.api.api_support import Client, application, client_on, ok
from tests.unit.services.api.engine_backend import EngineBackend

# One loop for all: the process that renders the model's template is read by the loop that started it.
pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module")]

TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"enum": ["train", "plane", "ship"]},
        "stops": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["city", "days", "by"],
    "additionalProperties": False,
}
ASKED = {"messages": [{"role": "user", "content": "Plan a trip of seven days to Paris by train."}], "max_tokens": 200}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, *({"temperature": 1.0, "seed": seed} for seed in range(5))]


@pytest.fixture(scope="module")
def client() -> Client:
    backend = EngineBackend(smollm2(), kv_memory="128MiB", block_size=16)  # of which there are compiled steps
    ready = backend.engine.worker.ready
    backend.model = ModelInfo("smollm2", 0, ready.max_model_len, ready.pool_limited, ready.vocab_size)
    return client_on(application(backend, PromptEncoder(smollm2())))


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_an_answer_follows_its_schema(client: Client, sampling: dict[str, Any]) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
    answer = await ok(client, "/v1/chat/completions", **ASKED, **sampling, response_format=asked)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), TRIP)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_tool_is_called_with_arguments_of_its_schema(client: Client, sampling: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "plan_trip", "parameters": TRIP, "strict": True}}
    once = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}  # else it calls on and on
    answer = await ok(client, "/v1/chat/completions", **ASKED, **sampling, **once)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "plan_trip"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TRIP)
