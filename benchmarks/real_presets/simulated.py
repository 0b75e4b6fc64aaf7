"""The same cells in virtual time: what the presets decide, on a machine whose speed does not drift between two runs."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.real_presets.cells import (
    IN_FLIGHT,
    MOST_FOR_CAPACITY,
    Bench,
    Run,
    System,
    keep,
    keep_capacity,
    known_capacity,
    run_arrivals,
)
from benchmarks.real_presets.chats import GAPS, Chat, draw, seen, simulated
from farsight.core.config.scheduling import SchedulerConfig
from farsight.services.bench.requests import BenchRequest
from farsight.services.bench.statistics import Metrics, distribution
from farsight.simulator.cluster.latency import LinearLatency, Roofline
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import RunOutcome
from farsight.simulator.run import run as run_experiment
from farsight.simulator.traffic.workload import SimRequest

CHUNK = 1024
"""Most tokens of a step, as on a server that computes on a processor."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica with prices of its own.

    Attributes:
        kv_tokens: Tokens that its KV pool holds.
        chats: What the workloads of ``chats.GAPS`` draw from.
    """

    latency: LinearLatency | Roofline
    kv_tokens: int
    chats: Sequence[Chat] = field(default=())

    def run(self, bench: Bench, system: System, arrivals: Sequence[SimRequest], clients: int | None) -> RunOutcome:
        """Serves all arrivals.

        Args:
            clients: Requests in flight of a closed loop; None for the arrivals' own times.

        Raises:
            ConfigError: The system is no preset.
            RuntimeError: A request fits no replica.
        """
        settings = tomllib.loads("\n".join(system.settings))
        experiment = Experiment(
            latency=self.latency,
            kv_tokens=self.kv_tokens,
            host_kv_tokens=self.kv_tokens,
            max_num_seqs=system.places or bench.max_num_seqs,
            max_batch_tokens=CHUNK,
            scheduler=SchedulerConfig(preset=system.preset, standby_slots=0, **settings),
            clients=clients,
        )
        outcome = run_experiment(experiment, arrivals)
        if outcome.failed:
            raise RuntimeError(f"{system.name}: {len(outcome.failed)} of {len(arrivals)} requests did not end")
        return outcome

    def capacity(self, bench: Bench, system: System, workload: str) -> float:
        """The requests per second that a system gets through, as ``cells.measure_capacity`` measures them."""
        if workload in GAPS:
            arrivals = simulated(draw(self.chats, MOST_FOR_CAPACITY, 1.0, workload, 0))
        else:
            requests = bench.requests(workload, 0)[:MOST_FOR_CAPACITY]
            arrivals = _arrivals(requests, [0.0] * len(requests))
        done = self.run(bench, system, arrivals, IN_FLIGHT).recorder.done
        return len(done) / max(record.finished_at for record in done)

    def measure(self, bench: Bench, system: System, run: Run, per_s: float) -> Metrics:
        """The figures of a run that the table reads, under the same names.

        Args:
            per_s: Requests per second at a load of 1.
        """
        if run.workload in GAPS:
            arrivals = simulated(draw(self.chats, bench.num_requests, run.load * per_s, run.workload, run.seed))
        else:
            requests = bench.requests(run.workload, run.seed)
            arrivals = _arrivals(requests, run_arrivals(run, len(requests), per_s))
        outcome = self.run(bench, system, arrivals, None)
        done = outcome.recorder.done
        wall_s = max(record.finished_at for record in done)
        metrics: Metrics = {"requests": len(done), "wall_s": wall_s, "evictions": outcome.summary.num_evictions}
        metrics["output_tokens_per_s"] = sum(record.num_tokens for record in done) / wall_s
        for name, seconds in (
            ("jct_ms", [record.jct_s for record in done]),
            ("ttft_ms", [record.ttft_s for record in done]),
            ("mtpot_ms", [record.max_gap_s for record in done]),
        ):
            metrics |= distribution(name, [1000 * each for each in seconds])
        read = [record for record in done if record.arrival.reading_rate]
        unread_s = [record.jct_s for record in done if record.arrival.reading_rate is None]
        return metrics | seen(unread_s, [record.ttft_s for record in read], [record.late_s for record in read])


def simulate(bench: Bench, machine: Machine, systems: Sequence[System], runs: Sequence[Run], folder: Path) -> None:
    """Writes the records of all runs, and before the first of a workload what a load of 1 is.

    Raises:
        ConfigError: A system is no preset of Farsight.
    """
    by_name = {each.name: each for each in systems}
    for run in runs:
        per_s = known_capacity(run.workload, folder)
        if per_s is None:
            per_s = machine.capacity(bench, systems[0], run.workload)
            keep_capacity(run.workload, folder, per_s, systems[0].name, min(MOST_FOR_CAPACITY, bench.num_requests))
        keep(run, per_s, machine.measure(bench, by_name[run.system], run, per_s), folder)


def _arrivals(requests: Sequence[BenchRequest], times: Sequence[float]) -> list[SimRequest]:
    """What a scheduler is told of each: its prompt, and one most length for all."""
    longest = max(each.output_tokens for each in requests)
    return [
        SimRequest(f"r{each.id}", at, each.prompt_tokens, each.output_tokens, longest)
        for each, at in zip(requests, times, strict=True)
    ]
