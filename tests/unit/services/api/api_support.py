"""A scripted backend, which stands for everything behind the HTTP layer, and a tiny model directory."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from farsight.core.images import EncodedImage, ImageFile, ImageSpan, digest_of
from farsight.core.messages.kv import KVTraffic, KVUsage
from farsight.core.messages.live import LiveView, SessionRow, SessionsQuery, SessionsView
from farsight.core.messages.log import ArtefactInfo, LoggedWindow, RequestTrace
from farsight.core.messages.placement import PlacementView
from farsight.core.messages.series import (
    ComponentsQuery,
    ComponentsReply,
    RecentDecisions,
    SeriesQuery,
    SeriesReply,
    TableReply,
)
from farsight.core.messages.status import ComponentCounts, ComponentStatus, Scale, StatusReply
from farsight.core.messages.supervision import DrainReplica, ServedWeights, Upgrade
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Fault, Origin, Request, SamplingParams, Slo
from farsight.services.api.app import DEFAULT_MAX_BODY_BYTES, build_app
from farsight.services.api.backend import Generator, ModelInfo
from farsight.services.api.generation import PromptText
from farsight.services.api.text.prompts import ChatPrompt, PromptEncoder

MODEL = "tiny"
LONG_S = 120.0
"""Only so that nothing hangs for ever."""

MAX_MODEL_LEN = 64
VOCAB_SIZE = 300
IMAGE_TOKENS = 5
"""Tokens of every picture that a scripted backend sees."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

R = TypeVar("R")
Client = httpx.AsyncClient

Step = TokenDelta | Exception | float
"""A delta to yield, an exception to raise, or seconds to wait."""


def delta(
    text: str = "",
    finish_reason: str | None = None,
    *,
    num_tokens: int = 1,
    error: str | None = None,
    fault: Fault = Fault.SERVICE,
) -> TokenDelta:
    return TokenDelta("r", 0, 0, tuple(range(num_tokens)), text, finish_reason, error, fault=fault)


HELLO: tuple[Step, ...] = (delta("Hel"), delta(), delta("lo"), delta("!", "stop"))


WORKER = ComponentStatus("worker-0", "ModelWorker", 7, "here", "ready", 2, 0.5, restarts=1, http_port=4321)
LEARNT = ArtefactInfo("length-predictor words", 3, 1.7e9, 12.5, 4000, "a note", 900, current=True)
TRAFFIC = KVTraffic(3, 2, 3072, 2048, 1, 9)
KV_USAGE = KVUsage(8, 5, 2, 0, num_host_blocks=6, free_host_blocks=4, flying_blocks=1, traffic=TRAFFIC)
METRICS = "# HELP vllm:num_requests_running Running.\n# TYPE vllm:num_requests_running gauge\n"


def told(value: R | Exception) -> R:
    if isinstance(value, Exception):
        raise value
    return value


class ScriptedBackend:
    """A generator, an operator and the components that it asks: plays a script for each stream and counts what becomes
    of them; ``components`` is what ``/status`` shows.
    """

    def __init__(self, script: Callable[[tuple[int, ...]], Iterable[Step]] | Iterable[Step] = HELLO) -> None:
        self.model = ModelInfo(MODEL, 1_700_000_000, MAX_MODEL_LEN, False, VOCAB_SIZE)
        self.calls: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.texts: list[PromptText | None] = []
        self.priorities: list[int] = []
        self.salts: list[str] = []
        self.images: list[tuple[ImageSpan, ...]] = []
        self.seen: list[tuple[ImageFile, str]] = []
        self.keys: list[str] = []
        self.is_healthy = True
        self.origins: list[Origin | None] = []
        self.targets: list[tuple[float | None, Slo]] = []
        self.traces: list[RequestTrace] = []
        self.scaled: list[tuple[str, int]] = []
        self.scale_error: Exception | None = None
        self.components: tuple[ComponentStatus, ...] = (WORKER,)
        self.artefacts = (LEARNT,)
        self.placements: PlacementView | Exception = PlacementView("round-robin")
        self.history: SeriesReply | Exception = SeriesReply((), ())
        self.on_replicas = LiveView(())
        self.turns_of: tuple[SessionRow, ...] = ()
        self.sessions_named: list[tuple[str, str, str]] = []
        self.loads = TableReply((), ())
        self.lives = ComponentsReply(TableReply((), ()), ())
        self.decided: tuple[RecentDecisions, ...] = ()
        self.kinds: list[str] = []
        self.logged: LoggedWindow | Exception | None = None
        self.num_opened = 0
        self.num_closed = 0
        self.num_completed = 0
        self.script = script

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        self.calls.append((request.prompt_ids, request.sampling))
        self.texts.append(text)
        self.origins.append(request.origin)
        self.sessions_named.append((request.session, request.continues, request.application))
        self.priorities.append(request.priority)
        self.targets.append((request.deadline_s, request.slo))
        self.salts.append(request.cache_salt)
        self.images.append(request.images)
        self.keys.append(key)
        self.num_opened += 1
        try:
            for step in self.script(request.prompt_ids) if callable(self.script) else self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TokenDelta):
                    self.num_completed += step.finish_reason is not None
                    yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.num_closed += 1

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        self.seen += [(file, salt) for file in files]
        digests = [file.digest or digest_of(file.url.encode()) for file in files]  # nothing is fetched here
        return tuple(EncodedImage(digest, IMAGE_TOKENS, (1, IMAGE_TOKENS), b"rows") for digest in digests)

    async def status(self) -> StatusReply:
        return StatusReply(self.components, KV_USAGE, self.artefacts, queue_delay_s=1.25)

    last_status = status

    async def metrics(self, *, open_metrics: bool) -> str:
        return METRICS

    @property
    def supervisor(self) -> Any:
        return self

    router = supervisor

    async def answer(self, who: str, asked: Awaitable[R]) -> R:
        return await asked

    async def placement(self) -> PlacementView:
        return told(self.placements)

    async def sessions(self, query: SessionsQuery) -> SessionsView:
        return SessionsView(self.turns_of[: query.max_rows], (), 50.0, len(self.turns_of))

    async def series(self, query: SeriesQuery) -> SeriesReply:
        return told(self.history)

    async def replica_series(self, query: SeriesQuery) -> TableReply:
        return self.loads

    async def component_series(self, query: ComponentsQuery) -> ComponentsReply:
        self.kinds.append(query.kind)
        return self.lives

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        return self.decided

    async def live(self, max_rows: int) -> LiveView:
        return self.on_replicas

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        return tuple(trace for trace in self.traces if trace.trace_id.startswith(f"{response_id}/"))

    async def logged_around(self, request_id: str) -> LoggedWindow | None:
        logged = told(self.logged)
        return None if logged is None else dataclasses.replace(logged, request_id=request_id)

    def _ordered(self, what: str, number: int) -> None:
        if self.scale_error is not None:
            raise self.scale_error
        self.scaled.append((what, int(number)))

    async def drain_replica(self, order: DrainReplica) -> ComponentCounts:
        self._ordered(order.replica, not order.cancel)
        return ComponentCounts(2, 1, 1, 0, drained=() if order.cancel else (order.replica,))

    async def upgrade(self, order: Upgrade) -> ServedWeights:
        self._ordered(order.model_dir or order.settings, order.surge)
        return ServedWeights(1, order.model_dir)

    async def scale(self, order: Scale) -> ComponentCounts:
        self._ordered(order.kind, order.count)
        return ComponentCounts(order.count, 1, 1, 0)

    async def healthy(self) -> bool:
        return self.is_healthy


_SERVED: ContextVar[tuple[Generator, PromptEncoder]] = ContextVar("served")


class _OfTheRequest:
    """Has whatever the backend, or the encoder, has that the request's client was opened on."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(_SERVED.get()[self._place], name)


@functools.cache
def _application(**settings: Any) -> FastAPI:
    return whole_app(_OfTheRequest(0), _OfTheRequest(1), **settings)  # type: ignore[arg-type]


def whole_app(backend: ScriptedBackend, encoder: PromptEncoder, *args: Any, **settings: Any) -> FastAPI:
    """Returns an application with all routes, those of operators too; its arguments are those of ``build_app``."""
    return build_app(backend, encoder, *args, operator=backend, **settings)


def application(
    backend: Generator, encoder: PromptEncoder, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, **settings: Any
) -> ASGIApp:
    """Returns the application over a backend and an encoder. Tests of one process share it: to build one takes 0.25 s.

    ``/live`` would tell what it has told another test a moment ago; its tests build applications of their own.

    Args:
        settings: As of ``build_app``: ``administration``, ``shares_across_keys``.
    """
    shared = _application(max_body_bytes=max_body_bytes, **settings)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        token = _SERVED.set((backend, encoder))
        try:
            await shared(scope, receive, send)
        finally:
            _SERVED.reset(token)

    return served


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not holds():  # noqa: ASYNC110, the condition has no event of its own
            await asyncio.sleep(0.001)


def client_on(app: ASGIApp, **headers: str) -> Client:
    """A client of an application in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


async def ok(client: Client, path: str, **body: Any) -> Any:
    """What a request is answered."""
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refusal(client: Client, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused."""
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return dict(reply.json()["error"])


def chat_ids(encoder: PromptEncoder, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Token ids of a rendered conversation."""
    return encoder.encode_rendered(encoder.render_chat(ChatPrompt(messages)))


def write_model_dir(folder: Path, chat_template: str | None = CHATML, **config: Any) -> Path:
    """A byte-level tokenizer that puts ``<s>`` before plain text, with a chat template beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the dog", "hello world, hello there"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def read_events(body: str) -> list[Any]:
    """The payloads of a stream; the closing ``[DONE]`` is checked and left out."""
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(item) for item in events[:-1]]
