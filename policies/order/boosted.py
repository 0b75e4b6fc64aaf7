"""Boosted arrivals over Gittins ranks: short requests pass long ones, and only so far.

Jobs go by ``arrival - boost`` (gamma-Boost: Yu and Scully, "Strongly Tail-Optimal Scheduling in the Light-Tailed
M/G/1", SIGMETRICS 2024; with laws instead of sizes: Harlev, Yu and Scully, "A Gittins Policy for Optimizing Tail
Latency", SIGMETRICS 2025). The boost of a job with rank w is y ln(1 / (1 - exp(-w / y))): about y ln(y / w) for a small
job, about 0 for one that is large beside the yardstick y. The rank is that of ``policies.order.gittins``. To it comes
the time that the job's tokens take on a full replica: one server of the theory ends a job of little work at once, a
replica needs a step for each token, and a long job has to start early to end with the others. Under overload there is
no decay rate from which the theory could take y, so y comes from the work B of the n jobs that have not begun: y is
9 B / sqrt(n) over ``tail``. B / sqrt(n) is the standard deviation of the sum of n exponential works of mean B / n.

**Bound.** A boost lies in [0, max_boost_s], whatever the yardstick is at the instant. Let i and j be of one urgency,
neither have begun, and a_j > a_i + max_boost_s. Then a_j - b_j >= a_j - max_boost_s > a_i >= a_i - b_i: i goes first.
This holds at every instant. So only a job that arrived within ``max_boost_s`` after another can overtake it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import ORDERS, Job, ReplicaContext
from farsight.policies.lengths import law as length_law
from farsight.policies.order.gittins import DecodePrice, FloatArray, Gittins
from farsight.policies.settings import PRIOR_CAPACITY

MAX_BOOST_S = 1800.0
"""In seconds: no request is overtaken by one that came half an hour later."""

SPREAD = 8.0
"""Boosts of jobs down to exp(-8) = 1/3000 of the yardstick still differ below ``max_boost_s``."""

DEVIATIONS = 9.0
"""The yardstick in standard deviations of the backlog at ``tail`` 1; docs/results_tail.md says what else was tried."""

_LEAST_S = 1e-9
STREAMS_A_PLACE = 4
"""Most begun streams for each place with which streams take turns: more could not keep their pauses short."""

SHARE_OF_KV = 0.6
"""Streams take turns while all that have begun fill at most this share of the memory: beyond it turns would move KV."""

STANDS_S = 0.3
"""Seconds without a step after which a stream counts as waiting work."""


def boosts(ranks: FloatArray, yardstick_s: float, max_boost_s: float) -> FloatArray:
    """Returns the seconds by which jobs count as older, in [0, max_boost_s], shape (n,); falls with the rank. O(n).

    Args:
        ranks: Seconds > 0, shape (n,).
        yardstick_s: Jobs of a rank above it have next to no boost.
    """
    boost: FloatArray = np.maximum(ranks, _LEAST_S)
    boost /= -yardstick_s
    np.expm1(boost, out=boost)
    np.log(-boost, out=boost)
    boost *= -yardstick_s
    return np.clip(boost, 0.0, max_boost_s, out=boost)


class Boosted(Gittins):
    """``Order`` by urgency, then streams that have begun, then by boosted arrival.

    Without ``max_pause_s`` a stream that has begun is not preempted for a job that has not: it stands still only where
    memory is short, and then goes before all that have not begun. With it, streams that have begun go by boosted
    arrival among the others while few enough have begun (``STREAMS_A_PLACE``, ``SHARE_OF_KV``), and one that has
    stood still for ``max_pause_s`` goes before all others until it has run.

    Costs are those of ``Gittins``, and a sum over all jobs for each ``ranked``.

    Args:
        price: As in ``Gittins``.
        theta: As in ``Gittins``; 1 while streams take turns, which moves no KV.
        tail: How far the mean latency is given up for the tail; > 0. Near 0 the order is that of the ranks, large
            values make it first come, first served.
        max_boost_s: Seconds > 0.
        max_pause_s: Seconds after which a stream that stands still goes first; 0: streams do not stand still for
            others.

    Raises:
        InvalidValueError: A parameter is out of range.
    """

    def __init__(
        self,
        price: DecodePrice,
        *,
        theta: float = 4.0,
        tail: float = 1.0,
        max_boost_s: float = MAX_BOOST_S,
        max_pause_s: float = 0.0,
    ) -> None:
        super().__init__(price, theta=theta)
        if not 0 < tail < math.inf:
            raise InvalidValueError("tail", tail, "a number > 0")
        if not 0 < max_boost_s < math.inf:
            raise InvalidValueError("max_boost_s", max_boost_s, "seconds > 0")
        if not 0 <= max_pause_s < math.inf:
            raise InvalidValueError("max_pause_s", max_pause_s, "seconds >= 0")
        self._tail, self._max_boost_s, self._max_pause_s = tail, max_boost_s, max_pause_s
        self._moves_with_time = max_pause_s > 0
        self.ranks_on_demand = not max_pause_s  # turns are as long as ranks stand
        self._asked_at = 0.0  # the instant of the latest keys

    @property
    def yardstick_s(self) -> float:
        """``DEVIATIONS`` of the expected work of jobs that wait, over ``tail``, in seconds.

        At most ``max_boost_s / SPREAD``, so that boosts still differ below their bound. Waiting jobs are jobs that have
        not begun and, where streams take turns, streams that stand still. The yardstick grows with the root of their
        number: a backlog twice as long lets short jobs pass less far, relative to the wait that it makes.
        """
        waits = self._column("generated") == 0
        if self._max_pause_s:
            waits |= self._column("ran_at") < self._asked_at - STANDS_S
        expected_s = self._column("expected")[waits]
        if not len(expected_s):
            return _LEAST_S
        deviation_s = float(expected_s.sum()) / math.sqrt(len(expected_s))
        return max(min(DEVIATIONS * deviation_s / self._tail, self._max_boost_s / SPREAD), _LEAST_S)

    def add(self, job: Job, now: float) -> None:
        super().add(job, now)
        self._column("ran_at")[self._known_row(job)] = job.last_ran_at

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        row = self._table.row(job) if self._max_pause_s else None
        if row is not None:
            self._column("ran_at")[row] = now
            self._ranking = None
        super().ran(job, duration_s, now)

    def learn(self, job: Job, *, censored: bool) -> None:
        version = self._history_version
        super().learn(job, censored=censored)
        if self._max_pause_s and self._history_version > version:
            self._mark_stale(slice(None))  # streams that stand still are not ranked again as they run

    def _observed(self) -> NDArray[np.int64]:
        """Returns the history's points; with turns short streams end first, so running ones count as cut entries."""
        generated = self._column("generated")
        going_on = generated[generated > 0].astype(np.int64).tolist() if self._max_pause_s else ()
        return self._history.quantiles(length_law.LEVELS, going_on)

    def _keys(self, rows: slice | NDArray[np.int64], now: float) -> list[NDArray[Any]]:
        self._asked_at = now
        resident, arrived_at = self._column("resident")[rows], self._column("arrived_at")[rows]
        rank = self._column("rank")[rows].copy()
        takes_turns = self._take_turns()
        if not takes_turns:  # a turn moves no KV: a job that is a little better may have it
            rank[resident] /= self._theta
        boosted_at = arrived_at - self._boosts(rank, self._column("tokens")[rows])
        begun = self._column("generated")[rows] > 0
        if takes_turns:
            ran_at = self._column("ran_at")[rows]
            is_due = begun & (ran_at <= now - self._max_pause_s)
            phase, key = np.where(is_due, 0, 2), np.where(is_due, ran_at, boosted_at)
        else:
            phase, key = np.where(begun, np.where(resident, 0, 1), 2), boosted_at
        return [self._column("priority")[rows], self._column("deadline_at")[rows], phase, key, arrived_at]

    def _take_turns(self) -> bool:
        """Returns whether streams may stand still for others, none for longer than ``max_pause_s`` and a turn."""
        if not self._max_pause_s:
            return False
        has_begun = self._column("generated") > 0
        if int(has_begun.sum()) > STREAMS_A_PLACE * self._price.max_num_seqs:
            return False
        return bool(self._column("context")[has_begun].sum() <= SHARE_OF_KV * self._price.capacity)

    def _boosts(self, ranks: FloatArray, tokens: FloatArray) -> FloatArray:
        boost = boosts(ranks, self.yardstick_s, self._max_boost_s)
        boost += tokens * self._step_s()
        return np.minimum(boost, self._max_boost_s, out=boost)

    def _step_s(self) -> float:
        """Returns the seconds of a full step whose jobs are half way through their outputs, as far as memory lasts."""
        lengths = self._column("context") + self._column("tokens") / 2
        if not len(lengths):
            return 0.0
        price = self._price
        context_len = min(price.capacity, price.max_num_seqs * float(lengths.mean()))
        return price.step.step_s(0, price.max_num_seqs, round(context_len))

    def slice_s(self, job: Job) -> float:
        """Returns the slice of ``Gittins``; infinity where streams do not take turns: a begun stream goes on."""
        return super().slice_s(job) if self._max_pause_s else math.inf

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the rank as last computed, the yardstick and the boost, and the weight of the job's forecast."""
        facts = dict(super().explain(job, now))
        if "rank_s" not in facts:
            return facts
        rank_s = float(facts["rank_s"]) / (self._theta if job.is_resident and not self._take_turns() else 1.0)
        tokens = self._column("tokens")[[self._known_row(job)]]
        boost_s = float(self._boosts(np.array([rank_s]), tokens)[0])
        return facts | {"yardstick_s": self.yardstick_s, "boost_s": boost_s}


@ORDERS.register("boosted", stands_for="gittins", reads_forecasts=True)
def build_boosted(context: ReplicaContext) -> Boosted:
    """Ranks by arrival, less a boost that is large for small Gittins ranks; streams that have begun go on."""
    settings = context.settings
    price = DecodePrice(settings.cost, context.max_num_seqs, PRIOR_CAPACITY)
    config = settings.scheduler
    return Boosted(price, theta=settings.theta, tail=config.tail, max_pause_s=config.max_pause_s)
