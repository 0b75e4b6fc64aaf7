"""How long a new request would wait: the work that has to go first, divided by the rate at which replicas serve.

All requests count as alike, with the mean lengths of the requests in flight, and as evenly spread over replicas: more
replicas change only this part of a delay. Progress is not looked at: by Little's law, the share of requests in flight
that are in their prefill equals the prefill's share of the time that requests spend in flight.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from farsight.core.costs import StepCost
from farsight.core.forecast import QUANTILES
from farsight.core.messages.requests import Demand, LoadSnapshot
from farsight.core.request import Request


def queue_delay_s(outlook: LoadSnapshot, num_replicas: int) -> float | None:
    """Returns the seconds until a request that came now would begin, with ``num_replicas`` like those of ``outlook``.

    With continuous batching a request waits until a running request has ended, if all places are taken, and until the
    prompts before its own are computed. With whole batches a request waits until the first running batch has ended and
    the full batches in the queue have run; the request joins the last batch there.

    Args:
        num_replicas: With 0 the delay is unknown.

    Returns:
        None for an unknown delay: no replica serves, or there are requests, but steps have not been measured.
    """
    found = delay_law(outlook, num_replicas)
    return None if found is None else found.mean_s


@dataclass(frozen=True, slots=True)
class DelayLaw:
    """A queue delay as a law: about normal, since many lengths add up."""

    mean_s: float
    sd_s: float = 0.0

    def quantile(self, level: float) -> float:
        """Returns the delay at a level in (0, 1), in seconds, at least 0."""
        return max(0.0, self.mean_s + self.sd_s * _NORMAL.inv_cdf(level))


def delay_law(outlook: LoadSnapshot, num_replicas: int) -> DelayLaw | None:
    """Returns the delay of ``queue_delay_s`` as a law.

    Departures follow each other like the ends of independent outputs: the delay behind k departures has k times the
    variance of one interval, whose relative deviation is that of the output lengths in flight.
    """
    demand, cost = outlook.demand, outlook.cost
    if not num_replicas:
        return None
    if not demand.num_requests:
        return DelayLaw(0.0)
    if cost is None or not outlook.kv_tokens:
        return None
    each = _MeanRequest(demand, cost)
    places = min(outlook.max_num_seqs, max(1, int(outlook.kv_tokens / each.context_len)))
    if not outlook.joins:
        return DelayLaw(_batches_s(demand, each, places, num_replicas))
    running = min(places, -(-demand.num_requests // num_replicas))
    ahead = max(0, demand.num_requests + 1 - places * num_replicas)
    prefill_s, decode_s = each.prefill_s, each.decode_s(running)
    prompts_s = running * prefill_s * prefill_s / (prefill_s + decode_s) if decode_s else running * prefill_s
    interval_s = each.batch_s(running) / running / num_replicas
    return DelayLaw(ahead * interval_s + prompts_s, interval_s * each.spread * math.sqrt(ahead))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of a request that came now, at one level of its law; in seconds from now.

    Attributes:
        tpot_s: Seconds between two tokens after the first.
    """

    ttft_s: float
    tpot_s: float
    end_s: float

    def later(self, factor: float) -> Prediction:
        """Returns the prediction with ``factor`` times the seconds to the first token; the end moves by as much."""
        more_s = (factor - 1.0) * self.ttft_s
        return Prediction(self.ttft_s + more_s, self.tpot_s, self.end_s + more_s)


def predict(outlook: LoadSnapshot, request: Request, level: float) -> Prediction | None:
    """Returns when a request with a target would have its tokens, with probability ``level``; None if that is unknown.

    Only requests with targets count as ahead of the request: all others give way to it in the end.
    """
    demand, cost = outlook.demand, outlook.cost
    if cost is None or not outlook.num_replicas:
        return None
    share = demand.num_with_targets / demand.num_requests if demand.num_requests else 1.0
    delay = delay_law(replace(outlook, demand=demand.scaled(share)), outlook.num_replicas)
    if delay is None:
        return None
    context_len = request.known_len
    running = min(outlook.max_num_seqs, -(-demand.num_requests // outlook.num_replicas) + 1)
    if demand.num_requests and outlook.kv_tokens:
        context_len = round(_MeanRequest(demand, cost).context_len)
        running = min(running, max(1, outlook.kv_tokens // context_len))
    tpot_s = cost.step_s(0, running, running * context_len)
    ttft_s = delay.quantile(level) + cost.prefill_s(request.known_len) + tpot_s
    return Prediction(ttft_s, tpot_s, ttft_s + _own_tokens(outlook, request, level) * tpot_s)


def _own_tokens(outlook: LoadSnapshot, request: Request, level: float) -> float:
    """Returns the most output tokens after the first, with probability ``level``."""
    most = request.sampling.max_new_tokens - len(request.output_ids) - 1
    lengths = outlook.lengths if request.forecast is None else request.forecast.quantiles
    if request.sampling.ignore_eos or not lengths:
        return most
    return min(float(most), float(np.interp(level, QUANTILES, lengths)))


_NORMAL = NormalDist()


def ended_after_s(outlook: LoadSnapshot, num_requests: int) -> float | None:
    """Returns the seconds until ``num_requests`` of the requests in flight have ended, if no others come.

    Returns:
        None where no replica serves, there are no requests, or steps have not been measured.
    """
    demand, cost = outlook.demand, outlook.cost
    if not outlook.num_replicas or not demand.num_requests or cost is None or not outlook.kv_tokens:
        return None
    each = _MeanRequest(demand, cost)
    places = min(outlook.max_num_seqs, max(1, int(outlook.kv_tokens / each.context_len)))
    running = min(places, -(-demand.num_requests // outlook.num_replicas))
    return num_requests * each.batch_s(running) / running / outlook.num_replicas


def _batches_s(demand: Demand, each: _MeanRequest, places: int, num_replicas: int) -> float:
    """Returns the expected delay in seconds: a running batch's rest, then the full batches in the queue.

    With n batches running, each at a uniformly random point, the first ends after 1 / (n + 1) of a batch on average.
    """
    if not demand.num_waiting and demand.num_busy < num_replicas:
        return 0.0
    running = min(places, -(-(demand.num_requests - demand.num_waiting) // max(1, demand.num_busy)))
    rest_s = each.batch_s(running) / (num_replicas + 1) if running else 0.0
    return rest_s + demand.num_waiting // places * each.batch_s(places) / num_replicas


class _MeanRequest:
    """The mean of the requests in flight, of which there is at least one.

    Attributes:
        context_len: Tokens that the request holds, in the mean over its life.
        prefill_s: Seconds of its prefill, without the base cost of the steps, which decode other requests as well.
        spread: Standard deviation of an output's predicted length, as a share of the mean.
    """

    def __init__(self, demand: Demand, cost: StepCost) -> None:
        num = demand.num_requests
        known_len, cached_len = demand.known_tokens / num, demand.cached_tokens / num
        self._output_len = demand.output_tokens / num
        self.spread = math.sqrt(demand.output_variance / num) / self._output_len if self._output_len else 0.0
        self._cost = cost
        self.context_len = max(1.0, known_len + self._output_len / 2)
        self.prefill_s = cost.prefill_s(round(known_len - cached_len), round(cached_len)) - cost.base_s

    def decode_s(self, num_seqs: int) -> float:
        """Returns the seconds from the request's first token to its last, in a batch of ``num_seqs``."""
        return self._output_len * self._cost.step_s(0, num_seqs, round(num_seqs * self.context_len))

    def batch_s(self, num_seqs: int) -> float:
        """Returns the seconds of ``num_seqs`` requests that begin together, with a replica to themselves."""
        return num_seqs * self.prefill_s + self.decode_s(num_seqs)


LEVEL = 0.95
"""Probability with which an admitted request is to meet its targets."""

WINDOW = 200
"""Most recent waits from which the errors of predictions are taken."""

MIN_WAITS = 20
"""Fewest waits from which the errors of predictions are taken."""


class WaitErrors:
    """The correction factor of predicted times to the first token: the ``LEVEL`` quantile of recent ratios of the real
    to the predicted time (as ``policies.outlook.calibration`` does for ends)."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self.factor = 1.0

    def add(self, predicted_s: float, waited_s: float) -> None:
        """Records a request's predicted and real time to its first token, in seconds. O(WINDOW)."""
        self._ratios.append(waited_s / predicted_s)
        if len(self._ratios) >= MIN_WAITS:
            self.factor = float(np.quantile(self._ratios, LEVEL))


@dataclass(frozen=True, slots=True)
class MissedTarget:
    """Why a request is refused.

    Attributes:
        late_s: Seconds by which the request would be late.
    """

    message: str
    late_s: float


def missed_target(request: Request, predicted: Prediction) -> MissedTarget | None:
    """Returns the first target that a request cannot meet; None if the request can meet all."""
    slo = request.slo
    deadline_s = math.inf if request.deadline_s is None else request.deadline_s
    targets = (
        ("slo.ttft", "time to the first token", predicted.ttft_s, slo.ttft_s),
        ("slo.tpot", "time of each further token", predicted.tpot_s, slo.tpot_s),
        ("deadline_s", "time to the end", predicted.end_s, deadline_s),
    )
    for field, what, seconds, wanted_s in targets:
        if seconds > wanted_s:
            return MissedTarget(f"predicted {what}: {seconds:.3g} s, {field} is {wanted_s:g} s", seconds - wanted_s)
    return None


class TargetCheck:
    """Decides whether requests can meet their targets, by predictions corrected by their recent errors.

    Attributes:
        errors: Recent errors of the predictions.
    """

    def __init__(self) -> None:
        self.errors = WaitErrors()

    def look(self, outlook: LoadSnapshot, request: Request) -> tuple[MissedTarget | None, float]:
        """Returns the target that cannot be met, and the uncorrected seconds to the first token; 0 if unknown."""
        raw = predict(outlook, request, LEVEL)
        if raw is None:
            return None, 0.0
        return missed_target(request, raw.later(self.errors.factor)), raw.ttft_s
