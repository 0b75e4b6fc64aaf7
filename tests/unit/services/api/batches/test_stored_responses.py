"""Responses that clients store: going on with them, other tenants, quotas, expiry, failures."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from core.errors import FarsightError
from core.kept import KeptObject, ObjectName, PutObject, PutVerdict
from services.api.dialects.stored import RESPONSE
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, delta
from tests.unit.services.api.batches.conftest import BatchService, Serve
from tests.unit.services.api.batches.kept_support import SqliteShelf
from tests.unit.services.api.batches.test_files import library

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATH = "/v1/responses"


def roomy(service: BatchService) -> BatchService:
    """With room for conversations."""
    service.backend.model = dataclasses.replace(service.backend.model, max_model_len=8192)
    return service


async def ask(service: BatchService, **fields: Any) -> dict[str, Any]:
    answer = await service.client.post(PATH, json={"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_openai_library_goes_on_with_a_stored_response(serve: Serve) -> None:
    service = roomy(serve())
    client = library(service)
    first = await client.responses.create(model=MODEL, input="one", instructions="Be brief.", store=True)
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id, store=True)
    third = await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    assert (first.output_text, second.previous_response_id) == ("Hello!", first.id)
    text = service.backend.texts[2]
    assert text is not None and text.user_input == "three"
    for said in ("one", "two"):
        assert said in text.instruction
    assert text.instruction.count("Hello!") == 2 and "Be brief." not in text.instruction, "instructions hold once"
    assert await client.responses.retrieve(second.id) == second
    Response.model_validate_json((await service.client.get(f"{PATH}/{second.id}")).content, strict=True)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(third.id)  # store is false where a client does not say so
    await client.responses.delete(first.id)
    again = await client.responses.create(model=MODEL, input="four", previous_response_id=second.id)
    assert again.status == "completed", "a stored response holds the whole conversation"
    for name in (first.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model=MODEL, input="x", previous_response_id=name)
        assert refused.value.param == "previous_response_id"


async def test_calls_and_their_results_go_on(serve: Serve) -> None:
    service = roomy(serve(backend=ScriptedBackend([delta(CALL, "stop")])))
    made = await ask(service, tools=[TOOL], store=True)
    call = made["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    await ask(service, tools=[TOOL], previous_response_id=made["id"], input=[result])
    text = service.backend.texts[1]
    assert text is not None and "sun" in text.user_input + text.instruction + str(text.source)


async def test_a_stream_is_stored(serve: Serve) -> None:
    service = serve()
    client = library(service)
    stream = await client.responses.create(model=MODEL, input="hi", store=True, stream=True)
    async for event in stream:
        if event.type == "response.completed":
            assert (await client.responses.retrieve(event.response.id)) == event.response


async def test_another_tenants_response_is_not_there(serve: Serve) -> None:
    service = serve(("one", "two"))
    one, two = library(service, service.keys["one"]), library(service, service.keys["two"])
    made = await one.responses.create(model=MODEL, input="hi", store=True)

    async def go_on(name: str) -> Any:
        return await two.responses.create(model=MODEL, input="hi", previous_response_id=name)

    for call in (two.responses.retrieve, two.responses.delete, go_on):
        with pytest.raises(openai.NotFoundError) as mine:
            await call(made.id)
        with pytest.raises(openai.NotFoundError) as none:
            await call("resp_unknown")
        assert mine.value.code == none.value.code == "response_not_found"
        assert str(mine.value).replace(made.id, "resp_unknown") == str(none.value)
    assert (await one.responses.retrieve(made.id)) == made


async def test_what_is_stored_counts_for_the_quota_and_expires(serve: Serve) -> None:
    service = roomy(serve(max_owner_bytes=3000))
    made = await ask(service, store=True)
    num_runs = len(service.backend.calls)
    refused = await service.client.post(PATH, json={"input": "x" * 3000, "store": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "store")
    assert len(service.backend.calls) == num_runs, "nothing is computed for what could not be stored"
    service.clock.now += service.batches.files.settings.max_age_s + 1
    assert (await service.client.get(f"{PATH}/{made['id']}")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_log_that_fails_is_an_error(serve: Serve, shelf: SqliteShelf, stream: bool) -> None:
    service = serve()
    put, kept = shelf.put_object, []

    async def fails(order: PutObject) -> PutVerdict:
        if order.kept.revision == 2:
            raise FarsightError("the log store cannot be reached")
        kept.append(order.kept)
        return await put(order)

    shelf.put_object = fails  # type: ignore[method-assign]
    answer = await service.client.post(PATH, json={"input": "hi", "store": True, "stream": stream})
    if stream:
        last = json.loads(answer.text.strip().split("\n\n")[-1].split("data: ")[1])
        assert last["type"] == "response.failed"
        assert "response.completed" not in answer.text
    else:
        assert answer.status_code >= 500
    begun: KeptObject = kept[0]
    assert (await shelf.find_object(ObjectName(RESPONSE, begun.object_id))).kept == begun
    assert (await service.client.get(f"{PATH}/{begun.object_id}")).status_code == 404
