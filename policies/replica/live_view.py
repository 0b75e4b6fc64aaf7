"""The present state of a replica for the operator's pages, from the books of its scheduler; decides nothing."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from farsight.core.decisions import unpack_decisions
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.live import EndedRequest, ForecastTally, LiveRequest, MemoryPoint, ReplicaLive
from farsight.core.messages.requests import Promise
from farsight.core.request import Residency
from farsight.policies.admission.past_future import peak_profile
from farsight.policies.interfaces import ScheduledRequest
from farsight.policies.replica.events import AccountClosed, RequestEnded
from farsight.policies.replica.scheduler import ReplicaScheduler

MAX_ENDS = 50
"""Most requests for which a view predicts the end: about 3 ms of CPU."""

MAX_POINTS = 64
MAX_ENDED = 200
FORGETTING = 0.02
"""Weight of the latest request in the mean length of those that have ended."""

_Q50, _Q90 = QUANTILES.index(0.5), QUANTILES.index(0.9)
_COMPLETE = ("stop", "length")


class SchedulerWatch:
    """Watches one scheduler.

    ``of`` costs O(admitted log admitted + rows), and one walk over the waiting requests if rows are asked for.

    Args:
        replica: Its name.
    """

    def __init__(self, replica: str, machine: ReplicaScheduler) -> None:
        self._replica = replica
        self._machine = machine
        self._ended: deque[tuple[float, EndedRequest]] = deque(maxlen=MAX_ENDED)  # when, and what
        self._mean_len: float | None = None
        self._forecasts = ForecastTally()
        self._just_ended: dict[str, RequestEnded] = {}

    def ended(self, end: RequestEnded) -> None:
        """Books the end of a request; ``closed`` tells its answer later."""
        length = float(end.finished.output_len)
        self._mean_len = length if self._mean_len is None else self._mean_len + FORGETTING * (length - self._mean_len)
        self._just_ended[end.finished.request_id] = end
        if end.forecast is not None and end.finished.status.finish_reason in _COMPLETE:
            self._forecasts = _counted(self._forecasts, end.forecast, end.finished.output_len)
        while len(self._just_ended) > MAX_ENDED:
            del self._just_ended[next(iter(self._just_ended))]

    def closed(self, account: AccountClosed) -> None:
        """Lists a request that has left, now that the decisions about it are complete."""
        end = self._just_ended.pop(account.request_id, None)
        if end is None:
            self._note_abandoned(account)
            return
        reason = end.finished.status.finish_reason or ""
        origin, forecast = account.origin, end.forecast
        ended = EndedRequest(
            response_id=origin.response_id,
            choice=origin.choice,
            reason=reason,
            output_len=end.finished.output_len,
            predicted_len=None if forecast is None else forecast.mean,
            took_s=end.ended_at - end.arrived_at,
            most_len=None if forecast is None else forecast.quantiles[_Q90],
            tenant=account.tenant,
            prompt_len=account.prompt_len,
            ttft_s=None if end.first_token_at is None else end.first_token_at - end.arrived_at,
        )
        self._ended.appendleft((end.ended_at, ended))

    def _note_abandoned(self, account: AccountClosed) -> None:
        """Lists a request that left unfinished because its client did; the worker has said nothing of its end."""
        decisions = unpack_decisions(account.decisions)
        if not decisions or decisions[-1].kind != "aborted":
            return
        forecast = next((each.facts for each in reversed(decisions) if each.kind == "forecast"), {})
        ended = EndedRequest(
            response_id=account.origin.response_id,
            choice=account.origin.choice,
            reason="abort",
            output_len=int(decisions[-1].facts["output_tokens"]),
            predicted_len=_number(forecast.get("mean_tokens")),
            took_s=decisions[-1].at - decisions[0].at,
            most_len=_number(forecast.get("q90_tokens")),
            tenant=account.tenant,
            prompt_len=account.prompt_len,
        )
        self._ended.appendleft((decisions[-1].at, ended))

    def of(self, now: float, max_rows: int) -> ReplicaLive:
        """Returns the present state of the replica.

        Args:
            max_rows: Most requests listed; with 0, ended requests are not listed either.
        """
        machine = self._machine
        admitted = machine.admitted
        return ReplicaLive(
            replica=self._replica,
            num_running=machine.num_admitted,
            num_waiting=machine.num_waiting,
            num_offloaded=machine.num_offloaded,
            used_tokens=sum(each.computed_len for each in admitted),
            capacity_tokens=machine.capacity_tokens,
            curve=self._curve(admitted),
            requests=tuple(self._rows(now, max_rows)),
            ended=tuple(replace(each, ago_s=now - at) for at, each in self._ended) if max_rows else (),
            forecasts=self._forecasts,
            prompt_tokens=machine.spent[0],
            gpu_s=machine.spent[1],
        )

    def _curve(self, admitted: list[ScheduledRequest]) -> tuple[MemoryPoint, ...]:
        """Returns equations (2) and (3) of Past-Future over the forecasts, thinned; begins with the memory held now."""
        if not admitted:
            return ()
        base = np.array([each.known_len for each in admitted], np.int64)
        remaining = np.array([self._remaining_len(each) for each in admitted], np.int64)
        steps, tokens = peak_profile(base, remaining)
        highest: dict[int, int] = {}  # by steps: jobs that complete at once are one point
        for ahead, used in zip(steps.tolist(), tokens.tolist(), strict=True):
            highest[ahead] = max(used, highest.get(ahead, 0))
        peak = max(highest, key=highest.__getitem__)
        rising = sorted(highest)
        kept = sorted({*rising[:: -(-len(rising) // (MAX_POINTS - 3))], rising[-1], peak})
        return MemoryPoint(0, int(base.sum())), *(MemoryPoint(ahead, highest[ahead]) for ahead in kept)

    def _remaining_len(self, each: ScheduledRequest) -> int:
        """Returns the predicted tokens to come, at least 1 and within the request's limit.

        With a forecast: the tokens to its mean, or beyond that to the next quantile. Else the mean length of ended
        requests, however long the output is already: without a forecast, lengths are taken to be memoryless.
        """
        most = each.max_new_tokens - each.output_len
        if each.forecast is None:
            ahead = most if self._mean_len is None else self._mean_len
        else:
            known = (each.forecast.mean, *each.forecast.quantiles)
            ahead = next((length - each.output_len for length in known if length > each.output_len), most)
        return max(1, min(most, round(ahead)))

    def _rows(self, now: float, max_rows: int) -> Iterator[LiveRequest]:
        if not max_rows:
            return
        machine = self._machine
        running = {job.request_id for job in machine.selector.running}
        has_worker = machine.capacity_tokens > 0
        waiting = machine.waiting(now) if has_worker else iter(())
        listed = list(itertools.islice(itertools.chain(machine.admitted, waiting), max_rows))
        asked = [each.request_id for each in listed[:MAX_ENDS]]
        ends = {made.request_id: made for made in machine.outlook(asked, now)}
        for each in listed:
            yield self._row(each, each.request_id in running, ends.get(each.request_id), now)

    def _row(self, each: ScheduledRequest, runs: bool, end: Promise | None, now: float) -> LiveRequest:
        origin, forecast = each.request.origin, each.shown_forecast
        facts = self._machine.order.explain(each, now)
        rank_s = facts.get("rank_s")
        return LiveRequest(
            request_id=each.request_id,
            response_id="" if origin is None else origin.response_id,
            choice=0 if origin is None else origin.choice,
            tenant=each.tenant,
            state=_state(each, runs),
            age_s=now - each.arrived_at,
            prompt_len=each.prompt_len,
            output_len=each.output_len,
            max_new_tokens=each.max_new_tokens,
            predicted_len=None if forecast is None else forecast.mean,
            most_len=None if forecast is None else forecast.quantiles[_Q90],
            kv_tokens=each.computed_len,
            level=int(facts.get("level", 0)),
            rank_s=None if rank_s is None else float(rank_s),
            waits_for=each.waits_for,
            num_preemptions=each.num_preemptions,
            eta_p50=None if end is None else end.p50_s,
            eta_p90=None if end is None else end.p90_s,
            prefilled_len=each.prefilled_len,
        )


def _number(fact: float | str | None) -> float | None:
    return None if fact is None else float(fact)


def _counted(tally: ForecastTally, forecast: Forecast, output_len: int) -> ForecastTally:
    excess = forecast.mean - output_len
    return ForecastTally(
        tally.num_requests + 1,
        tally.error_tokens + abs(excess),
        tally.excess_tokens + excess,
        tally.output_tokens + output_len,
        tally.within_p50 + (output_len <= forecast.quantiles[_Q50]),
        tally.within_p90 + (output_len <= forecast.quantiles[_Q90]),
    )


def _state(each: ScheduledRequest, runs: bool) -> str:
    if each.residency is Residency.HOST or each.is_offloaded:
        return "offloaded"
    if runs and not each.stalled:
        return "decode" if each.decodes else "prefill"
    return "paused" if each.is_resident else "waiting"
