"""A model that answers in this process: bodies of the API in, outputs and explanations out, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Origin
from farsight.policies.compose import check_scheduler
from farsight.services.api.answers.served import ANSWER, AnswerPromise
from farsight.services.api.backend import ModelInfo
from farsight.services.api.bodies import checked
from farsight.services.api.errors import as_api_error
from farsight.services.api.generate import run_requests
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.services.api.requests import generation_of, with_pictures
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.launch.launch import LocatedModel, find_site, locate_model
from farsight.services.local.system import LocalSystem, local_system
from farsight.tokenization.gguf_file import held_header

if TYPE_CHECKING:
    from farsight.services.api.pages.explain import Explanation

_T = TypeVar("_T")


class RequestRefused(FarsightError):
    """A request that this model cannot answer; the message names the field, its value and what would be right.

    Args:
        param: The field; None where no single one is wrong.
        code: A stable name for programs to test, as the API has it.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raises what the API would answer with as ``RequestRefused``; other errors of Farsight pass."""
    try:
        yield
    except FarsightError:
        raise
    except Exception as error:
        answer = as_api_error(error)
        if answer.code == "internal_error":
            raise
        raise RequestRefused(answer.message, answer.param, answer.code) from error


class LocalService:
    """One model and everything that schedules, computes and explains it.

    Args:
        system: The components; all are up.
        client: Takes the requests in.
        encoder: Tokenizer and chat template of the model.
    """

    def __init__(self, system: LocalSystem, client: EngineClient, encoder: PromptEncoder) -> None:
        self._system = system
        self._client = client
        self.encoder = encoder

    @property
    def model(self) -> ModelInfo:
        """What is known of the model."""
        return self._client.model

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens, prompt and output together."""
        return self.model.max_model_len

    async def read(self, kind: type[CompletionRequest | ChatCompletionRequest], body: Mapping[str, Any]) -> Generation:
        """Returns what a body of the API asks for, under a new id of its answer.

        Args:
            body: JSON values, as a client would send them.

        Raises:
            RequestRefused: A field is wrong, or the model cannot answer this.
            FarsightError: A picture cannot be read.
        """
        with refusing():
            fields = checked(kind, dict(body))
            generation = await generation_of(fields, self.model, self.encoder)
            generation = await self._whole(with_pictures(self._client, generation, ""))
        if generation.beams is not None:
            raise RequestRefused("use_beam_search: got true, expected false: only servers search", "use_beam_search")
        return generation.named(b"", str)

    async def run(
        self, generation: Generation, promise: AnswerPromise | None = None
    ) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yields the deltas of its requests as they come, each with its request's index; closing aborts what runs.

        Args:
            promise: Gets the predictions of when the requests end.

        Raises:
            FarsightError: A request failed, or the model cannot go on.
        """
        ANSWER.set(promise)
        with refusing():
            async with aclosing(run_requests(self._client, generation)) as deltas:
                # Item by item: a time limit around a ``yield`` would strike its reader.
                while (item := await self._whole(anext(deltas, None))) is not None:
                    yield item

    async def collect(self, generation: Generation) -> list[ChoiceResult]:
        """Returns the whole outputs, in the order of the requests; raises as ``run``."""
        results = [ChoiceResult() for _ in generation.requests]
        async with aclosing(self.run(generation)) as deltas:
            async for index, delta in deltas:
                results[index].add(delta)
        return results

    async def embed(self, body: Mapping[str, Any]) -> tuple[list[list[float]], list[int]]:
        """Returns the vectors of a body of ``/v1/embeddings``, and the number of tokens of each input.

        Raises:
            RequestRefused: A field is wrong, or the model makes no embeddings.
        """
        from farsight.services.api.vectors.schemas import EmbeddingRequest
        from farsight.services.api.vectors.texts import compute, embedding_requests, shortened

        name = f"embd-{uuid.uuid4().hex}"
        with refusing():
            fields = checked(EmbeddingRequest, dict(body))
            requests = await asyncio.to_thread(embedding_requests, fields, self.model, self.encoder)
            work = compute(self._client, requests, lambda index: Origin(name, index), "")
            vectors = await self._whole(work)
        normalizes = self.model.abilities.normalizes
        rows = [shortened(row, fields.dimensions, normalizes=normalizes).tolist() for row in vectors.rows]
        return rows, [request.prompt_len for request in requests]

    async def explain(self, response_id: str) -> Explanation:
        """Returns the decisions about an answer, while it runs or after.

        Raises:
            FarsightError: Nothing is known of it (any more).
        """
        from farsight.services.api.pages.explain import explanation

        traces = await self._whole(self._client.overview.explain(response_id))
        if not traces:
            raise RequestRefused(f"id: got {response_id!r}, expected the id of an answer of this model", "id")
        return explanation(response_id, traces)

    async def _whole(self, work: Awaitable[_T]) -> _T:
        return await self._system.while_whole(work)

    async def until_idle(self) -> None:
        """Returns once nothing is computed any more."""
        await self._system.until_idle()


def private_settings(config: FarsightConfig) -> FarsightConfig:
    """Returns settings without the bounds that protect a server from its clients: one program sends all it has."""
    return dataclasses.replace(config, server=config.server.unbounded())


@asynccontextmanager
async def local_service(config: FarsightConfig, model: LocatedModel | None = None) -> AsyncIterator[LocalService]:
    """Opens a service under these settings; it is up.

    Args:
        model: Where the configured model is, if that has been looked up.

    Raises:
        FarsightError: The model does not exist, cannot run as configured, or does not come up.
    """
    check_scheduler(config.scheduler)
    model = model or locate_model(config)
    _header = held_header(model.directory)  # so that a GGUF file is read once
    settings = private_settings(find_site(config, model).config)
    reading = asyncio.create_task(asyncio.to_thread(PromptEncoder, model.directory, settings.model))
    try:
        async with local_system(settings, Path(model.directory)) as system, system.ingress() as client:
            service = LocalService(system, client, await reading)
            try:
                yield service
            finally:
                await service.until_idle()
    finally:
        reading.cancel()  # still running where the system has not come up
