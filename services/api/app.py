"""The HTTP application: its routes and what each returns."""

import dataclasses
import functools
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from core.errors import FarsightError
from core.messages.placement import PlacementView
from core.request import Origin
from services.api.access.door import Door
from services.api.access.install import install_door, usage_routes
from services.api.access.metered import MeteredBackend
from services.api.admin import Administration, admin_routes
from services.api.answers.chunk_writer import ChunkWriter
from services.api.answers.replies import (
    ChatCompletion,
    Completion,
    ErrorReply,
    Health,
    ModelCard,
    ModelList,
    Status,
    chat_completion,
    completion,
    model_card,
    status_reply,
)
from services.api.answers.sse import EventStream, chunks
from services.api.backend import GenerationBackend
from services.api.errors import SERVER_ERROR, ApiError, install_error_handlers, unhealthy
from services.api.generate import ChoiceResult, ClientGone, collect, while_connected
from services.api.jobs import Generation, chat_jobs, check_model, completion_jobs
from services.api.middleware import BodyLimit, LastResort
from services.api.ownership import owner_of, salt_of, sent_key
from services.api.pages.dashboard import operator_page
from services.api.pages.explain import explain_routes
from services.api.pages.page import html_page
from services.api.pages.routes import docs_routes
from services.api.parsing import JsonRoute
from services.api.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from services.api.text.prompts import PromptEncoder

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
API_VERSION = "1"
METRICS_TYPE = "text/plain; version=0.0.4"
_CLIENT_CLOSED_REQUEST = 499

_Reply = TypeVar("_Reply")

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request is invalid for this server."},
    "5XX": {"model": ErrorReply, "description": "The server failed; the request may be sent again."},
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or its chunks where stream is true."}
}


def build_app(
    backend: GenerationBackend,
    encoder: PromptEncoder,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    administration: Administration | None = None,
    *,
    shares_across_keys: bool = True,
    door: Door | None = None,
) -> FastAPI:
    """The application over one backend.

    Args:
        backend: Runs the requests; every request reads its ``model`` again.
        encoder: Tokenizer and chat template of the same model.
        max_body_bytes: Limit of a request body in bytes; larger bodies get 413.
        administration: The admin token and its rights; without it all admin routes refuse.
        shares_across_keys: Whether requests of different tenants, or bearer keys, share cached prefixes.
        door: Asks for keys and counts for tenants; without one every request comes in.
    """
    app = FastAPI(
        title="Farsight",
        version=API_VERSION,
        redirect_slashes=False,
        strict_content_type=False,
        docs_url=None,
        redoc_url=None,
    )
    if door is not None:
        backend = MeteredBackend(backend, door, shares_prefixes=shares_across_keys)
        app.include_router(usage_routes(door, _ERRORS))
        shares_across_keys = shares_across_keys or not door.is_open  # a caller's tenant is in the salt already
    app.include_router(_model_routes(backend))
    app.include_router(_generation_routes(backend, encoder, shares_across_keys))
    app.include_router(explain_routes(backend, administration.token if administration else ""))
    app.include_router(_operator_routes(backend))
    app.include_router(admin_routes(backend, administration or Administration()))
    install_error_handlers(app)
    app.include_router(docs_routes(app))
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    if door is not None:
        install_door(app, door)
    app.add_middleware(LastResort)
    return app


def _model_routes(backend: GenerationBackend) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"], responses=_ERRORS)

    @router.get("/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model_card(backend.model)])

    @router.get("/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelCard:
        check_model(model_id, backend.model)
        return model_card(backend.model)

    return router


def _generation_routes(backend: GenerationBackend, encoder: PromptEncoder, shares_across_keys: bool) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["generation"], responses=_ERRORS | _EVENTS, route_class=JsonRoute)
    named = functools.partial(_named, shares_across_keys=shares_across_keys)

    @router.post("/completions", response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Completion | Response:
        generation = named("cmpl", await completion_jobs(body, backend.model, encoder), request)
        if body.stream:
            return _stream(backend, body, generation, encoder, chat=False)
        reply = functools.partial(completion, body.model, generation, texts=encoder.texts)
        return await _answer(request, backend, generation, reply)

    @router.post("/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> ChatCompletion | Response:
        generation = named("chatcmpl", await chat_jobs(body, backend.model, encoder), request)
        if body.stream:
            return _stream(backend, body, generation, encoder, chat=True)
        reply = functools.partial(chat_completion, body.model, generation, texts=encoder.texts)
        return await _answer(request, backend, generation, reply)

    return router


def _operator_routes(backend: GenerationBackend) -> APIRouter:
    router = APIRouter(tags=["operation"], responses=_ERRORS)

    @router.get("/health")
    async def health() -> Health:
        if not await backend.healthy():
            raise unhealthy()
        return Health()

    @router.get("/status")
    async def status() -> Status:
        return status_reply(await backend.status(), backend.model)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(await backend.metrics(), media_type=METRICS_TYPE)

    @router.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> Response:
        return html_page(operator_page("dashboard"))

    @router.get("/placement")
    async def placement() -> PlacementView:
        try:
            return await backend.placement()
        except FarsightError as error:
            raise ApiError(str(error), status=503, kind=SERVER_ERROR, code="unavailable") from error

    @router.get("/dashboard/placement", response_class=HTMLResponse)
    async def placement_dashboard() -> Response:
        return html_page(operator_page("placement"))

    return router


def _named(prefix: str, generation: Generation, request: Request, *, shares_across_keys: bool) -> Generation:
    """Sets the id of the answer, its owner, and the cache salt that decides which requests share prefixes with it."""
    key = sent_key(request.headers)
    jobs = generation.jobs
    if not shares_across_keys:
        jobs = [dataclasses.replace(job, cache_salt=salt_of(key, job.cache_salt)) for job in jobs]
    origin = Origin(f"{prefix}-{uuid.uuid4().hex}", owner=owner_of(key))
    return dataclasses.replace(generation, jobs=jobs, origin=origin)


def _stream(
    backend: GenerationBackend, body: SamplingFields, generation: Generation, encoder: PromptEncoder, *, chat: bool
) -> EventStream:
    writer = ChunkWriter(body.model, generation, encoder.texts, chat=chat, include_usage=body.include_usage)
    return EventStream(chunks(backend, generation, writer))


async def _answer(
    request: Request,
    backend: GenerationBackend,
    generation: Generation,
    reply: Callable[[list[ChoiceResult]], _Reply],
) -> _Reply | Response:
    """The complete answer; None if the client has disconnected."""
    try:
        return reply(await while_connected(request.receive, collect(backend, generation)))
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
