"""``[scheduler]``, ``[placement]`` and ``[batch]``: policies and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require
from core.config.engine import EXECUTIONS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What decides.

    Attributes:
        preset: A named composition of policies (``policies.presets``).
        placement: How requests find their replica; empty means as the preset says. So it does for the other parts:
        order: Who runs next on a replica.
        admission: Who may become resident there.
        kv: What becomes of KV when memory is short: whose is dropped, or moved to the host pool.
        execution: How a formed batch runs, in the presets of batch mode: ``ragged`` without padding, each request
            returned when it ends; ``static`` padded to the longest, in lockstep, returned together.
        gamma: Ageing in the order of ``farsight``: rank / (1 + gamma * wait / expected cost of the rest). With 0 a long
            request starves while short ones keep coming; more of it costs more of the mean.
        watermark: Share of the KV pool that admission may fill, in (0, 1].
        standby_slots: Requests shipped to the worker ahead of need.
        quantum_s: First quantum of skip-join MLFQ at the least; it is the time of a step of one sequence where that is
            longer. A quantum should outlast four round trips between scheduler and worker, of some 5 ms each.
        starve_limit_s: Under skip-join MLFQ a request that has waited so long is promoted to the first queue.
        event_log: Directory in which every Scheduler, and the Batcher, writes down what its state machine hears and
            answers, to be told again to a fresh one (``python -m services.commands.conformance``); empty writes
            nothing.
    """

    preset: str = "fcfs"
    placement: str = ""
    order: str = ""
    admission: str = ""
    kv: str = ""
    execution: str = "ragged"
    gamma: float = 0.1
    watermark: float = 0.95
    standby_slots: int = 16
    quantum_s: float = 0.02
    starve_limit_s: float = 30.0
    event_log: str = ""

    def __post_init__(self) -> None:
        executions = ", ".join(EXECUTIONS)
        require(self.execution in EXECUTIONS, "scheduler.execution", self.execution, f"one of {executions}")
        require(self.gamma >= 0, "scheduler.gamma", self.gamma, "a number >= 0")
        require(0 < self.watermark <= 1, "scheduler.watermark", self.watermark, "a number > 0 and <= 1")
        require(self.standby_slots >= 0, "scheduler.standby_slots", self.standby_slots, "an integer >= 0")
        for name in ("quantum_s", "starve_limit_s"):
            require(getattr(self, name) > 0, f"scheduler.{name}", getattr(self, name), "a number > 0")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How batches are formed under a preset of batch mode.

    Attributes:
        batch_size: Requests of a batch at most; 0 is the preset's own number. Never more than ``engine.max_num_seqs``.
        wma_threshold: A request joins a batch only if the wasted memory accesses stay below this; in tokens (Magnus).
        num_bins: Bins of output lengths (Multi-Bin).
        max_wait_s: A request waits so long for others of its bin; then its batch goes as it is (Multi-Bin).
    """

    batch_size: int = 0
    wma_threshold: float = 50_000.0
    num_bins: int = 4
    max_wait_s: float = 1.0

    def __post_init__(self) -> None:
        require(self.batch_size >= 0, "batch.batch_size", self.batch_size, "an integer >= 0")
        require(self.wma_threshold >= 0, "batch.wma_threshold", self.wma_threshold, "a number >= 0")
        require(self.num_bins >= 1, "batch.num_bins", self.num_bins, "an integer >= 1")
        require(self.max_wait_s >= 0, "batch.max_wait_s", self.max_wait_s, "a number >= 0")
