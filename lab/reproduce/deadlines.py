"""Honest admission in an overload: how many of those admitted are in time, and how many hindsight would have admitted.

Every request wants its first token and its further tokens in time (``SLO``). The front door refuses those that it
predicts to be late, by the same function as a server's. Hindsight is the greedy set in order of arrival with true
waits, on the same engine under ``fcfs``: a request is dropped at the instant at which it can no longer have its first
token in time. Until then it has only waited, which takes nothing from the others, so this is as if it had been refused
on arrival by one who knew.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.requests import LoadSnapshot
from farsight.core.request import Slo
from farsight.policies.compose import build_scheduler
from farsight.policies.fleet.events import (
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    RequestsEnded,
    RequestsStarted,
)
from farsight.policies.fleet.queue_delay import TargetCheck
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.lengths.history import LengthHistory
from farsight.policies.placement.base import LeastWork
from farsight.policies.replica.events import RefuseRequest, RequestsAborted, RequestsArrived
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.records import Record
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.combined import CombinedCell, replica_shape
from lab.reproduce.rows import UNBOUND, Own, Reproduction, Row, at_least

SLO = Slo(ttft_s=5.0, tpot_s=0.2)
SEED = 31
PRESETS = ("fcfs", "farsight")
LEARN_EVERY = 50
"""Ends after which the front door's law of lengths is taken again."""

CELLS = (
    CombinedCell("conversations, 121k tokens of memory", "sharegpt-like", 1.3, 121_000, 3000, sigma=None),
    CombinedCell("conversations, 30k", "sharegpt-like", 1.3, 30_000, 3000, sigma=None),
)


class HonestRouter(GlobalScheduler):
    """Refuses on arrival whom it predicts to be late."""

    def __init__(self, shape: FleetShape) -> None:
        super().__init__(LeastWork())
        self._shape = shape
        self._check = TargetCheck()
        self._predicted_s: dict[str, float] = {}
        self._prompts: dict[str, int] = {}
        self._lengths, self._num_ended = LengthHistory(window=1000), 0

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        if isinstance(event, RequestsEnded):
            self._learn(event, now)
        if isinstance(event, RequestsStarted):
            for each in event.started:
                prompt_s = A100_7B.cost.prefill_s(self._prompts[each.request_id])
                self._check.errors.add(self._predicted_s.pop(each.request_id), each.queue_s + prompt_s)
        if not isinstance(event, RequestsArrived):
            return super().handle(event, now)
        out: list[GlobalInstruction] = []
        for request in event.requests:
            missed, self._predicted_s[request.request_id] = self._check.look(self._seen(), request)
            self._prompts[request.request_id] = request.prompt_len
            if missed is None:
                out += super().handle(RequestsArrived((request,)), now)
            else:
                out.append(RefuseRequest(request.request_id, request.attempt, "", missed.message))
        return out

    def _seen(self) -> LoadSnapshot:
        return self.outlook(self._shape.replica.max_num_seqs, self._shape.latency.cost, joins=True)

    def _learn(self, event: RequestsEnded, now: float) -> None:
        for each in event.finished:
            self._lengths.add(each.output_len)
            self._num_ended += 1
            if self._num_ended % LEARN_EVERY == 0:
                quantiles = tuple(map(float, self._lengths.quantiles(np.array(QUANTILES))))
                mean = float(self._lengths.quantiles((np.arange(100) + 0.5) / 100).mean())
                super().handle(HistoryLearned(Forecast(mean, quantiles, self._num_ended, "history", 0)), now)


class HindsightFleet(Fleet):
    """Drops a request when it can no longer have its first token in time."""

    dropped: int = 0

    def _look(self) -> None:
        for request_id, (request, record) in list(self._under_way.items()):
            limit_at = record.arrival.arrived_at + SLO.ttft_s - A100_7B.cost.prefill_s(request.prompt_len)
            if not math.isnan(record.first_token_at) or limit_at >= self.now or not record.replica:
                continue
            replica = self.replicas[int(record.replica)]
            if request_id in {job.request_id for job in replica.scheduler.admitted}:
                continue
            replica.drop(request_id, self.now)
            self.machine.handle(RequestsAborted(((request_id, request.attempt),)), self.now)
            del self._under_way[request_id]
            self.dropped += 1


@dataclass(frozen=True, slots=True)
class InTime:
    """Requests that a run admitted, and those of them that were in time."""

    num: int
    in_time: int


def with_targets(arrivals: Iterable[SimRequest]) -> list[SimRequest]:
    return [dataclasses.replace(each, slo=SLO) for each in arrivals]


def is_in_time(record: Record) -> bool:
    """Whether it has kept ``SLO``."""
    return record.ttft_s <= SLO.ttft_s and not record.tpot_s > SLO.tpot_s


def _counted(records: Iterable[Record]) -> InTime:
    kept = [is_in_time(record) for record in records]
    return InTime(len(kept), sum(kept))


def _shape(cell: CombinedCell, look_every: int) -> FleetShape:
    return FleetShape(replica_shape(cell, look_every), A100_7B)


def honest(cell: CombinedCell, arrivals: list[SimRequest], preset: str) -> InTime:
    """With the front door's check."""
    shape, limits = _shape(cell, 1), SchedulerLimits(cell.max_num_seqs, standby_slots=0)
    settings = PolicySettings(UNBOUND, cost=A100_7B.cost)
    fleet = Fleet(shape, HonestRouter(shape), lambda _: build_scheduler(preset, limits, settings))
    return _counted(fleet.run(arrivals).done)


def hindsight(cell: CombinedCell, arrivals: list[SimRequest]) -> InTime:
    """With a greedy choice by true waits."""
    limits = SchedulerLimits(cell.max_num_seqs, standby_slots=0)
    plain = [dataclasses.replace(each, slo=Slo()) for each in arrivals]
    settings = PolicySettings(UNBOUND)
    fleet = HindsightFleet(
        _shape(cell, 0), GlobalScheduler(LeastWork()), lambda _: build_scheduler("fcfs", limits, settings)
    )
    return _counted(fleet.run(plain).done)


def cell_rows(cell: CombinedCell, preset: str) -> list[Row]:
    arrivals = with_targets(cell.arrivals(SEED, 0))
    known, found = hindsight(cell, arrivals), honest(cell, arrivals, preset)
    row = partial(Row, "deadlines", f"{cell.name} {cell.load:g}, {preset}")
    note = f"{found.num:,} of {len(arrivals):,} admitted, hindsight {known.in_time:,}"
    return [
        row("of the admitted in time", Own(at_least(0.95)), found.in_time / max(1, found.num), note),
        row("admitted / hindsight", Own(at_least(0.9)), found.num / max(1, known.in_time), note),
    ]


DEADLINES = (
    Reproduction(
        "deadlines",
        "honest admission at load 1.3: requests in time, and those that hindsight would have admitted",
        tuple(partial(cell_rows, cell, preset) for cell in CELLS for preset in PRESETS),
    ),
)
