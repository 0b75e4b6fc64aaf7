"""What the demo's page shows of the two services, without clock or I/O: the lanes of their requests and the means."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from farsight.services.bench.answers import Answer
from farsight.services.bench.statistics import percentile
from farsight.simulator.traffic.workload import SimRequest

PAUSE_S = 0.25
"""A gap between two chunks of an answer that is longer is drawn as a pause."""


@dataclass(slots=True)
class RaceLane:
    """One request at one service; instants in seconds from the start of the race.

    Attributes:
        answer: What its client has received so far; its instants are on the clock of ``began_at``.
        response_id: Empty until the service has said it.
    """

    arrival: SimRequest
    answer: Answer | None = None
    response_id: str = ""

    @property
    def has_ended(self) -> bool:
        return self.answer is not None and self.answer.ended_at > 0.0

    @property
    def is_broken(self) -> bool:
        return self.has_ended and self.answer is not None and self.answer.failure is not None

    def jct_s(self, began_at: float) -> float | None:
        """Seconds from its due time to its last byte; None until it has ended whole."""
        if self.answer is None or not self.has_ended or self.answer.failure is not None:
            return None
        return self.answer.ended_at - began_at - self.arrival.arrived_at

    def row(self, began_at: float) -> list[Any]:
        """``[due, first token, last token, ended, pauses]``; null for what has not happened."""
        due, answer = round(self.arrival.arrived_at, 2), self.answer
        if answer is None or not answer.chunks_at:
            return [due, None, None, self.has_ended, []]
        instants = [round(at - began_at, 2) for at in answer.chunks_at]
        pauses = [pair for pair in itertools.pairwise(instants) if pair[1] - pair[0] > PAUSE_S]
        return [due, instants[0], instants[-1], self.has_ended, pauses]


@dataclass(slots=True)
class RaceSide:
    """One service."""

    preset: str
    lanes: list[RaceLane]
    kills: list[float] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        return sum(lane.has_ended for lane in self.lanes)

    @property
    def num_broken(self) -> int:
        return sum(lane.is_broken for lane in self.lanes)

    @property
    def num_open(self) -> int:
        return sum(lane.answer is not None and not lane.has_ended for lane in self.lanes)


class Race:
    """Two services under the same arrivals.

    Args:
        presets: The presets of the two services.
    """

    def __init__(self, presets: Sequence[str], arrivals: Sequence[SimRequest]) -> None:
        self.arrivals = arrivals
        self.sides = [RaceSide(preset, [RaceLane(arrival) for arrival in arrivals]) for preset in presets]
        self.began_at: float | None = None
        self.stage = "Starting two services"
        self.simulated: float | None = None

    @property
    def is_over(self) -> bool:
        return all(side.num_ended == len(self.arrivals) for side in self.sides)

    def paired(self) -> list[list[float]]:
        """For each side the completion times of the requests that have ended at both, in the order of arrival."""
        if self.began_at is None:
            return [[] for _ in self.sides]
        pairs = [
            times
            for lanes in zip(*(side.lanes for side in self.sides), strict=True)
            if None not in (times := [lane.jct_s(self.began_at) for lane in lanes])
        ]
        return [[pair[i] or 0.0 for pair in pairs] for i in range(len(self.sides))]

    def ratio(self) -> float | None:
        """Mean completion time at the second service divided by that at the first; None while there is none."""
        first, second = self.paired()
        return fmean(second) / fmean(first) if first else None

    def view(self, now: float) -> dict[str, Any]:
        """What the page polls.

        Args:
            now: On the clock of ``began_at``.
        """
        began_at = self.began_at
        times = self.paired()
        return {
            "stage": self.stage,
            "elapsed_s": None if began_at is None else round(now - began_at, 2),
            "over": self.is_over,
            "paired": len(times[0]),
            "ratio": self.ratio(),
            "simulated": self.simulated,
            "kinds": [arrival.app for arrival in self.arrivals],
            "sides": [_side_view(side, each, began_at) for side, each in zip(self.sides, times, strict=True)],
        }

    def result(self) -> dict[str, Any]:
        """The figures at the end."""
        sides = [
            {
                "preset": side.preset,
                "mean_s": fmean(times) if times else None,
                "p99_s": percentile(times, 0.99) if times else None,
                "ended": side.num_ended,
                "broken": side.num_broken,
                "kills": len(side.kills),
            }
            for side, times in zip(self.sides, self.paired(), strict=True)
        ]
        return {"requests": len(self.arrivals), "sides": sides, "ratio": self.ratio(), "simulated": self.simulated}


def _side_view(side: RaceSide, times: Sequence[float], began_at: float | None) -> dict[str, Any]:
    return {
        "preset": side.preset,
        "open": side.num_open,
        "ended": side.num_ended,
        "broken": side.num_broken,
        "mean_s": fmean(times) if times else None,
        "p99_s": percentile(times, 0.99) if times else None,
        "kills": [round(each, 2) for each in side.kills],
        "lanes": [] if began_at is None else [lane.row(began_at) for lane in side.lanes],
    }
