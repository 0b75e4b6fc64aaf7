"""Cuts drawn requests to the context that servers list, so that none of them is refused for its length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from services.bench.cases import Case
from services.bench.client import count_prompt
from services.bench.load import run_async
from services.bench.options import BenchOptions, body_form
from services.bench.requests import BenchRequest, PromptPart, clipped
from services.bench.targets import BenchTarget, make_call

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
        fitted.append(dataclasses.replace(case, requests=requests))
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
