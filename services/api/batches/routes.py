"""The routes of ``/v1/files`` and ``/v1/batches``. What they show belongs to the tenant of the caller's key."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from farsight.core.errors import InvalidValueError
from farsight.core.kept import KeptObject
from farsight.services.api.access.keys import tenant_name
from farsight.services.api.batches.files import MAX_FILENAME_BYTES, Files, file_record, file_reply
from farsight.services.api.batches.lines import URLS
from farsight.services.api.batches.multipart import FormPart, parse_form
from farsight.services.api.batches.records import Batches, batch_reply
from farsight.services.api.bodies import JsonRoute
from farsight.services.api.errors import ERRORS
from farsight.services.api.fields import StrictModel

FILES_PATH = "/v1/files"
FORM_BYTES = 16 * 1024
"""What a form has beside its file, at most."""

MIN_EXPIRY_S = 3600
_PURPOSE = "batch"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

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
