"""The systems that Magnus (arXiv 2406.04785) compares, on its testbed as far as that is known.

Unknown of the testbed, and chosen once for all figures:

- Speed: prefill at 60 % of the V100's peak; the time of a decoding step and of a token of context from the two totals
  of the case study, 242 s and 60 s. Nothing of it is fitted to Figures 10 to 13.
- Memory: Theta / Delta = 16,096 tokens, the only reading that gives both of the paper's batch sizes, 7 and 10.
- VSQ (4 bits): 1.4 times the time of a step, outputs 1.15 times as long. The paper says slower and longer and gives no
  numbers; these are set by the throughput of VSQ against VS, 0.66 to 0.71, that follows from its other figures.
- CCB is served as described: all requests wait while a new request's prompt is computed. The result is far faster
than the paper's, so it is served a second time as "CCB, slow joins": 0.5 s more for each step in which a request
joins, set by the throughput of Magnus against CCB. Comparisons with VSQ or with slow joins are thus fitted, no test.
- Rates of arrival: 2 to 4 times what VS serves, since the paper's lengths are not at hand; 600 s of arrivals.

The lengths are those of the eight tasks in ``apps_text.jsonl.gz``, reference outputs for generated ones. The length
predictor is noise on the true length, RMSE 15.649 tokens, for each application as wide as its correlation in Table I
leaves; the serving-time estimator is the simulator's own time for the predicted lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from farsight.core.costs import ImageCost, StepCost
from farsight.estimator.knn import MIN_BATCHES, PERIOD_S, BatchTimes, ServedBatch, padded_batch_s
from farsight.policies.batching.base import BatchPolicy, ChooseBatch, first_arrived
from farsight.policies.batching.fcfs import FcfsBatches
from farsight.policies.batching.hrrn import HighestResponseRatio
from farsight.policies.batching.wma import WmaBatcher
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.fleet.events import BatchEnded
from farsight.policies.interfaces import Admission, Job, ReplicaPolicies
from farsight.policies.kv.newest_first import NewestGiveWay
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import GPUS, MODELS, LatencyModel, LinearLatency, Roofline
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.predictors import certain
from farsight.simulator.traffic.arrivals import Poisson
from farsight.simulator.traffic.traces import MissingTraceError, count_tokens, find_data, read_rows
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.padded import num_computed_tokens, padded_fleet
from lab.reproduce.rows import EXACT, UNBOUND, Exempt, OrderCheck, Printed, Reproduction, Row, near

TEXTS = "apps_text.jsonl.gz"
MEMORY_TOKENS = 16_096
_CAPACITY_TOKENS = int(MEMORY_TOKENS / 0.7)
_RELOAD_S = 20.0
VSQ_SLOWDOWN, VSQ_STRETCH = 1.4, 1.15
SLOW_JOIN_S = 0.5
LIMIT = 1024
_NUM_WORKERS = 7
NUM_SEATS = 7
_RMSE = 15.649
CORRELATION = {"MT": 0.967, "GC": 0.981, "TD": 0.778, "CT": 0.996, "BF": 0.992, "CC": 0.771}
DEVICE = Roofline(GPUS["v100-32g"], MODELS["chatglm-6b"])


@cache
def case_study_latency() -> LinearLatency:
    """Base and context time from 3 T(7, 1000, 1000) = 242 s and T(3, 1000, 1000) + T(18, 10, 10) = 60 s."""
    prefill_s = DEVICE.cost.prefill_token_s
    terms = [((7, 1000, 1000, 3),), ((3, 1000, 1000, 1), (18, 10, 10, 1))]
    units = [StepCost(1.0, 0.0, 0.0, 0.0), StepCost(0.0, 0.0, 0.0, 1.0), StepCost(0.0, prefill_s, 0.0, 0.0)]
    base, context, prefill = (
        np.array([sum(times * padded_batch_s(unit, *batch) for *batch, times in each) for each in terms])
        for unit in units
    )
    base_s, context_s = np.linalg.solve(np.stack([base, context], axis=1), np.array([242.0, 60.0]) - prefill)
    return LinearLatency(StepCost(float(base_s), prefill_s, 0.0, float(context_s)))


class PaperBatcher(WmaBatcher):
    """Batches for ``MEMORY_TOKENS``: the paper's Theta is 70 % of the memory that the weights leave."""

    def __init__(
        self,
        choose: ChooseBatch,
        max_batch_size: int | None = None,
        memory_tokens: int = MEMORY_TOKENS,
        wma_threshold: float = 50_000,
    ) -> None:
        super().__init__(memory_tokens, choose, wma_threshold, max_batch_size)

    def hold(self, memory_tokens: float, now: float) -> None:
        """Does nothing: the memory is given."""


def estimated_hrrn(latency: LatencyModel) -> HighestResponseRatio:
    return HighestResponseRatio(cache(partial(padded_batch_s, latency)))


@dataclass(frozen=True, slots=True)
class Pool:
    """Requests of the eight tasks: prompt, output and predicted output lengths in tokens."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    predicted: tuple[float, ...]


@cache
def _task_lengths(texts: Path) -> tuple[list[int], list[int], list[str]]:
    """Returns prompt and output lengths of the requests of all tasks, in tokens, and their applications."""
    rows = [row.values for row in read_rows(texts)]
    prompts = [count_tokens(f"{row['instruction']}\n{row['user_input']}") for row in rows]
    return prompts, [count_tokens(row["output"]) for row in rows], [row["app"] for row in rows]


@cache
def load_pool(error: float = 1.0, stretch: float = 1.0) -> Pool:
    """Lengths of ``apps_text.jsonl.gz``, every task equally often.

    Args:
        error: How many times as far as the paper's the predicted lengths are off.
        stretch: How many times as long as the reference the outputs are, up to the limit.

    Raises:
        MissingTraceError: the file is not there.
    """
    prompts, outputs_there, named = _task_lengths(find_data(TEXTS))
    prompts = [min(LIMIT, num) for num in prompts]
    outputs = np.array([min(LIMIT, math.ceil(stretch * num)) for num in outputs_there])
    apps = np.array(named)
    spread = np.zeros(len(apps))
    for app, correlation in CORRELATION.items():
        spread[apps == app] = outputs[apps == app].std() * math.sqrt(1 - correlation**2)
    spread *= error * _RMSE / math.sqrt(float((spread**2).mean()))
    predicted = np.clip(outputs + spread * np.random.default_rng(1).standard_normal(len(apps)), 1, LIMIT)
    return Pool(tuple(prompts), tuple(outputs.tolist()), tuple(predicted.tolist()))


def draw_requests(pool: Pool, rate: float, num: int, seed: int = 2) -> list[SimRequest]:
    """Poisson arrivals of requests drawn with replacement."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(pool.outputs), size=num).tolist()
    return [
        SimRequest(str(i), at, pool.prompts[j], pool.outputs[j], LIMIT, forecast=certain(pool.predicted[j]))
        for i, (at, j) in enumerate(zip(Poisson(rate).sample(rng, num).tolist(), chosen, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class MagnusOutcome:
    """Results of one system at one rate: requests and tokens per second until the last return, and response times."""

    throughput: float
    mean_s: float
    tail_s: float
    valid: float
    total: float


def _outcome(done: list[Record], num_tokens: int) -> MagnusOutcome:
    ended_at = max(record.finished_at for record in done)
    waits = np.array([record.jct_s for record in done])
    valid = sum(record.arrival.output_len for record in done)
    tail_s = float(np.quantile(waits, 0.99))
    return MagnusOutcome(len(done) / ended_at, float(waits.mean()), tail_s, valid / ended_at, num_tokens / ended_at)


@dataclass(frozen=True, slots=True)
class Stalling:
    """Continuous batching that stops all requests while a new prompt is computed: two forward passes in a step.

    Attributes:
        join_s: Additional seconds of a step in which a request joins.
        padding: Tokens of context that a step reads for each one there is.
    """

    inner: LatencyModel
    join_s: float = 0.0
    padding: float = 1.0

    @property
    def cost(self) -> StepCost:
        return self.inner.cost

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        context_tokens = round(self.padding * context_tokens)
        if prefill_tokens and decode_seqs:
            join_s = self.join_s + self.inner.step_s(prefill_tokens, 0, 0, prefill_pairs)
            return join_s + self.inner.step_s(0, decode_seqs, context_tokens)
        return self.inner.step_s(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        return self.inner.decode_run_s(decode_seqs, round(self.padding * context_tokens), num_steps)

    def copy_s(self, num_tokens: int) -> float:
        return self.inner.copy_s(num_tokens)

    @property
    def image_cost(self) -> ImageCost:
        return self.inner.image_cost


class InGroups(Admission):
    """Lets requests join only once so many places are free, or none runs; then all places may be filled."""

    def __init__(self, num_seats: int, group: int) -> None:
        self._most_running = num_seats - group

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._joins = not running or len(running) <= self._most_running

    def admits(self, job: Job) -> bool:
        return self._joins

    def add(self, job: Job) -> None:
        """Does nothing: the places are counted by the scheduler."""


def _slower(latency: LinearLatency, factor: float) -> LinearLatency:
    cost = latency.cost
    slow = StepCost(cost.base_s * factor, cost.prefill_token_s * factor, 0.0, cost.context_token_s * factor)
    return LinearLatency(slow)


def continuous(
    arrivals: list[SimRequest], latency: Stalling, num_seats: int = NUM_SEATS, group: int = 1
) -> MagnusOutcome:
    """CCB: at most 7 at a time on each instance.

    Args:
        group: Places that are free before any request joins.
    """
    shape = ReplicaShape(num_blocks=_CAPACITY_TOKENS // 16, max_num_seqs=num_seats, max_batch_tokens=8 * LIMIT)
    limits = SchedulerLimits(num_seats, standby_slots=0)

    def scheduler(_: int) -> ReplicaScheduler:
        if group == 1:
            return build_scheduler("fcfs", limits, PolicySettings(replace(UNBOUND, watermark=1.0)))
        return ReplicaScheduler(ReplicaPolicies(Fcfs(), InGroups(num_seats, group), NewestGiveWay()), limits)

    fleet = Fleet(FleetShape(shape, latency, _NUM_WORKERS), build_router("fcfs", "least-work"), scheduler)
    done = fleet.run(arrivals).done
    return _outcome(done, sum(record.num_tokens for record in done))


def _static_fleet(batcher: BatchPolicy, latency: LatencyModel) -> Fleet:
    return padded_fleet(batcher, latency, _NUM_WORKERS, kv_tokens=_CAPACITY_TOKENS, reload_s=_RELOAD_S)


def static(batcher: BatchPolicy, arrivals: list[SimRequest], latency: LatencyModel) -> MagnusOutcome:
    """Batches that return together."""
    fleet = _static_fleet(batcher, latency)
    done = fleet.run(arrivals).done
    return _outcome(done, num_computed_tokens(fleet))


def serve(system: str, arrivals: list[SimRequest]) -> MagnusOutcome:
    """One of the paper's systems on seven instances."""
    latency = case_study_latency()
    match system:
        case "CCB":
            return continuous(arrivals, Stalling(latency))
        case "CCB, slow joins":
            return continuous(arrivals, Stalling(latency, SLOW_JOIN_S))
        case "VSQ":
            longer = [
                replace(each, output_len=min(LIMIT, math.ceil(VSQ_STRETCH * each.output_len))) for each in arrivals
            ]
            return static(FcfsBatches(10), longer, _slower(latency, VSQ_SLOWDOWN))
        case "VS":
            return static(FcfsBatches(7), arrivals, latency)
        case "GLP":
            return static(PaperBatcher(first_arrived, max_batch_size=7), arrivals, latency)
        case "ABP":
            return static(PaperBatcher(first_arrived), arrivals, latency)
        case "Magnus":
            return static(PaperBatcher(estimated_hrrn(latency)), arrivals, latency)
    raise ValueError(system)


def batches_served(arrivals: list[SimRequest]) -> list[tuple[float, BatchEnded]]:
    """The batches that Magnus serves, with the instants at which they end."""
    fleet = _static_fleet(PaperBatcher(estimated_hrrn(case_study_latency())), case_study_latency())
    fleet.run(arrivals)
    return list(zip(fleet.batches_ended_at, fleet.batches, strict=True))


STEPS_AT_ONCE = 5
"""Periods of learning that one point of the curve covers."""


def table_1() -> list[Row]:
    """Table I: computes Pearson's coefficient of user input and output length by application."""
    name = "magnus_lengths"
    try:
        rows = [row.values for row in read_rows(find_data(TEXTS))]
    except MissingTraceError as problem:
        return [Row(name, "all", "correlation", Exempt(str(problem)), math.nan)]
    lens: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        lens[row["app"]].append((count_tokens(row["user_input"]), count_tokens(row["output"])))
    found = []
    for app, printed in CORRELATION.items():
        ours = float(np.corrcoef(np.array(lens[app]).T)[0, 1])
        note = "within 0.1; reference outputs for ChatGLM-6B's"
        found.append(Row(name, app, "correlation of lengths", Printed(near(printed, points=0.1)), ours, note))
    above = sum(float(row.ours) > 0.8 for row in found)
    most = OrderCheck(above > len(found) / 2)
    return [*found, Row(name, "all", "applications above 0.8", most, above, "most, as the text says", EXACT)]


def estimator_learning(num_requests: int = 20_000, rate: float = 6.0) -> list[Row]:
    """Computes Figure 14, serving times: the error of each two minutes of batches, ten minutes a point.

    The other half of the figure, and Table II, need trained predictors. The estimator is the one that serves
    (``BatchTimes``). It begins with 200 batches measured at half the load, takes the batches of
    a run of Magnus as they end, and learns every two minutes. Errors are of its estimate with the true longest output
    of each batch, before it has learned from it.
    """
    name = "magnus_learning"
    try:
        pool = load_pool()
    except MissingTraceError as problem:
        return [Row(name, "estimator", "RMSE s", Exempt(str(problem)), math.nan)]
    before = batches_served(draw_requests(pool, rate / 2, num_requests // 8, seed=7))
    served = batches_served(draw_requests(pool, rate, num_requests))
    # The step cost is never asked: enough batches are known from the beginning.
    estimator = BatchTimes(StepCost(0.0, 0.0, 0.0, 0.0), [_served(each) for _, each in before[:MIN_BATCHES]])
    points = _errors(estimator, served)
    rows = []
    for number, error_s in enumerate(points):
        at = f"estimator, minute {round(number * STEPS_AT_ONCE * PERIOD_S / 60)}"
        rows.append(Row(name, at, "RMSE s", Exempt("drawn in the figure, not printed"), error_s))
    first, last = points[0], float(np.mean(points[len(points) // 2 :]))
    order, note = OrderCheck(last < first, bound=1.0), "order: learning lowers it"
    return [*rows, Row(name, "estimator, second half / first point", "RMSE ratio", order, last / first, note)]


def _errors(estimator: BatchTimes, served: list[tuple[float, BatchEnded]]) -> list[float]:
    """RMSE of each point of the curve, in seconds."""
    span_s = STEPS_AT_ONCE * PERIOD_S
    squares: dict[int, list[float]] = defaultdict(list)
    for at, batch in served:
        known = _served(batch)
        estimate_s = estimator(known.batch_size, known.prompt_len, known.output_len)
        squares[int(at / span_s)].append((estimate_s - known.duration_s) ** 2)
        estimator.observe(known)
        estimator.learn(at)
    return [math.sqrt(float(np.mean(squares[point]))) for point in sorted(squares)]


def _served(batch: BatchEnded) -> ServedBatch:
    return ServedBatch(batch.num_requests, batch.prompt_len, batch.output_len, batch.duration_s)


MAGNUS_LEARNING = (
    Reproduction("magnus_lengths", "Magnus, Table I", (table_1,)),
    Reproduction("magnus_learning", "Magnus, Fig 14, serving times", (estimator_learning,)),
)
