"""``[scheduler]``, ``[placement]`` and ``[batch]``: policies and their numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farsight.core.config.engine import EXECUTIONS
from farsight.core.errors import require

DEFAULT_PRESET = "fcfs"
"""What a server does that is told nothing."""

MLFQ_KINDS = ("skip-join", "no-preemption", "preemption")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which policies decide.

    Attributes:
        preset: A named composition of policies (``policies.presets``).
        placement: Which replica gets a request; empty: the preset's own. The same holds for the next three settings.
        order: Which request runs next on a replica.
        admission: Which request may become resident there.
        kv: Whose KV is dropped, or moved to the host pool, when memory is short.
        execution: How a formed batch runs, in the presets of batch mode: ``ragged`` without padding, each request
            returned when it ends; ``static`` padded to the longest, in lockstep, returned together.
        gamma: Ageing in the order ``gittins``: rank / (1 + gamma * wait / expected cost of the rest). With 0 a long
            request starves while short ones keep coming; a higher value raises the mean completion time.
        tail: How much of the mean completion time the order ``boosted`` gives for the slowest requests; above 0, one
            number for all loads. At 0.1 short requests go first almost always, and the longest wait for all of them; at
            10 the order is almost that of arrival. In simulated overloads of 10 and 30 % 1 made the slowest percent
            take 5 to 17 % longer than in order of arrival, for means that were 7 to 52 % lower.
        max_pause_s: Seconds after which a stream that stands still for others goes first, under the order
            ``boosted``. 0: streams that have begun are not stopped for others. A client sees this pause and a turn of
            about 0.15 s. Where lengths are not known ahead and 16 places were overloaded 1.8 times, 0.4 made the mean
            40 % lower than 0 in one simulation, and on a server 5 % higher than order of arrival (ADR 90).
        reading_rate: Tokens a second that the reader of a stream takes in, where its client sends no
            ``x-farsight-reading-rate``. Under the order ``readers`` a stream that is ahead of its reader may stand
            still for others, one that is not goes before all others.
        max_gap_ms: Longest gap between two tokens of a stream that the prompts of other requests may make, in
            milliseconds: so many prompt tokens go into a step as its measured cost allows. Streams that take more than
            half of it by themselves leave prompts as much time as they take. 0 for no bound but
            ``engine.max_batch_tokens``. 200 cost nothing where it was measured.
        watermark: Share of the KV pool that admission may fill, in (0, 1] ("watermark" of the aggressive scheduler in
            Past-Future, table 1).
        standby_slots: Requests sent to the worker ahead of need.
        mlfq: Which MLFQ the order ``skip-join-mlfq`` is: ``skip-join``, FastServe's own; or a baseline of its section
            6.3, which knows no lengths, so that every request joins the first queue: ``no-preemption`` goes on with an
            iteration that outlasts its quantum, ``preemption`` cuts it off (``kills``): its work is lost, its time
            counts, and the request sinks. Iterations are cut off between layers, on ``cpu`` and ``emulated`` devices.
        quantum_s: Shortest quantum of the first queue of skip-join MLFQ, in seconds (FastServe, section 4.1); where a
            step of one sequence takes longer, that is the quantum. A quantum should outlast four round trips between
            Scheduler and worker, of some 5 ms each.
        quantum_ratio: Quantum of a level of skip-join MLFQ divided by that of the level above it (FastServe, section
            4.1).
        num_levels: Levels of skip-join MLFQ, its queues (FastServe, section 4.1); the last is then unbounded. 0 makes
            levels as they are needed.
        starve_limit_s: STARVE_LIMIT: skip-join MLFQ promotes a request that has waited so many seconds to the first
            queue (FastServe, algorithm 1).
        min_idle_slots: K: proactive offload keeps free what so many running requests hold (FastServe, section 4.2).
        num_burst_levels: K': it keeps as many slots free as requests are in so many of the highest levels, if that is
            more.
        reserve_ratio: Share of the KV pool that Past-Future keeps free ("reserved" in its table 1), in [0, 1).
        history_window: w: output lengths that Past-Future predicts from, those of the last so many finished requests
            (section 3.2).
        overcommit: The admission ``conservative`` counts the KV pool as so many times its size ("overcommit" in
            Past-Future, table 1).
        offload_deadline_ms: Milliseconds that the Scheduler waits for the KVOffloadManager to say whose KV moves; then
            it decides by the same rule alone, and waits again once the manager answers in time. 0 never asks.
        event_log: Directory in which every Scheduler, and in batch mode the Batcher, records the events and
            instructions of its state machine; ``python -m farsight.services.commands.conformance`` replays them. Empty
            records nothing.
    """

    preset: str = DEFAULT_PRESET
    placement: str = ""
    order: str = ""
    admission: str = ""
    kv: str = ""
    execution: str = "ragged"
    gamma: float = 0.1
    tail: float = 1.0
    max_pause_s: float = 0.0
    reading_rate: float = 12.0
    max_gap_ms: float = 200.0
    watermark: float = 0.95
    standby_slots: int = 16
    mlfq: str = "skip-join"
    quantum_s: float = 0.02
    quantum_ratio: float = 2.0
    num_levels: int = 0
    starve_limit_s: float = 30.0
    min_idle_slots: int = 1
    num_burst_levels: int = 2
    reserve_ratio: float = 0.05
    history_window: int = 1000
    overcommit: float = 1.0
    offload_deadline_ms: float = 20.0
    event_log: str = ""

    def __post_init__(self) -> None:
        executions = ", ".join(EXECUTIONS)
        require(self.execution in EXECUTIONS, "scheduler.execution", self.execution, f"one of {executions}")
        require(self.gamma >= 0, "scheduler.gamma", self.gamma, "a number >= 0")
        require(0 < self.tail < math.inf, "scheduler.tail", self.tail, "a number > 0")
        require(0 <= self.max_pause_s < math.inf, "scheduler.max_pause_s", self.max_pause_s, "seconds >= 0")
        require(0 < self.reading_rate < math.inf, "scheduler.reading_rate", self.reading_rate, "a number > 0")
        require(0 <= self.max_gap_ms < math.inf, "scheduler.max_gap_ms", self.max_gap_ms, "milliseconds >= 0")
        require(0 < self.watermark <= 1, "scheduler.watermark", self.watermark, "a number > 0 and <= 1")
        require(self.standby_slots >= 0, "scheduler.standby_slots", self.standby_slots, "an integer >= 0")
        deadline_ms = self.offload_deadline_ms
        require(0 <= deadline_ms <= 1000, "scheduler.offload_deadline_ms", deadline_ms, "milliseconds from 0 to 1000")
        for name in ("quantum_s", "starve_limit_s"):
            require(getattr(self, name) > 0, f"scheduler.{name}", getattr(self, name), "a number > 0")
        kinds = ", ".join(MLFQ_KINDS)
        require(self.mlfq in MLFQ_KINDS, "scheduler.mlfq", self.mlfq, f"one of {kinds}")
        self._check_papers()

    def _check_papers(self) -> None:
        require(1 < self.quantum_ratio < math.inf, "scheduler.quantum_ratio", self.quantum_ratio, "a number > 1")
        for name in ("num_levels", "min_idle_slots", "num_burst_levels"):
            require(getattr(self, name) >= 0, f"scheduler.{name}", getattr(self, name), "an integer >= 0")
        require(0 <= self.reserve_ratio < 1, "scheduler.reserve_ratio", self.reserve_ratio, "a number >= 0 and < 1")
        require(self.history_window >= 1, "scheduler.history_window", self.history_window, "an integer >= 1")
        require(1 <= self.overcommit < math.inf, "scheduler.overcommit", self.overcommit, "a number >= 1")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How batches are formed under a preset of batch mode.

    Attributes:
        batch_size: Most requests of a batch (B of Multi-Bin, section 3; the fixed batch size of Magnus, equation 1); 0
            is the preset's own number. Never more than ``engine.max_num_seqs``.
        wma_threshold: Phi: a request joins a batch only if the wasted memory accesses stay below this; in tokens
            (Magnus, section III-C).
        knn_neighbours: k: the serving time of a batch is the mean of so many served batches like it (Magnus,
            section III-D, which gives no number).
        artefact: Directory that ``farsight train --estimator`` wrote: batches whose times are known from the start;
            empty: a batch is estimated by the sum of its steps until 200 batches have run.
        forecast_wait_s: Seconds that a request without a forecast waits for one before it is put into a batch, under a
            preset that reads forecasts; then it counts with the mean of the lengths of the past. A forecast that comes
            later still moves it, until a worker pulls its batch. 0: it does not wait.
        num_bins: k: bins of output lengths (Multi-Bin, section 4).
        max_wait_s: Seconds that a request waits for others of its bin; then its batch runs as it is (Multi-Bin).
        reload_s: Seconds for which a worker takes no batch after one that ran out of memory, as long as the paper's
            worker takes to load its model again before the batch is split (Magnus, section III-C). 0: our workers
            keep their model, and go on at once.
        learn_every_s: Seconds between two fits of the estimator of batch times; Magnus fits every two minutes (section
            III-D).
        learn_min_error_s: Only batches whose estimate was wrong by more than so many seconds are learned from (Magnus,
            section III-D: 2) ...
        learn_min_share: ... and by more than this share of the true time (0.2).
    """

    batch_size: int = 0
    wma_threshold: float = 50_000.0
    knn_neighbours: int = 5
    artefact: str = ""
    forecast_wait_s: float = 0.05
    num_bins: int = 4
    max_wait_s: float = 1.0
    reload_s: float = 0.0
    learn_every_s: float = 120.0
    learn_min_error_s: float = 2.0
    learn_min_share: float = 0.2

    def __post_init__(self) -> None:
        require(self.batch_size >= 0, "batch.batch_size", self.batch_size, "an integer >= 0")
        require(self.wma_threshold >= 0, "batch.wma_threshold", self.wma_threshold, "a number >= 0")
        neighbours = self.knn_neighbours
        require(1 <= neighbours <= 200, "batch.knn_neighbours", neighbours, "an integer from 1 to 200")
        require(self.num_bins >= 1, "batch.num_bins", self.num_bins, "an integer >= 1")
        require(self.max_wait_s >= 0, "batch.max_wait_s", self.max_wait_s, "a number >= 0")
        for name in ("forecast_wait_s", "reload_s"):
            require(0 <= getattr(self, name) < math.inf, f"batch.{name}", getattr(self, name), "seconds >= 0")
        require(0 < self.learn_every_s < math.inf, "batch.learn_every_s", self.learn_every_s, "seconds > 0")
        for name in ("learn_min_error_s", "learn_min_share"):
            require(0 <= getattr(self, name) < math.inf, f"batch.{name}", getattr(self, name), "a number >= 0")


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Which parts of E2 are on, where the placement is ``e2`` (Preble, section 4.2), and what is placed twice.

    Attributes:
        window_s: H, seconds over which load, sharing and queueing are counted.
        rebalance: Redirect requests from replicas that are too heavy.
        rebalance_ratio: T_hbal: a replica is too heavy at so many times the load of the lightest one.
        rebalance_after: A replica's load is compared once it has so many requests in the window.
        autoscale: Give prefixes whose queueing doubles on a replica too heavy to one more.
        balance: Send what is not cached to replicas that mostly decode.
        imbalance_ratio: IMBALR: a replica mostly decodes if decoding is more than this share of its load ...
        balanced_ratio: ... and gets what is not cached if it is less than this share on another replica with load.
        initial_output_len: Output length in tokens that is assumed on replicas where no request ended in the window.
        max_tree_mib: MiB of the prefix tree, which ``e2-forecast`` has as well; beyond it, the Router forgets the least
            recently used prefixes.
        recall: Under any placement: place requests again that wait on one replica and could run at once on another.
    """

    window_s: float = 180.0
    rebalance: bool = True
    rebalance_ratio: float = 1.5
    rebalance_after: int = 50
    autoscale: bool = True
    balance: bool = True
    imbalance_ratio: float = 0.8
    balanced_ratio: float = 0.5
    initial_output_len: float = 200.0
    max_tree_mib: int = 256
    recall: bool = False

    @property
    def max_tree_bytes(self) -> int:
        return self.max_tree_mib << 20

    def __post_init__(self) -> None:
        checks = (
            (self.window_s > 0, "window_s", "a number > 0"),
            (self.max_tree_mib >= 1, "max_tree_mib", "an integer >= 1"),
            (self.rebalance_ratio >= 1, "rebalance_ratio", "a number >= 1"),
            (self.rebalance_after >= 0, "rebalance_after", "an integer >= 0"),
            (0 < self.imbalance_ratio <= 1, "imbalance_ratio", "a number > 0 and <= 1"),
            (0 <= self.balanced_ratio <= 1, "balanced_ratio", "a number >= 0 and <= 1"),
            (self.initial_output_len >= 0, "initial_output_len", "a number >= 0"),
        )
        for ok, name, expected in checks:
            require(ok, f"placement.{name}", getattr(self, name), expected)
