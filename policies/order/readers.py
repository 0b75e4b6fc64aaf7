"""Serves each request for what its client sees of it.

Who reads a stream wants its first token, and then tokens no later than he reads. Who does not read before the end, as
with ``stream: false``, wants the end. So jobs go in this order:

1. streams whose readers have soon read all that has come (TokenFlow, arXiv 2510.02758, pauses by the same rule), the
   nearest to it first, while they take no more than their share of the places,
2. streams without a first token, by arrival less a boost that is large where little of the prompt is left to compute:
   each gets a place beyond those that a step's price asks for,
3. jobs whose guards are about to pass (``policies.order.shadow``),
4. jobs that no one reads: those that have begun, then by boosted arrival,
5. streams of the first kind beyond their share,
6. streams ahead of their readers by more than coming back takes: they give way, and lose nothing that is seen.

Where KV is short, what has KV goes first and what has lost it second, each by arrival: giving way would cost KV.

The share of streams is their share of all jobs here. So where all cannot be read at once, readers get about as much of
the replica as order of arrival would give them, and who waits for an end gets the rest, one after the other.

Boosts need lengths that are predicted well enough. While fewer than ``LEAST_ACCURACY`` of the pairs that have ended
were predicted in their order, jobs of the fourth kind go by arrival.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.costs import StepCost, priced_rows
from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import ORDERS, Job, Order, ReplicaContext
from farsight.policies.order.boosted import MAX_BOOST_S, SHARE_OF_KV, SPREAD, Boosted, boosts
from farsight.policies.order.gittins import DecodePrice, FloatArray
from farsight.policies.order.shadow import NO_ENDS, GuardTally, ShadowFcfs
from farsight.policies.settings import PRIOR_CAPACITY

RESUMES_S = 0.6
"""Seconds of reading left at which a stream goes on: a report, a plan and a step with prompts come before its token."""

PAUSES_S = 1.5
"""Seconds of reading left from which a stream may stand still, so that it does not stop at every look."""

STEPS_AHEAD = 3
"""Steps of all streams that a stream needs at least to come back, where steps are long."""

TAIL = 0.5
"""Part of ``[scheduler] tail``: no boost touches streams, which keep the tail of all ends, so others may go by size."""

FIRST_DEVIATIONS = 1.0
"""Yardstick of the boosts of first tokens, in standard deviations of the prompt work that waits; with more, long new
prompts wait for many turns."""

LEAST_ACCURACY = 0.6
"""Share of ended pairs that must have been predicted in their order; a coin has 0.5."""

USUAL_LEN = 256.0
"""Output tokens that are assumed of a job without a forecast, until one has ended."""

LONG = 2.0
"""Predicted lengths that a long output has."""

FORGETTING = 0.02
"""Weight of the latest output in their mean."""

_HELD, _LOST, _DUE, _FIRST, _GUARDED, _BEGUN, _BACK, _NEW, _OVER, _AHEAD = range(10)


class ReadersFirst(Boosted):
    """``Order`` by urgency, then by what clients see: the kinds of the module, in their order.

    Costs are those of ``Boosted``.

    Args:
        price, theta, tail, max_boost_s: As in ``Boosted``.
        reading_rate: Tokens a second of a reader whose client says none; > 0.

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
        reading_rate: float = 12.0,
    ) -> None:
        super().__init__(price, theta=theta, tail=tail, max_boost_s=max_boost_s)
        if not 0 < reading_rate < math.inf:
            raise InvalidValueError("reading_rate", reading_rate, "tokens a second > 0")
        self._reading_rate = reading_rate
        self._moves_with_time = True
        self._most = price.max_num_seqs
        self._shadow, self._accuracy = ShadowFcfs(price.step, price.max_num_seqs), PairAccuracy()
        self._usual_len = USUAL_LEN
        self._rates: dict[str, float] = {}  # of jobs that are read as they come
        self._came: dict[str, int] = {}  # their output tokens by the latest report
        self._first: set[str] = set()  # those without a token

    @property
    def tally(self) -> GuardTally:
        """Ends beside those of order of arrival, so far."""
        return self._shadow.tally

    @property
    def accuracy(self) -> float | None:
        """As ``PairAccuracy.share``."""
        return self._accuracy.share

    def add(self, job: Job, now: float) -> None:
        super().add(job, now)
        row = self._known_row(job)
        if job.reading_rate is not None:
            self._rates[job.request_id] = rate = job.reading_rate or self._reading_rate
            self._came[job.request_id] = job.output_len
            if not job.output_len:
                self._first.add(job.request_id)
            self._table.put(row, "rate", rate)
            self._table.put(row, "read_by", now)
        if not job.output_len:
            crowd_s = self._crowd_s(job)
            self._table.put(row, "guard_at", job.arrived_at + crowd_s)
            self._shadow.arrived(job.request_id, job.prompt_len, job.missing_len, job.arrived_at, crowd_s)

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._rates.pop(job.request_id, None)
        self._came.pop(job.request_id, None)
        self._first.discard(job.request_id)

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        rate = self._rates.get(job.request_id)
        if rate is not None and job.output_len > (came := self._came[job.request_id]):
            self._came[job.request_id] = job.output_len
            self._first.discard(job.request_id)
            row = self._known_row(job)
            began_at = now - duration_s if came else now  # a reader who has read all goes on with the first of these
            read_by = max(float(self._column("read_by")[row]), began_at) + (job.output_len - came) / rate
            self._table.put(row, "read_by", read_by)
        super().ran(job, duration_s, now)

    def learn(self, job: Job, *, censored: bool) -> None:
        super().learn(job, censored=censored)
        if censored and job.output_len < job.max_new_tokens:
            self._shadow.left(job.request_id)  # its client has left: nothing is known of its length
            return
        self._shadow.ended(job.request_id, job.output_len, job.last_ran_at - job.arrived_at, job.last_ran_at)
        self._accuracy.observe(self._work_s(job, self._predicted_len(job)), self._work_s(job, job.output_len))
        self._usual_len += FORGETTING * (job.output_len - self._usual_len)

    def _predicted_len(self, job: Job) -> float:
        shown = job.shown_forecast
        usual = min(self._usual_len, float(job.max_new_tokens))
        return usual if shown is None else usual + self.gate.omega * (shown.mean - usual)

    def _work_s(self, job: Job, output_len: float) -> float:
        """Returns the seconds of the replica that a job takes with so many tokens: what the order is about."""
        step = self._price.step
        prompt_len = job.prompt_len - min(job.cached_len, job.prompt_len)
        context_s = step.context_token_s * (job.prompt_len + output_len / 2)
        token_s = step.decode_seq_s + context_s + step.base_s / self._num_rows
        return step.prefill_token_s * prompt_len + token_s * output_len

    def _crowd_s(self, job: Job) -> float:
        """Returns the seconds in which order of arrival would end a job, twice as long as predicted, beside all here.

        In a burst the times of those who came before say little: by these alone all who come in it would be guarded.
        """
        step, num_rows = self._price.step, min(len(self._table.jobs), self._most)
        step_s = step.step_s(0, num_rows, num_rows * (job.prompt_len + round(self._usual_len / 2)))
        missing_len = float(self._column("missing").sum())
        return step.prefill_token_s * missing_len + LONG * self._predicted_len(job) * step_s

    def price(self, cost: StepCost, capacity: int) -> None:
        """Sets the step cost and the KV capacity; a full step is one of as many rows as have places by this price."""
        num_rows = priced_rows(cost, self._usual_len, self._most)
        self._price = DecodePrice(cost, num_rows, capacity, self._price.unit)
        self._shadow.cost = cost
        self._mark_stale(slice(None))

    @property
    def _num_rows(self) -> int:
        return self._price.max_num_seqs

    def num_places(self, most: int, now: float) -> int:
        """Returns the places by price, and one more for each stream without a first token."""
        return min(most, self._num_rows + len(self._first))

    def _keys(self, rows: slice | NDArray[np.int64], now: float) -> list[NDArray[Any]]:
        self._asked_at = now
        columns = [self._column("priority"), self._column("deadline_at"), *self._kinds(now), self._column("arrived_at")]
        return [column[rows] for column in columns]

    def _kinds(self, now: float) -> tuple[NDArray[np.int64], FloatArray]:
        """Returns the kind of each job, shape (n,), and what jobs of one kind go by, in seconds."""
        arrived_at, resident = self._column("arrived_at"), self._column("resident")
        has_begun, is_read = self._column("generated") > 0, self._column("rate") > 0
        kinds = np.where(has_begun, np.where(resident, _BEGUN, _BACK), _NEW)
        kinds[~has_begun & self._is_guarded(now)] = _GUARDED
        unread = ~is_read & (kinds != _GUARDED)
        keys = arrived_at.copy()
        keys[unread] = self._boosted_at(arrived_at, resident)[unread]
        first = np.flatnonzero(is_read & ~has_begun)
        kinds[first] = _FIRST
        keys[first] = self._first_at(first)
        streams = np.flatnonzero(is_read & has_begun)
        if not self._has_room():  # who stands still for others would lose KV, which takes longer to come back
            held = resident | has_begun
            kinds[held] = np.where(resident[held], _HELD, _LOST)
            keys[held] = arrived_at[held]
        elif len(streams):
            ahead = self._look_ahead(streams, now)
            kinds[streams] = np.where(ahead, _AHEAD, _DUE)
            keys[streams] = self._column("read_by")[streams]
            due = streams[~ahead]
            num_unread = int(np.count_nonzero(~is_read))
            most = math.ceil(self._num_rows * len(streams) / (len(streams) + num_unread))
            kinds[due[np.argsort(keys[due], kind="stable")[most:]]] = _OVER
        return kinds, keys

    def _first_at(self, rows: NDArray[np.int64]) -> FloatArray:
        """Returns what streams without a first token go by: their arrivals, less boosts by the work left to compute.

        A long prompt whose beginning is cached counts for the rest alone. The yardstick is that of ``Boosted``, taken
        of this work, so that no one is passed by those who come much later than all of it takes.
        """
        work_s = self._price.step.prefill_token_s * np.maximum(self._column("missing")[rows], 1.0)
        if not len(rows) or not work_s.any():
            arrived_at: FloatArray = self._column("arrived_at")[rows]
            return arrived_at
        yardstick_s = FIRST_DEVIATIONS * float(work_s.sum()) / math.sqrt(len(rows))
        yardstick_s = min(yardstick_s, self._max_boost_s / SPREAD)
        boosted: FloatArray = self._column("arrived_at")[rows] - boosts(work_s, yardstick_s, self._max_boost_s)
        return boosted

    def _boosted_at(self, arrived_at: FloatArray, resident: NDArray[np.bool_]) -> FloatArray:
        share = self._accuracy.share
        if share is not None and share < LEAST_ACCURACY:
            return arrived_at
        rank = self._column("rank").copy()
        rank[resident] /= self._theta
        boosted: FloatArray = arrived_at - self._boosts(rank, self._column("tokens"))
        return boosted

    def _look_ahead(self, streams: NDArray[np.int64], now: float) -> NDArray[np.bool_]:
        """Returns which of the begun streams may stand still; keeps it: one that does so stands until little is left.

        Args:
            streams: Their rows.
        """
        ahead, left_s = self._column("ahead")[streams], self._column("read_by")[streams] - now
        context_len = int(self._column("context")[streams].sum())
        back_s = max(RESUMES_S, STEPS_AHEAD * self._price.step.step_s(0, len(streams), context_len))
        ahead = (ahead & (left_s >= back_s)) | (left_s >= PAUSES_S / RESUMES_S * back_s)
        self._column("ahead")[streams] = ahead
        return ahead

    def _has_room(self) -> bool:
        """Returns whether KV lasts for all that have begun, and for as many others beside them as there are places."""
        begun, context = self._column("generated") > 0, self._column("context")
        held, new = float(context[begun].sum()), context[~begun]
        coming = float(new.mean()) * min(len(new), self._num_rows) if len(new) else 0.0
        return held <= SHARE_OF_KV * self._price.capacity and held + coming <= self._price.capacity

    def _is_guarded(self, now: float) -> NDArray[np.bool_]:
        """Returns which jobs would end behind their guards if they began later than now."""
        step, num_rows = self._price.step, self._num_rows
        step_s = step.step_s(0, num_rows, round(num_rows * self._usual_len))
        stay_s = self._column("tokens") * step_s + step.prefill_token_s * self._column("missing")
        guard_at = np.maximum(self._column("guard_at"), self._column("arrived_at") + self._shadow.guard_s)
        guarded: NDArray[np.bool_] = now + stay_s >= guard_at
        return guarded

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the numbers of ``Boosted``, what the job is served for, its reader's seconds, and its guard."""
        facts = dict(super().explain(job, now))
        row = self._known_row(job)
        facts["served_for"] = "end" if job.reading_rate is None else "reader" if job.output_len else "first_token"
        if facts["served_for"] == "reader":
            facts["reader_ahead_s"] = float(self._column("read_by")[row]) - now
        if self._shadow.guard_s < math.inf:
            facts["guard_in_s"] = max(float(self._column("guard_at")[row]), job.arrived_at + self._shadow.guard_s) - now
        if self._accuracy.share is not None:
            facts["pairs_in_order"] = self._accuracy.share
        return facts


def tally_of(order: Order) -> GuardTally:
    """Returns the ends beside those of order of arrival so far; nothing under an order that keeps no shadow of it."""
    return order.tally if isinstance(order, ReadersFirst) else NO_ENDS


@ORDERS.register("readers", stands_for="gittins", reads_forecasts=True)
def build_readers(context: ReplicaContext) -> ReadersFirst:
    """Serves streams ahead of their readers, and all else by boosted arrival, behind a guard against long waits."""
    settings, config = context.settings, context.settings.scheduler
    price = DecodePrice(settings.cost, context.max_num_seqs, PRIOR_CAPACITY)
    return ReadersFirst(
        price,
        theta=settings.theta,
        tail=TAIL * config.tail,
        reading_rate=config.reading_rate,
    )


WINDOW = 200
"""Latest ends over which the share is taken."""

BESIDE = 32
"""Ends before it that each end is compared with."""

LEAST_ENDS = 50
"""With fewer ends nothing is known."""


class PairAccuracy:
    """Share of ordered pairs; a pair of equal works tells nothing, a pair of equal predictions counts half."""

    def __init__(self) -> None:
        self._beside: deque[tuple[float, float]] = deque(maxlen=BESIDE)
        self._counts: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._right, self._pairs = 0.0, 0

    @property
    def share(self) -> float | None:
        """Share of pairs in the right order, in [0, 1]; None while too few have ended."""
        return self._right / self._pairs if len(self._counts) >= LEAST_ENDS and self._pairs else None

    def observe(self, predicted: float, actual: float) -> None:
        """Records an ended request: its work as predicted at its arrival, and as it was. O(BESIDE)."""
        right, pairs = 0.0, 0
        for other_predicted, other_actual in self._beside:
            if other_actual != actual:
                pairs += 1
                if other_predicted == predicted:
                    right += 0.5
                else:
                    right += (other_predicted < predicted) == (other_actual < actual)
        self._beside.append((predicted, actual))
        if len(self._counts) == WINDOW:
            old_right, old_pairs = self._counts[0]
            self._right -= old_right
            self._pairs -= old_pairs
        self._counts.append((right, pairs))
        self._right += right
        self._pairs += pairs
