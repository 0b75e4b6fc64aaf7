"""The routes of ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``."""

from __future__ import annotations

import asyncio
import base64
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from farsight.core.request import Origin
from farsight.core.request import Request as EngineRequest
from farsight.services.api.access.keys import owner_of, salt_of, sent_key
from farsight.services.api.backend import Generator
from farsight.services.api.bodies import LargeBodyRoute, checked
from farsight.services.api.errors import ERRORS, ApiError
from farsight.services.api.generate import while_connected
from farsight.services.api.generation import GPU_SECONDS_DIGITS
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.api.vectors.schemas import (
    EmbeddingReply,
    EmbeddingRequest,
    EmbeddingRow,
    PrefillFields,
    RankedDocument,
    RankedRow,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
    ScoreRow,
    TextUsage,
)
from farsight.services.api.vectors.texts import (
    Vectors,
    compute,
    cosine,
    embedding_requests,
    logistic,
    pair_requests,
    shortened,
    text_requests,
)

MAX_BODY_BYTES = 1024 * 1024
"""Largest body of these routes; a thread reads it, which holds the interpreter for some 100 ms at worst."""


class _ManyTexts(LargeBodyRoute):
    async def handle_large(self, request: Request, body: bytes) -> Response:
        if len(body) > MAX_BODY_BYTES:
            message = f"The request body has {len(body)} bytes; {self.path} takes at most {MAX_BODY_BYTES}."
            raise ApiError(message, status=413, code="request_too_large")
        return await super().handle_large(request, body)


class VectorCalls:
    """Computes what the routes answer.

    Args:
        shares_across_keys: Whether requests of different bearer keys share cached prefixes.
    """

    def __init__(self, backend: Generator, encoder: PromptEncoder, *, shares_across_keys: bool) -> None:
        self.backend = backend
        self._encoder = encoder
        self._shares_across_keys = shares_across_keys

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> EmbeddingReply:
        model = self.backend.model
        name = f"embd-{uuid.uuid4().hex}"
        vectors = await self._run(name, functools.partial(embedding_requests, body, model, self._encoder), request)
        rows = [shortened(row, body.dimensions, normalizes=model.abilities.normalizes) for row in vectors.rows]
        data = []
        for index, row in enumerate(rows):
            in_base64 = body.encoding_format == "base64"
            shown = base64.b64encode(row.astype("<f4").tobytes()).decode() if in_base64 else row.tolist()
            data.append(EmbeddingRow(index=index, embedding=shown))
        return EmbeddingReply(
            id=name, created=int(time.time()), model=body.model or model.name, data=data, usage=_usage(vectors)
        )

    async def rows(self, fields: dict[str, Any], request: Request) -> tuple[list[list[float] | str], int]:
        """Returns the embeddings that the fields of a body ask for, and the tokens of its texts."""
        reply = await self.embeddings(checked(EmbeddingRequest, fields), request)
        return [row.embedding for row in reply.data], reply.usage.prompt_tokens

    async def score(self, body: ScoreRequest, request: Request) -> ScoreReply:
        name = f"score-{uuid.uuid4().hex}"
        scores, vectors = await self._scores(name, body.pairs, "text_2", body, request)
        return ScoreReply(
            id=name,
            created=int(time.time()),
            model=body.model or self.backend.model.name,
            data=[ScoreRow(index=index, score=score) for index, score in enumerate(scores)],
            usage=_usage(vectors),
        )

    async def rerank(self, body: RerankRequest, request: Request) -> RerankReply:
        name = f"rerank-{uuid.uuid4().hex}"
        pairs = [(body.query, document) for document in body.documents]
        scores, vectors = await self._scores(name, pairs, "documents", body, request)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
        shows = body.return_documents is not False
        results = [
            RankedRow(
                index=index,
                relevance_score=scores[index],
                document=RankedDocument(text=body.documents[index]) if shows else None,
            )
            for index in order
        ]
        return RerankReply(id=name, model=body.model or self.backend.model.name, results=results, usage=_usage(vectors))

    async def _scores(
        self, name: str, pairs: Sequence[tuple[str, str]], field: str, body: PrefillFields, request: Request
    ) -> tuple[list[float], Vectors]:
        """By the classifier of a model that has one; else the cosines of embeddings, each text's computed once."""
        model = self.backend.model
        if model.abilities.num_labels:
            make = functools.partial(pair_requests, pairs, field, body, model, self._encoder)
            vectors = await self._run(name, make, request)
            logits = [float(row[0]) for row in vectors.rows]
            return [logistic(each) if model.abilities.squashes else each for each in logits], vectors
        texts = {text: f"{field}[{index}]" for index, pair in reversed(list(enumerate(pairs))) for text in pair}
        named = [(place, text) for text, place in texts.items()]
        make = functools.partial(text_requests, named, body, model, self._encoder)
        vectors = await self._run(name, make, request)
        row_of = dict(zip(texts, vectors.rows, strict=True))
        return [cosine(row_of[first], row_of[second]) for first, second in pairs], vectors

    async def _run(self, name: str, make: Callable[[], list[EngineRequest]], request: Request) -> Vectors:
        """Tokenises in a thread, and computes until the client leaves."""
        key = sent_key(request.headers)
        owner = owner_of(key)
        salt = "" if self._shares_across_keys else salt_of(key, "")
        requests = await asyncio.to_thread(make)
        work = compute(self.backend, requests, lambda index: Origin(name, index, owner), salt)
        return await while_connected(request.receive, work)


def _usage(vectors: Vectors) -> TextUsage:
    return TextUsage(
        prompt_tokens=vectors.prompt_tokens,
        total_tokens=vectors.prompt_tokens,
        gpu_seconds=round(vectors.gpu_s, GPU_SECONDS_DIGITS),
    )


def vector_routes(calls: VectorCalls) -> APIRouter:
    """The routes, under the names that OpenAI, vLLM, Jina and Cohere have for them."""
    router = APIRouter(tags=["embeddings"], responses=ERRORS, route_class=_ManyTexts)

    @router.post("/v1/embeddings", response_model=EmbeddingReply)
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return _shown(await calls.embeddings(body, request))

    @router.post("/score", response_model=ScoreReply, include_in_schema=False)
    @router.post("/v1/score", response_model=ScoreReply)
    async def score(body: ScoreRequest, request: Request) -> Response:
        return _shown(await calls.score(body, request))

    @router.post("/rerank", response_model=RerankReply, include_in_schema=False)
    @router.post("/v2/rerank", response_model=RerankReply, include_in_schema=False)
    @router.post("/v1/rerank", response_model=RerankReply)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        return _shown(await calls.rerank(body, request))

    return router


def _shown(reply: BaseModel) -> Response:
    return JSONResponse(reply.model_dump(mode="json"))
