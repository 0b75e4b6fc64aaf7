"""Files of clients: what OpenAI's library does with them, other tenants, quotas, expiry, hostile uploads."""

from __future__ import annotations

import openai
import pytest

from core.kept import DropExpired
from services.api.batches.multipart import parse_form
from services.api.batches.shelf import PART_BYTES
from services.api.errors import ApiError
from tests.unit.services.api.batches.conftest import BatchService, Serve

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}\n'


def library(service: BatchService, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key=key,
        http_client=service.client,  # type: ignore[arg-type]
        max_retries=0,
    )


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
    one, two = library(service, service.keys["one"]), library(service, service.keys["two"])
    made = await one.files.create(file=("a", LINE), purpose="batch")
    for call in (two.files.retrieve, two.files.content, two.files.delete):
        with pytest.raises(openai.NotFoundError) as mine:
            await call(made.id)
        with pytest.raises(openai.NotFoundError) as none:
            await call("file-unknown")
        assert mine.value.code == none.value.code == "file_not_found"
        assert str(mine.value).replace(made.id, "file-unknown") == str(none.value)
    assert [each.id async for each in await two.files.list()] == []
    assert [each.id async for each in await two.files.list(after=made.id)] == []
    with pytest.raises(openai.NotFoundError):
        await two.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    assert (await service.client.get("/v1/files")).status_code == 401
    assert (await one.files.content(made.id)).content == LINE


async def test_quota_and_size(serve: Serve) -> None:
    service = serve(("one", "two"), max_owner_bytes=2500, max_file_bytes=2000)
    one, two = library(service, service.keys["one"]), library(service, service.keys["two"])
    first = await one.files.create(file=("a", b"x" * 1500), purpose="batch")
    with pytest.raises(openai.APIStatusError) as refused:
        await one.files.create(file=("b", b"x" * 1001), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "quota_exceeded")
    await two.files.create(file=("b", b"x" * 1001), purpose="batch")
    await one.files.delete(first.id)
    await one.files.create(file=("b", b"x" * 1001), purpose="batch")
    with pytest.raises(openai.APIStatusError) as large:
        await two.files.create(file=("c", b"x" * 40_000), purpose="batch")
    assert (large.value.status_code, large.value.code) == (413, "request_too_large")


async def test_what_has_expired_is_not_there(serve: Serve) -> None:
    service = serve(max_age_s=5000)
    client = library(service)
    made = await client.files.create(file=("a", LINE), purpose="batch")
    service.clock.now += 5000
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    assert (await client.files.list()).data == []
    await service.batches.shelf.drop_expired(DropExpired(service.clock.now))
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
