"""Beam search: for each token of an answer, one request for one token behind each beam, through the same engine.

The beams of a prompt share its KV and most of their own in the prefix cache. The order of beams is vLLM's: the sum of
the log probabilities, divided by the length, prompt included and EOS aside, to the power ``length_penalty``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import Request, SamplingParams
from farsight.services.api.backend import Generator
from farsight.services.api.errors import ApiError
from farsight.services.api.generate import collect
from farsight.services.api.generation import BeamParams, ChoiceResult, Generation
from farsight.services.api.text.dialect import TokenTexts


@dataclass(frozen=True, slots=True)
class Beam:
    """
    Attributes:
        token_ids: Its output so far, without EOS.
        entries: Log probabilities of each, beside the likeliest.
        total: Sum of the log probabilities, that of EOS included.
    """

    token_ids: tuple[int, ...] = ()
    entries: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    ended: bool = False

    def grown(self, entry: TokenLogprobs, end_ids: Sequence[int]) -> list[Beam]:
        """The beams behind it, one for each of the likeliest tokens.

        Args:
            entry: Log probabilities of the next token: the one that was taken, then the likeliest.
        """
        ids, values = entry[0][1:], entry[1][1:]
        found = []
        for token_id, value in zip(ids, values, strict=True):
            total = self.total + value
            if token_id in end_ids:
                found.append(Beam(self.token_ids, self.entries, total, ended=True))
            else:
                named = ((token_id, *ids), (value, *values))
                found.append(Beam((*self.token_ids, token_id), (*self.entries, named), total))
        return found


class PromptSearch:
    """The beams of one prompt."""

    def __init__(self, prompt: Request, params: BeamParams, end_ids: Sequence[int]) -> None:
        self._prompt = prompt
        self._params = params
        self._end_ids = () if params.ignore_eos else tuple(end_ids)
        self._live = [Beam()]
        self._ended: list[Beam] = []
        self._max_len = prompt.prompt_len + prompt.sampling.max_new_tokens

    def requests(self) -> list[Request]:
        """One for the next token of each beam; none once the search is over."""
        if self._is_over():
            return []
        width = max(2 * self._params.num_beams, self._prompt.sampling.logprobs or 0)
        sampling = SamplingParams(1, logprobs=width, ignore_eos=True, seed=self._prompt.sampling.seed)
        return [
            dataclasses.replace(self._prompt, prompt_ids=(*self._prompt.prompt_ids, *beam.token_ids), sampling=sampling)
            for beam in self._live
        ]

    def advance(self, results: Sequence[ChoiceResult]) -> None:
        """
        Args:
            results: What ``requests`` brought, in their order.

        Raises:
            ApiError: 400: what computes here tells no log probabilities.
        """
        if not all(result.logprobs for result in results):
            message = "use_beam_search: got true, expected false: what computes here tells no log probabilities"
            raise ApiError(message, param="use_beam_search", code="invalid_value")
        grown = [
            new
            for beam, result in zip(self._live, results, strict=True)
            for new in beam.grown(result.logprobs[0], self._end_ids)
        ]
        self._ended += [beam for beam in grown if beam.ended]
        self._live = self._best([beam for beam in grown if not beam.ended])

    def best(self) -> list[Beam]:
        """The beams to return, best first."""
        return self._best([*self._ended, *self._live])

    def _score(self, beam: Beam) -> float:
        return self._at_length(beam.total, self._prompt.prompt_len + len(beam.token_ids))

    def _at_length(self, total: float, length: int) -> float:
        return float(total / length**self._params.length_penalty)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._params.num_beams]

    def _is_over(self) -> bool:
        """At the limit of tokens, or where no live beam can come before those that have ended.

        Log probabilities are at most 0, so a live beam's sum only falls; what its length can still make of it is
        bounded by the two ends of the range of lengths.
        """
        if not self._live or len(self._live[0].token_ids) >= self._prompt.sampling.max_new_tokens:
            return True
        ended = self._best(self._ended)
        if len(ended) < self._params.num_beams:
            return False
        now = self._prompt.prompt_len + len(self._live[0].token_ids)
        reachable = max(
            max(self._at_length(beam.total, now), self._at_length(beam.total, self._max_len)) for beam in self._live
        )
        return reachable <= self._score(ended[-1])


async def search(
    backend: Generator, generation: Generation, params: BeamParams, texts: TokenTexts
) -> list[ChoiceResult]:
    """The complete outputs: ``num_beams`` of the first prompt, best first, then those of the second, and so on.

    Raises:
        Exception: As ``collect``; one request that fails ends the search.
    """
    prompts = generation.requests[:: generation.num_tries]
    searches = [PromptSearch(prompt, params, backend.model.end_ids) for prompt in prompts]
    firsts = [ChoiceResult() for _ in prompts]
    while True:
        steps = [each.requests() for each in searches]
        requests = tuple(request for step in steps for request in step)
        if not requests:
            break
        one_token = dataclasses.replace(generation, requests=requests, texts=(None,) * len(requests), num_tries=1)
        results = iter(await collect(backend, one_token))
        for each, step, first in zip(searches, steps, firsts, strict=True):
            found = [next(results) for _ in step]
            if found:
                each.advance(found)
                first.gpu_s += sum(result.gpu_s for result in found)
                if len(step) == 1 and not first.cached_len:
                    first.cached_len = min(found[0].cached_len, step[0].prompt_len)
    return [
        _result(beam, prompt, first if index == 0 else ChoiceResult(), texts)
        for each, prompt, first in zip(searches, prompts, firsts, strict=True)
        for index, beam in enumerate(each.best())
    ]


def _result(beam: Beam, prompt: Request, counted: ChoiceResult, texts: TokenTexts) -> ChoiceResult:
    stream = texts.decoder.start(prompt.prompt_ids)
    parts = [stream.push(token_id) for token_id in beam.token_ids]
    counted.texts = [*parts, stream.flush()]
    counted.token_ids = list(beam.token_ids)
    counted.num_tokens = len(beam.token_ids) + beam.ended
    counted.logprobs = list(beam.entries)
    counted.finish_reason = "stop" if beam.ended else "length"
    return counted
