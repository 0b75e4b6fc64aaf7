"""The loads that one call of ``farsight bench`` sends to every server, cut to the context that the servers list."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farsight.services.bench.client import count_prompt
from farsight.services.bench.datasets import chat_requests, prefix_requests, text_requests, trace_requests
from farsight.services.bench.load import Conversations, Load, run_async
from farsight.services.bench.options import BenchOptions, body_form
from farsight.services.bench.requests import BenchRequest, PromptPart, clipped
from farsight.services.bench.targets import BenchTarget, make_call
from farsight.services.bench.workloads import (
    GAMMA_CV,
    TALK_TOKENS,
    TURNS,
    drawn_arrivals,
    make_conversations,
    make_workload,
    replayed_arrivals,
)

NUM_TALKS = 8
"""Conversations at once where ``--concurrency`` does not say."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load.

    Attributes:
        name: Name in tables.
        load: As of ``load.measure``.
        later: Requests of the rounds after the first; where there are none, every round has the same.
    """

    name: str
    requests: Sequence[BenchRequest]
    load: Load
    later: Sequence[Sequence[BenchRequest]] = ()

    def of_round(self, number: int) -> Sequence[BenchRequest]:
        """Returns the requests of a round, from 0."""
        return self.later[number - 1] if number and self.later else self.requests

    @property
    def longest_output(self) -> int:
        return max(request.output_tokens for request in self.requests)

    @property
    def file_name(self) -> str:
        """The name without characters that file systems reject."""
        return "".join(char if char.isalnum() or char in "-." else "_" for char in self.name)


def make_cases(options: BenchOptions) -> list[Case]:
    """Every workload under every load.

    Raises:
        TraceError: A file cannot be used.
    """
    if options.chat_texts is not None:
        return _chat_cases(options, options.chat_texts)
    if options.conversations:
        return [_conversations(options, num_talks) for num_talks in options.concurrency or (NUM_TALKS,)]
    cases = []
    for name, drawn in _sources(options):
        requests = clipped(drawn, options.max_prompt_tokens, options.max_output_tokens)
        if options.concurrencies:
            cases += [Case(f"{name}, {num} in flight", requests, num) for num in options.concurrencies]
        elif options.trace is not None:
            cases.append(_replay(name, requests, options))
        else:
            cases.append(_open_loop(name, requests, options))
    return cases


def _chat_cases(options: BenchOptions, path: Path) -> list[Case]:
    """Returns every load with other chats in each round, since chats are sent as they are.

    So no server gets one twice while the file has others.
    """
    num, loads = options.num_requests, options.concurrencies or (0,)
    num_passes = 1 if options.same_prompts else options.repeats * len(loads)
    limit = options.max_output_tokens or options.output_tokens
    chats = chat_requests(path, num * num_passes, options.seed, limit, options.max_prompt_tokens)
    passes = itertools.cycle(chats[start : start + num] for start in range(0, len(chats), num))
    cases = []
    for load in loads:
        first, *later = itertools.islice(passes, options.repeats)
        closed = Case(f"{path.name}, {load} in flight", first, load)
        cases.append(replace(closed if load else _open_loop(path.name, first, options), later=later))
    return cases


def _conversations(options: BenchOptions, num_talks: int) -> Case:
    requests, gaps_s = make_conversations(num_talks, options.max_prompt_tokens or TALK_TOKENS, options.seed)
    return Case(f"{num_talks} conversations of {TURNS} turns", requests, Conversations(TURNS, tuple(gaps_s)))


def _sources(options: BenchOptions) -> list[tuple[str, list[BenchRequest]]]:
    limit, seed = options.num_requests, options.seed
    if (path := options.trace) is not None:
        return [(path.name, trace_requests(path, limit, seed))]
    if (path := options.texts) is not None:
        return [(path.name, text_requests(path, limit, seed, options.output_tokens))]
    if (path := options.prefix_groups) is not None:
        return [(path.name, prefix_requests(path, limit, seed, options.output_tokens))]
    return [
        (name, make_workload(name, limit, seed, options.num_groups, options.prefix_tokens))
        for name in options.workloads
    ]


def _replay(name: str, requests: Sequence[BenchRequest], options: BenchOptions) -> Case:
    scale = options.time_scale if options.time_scale is not None else 1.0
    arrivals = replayed_arrivals([request.arrival_s or 0.0 for request in requests], options.rate, scale)
    paced = f"{options.rate:g} req/s" if options.rate is not None else f"times x {scale:g}"
    return Case(f"{name}, {paced}", requests, arrivals)


def _open_loop(name: str, requests: Sequence[BenchRequest], options: BenchOptions) -> Case:
    assert options.rate is not None  # Otherwise it is a closed loop.
    cv = options.cv if options.cv is not None else GAMMA_CV if name == "gamma" else 1.0
    arrivals = drawn_arrivals(len(requests), options.rate, cv, options.seed)
    return Case(f"{name}, {options.rate:g} req/s, CV {cv:g}", requests, arrivals)


_PROBE_WORDS = 128
_MOST_PER_WORD = 8
"""Most tokens of a word that the probe allows for: a prompt of letters alone takes fewer."""
_SPREAD = 1.125
"""Prompts differ in their tokens per word by a few percent."""
_OUTPUT_SHARE = 0.75
"""Share of the context that an output may take at most, so that a prompt is left."""


def fit_cases(
    cases: Sequence[Case], options: BenchOptions, targets: Sequence[BenchTarget], salt: int, say: Callable[[str], None]
) -> list[Case]:
    """Returns the cases with every drawn request cut to the shortest context that a server lists.

    Limits that the options give are taken as they are. Given texts are not cut.
    """
    lengths = [target.max_model_len for target in targets if target.max_model_len]
    if not lengths or options.max_prompt_tokens is not None or options.max_output_tokens is not None:
        return list(cases)
    longest = min(lengths)
    per_word = max(_tokens_per_word(target, options, salt) for target in targets if target.max_model_len)
    fitted = []
    for case in cases:
        requests = _fit(case.requests, longest, per_word, hidden=options.hide_lengths)
        num_cut = sum(new != old for new, old in zip(requests, case.requests, strict=True))
        if num_cut:
            say(
                f"{case.name}: {num_cut} of {len(requests)} requests are cut to fit the served context of {longest}"
                f" tokens ({per_word:.2g} per word); --max-prompt-tokens and --max-output-tokens set other limits"
            )
        fitted.append(replace(case, requests=requests))
    return fitted


def _fit(requests: Sequence[BenchRequest], longest: int, per_word: float, *, hidden: bool) -> list[BenchRequest]:
    most_output = int(_OUTPUT_SHARE * longest)
    # Where lengths are hidden every request asks for the longest output.
    hidden_output = min(most_output, max(request.output_tokens for request in requests)) if hidden else 0
    fitted = []
    for request in requests:
        if request.text is None:
            room = longest - max(hidden_output, min(most_output, request.output_tokens))
            (request,) = clipped([request], max(1, int(room / per_word)), most_output)
        fitted.append(request)
    return fitted


def _tokens_per_word(target: BenchTarget, options: BenchOptions, salt: int) -> float:
    """Returns the tokens that a word of a drawn prompt takes at most on this server, measured by one request."""
    form = body_form(options, 1)
    if form.vocab_size is not None:
        return 1.0  # The prompt is sent as so many token ids.
    num_words = max(1, min(_PROBE_WORDS, target.max_model_len // _MOST_PER_WORD))
    probe = BenchRequest(0, 1, (PromptPart(0, num_words),))
    counted = run_async(count_prompt(target, form.endpoint, make_call(probe, target.model, form, salt)))
    return max(1.0, _SPREAD * counted / num_words)
