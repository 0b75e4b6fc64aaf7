"""Files and responses of clients: OpenAI's library, other tenants, quotas, expiry, failures, hostile uploads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from farsight.core.errors import FarsightError
from farsight.core.kept import DropExpired, KeptObject, ObjectName, PutObject, PutVerdict
from farsight.core.request import Fault
from farsight.services.api.batches.files import PART_BYTES
from farsight.services.api.batches.responses import MAX_WAITING, RESPONSE
from farsight.services.api.batches.routes import parse_form
from farsight.services.api.errors import ApiError
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, delta, ok, until
from tests.unit.services.api.batches.conftest import BatchService, Serve, running
from tests.unit.services.api.batches.kept_support import SqliteObjects

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}\n'


def library(service: BatchService, name: str = "") -> openai.AsyncOpenAI:
    """The ``openai`` library with the key of a tenant."""
    http: Any = service.client
    key = service.keys[name] if name else "none"
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)


async def assert_unknown(call: Any, name: str, code: str) -> None:
    """A call about what another tenant has is answered like one about what nobody has."""
    with pytest.raises(openai.NotFoundError) as mine:
        await call(name)
    with pytest.raises(openai.NotFoundError) as none:
        await call("unknown")
    assert mine.value.code == none.value.code == code
    assert str(mine.value).replace(name, "unknown") == str(none.value)


async def test_the_openai_library(serve: Serve) -> None:
    client = library(serve())
    content = LINE * (PART_BYTES // len(LINE) + 10)
    made = await client.files.create(
        file=("naïve €.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.bytes, made.filename, made.purpose) == (len(content), "naïve €.jsonl", "batch")
    assert made.expires_at == made.created_at + 3600
    assert (await client.files.retrieve(made.id)) == made
    assert (await client.files.content(made.id)).content == content
    others = [await client.files.create(file=(f"{i}", LINE), purpose="batch") for i in range(3)]
    names = [each.id async for each in await client.files.list(limit=2)]
    assert sorted(names) == sorted([made.id, *(each.id for each in others)])
    assert (await client.files.delete(made.id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_another_tenants_file_is_not_there(serve: Serve) -> None:
    service = serve(("one", "two"))
    one, two = library(service, "one"), library(service, "two")
    made = await one.files.create(file=("a", LINE), purpose="batch")
    for call in (two.files.retrieve, two.files.content, two.files.delete):
        await assert_unknown(call, made.id, "file_not_found")
    assert [each.id async for each in await two.files.list()] == []
    assert [each.id async for each in await two.files.list(after=made.id)] == []
    with pytest.raises(openai.NotFoundError):
        await two.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    assert (await service.client.get("/v1/files")).status_code == 401
    assert (await one.files.content(made.id)).content == LINE


async def test_quota_and_size(serve: Serve) -> None:
    service = serve(("one", "two"), max_owner_bytes=2500, max_file_bytes=2000)
    one, two = library(service, "one").files, library(service, "two").files
    first = await one.create(file=("a", b"x" * 1500), purpose="batch")
    for files, size, code in ((one, 1001, "quota_exceeded"), (two, 40_000, "request_too_large")):
        with pytest.raises(openai.APIStatusError) as refused:
            await files.create(file=("b", b"x" * size), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, code)
    await two.create(file=("b", b"x" * 1001), purpose="batch")
    await one.delete(first.id)
    await one.create(file=("b", b"x" * 1001), purpose="batch")


async def test_what_has_expired_is_not_there(serve: Serve) -> None:
    service = serve(max_age_s=5000)
    client = library(service)
    made = await client.files.create(file=("a", LINE), purpose="batch")
    service.clock.now += 5000
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    assert (await client.files.list()).data == []
    await service.batches.store.drop_expired(DropExpired(service.clock.now))
    service.clock.now -= 5000
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made.id)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..\\..\\x", "/etc/passwd", 'a"b; filename=c', "a%00b", "ä" * 120, "CON", ".", "a;b"]
)
async def test_a_filename_is_only_a_text(name: str, serve: Serve) -> None:
    service = serve()
    made = await library(service).files.create(file=(name, LINE), purpose="batch")
    assert made.id.startswith("file-")
    reply = await service.client.get(f"/v1/files/{made.id}/content")
    assert reply.content == LINE
    assert reply.headers["content-type"] == "application/octet-stream"
    assert "content-disposition" not in reply.headers


@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "%00", "file-x/../../y", "' OR 1=1 --", "a:b", "x" * 5000])
async def test_an_id_is_only_a_key(path: str, serve: Serve) -> None:
    service = serve()
    await library(service).files.create(file=("a", LINE), purpose="batch")
    for tail in ("", "/content"):
        reply = await service.client.get(f"/v1/files/{path}{tail}")
        assert reply.status_code == 404
        assert "passwd" not in reply.text or "root:" not in reply.text


def _form(head: bytes, data: bytes = LINE, end: bytes = b"\r\n--b--\r\n") -> bytes:
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    return purpose + b"--b\r\n" + head + b"\r\n\r\n" + data + end


_FILE = b'Content-Disposition: form-data; name="file"; filename="a"'


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_multipart"),
        (b"--b", "invalid_multipart"),
        (b"--b--", "invalid_value"),
        (_form(_FILE, end=b""), "invalid_multipart"),
        (_form(b"X: " + b"y" * 10_000), "invalid_multipart"),
        (_form(b"Content-Disposition: attachment; name=file; filename=a"), "invalid_multipart"),
        (_form(b"Content-Disposition: form-data"), "invalid_multipart"),
        (_form(b'Content-Disposition: form-data; name="file"'), "invalid_value"),
        (_form(b'Content-Disposition: form-data; name="file"; filename=""'), "invalid_value"),
        (_form(_FILE.replace(b'"a"', b'"' + b"a" * 256 + b'"')), "invalid_value"),
        (_form(_FILE.replace(b'"a"', b'"a\x07"')), "invalid_value"),
        (_form(_FILE, b""), "invalid_value"),
        (_form(_FILE, end=b"\r\n--b\r\n" + _FILE + b"\r\n\r\nx\r\n--b--"), "invalid_multipart"),
        (_form(_FILE).replace(b"\r\nbatch", b"\r\nassistants"), "invalid_value"),
        (_form(_FILE.replace(b'"file"', b'"image"')), "invalid_value"),
        (b"--b\r\n".join([b"", *[b'Content-Disposition: form-data; name="%d"\r\n\r\nx\r\n' % i for i in range(20)]])
         + b"--b--", "invalid_multipart"),
    ],
)  # fmt: skip
async def test_a_bad_form_is_a_400(body: bytes, code: str, serve: Serve) -> None:
    service = serve()
    headers = {"content-type": "multipart/form-data; boundary=b"}
    reply = await service.client.post("/v1/files", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), reply.text
    assert (await service.client.get("/v1/files")).json()["data"] == []


async def test_another_type_is_a_415(serve: Serve) -> None:
    client = serve().client
    for kind in ("application/json", "multipart/form-data", "multipart/mixed; boundary=b", ""):
        reply = await client.post("/v1/files", content=_form(_FILE), headers={"content-type": kind})
        assert reply.status_code == 415


def test_a_body_that_looks_like_its_own_boundary_is_kept() -> None:
    data = b"\r\n--c--\r\n--bb\r\n\x00\xff--b"
    form = parse_form("multipart/form-data; boundary=b", _form(_FILE, data.replace(b"\r\n--bb", b"\n--bb")))
    assert form["file"].data == data.replace(b"\r\n--bb", b"\n--bb")
    with pytest.raises(ApiError, match="boundary"):
        parse_form('multipart/form-data; boundary="b\x00"', b"--b\x00--")


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATH = "/v1/responses"


def roomy(service: BatchService) -> BatchService:
    """With room for conversations."""
    service.backend.model = dataclasses.replace(service.backend.model, max_model_len=8192)
    return service


async def ask(service: BatchService, **fields: Any) -> Any:
    return await ok(service.client, PATH, **{"input": "hi", **fields})


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
    one, two = library(service, "one"), library(service, "two")
    made = await one.responses.create(model=MODEL, input="hi", store=True)

    async def go_on(name: str) -> Any:
        return await two.responses.create(model=MODEL, input="hi", previous_response_id=name)

    for call in (two.responses.retrieve, two.responses.delete, go_on):
        await assert_unknown(call, made.id, "response_not_found")
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
async def test_a_log_that_fails_is_an_error(serve: Serve, store: SqliteObjects, stream: bool) -> None:
    service = serve()
    put, kept = store.put_object, []

    async def fails(order: PutObject) -> PutVerdict:
        if order.kept.revision == 2:
            raise FarsightError("the log store cannot be reached")
        kept.append(order.kept)
        return await put(order)

    store.put_object = fails  # type: ignore[method-assign]
    answer = await service.client.post(PATH, json={"input": "hi", "store": True, "stream": stream})
    if stream:
        last = json.loads(answer.text.strip().split("\n\n")[-1].split("data: ")[1])
        assert last["type"] == "response.failed"
        assert "response.completed" not in answer.text
    else:
        assert answer.status_code >= 500
    begun: KeptObject = kept[0]
    assert await store.find_object(ObjectName(RESPONSE, begun.object_id)) == begun
    assert (await service.client.get(f"{PATH}/{begun.object_id}")).status_code == 404


async def test_a_missing_id_says_when_responses_are_kept(serve: Serve) -> None:
    for on, words in ((False, "store: true ([files] store_responses is off)"), (True, "store_responses is on")):
        answer = await serve(store_responses=on).client.get(f"{PATH}/resp_unknown")
        assert answer.status_code == 404 and words in answer.json()["error"]["message"]


async def test_the_server_may_keep_responses_unasked(serve: Serve) -> None:
    client = library(serve(store_responses=True))
    made = await client.responses.create(model=MODEL, input="hi")
    assert await client.responses.retrieve(made.id) == made
    not_kept = await client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(not_kept.id)


async def test_input_items(serve: Serve) -> None:
    client = library(roomy(serve()))
    first = await client.responses.create(model=MODEL, input="one", store=True)
    said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    second = await client.responses.create(model=MODEL, input=said, previous_response_id=first.id, store=True)
    rows: Any = [each async for each in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [(row.role, row.content[0].text) for row in rows] == [
        ("user", "one"),
        ("assistant", "Hello!"),
        ("user", "two"),
    ]
    assert len({row.id for row in rows}) == 3
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert newest.data == rows[2:] and newest.has_more
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.responses.input_items.list(second.id, after="item_unknown")


async def until_ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert not found.output
        await asyncio.sleep(0.01)
    return found


async def test_a_response_of_the_background(serve: Serve) -> None:
    service = roomy(serve(("one", "two")))
    one, two = library(service, "one"), library(service, "two")
    before = await one.responses.create(model=MODEL, input="before", store=True)
    begun = await one.responses.create(
        model=MODEL, input="hi", background=True, store=True, previous_response_id=before.id, metadata={"a": "b"}
    )
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id: got .*, which is queued"):
        await one.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
    async with running(service.runner()):
        ended = await until_ended(one, begun.id)
    assert (ended.id, ended.status, ended.output_text) == (begun.id, "completed", "Hello!")
    assert ended.background and ended.metadata == {"a": "b"} and ended.previous_response_id == before.id
    origin = service.backend.origins[-1]
    assert origin is not None and origin.response_id == begun.id and service.backend.keys[-1] == "one"
    text = service.backend.texts[-1]
    assert text is not None and "before" in text.instruction and text.user_input == "hi"
    assert await one.responses.cancel(begun.id) == ended, "what has ended stays as it is"
    with pytest.raises(openai.BadRequestError, match="background"):
        await one.responses.cancel(before.id)
    for call in (two.responses.cancel, two.responses.input_items.list):
        await assert_unknown(call, begun.id, "response_not_found")


async def test_a_response_of_the_background_is_cancelled(serve: Serve) -> None:
    service = serve(backend=ScriptedBackend([delta("a"), 60.0, delta("b", "stop")]))
    client = library(service)
    waiting, deleted = [
        await client.responses.create(model=MODEL, input="hi", background=True, store=True) for _ in "ab"
    ]
    assert (await client.responses.cancel(waiting.id)).status == "cancelled"
    await client.responses.delete(deleted.id)
    running_one = await client.responses.create(model=MODEL, input="hi", background=True, store=True)
    async with running(service.runner()):
        await until(lambda: service.backend.num_opened)
        assert (await client.responses.cancel(running_one.id)).status == "cancelled"
        await until(lambda: service.backend.num_closed)
    assert service.backend.num_opened == 1, "neither of the others has run"


async def test_a_response_of_the_background_that_fails_says_why(serve: Serve) -> None:
    service = serve(backend=ScriptedBackend([delta("", "error", error="no token", fault=Fault.MODEL)]))
    client = library(service)
    begun = await client.responses.create(model=MODEL, input="hi", background=True, store=True)
    async with running(service.runner()):
        ended = await until_ended(client, begun.id)
    assert ended.status == "failed" and ended.error is not None and "no token" in ended.error.message


async def test_the_background_is_bounded(serve: Serve) -> None:
    service = serve()
    for fields, words in (
        ({"store": None}, "store: true"),
        ({"stream": True}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "x " * 3000}, "context_length_exceeded"),
    ):
        body = {"input": "hi", "background": True, "store": True, **fields}
        refused = await service.client.post(PATH, json=body)
        assert refused.status_code == 400 and words in refused.text, "checked before it is kept"
    small = serve(max_owner_bytes=3000)
    over = await small.client.post(
        PATH, json={"input": "hi", "background": True, "store": True, "metadata": {"a": "x" * 3000}}
    )
    assert (over.status_code, over.json()["error"]["param"]) == (413, "store")
    for _ in range(MAX_WAITING):
        await ask(service, background=True, store=True)
    full = await service.client.post(PATH, json={"input": "hi", "background": True, "store": True})
    assert full.status_code == 429 and full.headers["retry-after"]
    assert not service.backend.calls
