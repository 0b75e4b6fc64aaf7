"""The scheduler over replicas in batch mode: idle replicas pull batches from one central queue.

Like ``GlobalScheduler`` it holds a table of requests in flight, which handles announcements, aborts and losses in both
modes. ``GlobalScheduler`` has a placement beside the table, ``BatchScheduler`` a ``CentralQueue``.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Set
from dataclasses import dataclass, field, replace

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.forecast import ForecastMade
from farsight.core.key_sums import NUM_PARTS, part_of
from farsight.core.messages.requests import Key
from farsight.core.request import Request
from farsight.policies.batching.base import BatchPolicy, FormedBatch
from farsight.policies.fleet.central_queue import CentralQueue, Member
from farsight.policies.fleet.events import (
    AskIngress,
    BatchEnded,
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    PlaceRequests,
    ReplicaAway,
    ReplicaBroke,
    ReplicaDraining,
    ReplicaGone,
    ReplicaRests,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
)
from farsight.policies.fleet.fleet_replica import Entry
from farsight.policies.fleet.scheduler import FleetMachine
from farsight.policies.interfaces import Job
from farsight.policies.placement.base import Choice
from farsight.policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived
from farsight.policies.settings import ServingTime


@dataclass(frozen=True, slots=True)
class BatchChoice(Choice):
    """An idle worker pulled a batch: the choice for one of its requests.

    Attributes:
        told: The batch's facts: ``batch_size`` requests, ``batch_len`` L(B) and ``generation_len`` G(B), its longest
            prompt and its longest predicted output in tokens, and the batcher's story (``BatchPolicy.story``).
        counted_len: G(p), the output tokens that the request counted with when batches were formed and chosen.
        counted_by: Source of ``counted_len``: that of the forecast, or ``max_tokens`` without one.
    """

    told: Facts = field(default_factory=dict)
    counted_len: int = 0
    counted_by: str = ""

    def facts(self) -> Facts:
        return {**self.told, "counted_tokens": self.counted_len, "counted_by": self.counted_by}


def batch_choices(replica: str, batch: FormedBatch, story: Facts) -> list[BatchChoice]:
    """Returns the choice of a replica whose worker pulled this batch, for each of its jobs in order."""
    reason = f"idle; pulled a batch of {len(batch)}"
    shape = {"batch_size": len(batch), "batch_len": batch.prompt_len, "generation_len": batch.predicted_len}
    told = {"replica": replica, "reason": reason, **shape, **story}
    return [
        BatchChoice(
            replica,
            reason,
            told=told,
            counted_len=length,
            counted_by="max_tokens" if job.forecast is None else job.forecast.source,
        )
        for job, length in zip(batch.jobs, batch.predicted_lens, strict=True)
    ]


@dataclass(slots=True)
class _Run:
    """A batch in a replica.

    Attributes:
        left: Output tokens of each unfinished request when it was placed.
        output_len: Longest output of the finished requests, in tokens.
        whole: Whether no request has left before its end.
    """

    batch: FormedBatch
    began_at: float
    estimated_s: float
    left: dict[str, int]
    output_len: int = 0
    whole: bool = True


class BatchScheduler(FleetMachine):
    """Forms batches, and gives the next one to each replica that has nothing in flight.

    The requests of a batch that ran out of memory come back through the ingress replicas, like all lost requests,
    because only these know the tokens that clients have. This object remembers the requests of the batch, and splits
    the batch once all of them are back or gone.

    Args:
        batcher: Forms batches; this object owns it from now on.
        serving_time_s: Estimated seconds of a batch, for the record.
        forecast_wait_s: As in ``CentralQueue``.
        reload_s: Seconds for which a replica takes nothing after its batch has broken off (Magnus, section III-C,
            loads the model again); 0 for replicas that go on at once.
    """

    pulls = True

    def __init__(
        self, batcher: BatchPolicy, serving_time_s: ServingTime, forecast_wait_s: float = 0.0, reload_s: float = 0.0
    ) -> None:
        super().__init__()
        self._serving_time_s = serving_time_s
        self._reload_s = reload_s
        self._reloads_until: dict[str, float] = {}  # by replica
        self._waiting = CentralQueue(batcher, forecast_wait_s)
        self._runs: dict[str, _Run] = {}  # by replica
        self._resting: dict[str, frozenset[Key]] = {}  # by replica
        self._kinds: set[tuple[int, bool]] = set()  # (longest request, external) of the replicas at the last check
        self._numbers = itertools.count()
        self._ended: list[GlobalInstruction] = []
        self.num_splits = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that no replica has taken."""
        return self._table.num_queued

    def timed(self) -> Iterable[FormedBatch]:
        """Returns the batches whose times the next choice may ask for; a worker's pull asks for all of them at once."""
        return self._waiting.timed()

    @property
    def next_due_at(self) -> float | None:
        """The instant at which the next ``TimePassed`` is due; None if none is."""
        due_at = self._waiting.next_due_at(lambda: any(map(self._is_idle, self._names())))
        due = [] if due_at is None else [due_at]
        if self._table.num_queued:
            due += self._reloads_until.values()
        return min(due, default=None)

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """Does as ``FleetMachine.handle`` says; after every event idle replicas pull."""
        self._now = now
        self._reloads_until = {name: until for name, until in self._reloads_until.items() if until > now}
        out = self._take(event)
        self._waiting.pass_time(now)
        out += self._refuse_failed()
        out += self._pull()
        out += self._ended
        self._ended = []
        return out

    def _take(self, event: GlobalEvent) -> list[GlobalInstruction]:
        """Applies one event. Events about caches, costs and starts change nothing: they choose no replica."""
        match event:
            case RequestsArrived(requests):
                return self._arrive(requests)
            case RequestsAborted(keys):
                self._forget_aborted(keys)
                return self._table.abort(keys)
            case RequestsEnded(finished):
                self._table.end(finished)
            case IngressAnnounced():
                return self._reconcile(event)
            case IngressLost(ingress_id):
                self._forget_awaited(ingress_id, frozenset(), range(NUM_PARTS))
                return self._table.lose_ingress(ingress_id)
            case KeysUnknown(replica, keys):
                return self._table.drop_unknown(replica, keys)
            case ReplicaUp(name, ready, sums=sums):
                self._table.bring_up(name, ready)
                return self._measure_replicas() + self._table.compare(name, sums, self._now)
            case ReplicaAway(name):
                self._table.set_away(name)
                self._reloads_until.pop(name, None)  # its next process has loaded the model
            case ReplicaDraining(name, ends):
                self._table.drain(name, ends=ends)
            case ReplicaGone(name):
                self._drop_replica(name)
            case ReplicaBroke(name, keys):
                self._break_off(name, keys)
            case ReplicaRests(name, keys):
                self._resting[name] = frozenset(keys)
            case HistoryLearned(forecast):
                self._waiting.set_usual_forecast(forecast)
                self._table.learn_lengths(forecast)
            case ForecastsArrived(made):
                self._take_forecasts(made)
        return []

    def _names(self) -> list[str]:
        return [load.name for load in self._table.loads()]

    def _is_idle(self, name: str) -> bool:
        """Returns whether a replica takes the next batch: its requests in flight, if any, have no reading client."""
        if name in self._reloads_until:
            return False
        if not self.num_on(name):
            return True
        resting = self._resting.get(name)
        if not resting:
            return False
        return all(key in resting for key in self._table.keys_on(name))

    def _arrive(self, requests: Iterable[Request]) -> list[GlobalInstruction]:
        awaits = self._waiting.is_awaited
        fresh, out = self._table.accept(each for each in requests if not awaits((each.request_id, each.attempt)))
        if not self._table.loads():
            self._kinds = set()  # whether they fit is unknown while no replica is up
        for request in fresh:
            if self._table.never_fits(request):
                self._waiting.remove(request.request_id, self._now)
                out.append(self._table.refuse(request))
            else:
                self._table.enqueue(request, self._now)
                self._waiting.add(request, self._now)
        return out

    def _measure_replicas(self) -> list[GlobalInstruction]:
        """Bounds all batches by the smallest replica after one came up; refuses requests that fit no replica."""
        lives = self.lives()
        self._waiting.hold(min(ready.num_blocks * ready.block_size for ready in lives), self._now)
        kinds = {(ready.max_model_len, ready.external) for ready in lives}
        if kinds == self._kinds:  # requests that came since were checked when they came
            return []
        self._kinds = kinds
        unfit = [request for request, _ in self._table.all_queued() if self._table.never_fits(request)]
        for request in unfit:
            self._table.remove(request.request_id)
        return [self._table.refuse(request) for request in unfit]

    def _refuse_failed(self) -> list[GlobalInstruction]:
        """Refuses requests that ran out of memory alone, since they would do so again."""
        refused: list[GlobalInstruction] = []
        for job in self._waiting.take_failed():
            request = self._queued(job.request_id)
            self._table.remove(job.request_id)
            message = "the request ran out of KV memory with a worker to itself"
            refused.append(RefuseRequest(request.request_id, request.attempt, "max_tokens", message))
        return refused

    def _queued(self, request_id: str) -> Request:
        request = self._table.queued(request_id)
        assert request is not None
        return request

    def _pull(self) -> list[GlobalInstruction]:
        out: list[GlobalInstruction] = []
        if not self._table.num_queued:
            return out
        for name in self._names():
            if self._is_idle(name):
                batch = self._waiting.pull(lambda job, name=name: self._holds(name, job), self._now)  # type: ignore[misc]
                if batch is None:
                    continue
                out.append(self._run(name, batch))
                if not self._table.num_queued:
                    break
        return out

    def _holds(self, name: str, job: Job) -> bool:
        replica = self._table.replica(name)
        return replica is not None and replica.fits(self._queued(job.request_id))

    def _run(self, name: str, batch: FormedBatch) -> PlaceRequests:
        requests = tuple(self._queued(job.request_id) for job in batch.jobs)
        story = self._waiting.story(batch, self._now)
        for request, choice in zip(requests, batch_choices(name, batch, story), strict=True):
            self._table.place(request, choice, self._now)
        estimated_s = self._serving_time_s(len(batch), batch.prompt_len, batch.predicted_len)
        left = {request.request_id: len(request.output_ids) for request in requests}
        self._runs[name] = _Run(batch, self._now, estimated_s, left)
        return PlaceRequests(name, requests)

    def _removed(self, request_id: str, entry: Entry | None, output_len: int | None) -> None:
        self._waiting.remove(request_id, self._now)
        if entry is not None:
            self._leave(entry.replica, request_id, output_len)

    def _leave(self, name: str, request_id: str, output_len: int | None) -> None:
        """Books that a request of a batch is no longer in flight; the last one ends the batch."""
        run = self._runs.get(name)
        if run is None or request_id not in run.left:
            return
        had_len = run.left.pop(request_id)
        if output_len is None:
            run.whole = False
        else:
            run.output_len = max(run.output_len, output_len - had_len)
        if not run.left:
            del self._runs[name]
            if run.whole:
                self._ended.append(self._outcome(name, run))

    def _outcome(self, name: str, run: _Run) -> BatchEnded:
        batch = run.batch
        return BatchEnded(
            replica=name,
            number=next(self._numbers),
            num_requests=len(batch),
            prompt_len=batch.prompt_len,
            output_len=run.output_len,
            predicted_len=batch.predicted_len,
            estimated_s=run.estimated_s,
            duration_s=self._now - run.began_at,
        )

    def _forget_aborted(self, keys: Iterable[Key]) -> None:
        """Forgets requests of broken batches that are awaited as one of these attempts or an earlier one."""
        for request_id, attempt in keys:
            if self._waiting.is_awaited_up_to(request_id, attempt):
                self._waiting.remove(request_id, self._now)

    def _break_off(self, name: str, keys: tuple[Key, ...]) -> None:
        """Takes in a broken batch, which its replica repeats until it was heard.

        Attempts that have come back since, or were never placed there, are ignored.
        """
        members = []
        for request_id, attempt in keys:
            entry = self._table.entry(request_id)
            if entry is not None and (entry.attempt, entry.replica) == (attempt, name):
                members.append(Member(request_id, attempt, entry.ingress_id))
        if not members:
            return
        run = self._runs.pop(name, None)
        for member in members:
            self._table.remove(member.request_id)
        self._waiting.break_off(members, len(keys), None if run is None else run.batch, self._now)
        if self._reload_s:
            self._reloads_until[name] = self._now + self._reload_s
        self.num_splits += 1

    def _take_forecasts(self, made: Iterable[ForecastMade]) -> None:
        queued, _ = self._table.foresee(made)
        self._waiting.foresee(queued, self._now)

    def _reconcile(self, announced: IngressAnnounced) -> list[GlobalInstruction]:
        """Reports requests of broken batches as lost while their ingress replica still takes them for running.

        They are in no table, so that sums do not tell whether their clients have left: their parts are asked for.
        """
        ingress_id = announced.ingress_id
        awaits = self._waiting.is_awaited
        broken = tuple(key for each in announced.open if awaits(key := (each.request_id, each.attempt)))
        parts = self._forget_awaited(ingress_id, {each.request_id for each in announced.open}, announced.listed)
        others = tuple(each for each in announced.open if (each.request_id, each.attempt) not in broken)
        out = self._table.reconcile(replace(announced, open=others), self._now)
        if broken:
            out.append(ReportLost(ingress_id, broken))
        if parts:
            out.append(AskIngress(ingress_id, tuple(parts)))
        return out

    def _forget_awaited(self, ingress_id: str, still_open: Set[str], listed: Container[int]) -> set[int]:
        """Forgets requests of broken batches whose clients have left meanwhile; returns parts that were not listed."""
        parts = set()
        for member in self._waiting.awaited():
            if member.ingress_id != ingress_id:
                continue
            part = part_of(member.request_id)
            if part in listed and member.request_id not in still_open:
                self._waiting.remove(member.request_id, self._now)
            elif part not in listed:
                parts.add(part)
        return parts

    def _drop_replica(self, name: str) -> None:
        self._kinds = set()
        self._table.drop_replica(name)
        self._runs.pop(name, None)
        self._resting.pop(name, None)
        self._reloads_until.pop(name, None)

    def check_integrity(self) -> None:
        """Checks as ``FleetMachine`` does, and that the queue and the batches agree with the table."""
        super().check_integrity()
        self._waiting.check_integrity()
        if self._waiting.num_waiting != self._table.num_queued:
            raise IntegrityError(f"{self._table.num_queued} requests are queued, {self._waiting.num_waiting} wait")
        for name, run in self._runs.items():
            replica = self._table.replica(name)
            if replica is None or not run.left or not run.left.keys() <= replica.requests.keys():
                raise IntegrityError(f"the batch on replica {name} and what is in flight there disagree")
