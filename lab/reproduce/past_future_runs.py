"""What the Past-Future reproductions have in common: the distributions, the methods, and how a run is served.

Figures 3 and 4, how alike the output lengths of neighbouring windows of requests are, need no run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_not

import numpy as np

from farsight.policies.admission.conservative import Conservative
from farsight.policies.admission.past_future import HistoryLengths, PastFuture, TrueLengths, future_memory
from farsight.policies.admission.watermark import Aggressive
from farsight.policies.compose import build_router
from farsight.policies.interfaces import Admission, Job, ReplicaPolicies
from farsight.policies.kv.newest_first import NewestGiveWay
from farsight.policies.lengths.history import LengthHistory
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B, LatencyModel
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.predictors import certain
from farsight.simulator.traffic.lengths import D1, D2, D3, LengthPair, LogNormal
from farsight.simulator.traffic.traces import MissingTraceError, find_data, read_trace
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.rows import EXACT, ONE_DRAW, Exempt, OrderCheck, Row

CAPACITY = 121_060
UNBOUNDED = 10**6


DISTRIBUTIONS = {"D1": D1, "D2": D2, "D3": D3}

# ASSUMED: prompts as in ShareGPT, long outputs as of a reasoning model; the paper gives no numbers.
SHAREGPT_O1_LIKE = LengthPair(LogNormal(161, 1.2, 2048), LogNormal(1500, 0.7, 4096), 4096, fitted=True)


@dataclass(frozen=True, slots=True)
class Method:
    """An admission as a line of the table names it.

    Attributes:
        make: From ``max_new_tokens``.
        draws: Whether its answer may change from step to step though nothing has ended.
    """

    name: str
    make: Callable[[int], Admission]
    draws: bool = False


def past_future(reserve_ratio: float) -> Method:
    def make(max_new_tokens: int) -> Admission:
        history = LengthHistory(initial=[max_new_tokens])
        return PastFuture(HistoryLengths(history, np.random.default_rng(1)), reserve_ratio=reserve_ratio)

    return Method(f"Past-Future {reserve_ratio:.0%}", make, draws=True)


def aggressive(watermark: float) -> Method:
    return Method(f"Aggressive {watermark:.0%}", lambda _: Aggressive(watermark))


class Counting(Conservative):
    """Counts so many output tokens of every job, whatever its own limit is."""

    def __init__(self, overcommit: float, limit: int) -> None:
        self._output_limit = limit
        super().__init__(overcommit)

    def most_tokens(self, job: Job) -> int:
        return job.prompt_len + self._output_limit


def conservative(overcommit: float = 1.0, counts: int = 0) -> Method:
    """Returns the admission by output limits; ``counts`` is the one for all requests, 0 is each request's own."""
    name = "Conservative" if overcommit == 1 else f"Conservative, overcommit {overcommit:.0%}"
    return Method(name, partial(_counting, overcommit, counts))


def _counting(overcommit: float, counts: int, max_new_tokens: int) -> Admission:
    return Counting(overcommit, counts or max_new_tokens)


ORACLE = Method("Oracle", lambda _: PastFuture(TrueLengths(), reserve_ratio=0.0, max_lists=1))


class Watched(Admission):
    """An admission, and what its batches will really need: M* with true lengths.

    The forecasts of the jobs must be their true lengths.

    Attributes:
        peaks: M* whenever something has been added.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._truth = TrueLengths()
        self._jobs: list[Job] = []
        self._has_added = False
        self._peak = 0
        self._lens: dict[str, int] = {}
        self._sum, self._num_steps = 0, 0
        self.peaks: list[int] = []

    @property
    def mean_peak(self) -> float:
        """M* as a mean over the steps in which a request waits. Each is a scheduling point (Algorithm 1)."""
        return self._sum / self._num_steps if self._num_steps else self._peak

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._has_added = False
        steps = max((job.output_len - self._lens.get(job.request_id, job.output_len) for job in running), default=0)
        self._sum, self._num_steps = self._sum + steps * self._peak, self._num_steps + steps
        self._lens = {job.request_id: job.output_len for job in running}
        # While the same jobs decode, M* stays as it is.
        if len(running) != len(self._jobs) or any(map(is_not, running, self._jobs)):
            self._jobs = list(running)
            self._peak = self._needed()
        self._admission.begin(running, capacity)

    def admits(self, job: Job) -> bool:
        return self._admission.admits(job)

    def add(self, job: Job) -> None:
        self._admission.add(job)
        self._jobs.append(job)
        self._lens[job.request_id] = job.output_len
        self._peak = self._needed()
        if self._has_added:
            self.peaks[-1] = self._peak
        else:
            self.peaks.append(self._peak)
        self._has_added = True

    def _needed(self) -> int:
        if not self._jobs:
            return 0
        lengths = self._truth.draw(self._jobs, 1)[0]
        generated = np.array([each.output_len for each in self._jobs])
        return int(future_memory(np.array([each.known_len for each in self._jobs]), lengths - generated))

    def reserve(self, capacity: int) -> int:
        return self._admission.reserve(capacity)

    def learn(self, output_len: int, *, censored: bool) -> None:
        self._admission.learn(output_len, censored=censored)


@dataclass(frozen=True, slots=True)
class PastFutureOutcome:
    """What Table 1 says of a run; shares in percent.

    Attributes:
        future_required: Mean over all steps.
        future_admitting: The same over admissions alone.
    """

    num_steps: int
    current_memory: float
    future_required: float
    evictions: float
    done: list[Record]
    future_admitting: float

    def numbers(self) -> tuple[float, float, float, float]:
        """In the order of the table's columns."""
        return self.num_steps, self.current_memory, self.future_required, self.evictions


def serve(
    arrivals: Sequence[SimRequest],
    method: Method,
    *,
    capacity: int = CAPACITY,
    latency: LatencyModel = A100_7B,
    clients: int | None = None,
    host_tokens: int = 0,
) -> PastFutureOutcome:
    """One replica under FCFS, with blocks of one token and whole prompts in one step.

    Args:
        host_tokens: Where KV of evicted requests goes while there is room; 0: it is dropped and computed again.
    """
    admission = Watched(method.make(arrivals[0].max_new_tokens))
    shape = ReplicaShape(capacity, 1, host_tokens, UNBOUNDED, UNBOUNDED, look_every=int(method.draws))
    policies = ReplicaPolicies(Fcfs(), admission, NewestGiveWay(swaps=host_tokens > 0))
    scheduler = ReplicaScheduler(policies, SchedulerLimits(UNBOUNDED, 0))
    fleet = Fleet(FleetShape(shape, latency), build_router("fcfs"), lambda _: scheduler, clients=clients)
    recorder = fleet.run(arrivals)
    usage = recorder.usage["0"]
    return PastFutureOutcome(
        usage.num_steps,
        100 * usage.token_steps / usage.num_steps / capacity,
        100 * admission.mean_peak / capacity,
        100 * sum(record.num_evictions for record in recorder.done) / len(arrivals),
        recorder.done,
        100 * float(np.mean(admission.peaks)) / capacity,
    )


def requests(lengths: LengthPair, num: int, seed: int = 0, name: str = "r") -> list[SimRequest]:
    """All at the start, each with its true length for a forecast."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths.prompt.sample(rng, num).tolist(), lengths.output.sample(rng, num).tolist()
    return [
        SimRequest(f"{name}{i}", 0.0, prompt, output, lengths.max_new_tokens, forecast=certain(output))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


NAN = math.nan

CHANCE = 0.01
"""By less than this, windows of one distribution differ in similarity."""


_BIN_TOKENS = 16


def similarity(some: Sequence[int], others: Sequence[int]) -> float:
    """Returns the cosine of two histograms of lengths, in bins of ``_BIN_TOKENS``; 1 for the same distribution."""
    num_bins = max(*some, *others) // _BIN_TOKENS + 1
    a, b = (np.bincount(np.asarray(each) // _BIN_TOKENS, minlength=num_bins).astype(float) for each in (some, others))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def adjacent_similarity(lengths: Sequence[int], history: int, running: int, first: int) -> float:
    """Mean similarity of windows of ``running`` requests, from ``first`` on, with the ``history`` just before each."""
    starts = range(first, len(lengths) - running + 1, running)
    return float(np.mean([similarity(lengths[i : i + running], lengths[i - history : i]) for i in starts]))


def distant_similarity(lengths: Sequence[int], size: int) -> float:
    """Mean similarity of windows of this size that are neither equal nor neighbours."""
    windows = [lengths[i : i + size] for i in range(0, len(lengths) - size + 1, size)]
    pairs = [(a, b) for i, a in enumerate(windows) for b in windows[i + 2 :]]
    return float(np.mean([similarity(a, b) for a, b in pairs]))


TRACES = ("azure2023_conv.csv.gz", "azure2023_code.csv.gz", "mooncake_conversation.jsonl.gz")


def figure_3() -> list[Row]:
    """Windows of 1,000 requests: those next to each other are alike, and at least as much as others are."""
    name, rows = "past_future_window", []
    for file in TRACES:
        setting = f"Fig. 3, {file.split('.')[0]}"
        try:
            lengths = [arrival.output_len for arrival in read_trace(find_data(file))]
        except MissingTraceError as problem:
            rows.append(Row(name, setting, "similarity of adjacent windows", Exempt(str(problem)), NAN))
            continue
        adjacent, apart = adjacent_similarity(lengths, 1000, 1000, 1000), distant_similarity(lengths, 1000)
        note = "the paper's figure has no numbers; high is taken as 0.9; bins of 16 tokens"
        rows.append(
            Row(name, setting, "similarity of adjacent windows", OrderCheck(adjacent > 0.9), adjacent, note, EXACT)
        )
        order = OrderCheck(adjacent > apart)
        draws = EXACT if abs(adjacent - apart) > CHANCE else ONE_DRAW
        rows.append(Row(name, setting, "adjacent less apart", order, adjacent - apart, note, draws))
    return rows


def figure_4() -> list[Row]:
    """A history of 1,000 does about as well as any other, whatever the size of the batch."""
    name, metric = "past_future_window", "similarity of a history of 1000, of the best"
    missing = Exempt("not at hand; get it from https://github.com/HPMLL/BurstGPT")
    rows = [Row(name, "Fig. 4, BurstGPT", metric, missing, NAN)]
    try:
        lengths = [arrival.output_len for arrival in read_trace(find_data(TRACES[0]))]
    except MissingTraceError as problem:
        return [*rows, Row(name, "Fig. 4, azure2023_conv", metric, Exempt(str(problem)), NAN)]
    note = "histories of 100, 200, 500, 1000, 2000 and 4000; at least 0.97 of the best"
    sizes = (100, 200, 500, 1000, 2000, 4000)
    for running in (50, 200, 1000):
        similarities = {size: adjacent_similarity(lengths, size, running, max(sizes)) for size in sizes}
        ours = similarities[1000] / max(similarities.values())
        rows.append(
            Row(name, f"Fig. 4, azure2023_conv, {running} running", metric, OrderCheck(ours >= 0.97), ours, note, EXACT)
        )
    return rows
