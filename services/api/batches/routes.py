"""The routes of ``/v1/files`` and ``/v1/batches``. What they show belongs to the tenant of the caller's key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from farsight.core.errors import InvalidValueError
from farsight.core.kept import KeptObject
from farsight.services.api.access.keys import tenant_name
from farsight.services.api.batches.files import MAX_FILENAME_BYTES, Files, file_record, file_reply
from farsight.services.api.batches.lines import URLS
from farsight.services.api.batches.records import Batches, batch_reply
from farsight.services.api.bodies import JsonRoute
from farsight.services.api.errors import ERRORS, ApiError
from farsight.services.api.fields import StrictModel

FILES_PATH = "/v1/files"
FORM_BYTES = 16 * 1024
"""What a form has beside its file, at most."""

MIN_EXPIRY_S = 3600
_PURPOSE = "batch"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_MAX_PARTS = 16
_MAX_HEAD_BYTES = 8192
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")

Limit = Annotated[int, Query(ge=1, le=1000)]


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S)]


class BatchRequest(StrictModel):
    """``POST /v1/batches``"""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


assert set(URLS) == set(BatchRequest.model_fields["endpoint"].annotation.__args__)  # type: ignore[union-attr]


def file_routes(files: Files) -> APIRouter:
    router = APIRouter(prefix=FILES_PATH, tags=["files"], responses=ERRORS)

    @router.post("")
    async def create_file(request: Request) -> dict[str, Any]:
        parts = parse_form(request.headers.get("content-type", ""), await request.body())
        filename, data = _file(parts)
        purpose = _text(parts, "purpose")
        if purpose != _PURPOSE:
            raise InvalidValueError("purpose", purpose, "'batch': files are inputs of batches here")
        expires_s = _expiry(parts)
        unknown = set(parts) - {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
        if unknown:
            raise InvalidValueError(
                min(unknown)[:100], "a value", "no such field; the fields are file, purpose, expires_after"
            )
        return file_reply(await files.create(tenant_name(), filename, purpose, data, expires_s))

    @router.get("")
    async def list_files(
        purpose: str | None = None,
        limit: Limit = 1000,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str, Query(max_length=100)] = "",
    ) -> dict[str, Any]:
        found = await files.list(tenant_name(), limit + 1, after=after, newest_first=order == "desc")
        shown = [kept for kept in found[:limit] if purpose in (None, file_record(kept).purpose)]
        return _page([file_reply(kept) for kept in shown], has_more=len(found) > limit)

    @router.get("/{file_id}")
    async def get_file(file_id: str) -> dict[str, Any]:
        return file_reply(await files.find(tenant_name(), file_id))

    @router.get("/{file_id}/content")
    async def get_content(file_id: str) -> Response:
        owner = tenant_name()
        kept: KeptObject = await files.find(owner, file_id)
        headers = {"content-length": str(file_record(kept).num_bytes), "x-content-type-options": "nosniff"}
        content = files.content(owner, file_id)
        return StreamingResponse(content, media_type="application/octet-stream", headers=headers)

    @router.delete("/{file_id}")
    async def delete_file(file_id: str) -> dict[str, Any]:
        await files.delete(tenant_name(), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def batch_routes(batches: Batches) -> APIRouter:
    router = APIRouter(prefix="/v1/batches", tags=["batches"], responses=ERRORS, route_class=JsonRoute)

    @router.post("")
    async def create_batch(body: BatchRequest) -> dict[str, Any]:
        after = body.output_expires_after
        return batch_reply(
            await batches.create(
                tenant_name(),
                body.endpoint,
                body.input_file_id,
                body.metadata,
                None if after is None else after.seconds,
            )
        )

    @router.get("")
    async def list_batches(
        limit: Annotated[int, Query(ge=1, le=100)] = 20, after: Annotated[str, Query(max_length=100)] = ""
    ) -> dict[str, Any]:
        found = await batches.list(tenant_name(), limit + 1, after)
        return _page([batch_reply(each) for each in found[:limit]], has_more=len(found) > limit)

    @router.get("/{batch_id}")
    async def get_batch(batch_id: str) -> dict[str, Any]:
        return batch_reply(await batches.find(tenant_name(), batch_id))

    @router.delete("/{batch_id}")
    async def delete_batch(batch_id: str) -> dict[str, Any]:
        await batches.delete(tenant_name(), batch_id)
        return {"id": batch_id, "object": "batch", "deleted": True}

    cancel = APIRouter(prefix="/v1/batches", tags=["batches"], responses=ERRORS)  # a POST without a body

    @cancel.post("/{batch_id}/cancel")
    async def cancel_batch(batch_id: str) -> Response:
        return JSONResponse(batch_reply(await batches.cancel(tenant_name(), batch_id)))

    whole = APIRouter()
    whole.include_router(router)
    whole.include_router(cancel)
    return whole


def _page(rows: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"object": "list", "data": rows, "first_id": first, "last_id": last, "has_more": has_more}


def _file(parts: dict[str, FormPart]) -> tuple[str, bytes]:
    part = parts.get("file")
    if part is None or part.filename is None:
        raise InvalidValueError("file", "nothing" if part is None else "a field without a filename", "a file")
    name = part.filename
    if not name or len(name.encode("utf-8", "replace")) > MAX_FILENAME_BYTES or _CONTROL.search(name):
        raise InvalidValueError(
            "file", name[:100], f"a filename of 1 to {MAX_FILENAME_BYTES} bytes without control characters"
        )
    if not part.data:
        raise InvalidValueError("file", "0 bytes", "a file with content")
    return name, part.data


def _text(parts: dict[str, FormPart], name: str) -> str:
    part = parts.get(name)
    if part is None:
        raise InvalidValueError(name, "nothing", "a value")
    return part.data.decode("utf-8", "replace")


def _expiry(parts: dict[str, FormPart]) -> float | None:
    if not any(name.startswith("expires_after") for name in parts):
        return None
    if _text(parts, "expires_after[anchor]") != "created_at":
        raise InvalidValueError("expires_after[anchor]", _text(parts, "expires_after[anchor]"), "'created_at'")
    seconds = _text(parts, "expires_after[seconds]")
    if not re.fullmatch("[0-9]{1,9}", seconds) or int(seconds) < MIN_EXPIRY_S:
        raise InvalidValueError("expires_after[seconds]", seconds[:20], f"an integer >= {MIN_EXPIRY_S}")
    return float(seconds)


@dataclass(frozen=True, slots=True)
class FormPart:
    """
    Attributes:
        filename: None for a plain field.
    """

    filename: str | None
    data: bytes


def parse_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """The parts by their names.

    Raises:
        ApiError: 400: not such a body, too many parts, or two of one name.
    """
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter):
        raise _unreadable("it does not begin with its boundary")
    parts: dict[str, FormPart] = {}
    at = len(delimiter)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise _unreadable("a boundary is not followed by a line end")
        end = body.find(b"\r\n" + delimiter, at)
        if end < 0:
            raise _unreadable("its last boundary is missing")
        name, part = _part(body, at + 2, end)
        if name in parts:
            raise _unreadable(f"two parts are named {name!r}")
        parts[name] = part
        if len(parts) > _MAX_PARTS:
            raise _unreadable(f"it has more than {_MAX_PARTS} parts")
        at = end + 2 + len(delimiter)
    return parts


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        shown = content_type[:100]
        raise ApiError(
            f"Content-Type: got {shown!r}, expected multipart/form-data with a boundary",
            status=415,
            code="unsupported_media_type",
        )
    if not _BOUNDARY.fullmatch(boundary):
        raise _unreadable("its boundary is not one of RFC 2046")
    return boundary.encode("ascii")


def _part(body: bytes, begin: int, end: int) -> tuple[str, FormPart]:
    head_end = body.find(b"\r\n\r\n", begin, min(end, begin + _MAX_HEAD_BYTES))
    if head_end < 0:
        raise _unreadable("a part has no headers, or too long ones")
    message = Message()
    for line in body[begin:head_end].split(b"\r\n"):
        header, colon, value = line.partition(b":")
        if colon and header.strip().lower() == b"content-disposition":
            message["content-disposition"] = value.strip().decode("utf-8", "replace")
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise _unreadable("a part has no name")
    return name, FormPart(message.get_filename(), body[head_end + 4 : end])


def _unreadable(why: str) -> ApiError:
    return ApiError(f"The multipart body cannot be read: {why}.", code="invalid_multipart")
