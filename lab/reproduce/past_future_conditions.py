"""Past-Future: what decides its goodput over Aggressive's (Figure 7), and the columns of Tables 1 and 2."""

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
from lab.reproduce.conditions import conditions, joined, varied
from lab.reproduce.past_future import TABLE_1, goodput
from lab.reproduce.past_future_images import TABLE_2, Seeing, questions, throughput
from lab.reproduce.past_future_runs import (
    CAPACITY,
    DISTRIBUTIONS,
    SHAREGPT_O1_LIKE,
    Method,
    PastFutureOutcome,
    aggressive,
    conservative,
    past_future,
    requests,
    serve,
)
from lab.reproduce.rows import Reproduction, between, near

_A100 = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"])
_BOTH, _GAPS = Sla(), Sla(ttft_s=math.inf)


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


@dataclass(frozen=True, slots=True)
class Line:
    """A line of Table 1 with 300 requests.

    Attributes:
        distribution: One of the keys of ``TABLE_1``.
        number: In that table, from 0.
        instead: Another method than the line's.
    """

    distribution: str
    number: int
    instead: Method | None = None

    @property
    def printed(self) -> tuple[float, ...]:
        """Steps, memory in use, future required and evictions."""
        _, *lines = TABLE_1[self.distribution]
        return lines[self.number]

    def serve(self, seed: int) -> dict[str, float]:
        """Returns both means of M*, the memory in use and the evictions."""
        method = self.instead or TABLE_1[self.distribution][0][self.number]
        outcome = serve(requests(DISTRIBUTIONS[self.distribution], 300, seed), method)
        required = (outcome.future_required, outcome.future_admitting)
        return dict(zip(_COLUMNS, (outcome.current_memory, *required, outcome.evictions), strict=True))


_COLUMNS = (
    "memory in use, %",
    "future required over steps, %",
    "future required over admissions, %",
    "evictions for 100 requests",
)
_LINES = {
    "D2, Conservative": Line("D2", 7),
    "D2, Conservative, its own limits": Line("D2", 7, conservative()),
    "D2, Conservative, overcommit 125%": Line("D2", 8),
    "D2, Conservative, overcommit 125%, its own limits": Line("D2", 8, conservative(1.25)),
}


def _table_1(name: str, source: str) -> Reproduction:
    tables = []
    for what, line in _LINES.items():
        _, in_use, required, evictions = line.printed
        figures = [near(in_use, points=1.5), *[near(required, points=1.5)] * 2, near(evictions, points=3.0)]
        wanted = dict(zip(_COLUMNS, figures, strict=True))
        tables.append(conditions(name, source, {what: line}, Line.serve, wanted))
    return joined(name, source, tables)


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


def _table_2(name: str, source: str) -> Reproduction:
    tables = []
    for line in TABLE_2:
        lengths = {f"{line.name}, answers of {n:g} tokens": Answers(replace(line, limit=128), n) for n in (4, 16, 64)}
        wanted = {"tokens/s": near(line.lightllm, share=0.15)}
        tables.append(conditions(name, source, lengths, seeing_throughput, wanted))
    return joined(name, source, tables)


PAST_FUTURE_CONDITIONS = (
    conditions(
        "conditions_past_future",
        "Past-Future, Fig 7: what decides its goodput over Aggressive's",
        varied(
            Heavy(),
            {
                "first token within 30 s": {"sla": Sla(ttft_s=30.0)},
                "first token at any time": {"sla": _GAPS},
                "gaps up to 0.5 s": {"sla": Sla(mtpot_s=0.5)},
                "gaps up to 5 s": {"sla": Sla(mtpot_s=5.0)},
                "watermark 99 %": {"watermark": 0.99},
                "reserve 10 %": {"reserve": 0.1},
                "half of the memory, half of the clients": {"capacity": CAPACITY // 2, "clients": 65},
                "evicted KV goes to the host": {"host_tokens": 10 * CAPACITY},
                "170 clients": {"clients": 170},
                "3 requests a second, no clients": {"clients": None, "rate": 3.0},
                "D1, 36 clients": {"lengths": D1, "num_requests": 150, "clients": 36},
                "first token at any time, 170 clients": {"sla": _GAPS, "clients": 170},
                "first token at any time, 170 clients, watermark 99 %": {
                    "sla": _GAPS,
                    "clients": 170,
                    "watermark": 0.99,
                },
            },
        ),
        goodput_ratio,
        {"goodput, Past-Future / Aggressive": between(2, 3)},
    ),
    _table_1("conditions_past_future_table1", "Past-Future, Table 1: what decides its columns"),
    _table_2("conditions_past_future_table2", "Past-Future, Table 2: throughput by the length of answers"),
)
