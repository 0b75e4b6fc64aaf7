"""Runs and their results, kept as JSON lines so that a measurement can go on where it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.live_presets.live import run_live
from benchmarks.live_presets.priority import before_others
from benchmarks.live_presets.study import Setup, Study, System
from farsight.core.errors import ConfigError
from farsight.simulator.cluster.records import Record
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.workload import SimRequest

MAX_LAG_S = 0.004
"""Mean lag above which a run was disturbed by other work on the machine. At 2 ms mean JCTs were within 8 % of the
simulator's; at 8 ms those of an overload were up to half as long again."""


@dataclass(frozen=True, slots=True)
class Run:
    """The inputs that determine a run."""

    setup: str
    system: str
    seed: int
    num_requests: int
    speed: float
    live: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a run; times in seconds of the device.

    Attributes:
        jct_s: Mean over requests; with batches their mean response time.
        goodput: Requests a second that kept the SLA.
        throughput: Requests a second, from the first arrival to the last token.
        hit_rate: Part of the prompt tokens that came from a prefix cache.
        evictions: Evictions for each request; NaN where they are not counted.
        gap_s: Mean time between two steps of the worker; NaN in the simulator.
        lag_s: As in ``LiveRun``; 0 in the simulator.
        refused: Why the service does not support the system; empty if it does. If set, no other field is valid.
    """

    jct_s: float = float("nan")
    p99_jct_s: float = float("nan")
    goodput: float = float("nan")
    throughput: float = float("nan")
    evictions: float = float("nan")
    gap_s: float = float("nan")
    lag_s: float = 0.0
    hit_rate: float = float("nan")
    refused: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is worth keeping: neither refused nor disturbed."""
        return not self.refused and self.lag_s <= MAX_LAG_S


class Store:
    """Results by run, in a file that several processes append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Run, Figures] = {}
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                row = json.loads(line)
                self._found[Run(**row["run"])] = Figures(**row["figures"])

    def get(self, run: Run) -> Figures | None:
        return self._found.get(run)

    def put(self, run: Run, figures: Figures) -> None:
        """Appends each line with one write, so that lines of several processes do not mix."""
        self._found[run] = figures
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": asdict(run), "figures": asdict(figures)}) + "\n")


def measure(study: Study, path: Path, runs: Sequence[Run], *, real_time: bool = False) -> None:
    """Carries out runs of one setup and seed, all on the same arrivals, except those with a stored result.

    Runs that the service refused or other work disturbed are repeated: the version or the load may have changed.

    Args:
        real_time: Give live runs, and only them, priority over other work on the machine.
    """
    store = Store(path)
    missing = [run for run in runs if (found := store.get(run)) is None or not found.counts]
    if not missing:
        return
    setup = study.setups[missing[0].setup].sized(missing[0].num_requests)
    arrivals = setup.arrivals(missing[0].seed)
    for run in missing:
        store.put(run, _carry_out(run, study.systems[run.system], setup, arrivals, real_time))


def _carry_out(run: Run, system: System, setup: Setup, arrivals: list[SimRequest], real_time: bool) -> Figures:
    if run.live and system.settings is not None:
        try:
            with before_others() if real_time else nullcontext():
                served = run_live(arrivals, setup.hardware, system.settings, run.speed)
        except ConfigError as error:
            return Figures(refused=str(error))
        found = figures(served.records, setup.sla, served.num_preemptions / len(arrivals), setup.num_warmup)
        return replace(found, gap_s=served.gap_s, lag_s=served.lag_s)
    if system.predict is None:
        return Figures(refused="not simulated")
    records = system.predict(setup, arrivals)
    evictions = sum(each.num_evictions + each.num_swaps for each in records) / len(arrivals)
    return figures(records, setup.sla, evictions, setup.num_warmup)


def figures(records: Sequence[Record], sla: Sla, evictions: float, num_warmup: int = 0) -> Figures:
    """Figures of the requests of a run, without the first ``num_warmup``."""
    came = sorted(record.arrival.arrived_at for record in records)
    counted = [record for record in records if record.arrival.arrived_at >= came[num_warmup]]
    jct_s = np.array([record.jct_s for record in counted])
    seconds = max(record.finished_at for record in counted) - min(record.arrival.arrived_at for record in counted)
    good = sum(map(sla.meets, counted))
    return Figures(
        float(jct_s.mean()),
        float(np.quantile(jct_s, 0.99)),
        good / seconds,
        len(counted) / seconds,
        evictions,
        hit_rate=sum(each.cached_len for each in counted) / sum(each.arrival.prompt_len for each in counted),
    )
