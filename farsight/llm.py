"""A model in this process, for Python programs: the schedulers, forecasts and explanations of a server, without one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from farsight.answers import Answer, Message, Prompt
from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.errors import FarsightError, InvalidValueError
from farsight.keywords import ModelSettings
from farsight.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from farsight.sampling import SamplingParams
from farsight.services.commands.pull import fetch_missing
from farsight.services.local.service import LocalService, local_service
from farsight.services.local.threads import ServiceThread
from farsight.services.settings import naming, overrides_of

if TYPE_CHECKING:
    from farsight.services.api.pages.explain import Explanation

T = TypeVar("T")


def _configured(model: str | Path, config: str | Path | None, settings: Mapping[str, Any]) -> FarsightConfig:
    """Returns the configuration of these keywords; a model of the catalogue is here afterwards."""
    overrides = overrides_of({"model": str(model) or None, **settings})
    with naming(overrides, flags=False):
        found = load_config(None if config is None else Path(config), overrides)
    fetch_missing(found.model.path, _tell, quiet=True)
    return found


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


class AsyncLLM:
    """A model in this process, for programs that await.

    ``async with AsyncLLM("smollm2") as llm`` loads it and frees it. All calls run side by side, as a server's requests.

    Args:
        model: A name that ``farsight models`` lists, which is downloaded if it is not here; a directory; a GGUF file; a
            hub id. Empty for the embedded model.
        config: A ``farsight.toml``; keywords override it.
        settings: As the flags of ``farsight serve``.

    Raises:
        FarsightError: A setting is wrong; names it, its value and what would be right.
    """

    def __init__(
        self, model: str | Path = "", *, config: str | Path | None = None, **settings: Unpack[ModelSettings]
    ) -> None:
        self._config = _configured(model, config, settings)
        self._stack = AsyncExitStack()
        self._found: LocalService | None = None

    async def __aenter__(self) -> Self:
        self._found = await self._stack.enter_async_context(local_service(self._config))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._found = None
        await self._stack.aclose()

    @property
    def _service(self) -> LocalService:
        if self._found is None:
            raise FarsightError("this model is not loaded: use it inside of `async with`")
        return self._found

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens, prompt and output together."""
        return self._service.max_model_len

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answer to a prompt each time that it has grown; the last has ``finished`` set.

        Closing the generator early aborts what runs.

        Raises:
            FarsightError: The model cannot answer this.
        """
        async with aclosing((await Answer.to_prompt(self._service, prompt, sampling_params)).grow()) as grown:
            async for answer in grown:
                yield answer.output()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Does the same for the answer to a conversation.

        Args:
            tools: Functions that the model may call, as the API takes them.
            more: Further fields of a body of ``/v1/chat/completions``, such as ``tool_choice``.
        """
        fields = more | {"tools": None if tools is None else list(tools)}
        async with aclosing((await Answer.to_chat(self._service, messages, sampling_params, fields)).grow()) as grown:
            async for answer in grown:
                yield answer.output()

    async def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embeddings of texts, in their order; errors as of ``LLM.embed``."""
        return await _embed(self._service, texts, dimensions)

    async def explain(self, output: RequestOutput | str) -> Explanation:
        """Returns the decisions about an answer, or about the one with this ``request_id``, also while it runs."""
        return await self._service.explain(output if isinstance(output, str) else output.request_id)


class LLM:
    """A model in this process, loaded when the constructor returns; arguments and errors as of ``AsyncLLM``.

    All prompts of a call run side by side, as do calls of several threads. ``with LLM() as llm``, or ``close``, frees
    the model.
    """

    def __init__(
        self, model: str | Path = "", *, config: str | Path | None = None, **settings: Unpack[ModelSettings]
    ) -> None:
        self._thread = ServiceThread(_configured(model, config, settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and frees the model; may be called again."""
        self._thread.close()

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens, prompt and output together."""
        return self._thread.service.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Returns the answers to prompts, in their order.

        Args:
            prompts: One or several.
            sampling_params: For all of them, or one for each.

        Raises:
            FarsightError: The model cannot answer one of them: the others are cancelled.
        """
        several: list[Prompt] = (
            [cast(Prompt, prompts)] if _is_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        )
        params = _each(sampling_params, len(several))

        async def run() -> list[RequestOutput]:
            begun = [Answer.to_prompt(self._thread.service, *each) for each in zip(several, params, strict=True)]
            return await _all([_whole(each) for each in begun])

        return self._thread.call(run())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> list[RequestOutput]:
        """Returns the answers to one conversation, or to several, in their order.

        Args:
            tools: Functions that the model may call, as the API takes them.
            more: Further fields of a body of ``/v1/chat/completions``, such as ``tool_choice``.

        Raises:
            FarsightError: As ``generate``.
        """
        several = cast(list[Sequence[Message]], [messages] if _is_conversation(messages) else list(messages))
        params = _each(sampling_params, len(several))
        fields = more | {"tools": None if tools is None else list(tools)}

        async def run() -> list[RequestOutput]:
            pairs = zip(several, params, strict=True)
            begun = [Answer.to_chat(self._thread.service, *each, fields) for each in pairs]
            return await _all([_whole(each) for each in begun])

        return self._thread.call(run())

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **more: Any,
    ) -> Iterator[str]:
        """Yields the text of one answer as it comes; a reader that leaves aborts it.

        Args:
            prompt: A prompt, or the messages of a conversation.
            more: For a conversation, as ``chat`` takes it.

        Raises:
            FarsightError: As ``generate``.
        """
        service = self._thread.service
        if _is_conversation(prompt):
            begun = Answer.to_chat(service, cast(Sequence[Message], prompt), sampling_params, more)
        elif more:
            raise InvalidValueError(next(iter(more)), next(iter(more.values())), "nothing beside a prompt")
        else:
            begun = Answer.to_prompt(service, cast(Prompt, prompt), sampling_params)
        answer, shown = self._thread.call(begun), 0
        for _ in self._thread.iterate(answer.grow()):
            text = answer.output().text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embeddings of texts, in their order.

        Args:
            dimensions: Keep so many first numbers of each.

        Raises:
            FarsightError: The model makes none, or cannot take a text.
        """
        return self._thread.call(_embed(self._thread.service, texts, dimensions))

    def explain(self, output: RequestOutput | str) -> Explanation:
        """Returns the decisions about an answer, or about the one with this ``request_id``, also while it runs.

        Raises:
            FarsightError: Nothing is known of it (any more).
        """
        response_id = output if isinstance(output, str) else output.request_id
        return self._thread.call(self._thread.service.explain(response_id))


async def _whole(begun: Any) -> RequestOutput:
    output: RequestOutput = await (await begun).whole()
    return output


async def _all(answers: Sequence[Any]) -> list[RequestOutput]:
    """Returns all of them; the first failure cancels the others."""
    tasks = [asyncio.create_task(each) for each in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed(service: LocalService, texts: Any, dimensions: int | None) -> list[EmbeddingRequestOutput]:
    given = texts if isinstance(texts, str) else [each if isinstance(each, str | int) else list(each) for each in texts]
    body = {"input": given} | ({} if dimensions is None else {"dimensions": dimensions})
    rows, lengths = await service.embed(body)
    return [EmbeddingRequestOutput(EmbeddingOutput(row), num) for row, num in zip(rows, lengths, strict=True)]


def _is_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, and not several."""
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _is_conversation(prompt: Any) -> bool:
    """Whether this is one list of messages."""
    return not isinstance(prompt, str | Mapping) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    """Returns the parameters of each of so many prompts.

    Raises:
        InvalidValueError: There are others than one for each.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidValueError("sampling_params", f"{len(params)} of them", f"one, or {count}: one for each prompt")
    return params
