"""Past-Future: its goodput over Aggressive's (Figure 7), and the columns of Table 1 and Table 2 that are missed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from farsight.simulator.cluster.latency import GPUS, MODELS, Roofline
from farsight.simulator.experiment import free_kv_tokens
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.arrivals import Poisson
from farsight.simulator.traffic.lengths import D1, LengthPair
from lab.reproduce.conditions.table import AS_IS, conditions
from lab.reproduce.past_future import TABLE_1, goodput
from lab.reproduce.past_future_images import TABLE_2, Seeing, questions, throughput
from lab.reproduce.past_future_runs import (
    CAPACITY,
    DISTRIBUTIONS,
    SHAREGPT_O1_LIKE,
    Method,
    PastFutureOutcome,
    aggressive,
    past_future,
    requests,
    serve,
)
from lab.reproduce.rows import Reproduction, between, near

_A100 = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"])


_BOTH = Sla()


@dataclass(frozen=True, slots=True)
class Heavy:
    """Heavy load of Figure 7, as reproduced.

    Attributes:
        clients: None: requests come by themselves, ``rate`` a second.
        sla: The bounds of a good request.
        reserve, watermark: Of Past-Future and of Aggressive.
        capacity: KV tokens.
        host_tokens: As in ``past_future_runs.serve``.
    """

    lengths: LengthPair = SHAREGPT_O1_LIKE
    num_requests: int = 400
    clients: int | None = 130
    rate: float = math.inf
    sla: Sla = _BOTH
    reserve: float = 0.05
    watermark: float = 0.95
    capacity: int = CAPACITY
    host_tokens: int = 0


@cache
def _served(setting: Heavy, method: Method, seed: int) -> PastFutureOutcome:
    """Runs a setting once, whatever its bounds are."""
    arrivals = requests(setting.lengths, setting.num_requests, seed)
    if setting.clients is None:
        at = Poisson(setting.rate).sample(np.random.default_rng(seed), len(arrivals)).tolist()
        arrivals = [replace(each, arrived_at=instant) for each, instant in zip(arrivals, at, strict=True)]
    capacity, host_tokens = setting.capacity, setting.host_tokens
    return serve(arrivals, method, capacity=capacity, latency=_A100, clients=setting.clients, host_tokens=host_tokens)


_ours, _bold = cache(past_future), cache(aggressive)  # equal ones must be one and the same, as keys


def goodput_ratio(setting: Heavy, seed: int) -> dict[str, float]:
    """Returns the goodput of Past-Future over that of Aggressive."""
    methods = _ours(setting.reserve), _bold(setting.watermark)
    alike = replace(setting, sla=_BOTH, reserve=0.0, watermark=0.0)
    ours, bold = (goodput(_served(alike, method, seed), setting.sla) for method in methods)
    return {"goodput, Past-Future / Aggressive": ours.good / bold.good}


_BASE = Heavy()
_GAPS = Sla(ttft_s=math.inf)
GOODPUT_SETTINGS = {
    AS_IS: _BASE,
    "first token within 30 s": replace(_BASE, sla=Sla(ttft_s=30.0)),
    "first token at any time": replace(_BASE, sla=_GAPS),
    "gaps up to 0.5 s": replace(_BASE, sla=Sla(mtpot_s=0.5)),
    "gaps up to 5 s": replace(_BASE, sla=Sla(mtpot_s=5.0)),
    "watermark 99 %": replace(_BASE, watermark=0.99),
    "reserve 10 %": replace(_BASE, reserve=0.1),
    "half of the memory, half of the clients": replace(_BASE, capacity=CAPACITY // 2, clients=65),
    "evicted KV goes to the host": replace(_BASE, host_tokens=10 * CAPACITY),
    "170 clients": replace(_BASE, clients=170),
    "3 requests a second, no clients": replace(_BASE, clients=None, rate=3.0),
    "D1, 36 clients": replace(_BASE, lengths=D1, num_requests=150, clients=36),
    "first token at any time, 170 clients": replace(_BASE, sla=_GAPS, clients=170),
    "first token at any time, 170 clients, watermark 99 %": replace(_BASE, sla=_GAPS, clients=170, watermark=0.99),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of Table 1 with 300 requests.

    Attributes:
        distribution: One of the keys of ``TABLE_1``.
        method: As Table 1 names it.
        limit: ``max_new_tokens`` that the method counts with; 0: the distribution's upper end.
    """

    distribution: str
    method: str
    limit: int = 0

    @property
    def printed(self) -> tuple[float, ...]:
        """Steps, memory in use, future required and evictions."""
        methods, *lines = TABLE_1[self.distribution]
        return lines[[method.name for method in methods].index(self.method)]

    def serve(self, seed: int, *, every_step: bool) -> PastFutureOutcome:
        methods, *_ = TABLE_1[self.distribution]
        arrivals = requests(DISTRIBUTIONS[self.distribution], 300, seed)
        if self.limit:
            arrivals = [replace(each, max_new_tokens=self.limit) for each in arrivals]
        method = next(method for method in methods if method.name == self.method)
        return serve(arrivals, method, every_step=every_step)


_OVER_ADMISSIONS, _OVER_STEPS = "future required over admissions, %", "future required over steps, %"
_IN_USE, _EVICTED = "memory in use, %", "evictions for 100 requests"


def future_required(line: Line, seed: int) -> dict[str, float]:
    """Returns both means of M*, of which the text does not say which it prints."""
    outcome = line.serve(seed, every_step=True)
    return {_OVER_ADMISSIONS: outcome.future_required, _OVER_STEPS: outcome.future_by_point}


def memory_in_use(line: Line, seed: int) -> dict[str, float]:
    """Returns the memory in use and the evictions."""
    outcome = line.serve(seed, every_step=False)
    return {_IN_USE: outcome.current_memory, _EVICTED: outcome.evictions}


FUTURE_LINES = (
    Line("D1", "Past-Future 5%"),
    Line("D1", "Aggressive 95%"),
)
LIMIT_LINES = tuple(
    Line("D2", method, limit) for method in ("Conservative", "Conservative, overcommit 125%") for limit in (0, 4096)
)


@dataclass(frozen=True, slots=True)
class Answers:
    """A line of Table 2 with answers of another length."""

    line: Seeing
    answer_tokens: float


def seeing_throughput(setting: Answers, seed: int) -> dict[str, float]:
    """Returns the output tokens a second of Past-Future."""
    gpu = Roofline(GPUS["a100-80g"], MODELS[setting.line.model])
    arrivals = questions(setting.line, 300, seed, setting.answer_tokens)
    done = serve(arrivals, past_future(0.05), capacity=free_kv_tokens(gpu), latency=gpu).done
    return {"tokens/s": throughput(done)}


ANSWER_TOKENS = (4.0, 16.0, 64.0)


def _table_1() -> Reproduction:
    name, source = "conditions_past_future_table1", "Past-Future, Table 1: what decides its columns"
    tables = []
    for line in FUTURE_LINES:
        required = near(line.printed[2], points=1.5)
        wanted = {_OVER_ADMISSIONS: required, _OVER_STEPS: required}
        tables.append(conditions(name, source, {f"{line.distribution}, {line.method}": line}, future_required, wanted))
    for line in LIMIT_LINES:
        _, in_use, _, evictions = line.printed
        wanted = {_IN_USE: near(in_use, points=1.5), _EVICTED: near(evictions, points=3.0)}
        what = f"{line.distribution}, {line.method}{f', counting {line.limit:,}' if line.limit else ''}"
        tables.append(conditions(name, source, {what: line}, memory_in_use, wanted))
    return Reproduction(name, source, tuple(cell for table in tables for cell in table.cells))


def _table_2() -> Reproduction:
    name, source = "conditions_past_future_table2", "Past-Future, Table 2: throughput by the length of answers"
    tables = [
        conditions(
            name,
            source,
            {
                f"{line.name}, answers of {num:g} tokens": Answers(replace(line, limit=128), num)
                for num in ANSWER_TOKENS
            },
            seeing_throughput,
            {"tokens/s": near(line.lightllm, share=0.15)},
        )
        for line in TABLE_2
    ]
    return Reproduction(name, source, tuple(cell for table in tables for cell in table.cells))


PAST_FUTURE_CONDITIONS = (
    conditions(
        "conditions_past_future",
        "Past-Future, Fig 7: what decides its goodput over Aggressive's",
        GOODPUT_SETTINGS,
        goodput_ratio,
        {"goodput, Past-Future / Aggressive": between(2, 3)},
    ),
    _table_1(),
    _table_2(),
)
