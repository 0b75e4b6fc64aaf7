"""One prompt on its way through a service in this process, and what has come out of it so far."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from farsight.core.messages.tokens import TokenDelta
from farsight.outputs import CompletionOutput, RequestOutput, ToolCall
from farsight.sampling import SamplingParams
from farsight.services.api.answers.parts import ChoiceParts, chat_logprobs, likeliest, prompt_logprobs
from farsight.services.api.answers.replies import completion_logprobs
from farsight.services.api.answers.served import AnswerPromise
from farsight.services.api.generation import ChoiceResult, Generation, shown_choices
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.local.service import LocalService
from farsight.tokenization.tool_formats.parts import CallArguments, CallStart, ReasoningPart, TextPart

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``."""

Message = Mapping[str, Any]
"""A message as the API takes it: ``{"role": "user", "content": "Hello"}``."""


class Choice:
    """One output while it grows."""

    def __init__(self, generation: Generation, index: int) -> None:
        self.result = ChoiceResult()
        self._text = generation.echoes[0].text if generation.echoes else ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []
        self._generation = generation
        form = generation.form
        self._parts = None if form is None else ChoiceParts(form, generation.response_id, index, stream=True)

    def add(self, delta: TokenDelta) -> None:
        """Takes what has been generated further."""
        self.result.add(delta)
        if self._parts is None:
            self._text += delta.text
            return
        for part in self._parts.read(delta.text, ended=delta.finish_reason is not None):
            match part:
                case TextPart():
                    self._text += part.text
                case ReasoningPart():
                    self._reasoning += part.text
                case CallStart():
                    self._calls.append(ToolCall(self._parts.id_of(part), part.name, ""))
                case CallArguments():
                    call = self._calls[part.index]
                    self._calls[part.index] = ToolCall(call.id, call.name, call.arguments + part.text)

    def output(self, index: int, logprobs: Any) -> CompletionOutput:
        """Returns it as it is now."""
        reason = self.result.finish_reason
        return CompletionOutput(
            index=index,
            text=self._text,
            token_ids=tuple(self.result.token_ids),
            finish_reason=reason if self._parts is None else self._parts.finish_reason(reason),
            logprobs=logprobs,
            reasoning=self._reasoning,
            tool_calls=tuple(self._calls),
        )


class Answer:
    """The outputs of one prompt while they grow.

    Args:
        prompt: Its text, for the client; None where there is none.
    """

    def __init__(self, service: LocalService, generation: Generation, prompt: str | None) -> None:
        self._service = service
        self._generation = generation
        self._prompt = prompt
        self._promise = AnswerPromise(len(generation.requests))
        self._choices = [Choice(generation, index) for index in range(len(generation.requests))]

    @classmethod
    async def to_prompt(cls, service: LocalService, prompt: Prompt, params: SamplingParams | None) -> Answer:
        """Begins a completion.

        Raises:
            FarsightError: The model cannot answer this; the message names the field.
        """
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt") or prompt.get("prompt_token_ids") or ""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = {"prompt": given, **(params or SamplingParams()).fields(chat=False)}
        return cls(service, await service.read(CompletionRequest, body), given if isinstance(given, str) else None)

    @classmethod
    async def to_chat(
        cls, service: LocalService, messages: Sequence[Message], params: SamplingParams | None, more: Mapping[str, Any]
    ) -> Answer:
        """Begins a chat; errors as of ``to_prompt``.

        Args:
            more: Further fields of a body of ``/v1/chat/completions``, such as ``tools``.
        """
        fields = {name: value for name, value in more.items() if value is not None}
        body = {"messages": list(map(dict, messages)), **fields, **(params or SamplingParams()).fields(chat=True)}
        return cls(service, await service.read(ChatCompletionRequest, body), None)

    async def grow(self) -> AsyncGenerator[Answer, None]:
        """Yields this answer whenever it has grown, until it is whole.

        Raises:
            FarsightError: A request failed, or the model cannot go on.
        """
        async with aclosing(self._service.run(self._generation, self._promise)) as deltas:
            async for index, delta in deltas:
                self._choices[index].add(delta)
                yield self

    async def whole(self) -> RequestOutput:
        """Returns the whole answer; errors as of ``grow``."""
        async with aclosing(self.grow()) as grown:
            async for _ in grown:
                pass
        return self.output()

    def output(self) -> RequestOutput:
        """Returns what there is by now."""
        generation, texts = self._generation, self._service.encoder.texts.named(by_id=self._generation.names_ids)
        finished = all(each.result.finish_reason is not None for each in self._choices)
        results = [each.result for each in self._choices]
        if finished:
            results = shown_choices(generation, results)
        choices = [next(each for each in self._choices if each.result is result) for result in results]
        known = None
        if generation.num_prompt_logprobs is not None and results[0].prompt_logprobs:
            known = prompt_logprobs(texts, results[0].prompt_logprobs, generation.num_prompt_logprobs)
        headers = self._promise.headers()
        etas = (headers.get("farsight-eta-p50"), headers.get("farsight-eta-p90"))
        return RequestOutput(
            request_id=generation.response_id,
            prompt=self._prompt,
            prompt_token_ids=generation.prompts[0].prompt_ids,
            outputs=tuple(each.output(index, self._logprobs(each.result)) for index, each in enumerate(choices)),
            finished=finished,
            num_cached_tokens=results[0].cached_len,
            prompt_logprobs=known,
            eta_s=(float(etas[0]), float(etas[1])) if etas[0] and etas[1] else None,
        )

    def _logprobs(self, result: ChoiceResult) -> Any:
        generation = self._generation
        if not generation.shows_logprobs:
            return None
        entries, texts = likeliest(result.logprobs, generation.num_logprobs), self._service.encoder.texts
        if generation.chat:
            return chat_logprobs(texts, entries)["content"]
        return completion_logprobs(generation, 0, texts).add(entries)
