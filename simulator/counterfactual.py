"""What would have become of one request under another preset, number of replicas, or priority.

The requests around it are run twice, as they were and changed. The figures of the changed run are scaled by how far the
run as it was misses the log, so that what the simulation leaves out cancels as far as both runs leave it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import InvalidValueError
from policies.presets import PRESETS
from simulator.cluster.records import Record
from simulator.experiment import Experiment
from simulator.run import run_until
from simulator.traffic.workload import SimRequest, Workload

MAX_WINDOW = 2000
"""Requests of one run at most."""

MAX_REPLICAS = 64
ROUNDS = 2
"""What overlapped the request, and what overlapped that, has an effect on it worth simulating."""

MARGIN = 3.0
"""Later requests come until so many times its own time has passed: the change may make it slower."""


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
    """

    as_simulated: Life
    changed: Life
    jct_s: float
    num_requests: int


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


def window(arrivals: Workload, jct_s: Sequence[float], index: int) -> list[SimRequest]:
    """The requests that a request can have met, at most ``MAX_WINDOW``; it is one of them.

    Args:
        arrivals: In order of arrival.
        jct_s: How long each took.
        index: Place of the request in ``arrivals``.
    """
    began_at = arrivals[index].arrived_at
    for _ in range(ROUNDS):
        met = (
            each.arrived_at
            for each, took_s in zip(arrivals[:index], jct_s[:index], strict=True)
            if each.arrived_at + took_s > began_at
        )
        began_at = min(met, default=began_at)
    ends_at = arrivals[index].arrived_at + MARGIN * jct_s[index]
    first = max(index - MAX_WINDOW + 1, 0)
    chosen = [
        each
        for place, each in enumerate(arrivals[first:], first)
        if place == index or began_at <= each.arrived_at <= ends_at
    ]
    return chosen[:MAX_WINDOW]


def what_if(
    experiment: Experiment, arrivals: Workload, jct_s: Sequence[float], index: int, change: Change
) -> Counterfactual:
    """The life of one request with a change.

    Args:
        experiment: As the requests were served.
        arrivals: Logged requests in order of arrival.
        jct_s: Logged seconds of each.
        index: Place of the request in ``arrivals``.
    """
    requests = window(arrivals, jct_s, index)
    own = arrivals[index]
    before = _life(run_until(experiment, requests, own.request_id))
    changed = dataclasses.replace(
        experiment,
        preset=experiment.preset if change.preset is None else change.preset,
        num_replicas=experiment.num_replicas if change.replicas is None else change.replicas,
    )
    if change.priority is not None:
        urgent = dataclasses.replace(own, priority=change.priority)
        requests = [urgent if each.request_id == own.request_id else each for each in requests]
    after = _life(run_until(changed, requests, own.request_id))
    return Counterfactual(before, after, jct_s[index] * after.jct_s / before.jct_s, len(requests))


def _life(record: Record) -> Life:
    return Life(record.ttft_s, record.jct_s)
