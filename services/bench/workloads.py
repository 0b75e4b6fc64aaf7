"""Seeded workloads: the same arguments give the same requests.

``uniform``: output lengths uniform. ``skewed``: log-normal. ``hol``: few very long outputs spread among many short
ones, so that first come, first served always has a straggler; ``hol-burst``: the same with the long ones first.
``zipf``: prompt and output lengths bounded Zipf. ``gamma``: lengths as in ``skewed``, for bursty arrivals. ``prefix``:
groups that share a prefix, Zipf over the groups. Lengths are tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

from farsight.services.bench.requests import BenchRequest, PromptPart

PROMPT_LENS = (64, 256)
OUTPUT_LENS = (8, 256)
SHORT_LENS = (8, 32)
LONG_LENS = (384, 768)
LONG_PERIOD = 12
"""``hol``: one request of this many has a long output (8 %)."""
SKEWED_MEDIAN = 28.0
SKEWED_SIGMA = 1.0

ZIPF_PROMPT_LENS = (16, 512)
ZIPF_OUTPUT_LENS = (4, 512)
ZIPF_EXPONENT = 0.9
"""Exponent of the Zipf law of lengths."""

GAMMA_CV = 4.0
"""Default coefficient of variation of the gaps between arrivals of ``gamma``."""

GROUP_EXPONENT = 1.1
"""Exponent of the Zipf law of prefix popularity."""
NUM_GROUPS = 16
PREFIX_TOKENS = 512


class ZipfRanks:
    """Draws ranks 0 .. ``num_ranks`` - 1, rank ``r`` with a weight of ``(r + 1) ** -exponent``."""

    def __init__(self, num_ranks: int, exponent: float) -> None:
        self._cumulative = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(num_ranks)))

    def draw(self, rng: random.Random) -> int:
        return min(bisect(self._cumulative, rng.random() * self._cumulative[-1]), len(self._cumulative) - 1)


def make_workload(
    name: str, num_requests: int, seed: int, num_groups: int = NUM_GROUPS, prefix_tokens: int = PREFIX_TOKENS
) -> list[BenchRequest]:
    """The requests of a workload.

    Args:
        name: One of ``WORKLOADS``.
        num_groups: Number of prefixes of ``prefix``.
        prefix_tokens: Length of each prefix in tokens.
    """
    rng = random.Random(seed)
    if name == "zipf":
        return _zipf(num_requests, rng)
    requests = _by_output_length(_OUTPUT_LENGTH[name], num_requests, rng)
    if name.startswith("hol"):
        _lengthen(requests, rng)
    if name == "hol-burst":
        requests.sort(key=lambda request: request.kind != "long")
    if name == "prefix":
        requests = _with_prefixes(requests, num_groups, prefix_tokens, rng)
    return [replace(request, id=i) for i, request in enumerate(requests)]


def _by_output_length(
    draw: Callable[[random.Random], int], num_requests: int, rng: random.Random
) -> list[BenchRequest]:
    requests = []
    for i in range(num_requests):
        # The order of the draws is fixed, so that figures of one seed stay comparable between versions.
        output_tokens, prompt_tokens = draw(rng), rng.randint(*PROMPT_LENS)
        requests.append(BenchRequest(i, output_tokens, (PromptPart(rng.getrandbits(31), prompt_tokens),)))
    return requests


def _uniform(rng: random.Random) -> int:
    return rng.randint(*OUTPUT_LENS)


def _skewed(rng: random.Random) -> int:
    drawn = math.exp(rng.gauss(math.log(SKEWED_MEDIAN), SKEWED_SIGMA))
    return int(min(OUTPUT_LENS[1], max(OUTPUT_LENS[0], drawn)))


def _short(rng: random.Random) -> int:
    return rng.randint(*SHORT_LENS)


_OUTPUT_LENGTH: dict[str, Callable[[random.Random], int]] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "hol": _short,
    "hol-burst": _short,
    "gamma": _skewed,
    "prefix": _skewed,
}

WORKLOADS = (*_OUTPUT_LENGTH, "zipf")


def _lengthen(requests: list[BenchRequest], rng: random.Random) -> None:
    """Makes one request of every period a long one, at a random place in it."""
    for start in range(0, len(requests), LONG_PERIOD):
        place = start + rng.randrange(min(LONG_PERIOD, len(requests) - start))
        for i in range(start, min(start + LONG_PERIOD, len(requests))):
            requests[i] = replace(requests[i], kind="short")
        requests[place] = replace(requests[place], output_tokens=rng.randint(*LONG_LENS), kind="long")


def _zipf(num_requests: int, rng: random.Random) -> list[BenchRequest]:
    prompts = ZipfRanks(ZIPF_PROMPT_LENS[1] - ZIPF_PROMPT_LENS[0] + 1, ZIPF_EXPONENT)
    outputs = ZipfRanks(ZIPF_OUTPUT_LENS[1] - ZIPF_OUTPUT_LENS[0] + 1, ZIPF_EXPONENT)
    requests = []
    for i in range(num_requests):
        prompt = PromptPart(rng.getrandbits(31), ZIPF_PROMPT_LENS[0] + prompts.draw(rng))
        requests.append(BenchRequest(i, ZIPF_OUTPUT_LENS[0] + outputs.draw(rng), (prompt,)))
    return requests


def _with_prefixes(
    requests: list[BenchRequest], num_groups: int, prefix_tokens: int, rng: random.Random
) -> list[BenchRequest]:
    zipf = ZipfRanks(num_groups, GROUP_EXPONENT)
    prefixes = [PromptPart(rng.getrandbits(31), prefix_tokens) for _ in range(num_groups)]
    return [replace(request, parts=(prefixes[zipf.draw(rng)], *request.parts)) for request in requests]


TURNS = 10
"""Turns of a conversation."""

TALK_TOKENS = 6000
"""Prompt of its last turn."""

GAP_S = 0.8
"""Mean seconds between an answer and the next turn: a tenth of what an agent's tools take in the median."""

_REPLY_SHARE = 0.25
_ANSWERS = (8, 48)


def make_conversations(num_talks: int, num_tokens: int, seed: int) -> tuple[list[BenchRequest], list[float]]:
    """Draws conversations of ``TURNS`` turns, whose prompts grow to ``num_tokens``, and the gaps before their turns.

    The answers in later prompts are drawn as well, so that all servers get the same prompts.
    """
    rng, requests, gaps_s = random.Random(seed), list[BenchRequest](), list[float]()
    for _ in range(num_talks):
        parts: tuple[PromptPart, ...] = ()
        shares = [rng.expovariate(1) + _REPLY_SHARE for _ in range(TURNS)]
        for share in shares:
            num_new = max(1, int(num_tokens * share / sum(shares)))
            parts = (*parts, PromptPart(rng.getrandbits(31), num_new))
            requests.append(BenchRequest(len(requests), rng.randint(*_ANSWERS), parts))
            gaps_s.append(rng.expovariate(1 / GAP_S))
    return requests, gaps_s


def drawn_arrivals(num_requests: int, rate: float, cv: float, seed: int) -> list[float]:
    """Arrivals whose gaps are Gamma distributed.

    Args:
        rate: Mean requests per second.
        cv: Coefficient of variation of the gaps: 1 is a Poisson process, 0 even spacing, above 1 bursts.
    """
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(num_requests):
        now += rng.gammavariate(1 / cv**2, cv**2 / rate) if cv else 1 / rate
        arrivals.append(now)
    return arrivals


def replayed_arrivals(times: Sequence[float], rate: float | None, time_scale: float) -> list[float]:
    """The arrivals of a trace, from 0 on.

    Args:
        times: Seconds, not decreasing.
        rate: Mean requests per second that the trace is scaled to; None keeps its own rate.
        time_scale: Seconds of the run per second of the trace; used without ``rate``.
    """
    span = times[-1] - times[0] if times else 0.0
    if rate is not None:
        time_scale = (len(times) / rate) / span if span else 0.0
    return [(time - times[0]) * time_scale for time in times]
