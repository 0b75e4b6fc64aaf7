"""The HTTP application: its routes and what each returns."""

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response

from farsight.core.exposition import OPEN_METRICS_TYPE, PLAIN_TYPE, accepts_open_metrics
from farsight.core.messages.placement import PlacementView
from farsight.services.api.access.access_control import AccessControl, MeteredGenerator
from farsight.services.api.access.gate import install_access_control, routes_of, usage_routes
from farsight.services.api.access.keys import may_observe
from farsight.services.api.admin import Administration, admin_routes
from farsight.services.api.answers.beam_search import search
from farsight.services.api.answers.replies import (
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    ModelList,
    ServerLoad,
    Status,
    Version,
    chat_completion,
    completion,
    model_card,
    status_reply,
)
from farsight.services.api.answers.served import ANSWER, HEADERS
from farsight.services.api.answers.sse import ChunkWriter, EventStream, chunks
from farsight.services.api.backend import Generator, Operator
from farsight.services.api.batches.records import Batches
from farsight.services.api.batches.routes import FILES_PATH, FORM_BYTES, batch_routes, file_routes
from farsight.services.api.bodies import JsonRoute
from farsight.services.api.body_workers import BodyWorkers, read_body
from farsight.services.api.dialects.messages import message_routes
from farsight.services.api.dialects.ollama import ollama_routes
from farsight.services.api.dialects.responses import response_routes
from farsight.services.api.dialects.running import Running
from farsight.services.api.errors import ERRORS, install_error_handlers, or_unavailable, unhealthy
from farsight.services.api.generate import ClientGone, collect, while_connected
from farsight.services.api.generation import Generation
from farsight.services.api.middleware import BodyLimit, ErrorShapes, LastResort, Methods, Slashes
from farsight.services.api.pages.dashboard import docs_routes, page_routes
from farsight.services.api.pages.explain import explain_routes
from farsight.services.api.pages.live import live_routes
from farsight.services.api.pages.what_if import what_if_routes
from farsight.services.api.readiness import DrainGate, Readiness, Reason, Shed
from farsight.services.api.requests import check_model
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.streams.manager import StreamManager
from farsight.services.api.streams.routes import ResumableStreams, stream_routes, wants_resumable
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.api.tokens import token_routes
from farsight.services.api.tracing.middleware import AccessLog, Tracing
from farsight.services.api.vectors.routes import VectorCalls, vector_routes

if TYPE_CHECKING:
    from farsight.services.api.tracing.exporter import SpanExporter

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
API_VERSION = "1"
_VERSION = importlib.metadata.version("farsight")
_CLIENT_CLOSED_REQUEST = 499

_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "description": "The answer, or its chunks where stream is true.",
        "headers": {name: {"description": about, "schema": {"type": "string"}} for name, about in HEADERS.items()},
    }
}


def build_app(
    generator: Generator,
    encoder: PromptEncoder,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    administration: Administration | None = None,
    *,
    operator: Operator | None = None,
    shares_across_keys: bool = True,
    access: AccessControl | None = None,
    workers: BodyWorkers | None = None,
    readiness: Readiness | None = None,
    manager: StreamManager | None = None,
    shed: Reason | None = None,
    spans: "SpanExporter | None" = None,
    batches: Batches | None = None,
    access_log: bool = False,
) -> FastAPI:
    """Returns the application that serves one model.

    Args:
        generator: Runs the requests; every request reads its ``model`` again.
        encoder: Tokenizer and chat template of the same model.
        max_body_bytes: Limit of a request body in bytes; larger bodies get 413.
        administration: The admin token and its rights; without it all admin routes refuse.
        operator: Knows the components; without it there are no routes and pages for operators.
        shares_across_keys: Whether requests of different tenants, or bearer keys, share cached prefixes.
        access: Asks for keys and counts for tenants; without one every request comes in.
        workers: Read large bodies; without them a thread of this process does.
        readiness: What is known of the Supervisor and of a drain; without it there is neither.
        manager: Runs resumable streams; without one, streams are not resumable.
        shed: Asked of each request for tokens before its body is read; without it none is refused so early.
        spans: Takes the spans of requests; without one there are none.
        batches: Keeps files, batches and responses of clients; without it there are none.
        access_log: Whether each request gets a line in the log.
    """
    app = FastAPI(
        title="Farsight",
        version=API_VERSION,
        redirect_slashes=False,
        strict_content_type=False,
        docs_url=None,
        redoc_url=None,
    )
    readiness = readiness or Readiness()
    if operator is not None:
        # First: open pages ask again and again, and routes are tried in turn.
        _add(app, live_routes(generator, operator))
    if access is not None:
        generator = MeteredGenerator(generator, access, shares_prefixes=shares_across_keys)
        _add(app, usage_routes(access))
        shares_across_keys = shares_across_keys or not access.is_open  # a caller's tenant is in the salt already
    _add(app, _model_routes(generator))
    streams = None if manager is None else ResumableStreams(manager, generator, encoder.texts, access)
    _add(app, token_routes(generator, encoder, shares_across_keys=shares_across_keys))
    calls = VectorCalls(generator, encoder, shares_across_keys=shares_across_keys)
    _add(app, vector_routes(calls))
    running = Running(generator, encoder, shares_across_keys)
    _add(app, _generation_routes(running, workers, streams))
    _add(app, message_routes(running))
    _add(app, ollama_routes(running, calls.rows))
    _add(app, response_routes(running, None if batches is None else batches.responses))
    if streams is not None:
        _add(app, stream_routes(streams, ERRORS | _EVENTS))
    larger = {}
    if batches is not None:
        _add(app, file_routes(batches.files))
        _add(app, batch_routes(batches))
        larger[FILES_PATH] = batches.files.settings.max_file_bytes + FORM_BYTES
    if operator is not None:
        _add_operator_routes(app, generator, operator, administration or Administration(), readiness)
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _gone)
    _add(app, docs_routes(app))
    _add(app, page_routes(of_operators=operator is not None))
    app.add_middleware(Methods, methods=_methods(app))
    app.add_middleware(DrainGate, readiness=readiness)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, larger=larger)
    if shed is not None:
        app.add_middleware(Shed, reason=shed, readiness=readiness, max_body_bytes=max_body_bytes)
    if access is not None:
        install_access_control(app, access)
    if spans is not None:
        app.add_middleware(Tracing, exporter=spans)
    app.add_middleware(Slashes)
    app.add_middleware(LastResort)
    app.add_middleware(ErrorShapes)
    if access_log:
        app.add_middleware(AccessLog)
    return app


def _add_operator_routes(
    app: FastAPI, generator: Generator, operator: Operator, administration: Administration, readiness: Readiness
) -> None:
    _add(app, explain_routes(operator, administration.token))
    _add(app, what_if_routes(operator, administration.token))
    _add(app, _status_routes(generator, operator, readiness))
    _add(app, admin_routes(operator, administration))


def _add(app: FastAPI, router: APIRouter) -> None:
    """Adds the routes of a router that has no dependencies: ``include_router`` would make each of them twice."""
    app.router.routes.extend(router.routes)


def _methods(app: FastAPI) -> dict[str, set[str]]:
    """The methods of each path."""
    found: dict[str, set[str]] = {}
    for route in routes_of(app):
        found.setdefault(route.path, set()).update(route.methods or ())
    return found


def _model_routes(generator: Generator) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"], responses=ERRORS)

    @router.get("/models")
    async def list_models() -> ModelList:
        tells_root = may_observe()
        return ModelList(
            data=[model_card(generator.model, name, tells_root=tells_root) for name in generator.model.names]
        )

    @router.get("/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelCard:
        check_model(model_id, generator.model)
        return model_card(generator.model, model_id, tells_root=may_observe())

    return router


def _generation_routes(running: Running, workers: BodyWorkers | None, streams: ResumableStreams | None) -> APIRouter:
    generator = running.backend

    async def respond(
        generation: Generation, request: Request, headers: MutableHeaders
    ) -> Completion | ChatCompletion | Response:
        named, texts = await running.begin(generation, request), running.encoder.texts
        if streams is not None and wants_resumable(request.headers, named):
            return streams.begin(named, request.headers)
        if named.stream:
            return EventStream(chunks(generator, named, ChunkWriter(named, texts)))
        beams = named.beams
        work = collect(generator, named) if beams is None else search(generator, named, beams, texts)
        results = await while_connected(request.receive, work)
        if (promise := ANSWER.get()) is not None:
            headers.update(promise.headers())
        return (chat_completion if named.chat else completion)(named, results, texts)

    async def read_large(body: bytes, chat: bool) -> Generation:
        if workers is not None:
            return await workers.read(body, chat=chat, model=generator.model)
        return await asyncio.to_thread(read_body, body, chat=chat, model=generator.model, encoder=running.encoder)

    class LargeBodies(JsonRoute):
        """Has a large body read elsewhere, and answers as for any other."""

        async def handle_large(self, request: Request, body: bytes) -> Response:
            chat = self.path_format.endswith("/chat/completions")
            generation = await while_connected(request.receive, read_large(body, chat))
            headers = MutableHeaders()
            reply = await respond(generation, request, headers)
            if isinstance(reply, Response):
                return reply
            return JSONResponse(reply.model_dump(mode="json"), headers=dict(headers))

    router = APIRouter(prefix="/v1", tags=["generation"], responses=ERRORS | _EVENTS, route_class=LargeBodies)

    @router.post("/completions", response_model=Completion)
    async def create_completion(
        body: CompletionRequest, request: Request, response: Response
    ) -> Completion | ChatCompletion | Response:
        return await respond(await running.read(body), request, response.headers)

    @router.post("/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(
        body: ChatCompletionRequest, request: Request, response: Response
    ) -> Completion | ChatCompletion | Response:
        return await respond(await running.read(body), request, response.headers)

    return router


def _status_routes(generator: Generator, operator: Operator, readiness: Readiness) -> APIRouter:
    router = APIRouter(tags=["operation"], responses=ERRORS)

    @router.get("/health")
    async def health() -> Health:
        if not (await operator.healthy() and readiness.is_supervised):
            raise unhealthy()
        return Health()

    @router.get("/health/ready")
    async def ready() -> Health:
        problem = readiness.problem(healthy=await operator.healthy())
        if problem is not None:
            raise problem
        return Health()

    @router.get("/ping")
    @router.post("/ping", include_in_schema=False)
    async def ping() -> Health:
        return await health()

    @router.get("/version")
    async def version() -> Version:
        return Version(version=_VERSION)

    @router.get("/load")
    async def load() -> ServerLoad:
        return ServerLoad(server_load=readiness.num_open)

    @router.get("/status")
    async def status() -> Status:
        return status_reply(await operator.status(), generator.model)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        open_metrics = accepts_open_metrics(request.headers.get("accept", ""))
        text = await operator.metrics(open_metrics=open_metrics)
        return Response(text, media_type=OPEN_METRICS_TYPE if open_metrics else PLAIN_TYPE)

    @router.get("/placement")
    async def placement() -> PlacementView:
        with or_unavailable():
            return await operator.answer("the Router", operator.router.placement())

    return router


async def _gone(request: Request, error: Exception) -> Response:
    """The connection is closed: the status is for the access log."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
