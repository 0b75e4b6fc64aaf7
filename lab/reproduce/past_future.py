"""Past-Future (LightLLM, ASPLOS 2025): Table 1 and Figures 1, 3, 4, 7 and 8.

Unknown of the testbed, and chosen once for all of it:

- Capacity 121,060 tokens (LightLLM's documentation uses it for a 7B model on an A100-80G) and 3,000 requests, all there
  at the start: they reproduce the step counts of Table 1, which the paper gives without either.
- The three distributions as uniform laws: U[32, 4096] and U[2048, 4096], U[3000, 5000] twice, and the first two
  swapped. ``max_new_tokens`` is the upper end.
- Conservative counts 4,096 output tokens of every request, the output limit of Llama-2: set by its memory in use on D2,
  whose outputs are longer. Its other figures there follow; on D1 and D3 that is the upper end itself.
- The history begins with one entry of ``max_new_tokens``. The paper begins with the longest output and does not say how
  many entries.
- Evictions of the aggressive scheduler vary most from workload to workload (86 to 90 for 100 requests on D1 at 99 %),
  and its lines are cheap: they are means of three workloads. All other lines are single runs.
- An eviction drops the KV of the newest, which waits at the head of the queue and computes it again.

"Evicted" is the number of evictions for each 100 requests. "Current memory" and "future required" are means over steps
of the tokens held and of M* with the true lengths, both of the capacity: the paper averages what is required "when
scheduling", and schedules at every step (Algorithm 1). Over admissions alone, 11 of the 27 lines would miss it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from farsight.simulator.cluster.latency import GPUS, MODELS, Roofline
from farsight.simulator.cluster.records import Record
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.lengths import D1, D2, D3, LengthPair
from lab.reproduce.past_future_images import TABLE_2_REPRODUCTION
from lab.reproduce.past_future_runs import (
    DISTRIBUTIONS,
    ORACLE,
    SHAREGPT_O1_LIKE,
    PastFutureOutcome,
    aggressive,
    conservative,
    figure_3,
    figure_4,
    past_future,
    requests,
    serve,
)
from lab.reproduce.rows import (
    Check,
    Exempt,
    Fitted,
    OrderCheck,
    Own,
    Printed,
    Reproduction,
    Row,
    at_most,
    between,
    near,
)

NUM_REQUESTS = 3000
COUNTED = 4096
METHODS = (
    ORACLE,
    *(past_future(ratio) for ratio in (0.03, 0.05, 0.1)),
    *(aggressive(watermark) for watermark in (0.99, 0.95, 0.9)),
    conservative(counts=COUNTED),
)

TABLE_1 = {
    "D1": (
        (*METHODS, conservative(1.5, COUNTED)),
        (294250, 94.87, 98.89, 0),
        (296710, 93.61, 97.47, 6.86),
        (301680, 91.87, 95.73, 3.37),
        (320720, 87.09, 91.51, 1.58),
        (284160, 98.41, 103.12, 93.74),
        (290980, 96.10, 101.21, 24.08),
        (302900, 92.46, 97.87, 10.76),
        (485650, 57.75, 60.79, 0),
        (320530, 87.34, 90.79, 17.23),
    ),
    "D2": (
        (*METHODS, conservative(1.25, COUNTED)),
        (653120, 92.57, 98.29, 0),
        (654500, 92.16, 97.21, 7.42),
        (669770, 90.07, 95.82, 4.39),
        (705920, 85.26, 90.99, 1.54),
        (616230, 97.83, 103.68, 97.72),
        (628410, 95.86, 101.81, 26.19),
        (654190, 92.37, 99.12, 13.88),
        (842470, 71.71, 75.45, 0),
        (665970, 90.64, 94.68, 84.34),
    ),
    "D3": (
        (*METHODS, conservative(1.5, COUNTED)),
        (230690, 96.60, 98.60, 0),
        (239260, 94.50, 96.51, 2.59),
        (241650, 92.64, 94.62, 0.87),
        (263670, 87.80, 89.87, 0.00),
        (227250, 98.13, 100.20, 34.30),
        (234540, 95.07, 97.16, 3.23),
        (247130, 90.29, 92.33, 0.17),
        (374250, 59.73, 61.59, 0),
        (246870, 90.45, 92.54, 19.09),
    ),
}
"""Methods and, line by line, steps, current memory, future required (both in %) and evictions for 100 requests."""

FITTED_STEPS = "; the number of requests and the capacity were set by the step counts"
FITTED_LIMIT = "; what Conservative counts was set by this figure"


def table_1_line(distribution: str, line: int, num_requests: int = NUM_REQUESTS) -> list[Row]:
    methods, *reported = TABLE_1[distribution]
    method = methods[line]
    seeds = range(3 if method.name.startswith("Aggressive") else 1)
    outcomes = [serve(requests(DISTRIBUTIONS[distribution], num_requests, seed), method) for seed in seeds]
    ours = [float(np.mean(values)) for values in zip(*map(PastFutureOutcome.numbers, outcomes), strict=True)]
    steps, current, future, evictions = reported[line]
    # A quarter of the figure and at least 2 points, but never more than was promised beforehand. Where that is as much
    # as the figure, the row is open.
    points = min(7.0 if method.name == "Aggressive 99%" else 3.0, max(0.25 * evictions, 2.0))
    checks = [
        ("decoding steps", near(steps, share=0.02), "within 2 %" + FITTED_STEPS),
        ("current memory, %", near(current, points=1.5), "within 1.5 points"),
        ("future required, %", near(future, points=1.5), "within 1.5 points; a mean over steps"),
        ("evictions for 100 requests", near(evictions, points=points), f"within {points:.3g} points"),
    ]
    rows = []
    if method.name in (ORACLE.name, conservative().name):
        checks.pop()  # neither can evict, by its definition
    for (metric, figure, note), here in zip(checks, ours, strict=False):
        sets_limit = (distribution, method.name, metric) == ("D2", "Conservative", "current memory, %")
        check = Fitted(figure) if sets_limit or metric == "decoding steps" else Printed(figure)
        note += FITTED_LIMIT if sets_limit else ""
        rows.append(Row("past_future_table1", f"{distribution}, {method.name}", metric, check, here, note))
    return rows


def figure_1(distribution: str, num_requests: int = 600) -> list[Row]:
    """The three kinds of scheduler; the figure's own numbers are not printed, so its text is checked."""
    arrivals = requests(DISTRIBUTIONS[distribution], num_requests)
    careful, bold, ours = (serve(arrivals, method) for method in (conservative(), aggressive(0.99), past_future(0.05)))
    low_now, low_later = 0.85 * ours.current_memory, 0.85 * ours.future_required
    claims = [
        ("current memory, Conservative, %", careful.current_memory, careful.current_memory < low_now),
        ("current memory, Aggressive, %", bold.current_memory, bold.current_memory > ours.current_memory),
        ("current memory, Past-Future, %", ours.current_memory, ours.current_memory > 85),
        ("future required, Conservative, %", careful.future_required, careful.future_required < low_later),
        ("future required, Aggressive, %", bold.future_required, bold.future_required > ours.future_required),
        ("future required, Past-Future, %", ours.future_required, 90 < ours.future_required <= 100),
        ("evictions for 100 requests, Aggressive", bold.evictions, bold.evictions > 2 * ours.evictions),
        ("evictions for 100 requests, Past-Future", ours.evictions, ours.evictions < 10),
    ]
    note = f"order only; {num_requests} requests, watermark 99 %, reserve 5 %"
    return [Row("past_future_fig1", distribution, metric, OrderCheck(ok), value, note) for metric, value, ok in claims]


SATURATING = {
    "D1": (D1, 150, (16, 28, 36), (600, 64)),
    "D3": (D3, 150, (16, 28, 36), (600, 56)),
    "ShareGPT-o1 (fitted)": (SHAREGPT_O1_LIKE, 400, (60, 95, 130), (1600, 170)),
}
"""Requests, and clients for light load, about what memory holds, and well above that; then requests and clients for
twice what memory holds, where first tokens are not counted."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second that kept the SLA, and shares of all requests that broke one of its two limits."""

    good: float
    late: float
    stalled: float


def goodput(outcome: PastFutureOutcome, sla: Sla) -> Goodput:
    done = outcome.done
    seconds = max(record.finished_at for record in done)
    return Goodput(
        sum(map(sla.meets, done)) / seconds,
        sum(record.ttft_s > sla.ttft_s for record in done) / len(done),
        sum(record.max_gap_s > sla.mtpot_s for record in done) / len(done),
    )


CLOSED_LOOP = (
    "off: under FCFS what does not fit waits before its first token; {wait:.0%} of Past-Future's and {other:.0%} of"
    " Aggressive's requests are late by that, so at this load TTFT decides and not evictions"
)


def figure_7(name: str) -> list[Row]:
    """Clients that each send a request when the last one has ended; a 7B model on an A100-80G by its roofline."""
    pair, num, all_clients, beyond = SATURATING[name]
    latency = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"])
    arrivals = requests(pair, num)
    rows = []

    def row(setting: str, metric: str, check: Check, ours: float, note: str = "") -> None:
        rows.append(Row("past_future_goodput", f"{name}, {setting}", metric, check, ours, note))

    def at(clients: int) -> list[Goodput]:
        results = []
        for method in (conservative(), aggressive(0.95), past_future(0.05)):
            results.append(goodput(serve(arrivals, method, latency=latency, clients=clients), Sla()))
            drawn = Exempt("drawn in the figure, not printed")
            row(f"{clients} clients, {method.name}", "goodput, requests/s", drawn, results[-1].good)
        return results

    light, full, heavy = (at(clients) for clients in all_clients)
    few, some, many = (f"{clients} clients" for clients in all_clients)
    ratio = light[2].good / light[1].good
    same = OrderCheck(abs(ratio - 1) <= 0.05, bound=1.05)
    row(few, "goodput, Past-Future / Aggressive", same, ratio, "the same, within 5 %")
    gain = Printed(between(2, 3))
    ratio = full[2].good / full[0].good
    row(some, "goodput, Past-Future / Conservative", gain, ratio, 'from "up to 2-3 times other schedulers"')
    ratio = heavy[2].good / heavy[1].good
    reason = CLOSED_LOOP.format(wait=heavy[2].late, other=heavy[1].late)
    note = reason if ratio < 2 else "of other schedulers under heavy loads"
    row(many, "goodput, Past-Future / Aggressive", gain, ratio, note)
    less = heavy[1].stalled - heavy[2].stalled
    metric = "share with a gap above 1.5 s, Aggressive less Past-Future"
    row(many, metric, OrderCheck(less > 0, bound=0.0), less, "more than 0")
    return rows + _gaps_alone(name, pair, latency, *beyond)


GAPS_ALONE = Sla(ttft_s=math.inf)


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """Requests a second, those of them without a long gap, and mean seconds from first token to end."""

    rate: float
    good: float
    running_s: float


def _steady(done: list[Record], clients: int) -> SteadyRun:
    """Between the start, when all clients come at once, and the end, when fewer are left."""
    ended = sorted(done, key=lambda record: record.finished_at)
    middle = ended[len(ended) // 4 : -clients]
    seconds = middle[-1].finished_at - middle[0].finished_at
    running_s = float(np.mean([record.jct_s - record.ttft_s for record in middle]))
    return SteadyRun(len(middle) / seconds, sum(map(GAPS_ALONE.meets, middle)) / seconds, running_s)


def _gaps_alone(name: str, pair: LengthPair, latency: Roofline, num: int, clients: int) -> list[Row]:
    """Heavy load, where first tokens are late under any admission in order of arrival; so only gaps are counted.

    By Little's law, no more clients get a first token within its bound than those that run and those that begin to run
    within that time.
    """
    arrivals, methods = requests(pair, num), (past_future(0.05), aggressive(0.95), aggressive(0.99))
    runs = [_steady(serve(arrivals, each, latency=latency, clients=clients).done, clients) for each in methods]
    ours, *others = runs
    in_time = ours.rate * (Sla().ttft_s + ours.running_s)
    name, setting = "past_future_goodput", f"{name}, {clients} clients"
    note = "the load is beyond it, so first tokens are late under any admission in order of arrival"
    rows = [Row(name, setting, "clients in time, at most", Own(at_most(clients)), in_time, note)]
    for method, run in zip(methods, runs, strict=True):
        drawn = Exempt("drawn in the figure, not printed")
        rows.append(Row(name, f"{setting}, {method.name}", "goodput by gaps, requests/s", drawn, run.good))
    note = "of other schedulers under heavy loads; first tokens not counted; 99 % is vLLM's default"
    for method, run in zip(methods[1:], others, strict=True):
        gain = ours.good / run.good
        rows.append(Row(name, f"{setting}, over {method.name}", "goodput by gaps", Printed(between(2, 3)), gain, note))
    return rows


def figure_8(num_each: int = 250) -> list[Row]:
    """ShareGPT-o1 (fitted), D1, D2 and D3 one after the other: evictions of each line of settings at equal steps."""
    parts = [("o1-", SHAREGPT_O1_LIKE), ("d1-", D1), ("d2-", D2), ("d3-", D3)]
    arrivals = [each for name, pair in parts for each in requests(pair, num_each, name=name)]
    ours, bold, careful = (
        {method.name: serve(arrivals, method) for method in line}
        for line in (
            [past_future(ratio) for ratio in (0.03, 0.05, 0.1)],
            [aggressive(watermark) for watermark in (0.99, 0.95, 0.9, 0.85)],
            [conservative(overcommit) for overcommit in (1.75, 1.5, 1.25, 1.0)],
        )
    )
    note = f"fitted lengths in the place of ShareGPT-o1; {num_each} requests of each part"
    rows = []
    for name, outcome in (ours | bold | careful).items():
        for metric, value in (("decoding steps", outcome.num_steps), ("evictions for 100 requests", outcome.evictions)):
            drawn = Exempt("drawn in the figure, not printed")
            rows.append(Row("past_future_varying", name, metric, drawn, value, note))
    for name, outcome in ours.items():
        for other, line in (("Aggressive", bold), ("Conservative", careful)):
            steps, evictions = zip(*sorted((each.num_steps, each.evictions) for each in line.values()), strict=True)
            there = float(np.interp(outcome.num_steps, steps, evictions))
            metric = f"evictions less those of {other} at equal steps"
            difference = outcome.evictions - there
            order = OrderCheck(difference <= 0, bound=0.0)
            rows.append(Row("past_future_varying", name, metric, order, difference, note))
    return rows


_TABLE_1_CELLS = tuple(partial(table_1_line, name, line) for name in TABLE_1 for line in range(len(TABLE_1[name]) - 1))

PAST_FUTURE = (
    Reproduction("past_future_fig1", "Past-Future, Figure 1", tuple(partial(figure_1, name) for name in DISTRIBUTIONS)),
    Reproduction("past_future_table1", "Past-Future, Table 1", _TABLE_1_CELLS),
    Reproduction("past_future_window", "Past-Future, Figures 3 and 4", (figure_3, figure_4)),
    Reproduction("past_future_goodput", "Past-Future, Figure 7", tuple(partial(figure_7, name) for name in SATURATING)),
    Reproduction("past_future_varying", "Past-Future, Figure 8", (figure_8,)),
    TABLE_2_REPRODUCTION,
)
