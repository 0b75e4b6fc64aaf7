"""What would have become of one request under another preset, number of replicas, or priority.

The requests around it are run twice, as they were and changed. The figures of the changed run are scaled by how far the
run as it was misses the log, so that what the simulation leaves out cancels as far as both runs leave it out.

The requests may be those of a log (``as_arrival``, ``answer``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farsight.core.config.load import make_config
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Forecast
from farsight.core.messages.log import (
    FinishedRequest,
    RecentAnswer,
    RecentTimes,
    ServedAs,
    WhatIfAnswer,
    WhatIfQuestion,
)
from farsight.policies.compose import is_steady
from farsight.policies.presets import PRESETS
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.records import Record
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run, run_until
from farsight.simulator.traffic.workload import SimRequest, Workload

MAX_CPU_MS = 1000.0
"""Processor time of an answer; the number of simulated requests follows from it."""

STEADY_MS, MOVING_MS = 1.5, 4.0
"""Processor time of one request in a run: where decisions change with events alone, and where time changes them too."""

MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """What is different; None is as it was."""

    preset: str | None = None
    replicas: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """Seconds from the arrival to the first token and to the end."""

    ttft_s: float
    jct_s: float


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """One request with and without a change.

    Attributes:
        as_simulated: The run as it was.
        changed: The changed run, as simulated.
        jct_s: What the request would have taken, by the log and the ratio of both runs.
        num_requests: Requests in each run.
        is_whole: Whether these are all that arrived from the last idle instant until the later end; else the runs begin
            later, in the midst of the work, or the earliest or the latest are left out, to bound the work.
    """

    as_simulated: Life
    changed: Life
    jct_s: float
    num_requests: int
    is_whole: bool


def parse_change(text: str) -> Change:
    """A change as ``preset=fcfs``, ``replicas=3`` or ``priority=-1``; several separated by commas.

    Raises:
        InvalidValueError: It is something else; names what would be right.
    """
    found: dict[str, str | int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "preset" and value in PRESETS:
            found[name] = value
        elif (
            name in ("replicas", "priority")
            and _is_integer(value)
            and (name == "priority" or 1 <= int(value) <= MAX_REPLICAS)
        ):
            found[name] = int(value)
        else:
            expected = f"preset=NAME ({', '.join(PRESETS)}), replicas=N (1 to {MAX_REPLICAS}) or priority=N"
            raise InvalidValueError("--if", part, expected)
    return Change(**found)  # type: ignore[arg-type]


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 10


@dataclass(frozen=True, slots=True)
class Window:
    """The requests of both runs.

    Attributes:
        requests: In order of arrival; the one that is asked for is among them. Where the first of them come together,
            they are what the log shows under way at that instant, with the tokens that they had.
        is_whole: Whether they begin at an instant at which the log shows the service idle.
        next_at: Arrival of the first later request that is left out; infinity if none is.
    """

    requests: Workload
    is_whole: bool
    next_at: float

    def holds_until(self, ends_at: float) -> bool:
        """Whether no request is left out that arrived between the idle instant and this one."""
        return self.is_whole and ends_at <= self.next_at


def most_requests(*configs: SchedulerConfig) -> int:
    """Returns the requests of a window whose runs with these settings together take about ``MAX_CPU_MS``."""
    cost_ms = sum(STEADY_MS if is_steady(config) else MOVING_MS for config in configs)
    return int(MAX_CPU_MS / cost_ms)


def window(arrivals: Workload, lives: Sequence[Life], index: int, most: int) -> Window:
    """The requests that can influence one, at most ``most``.

    They go from the last idle instant before it until its end. Where they are too many, the window begins later, in the
    midst of the work, with what was under way then. Where that is too many as well, it begins with nothing: the
    earliest are left out, but not more than leave half of the window to those before it.

    Args:
        arrivals: In order of arrival.
        lives: As logged.
        index: Place of the request in ``arrivals``.
    """
    arrived_s = np.array([each.arrived_at for each in arrivals])
    ends_s = arrived_s + [each.jct_s for each in lives]
    idle = np.flatnonzero(arrived_s[1 : index + 1] >= np.maximum.accumulate(ends_s)[:index]) + 1
    first = int(idle[-1]) if len(idle) else 0
    num_later = max(0, int(np.searchsorted(arrived_s, ends_s[index])) - index - 1)
    begins = np.arange(first, index + 1)
    num_under_way = begins - np.searchsorted(np.sort(ends_s), arrived_s[begins], side="right")
    num_under_way[0] = 0
    fitting = begins[np.maximum(num_under_way, 0) + (index - begins) + 1 + num_later <= most]
    if len(fitting):
        begin = int(fitting[0])
        carried = [] if begin == first else _under_way(arrivals[:begin], lives, arrivals[begin].arrived_at)
    else:
        begin, carried = max(first, index - max(most - 1 - num_later, most // 2)), []
    end = begin + most - len(carried)
    next_at = arrivals[end].arrived_at if end < len(arrivals) else math.inf
    return Window([*carried, *arrivals[begin:end]], begin == first, next_at)


def _under_way(arrivals: Workload, lives: Sequence[Life], now: float) -> list[SimRequest]:
    """Requests that have come and not ended by now, as arrivals of this instant; tokens came evenly from the first."""
    found = []
    for each, life in zip(arrivals, lives, strict=False):
        since_s = now - each.arrived_at
        if since_s >= life.jct_s:
            continue
        done = max(0.0, since_s - life.ttft_s) / max(life.jct_s - life.ttft_s, 1e-9)
        generated = min(each.output_len - 1, 1 + int(done * (each.output_len - 1))) if since_s >= life.ttft_s else 0
        found.append(dataclasses.replace(each, arrived_at=now, generated=generated))
    return found


def what_if(
    experiment: Experiment,
    arrivals: Workload,
    lives: Sequence[Life],
    index: int,
    change: Change,
    *,
    most: int | None = None,
) -> Counterfactual:
    """The life of one request with a change.

    Args:
        experiment: As the requests were served.
        arrivals: Logged requests in order of arrival.
        lives: Logged, of each.
        index: Place of the request in ``arrivals``.
        most: Requests of the window at most; None for as many as ``MAX_CPU_MS`` allows.
    """
    changed = experiment if change.preset is None else experiment.under(change.preset)
    most = most_requests(experiment.scheduler, changed.scheduler) if most is None else most
    chosen = window(arrivals, lives, index, most)
    requests, own = chosen.requests, arrivals[index]
    before = _life(run_until(experiment, requests, own.request_id))
    if change.replicas is not None:
        changed = dataclasses.replace(changed, num_replicas=change.replicas)
    if change.priority is not None:
        urgent = dataclasses.replace(own, priority=change.priority)
        requests = [urgent if each.request_id == own.request_id else each for each in requests]
    after = _life(run_until(changed, requests, own.request_id))
    last_end_at = own.arrived_at + max(before.jct_s, after.jct_s)
    scaled_s = lives[index].jct_s * after.jct_s / before.jct_s
    return Counterfactual(before, after, scaled_s, len(requests), chosen.holds_until(last_end_at))


def _life(record: Record) -> Life:
    return Life(record.ttft_s, record.jct_s)


ENDS = ("stop", "length", "abort")
"""Finish reasons of requests with a known output; a disconnected client's output ends at the disconnect."""


def is_known(record: FinishedRequest) -> bool:
    """Whether the length of its output is known."""
    return record.finish_reason in ENDS and record.output_len > 0


def as_arrival(record: FinishedRequest, begin: float, forecast: Forecast | None = None) -> SimRequest:
    """The request as it came, in seconds since ``begin``. A forecast counts as known on arrival."""
    return SimRequest(
        record.request_id,
        record.received_at - begin,
        record.prompt_len,
        record.output_len,
        max(record.max_new_tokens, record.output_len),
        priority=record.priority,
        tenant=record.tenant,
        forecast=forecast,
    )


def as_life(record: FinishedRequest) -> Life:
    """How it went. A record without a first token counts as answered at its end."""
    return Life(record.jct_s if record.ttft_s is None else record.ttft_s, record.jct_s)


def answer(question: WhatIfQuestion) -> WhatIfAnswer:
    """Returns what would have become of the request, or of the latest ones where the question names none.

    Raises:
        InvalidValueError: It is not among the records, or fits no replica; or there are no records.
    """
    window = question.window
    records = sorted(filter(is_known, window.records), key=lambda each: each.received_at)
    if not window.request_id:
        return WhatIfAnswer(recent=_of_latest(records, experiment_as(window.served), question))
    places = [place for place, each in enumerate(records) if each.request_id == window.request_id]
    if not places:
        raise InvalidValueError("id", window.request_id, "a request with an output")
    change = Change(question.preset or None, question.replicas, question.priority)
    lives = [as_life(each) for each in records]
    found = what_if(experiment_as(window.served), _arrivals(records), lives, places[0], change)
    before, after = found.as_simulated, found.changed
    return WhatIfAnswer(
        lives[places[0]].jct_s,
        found.jct_s,
        before.ttft_s,
        before.jct_s,
        after.ttft_s,
        after.jct_s,
        is_whole=found.is_whole,
    )


def _of_latest(records: Sequence[FinishedRequest], served: Experiment, question: WhatIfQuestion) -> RecentAnswer:
    """Runs the latest requests as they were served and changed; the logged figures are scaled by the ratio of both."""
    changed = served.under(question.preset) if question.preset else served
    if question.replicas is not None:
        changed = dataclasses.replace(changed, num_replicas=question.replicas)
    latest = records[-most_requests(served.scheduler, changed.scheduler) :]
    if not latest:
        raise InvalidValueError("log", "no ended request", "at least one request that has ended with an output")
    arrivals = _arrivals(latest)
    before, after = (
        {each.arrival.request_id: _life(each) for each in run(experiment, arrivals, looks_often=False).recorder.done}
        for experiment in (served, changed)
    )
    both = [each for each in latest if each.request_id in before and each.request_id in after]
    if not both:
        raise InvalidValueError("log", f"{len(latest)} ended requests", "requests that fit a replica")
    logged = _times([as_life(each) for each in both])
    as_simulated, simulated = (_times([lives[each.request_id] for each in both]) for lives in (before, after))
    ratios = (
        told * now / then if then else told
        for told, now, then in zip(*map(dataclasses.astuple, (logged, simulated, as_simulated)), strict=True)
    )
    return RecentAnswer(len(both), logged, RecentTimes(*ratios))


def _times(lives: Sequence[Life]) -> RecentTimes:
    ends_s = [each.jct_s for each in lives]
    ttft_s = sum(each.ttft_s for each in lives) / len(lives)
    return RecentTimes(ttft_s, sum(ends_s) / len(ends_s), float(np.quantile(ends_s, 0.99)))


def _arrivals(records: Sequence[FinishedRequest]) -> list[SimRequest]:
    return [as_arrival(each, records[0].received_at) for each in records]


def experiment_as(served: ServedAs) -> Experiment:
    """Returns the experiment that decides as a server did."""
    server = make_config(json.loads(served.settings))
    return Experiment(
        scheduler=server.scheduler,
        placement=server.placement,
        batch=server.batch,
        num_replicas=served.num_replicas,
        latency=LinearLatency(served.cost),
        kv_tokens=served.kv_tokens,
        max_num_seqs=served.max_num_seqs,
    )
