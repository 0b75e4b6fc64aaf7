"""The scheduler of one model replica: a state machine, ``handle(event, now) -> [Instruction]``.

An event goes one way: ``WorkerMirror`` books the event, ``StepSelector`` decides from the books whose turn it is, and
``ReplicaPlans`` tells the worker. ``DecisionTrace`` observes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.core.forecast import ForecastMade
from farsight.core.messages.plans import FinishedSequence, SlotProgress, StepReport, TenantService, WorkerState
from farsight.core.messages.requests import Key, Promise
from farsight.core.request import Request, Residency, SequenceStatus
from farsight.kvcache.cache_journal import CacheMirror
from farsight.policies.interfaces import ReplicaPolicies, ScheduledRequest
from farsight.policies.outlook.promises import JustEnough, Outlook, PromiseMaker, ReplicaJobs, ServicePace
from farsight.policies.outlook.rollout import MAX_LISTED
from farsight.policies.replica.decision_trace import Account, DecisionTrace, account_closed, promise_facts
from farsight.policies.replica.events import (
    AskOffload,
    BatchBroken,
    CacheTold,
    CostLearned,
    Event,
    ForecastsArrived,
    Instruction,
    OffloadOrdered,
    OffloadUnanswered,
    PromisesAsked,
    PromisesMade,
    RefuseRequest,
    RequestEnded,
    RequestGivenBack,
    RequestsAborted,
    RequestsArrived,
    RequestsRecalled,
    RequestStarted,
    SendPlan,
    StepsRan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)
from farsight.policies.replica.facts import (
    Adopted,
    Arrived,
    EndReached,
    Fact,
    HostFull,
    Left,
    Predicted,
    StartedAlone,
    TurnedAway,
    TurnsChanged,
)
from farsight.policies.replica.mirror import WorkerMirror
from farsight.policies.replica.order_check import OffloadClient, OffloadTally
from farsight.policies.replica.places import PlaceLimit
from farsight.policies.replica.planner import NO_BUDGET, ReplicaPlans, StepBudget
from farsight.policies.replica.step_selector import StepSelector
from farsight.policies.tenancy.fair_shares import FairShares

COST_CHANGE = 0.05
"""Share by which a step cost must differ to count as changed."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what a plan holds.

    Attributes:
        max_num_seqs: Most requests that execute; the worker's own bound of a step.
        standby_slots: Requests shipped ahead so that a place never stays empty for a round trip.
        grant_lead_s: A grant is renewed when less than this many seconds are left, so that no request waits between
            the end of its grant and the plan that follows the report of it; a grant lasts at least twice as long. 0
            where reports and plans take no time.
        budget: How many prompt tokens a step may carry beside streams.
        gives_way: As in ``StepSelector``.
        offload_deadline_s: As in ``OffloadClient``: 0 where nothing answers, or where an answer takes no time.
    """

    max_num_seqs: int
    standby_slots: int
    grant_lead_s: float = 0.0
    budget: StepBudget = NO_BUDGET
    gives_way: bool = True
    offload_deadline_s: float = 0.0


class ReplicaScheduler:
    """Orders, admits and preempts the requests of one replica.

    Args:
        policies: The parts that decide; this object owns them from now on.
        limits: Bounds of a plan.
    """

    def __init__(self, policies: ReplicaPolicies, limits: SchedulerLimits) -> None:
        self.order, self.admission = policies.order, policies.admission
        self.limits = limits
        self._mirror = mirror = WorkerMirror(policies.order.changed)
        self.shares = shares = FairShares(limits.max_num_seqs)
        self.places = places = PlaceLimit(limits.max_num_seqs, limits.max_num_seqs)
        self._trace = DecisionTrace(policies, places, mirror.requests, mirror.admitted, shares)
        self._promises = PromiseMaker(limits.max_num_seqs)
        self._just_enough = JustEnough(self._promises.laws, limits.grant_lead_s)
        due, gives_way = self._just_enough.due, limits.gives_way
        self._offload = offload = OffloadClient(limits.offload_deadline_s)
        self.selector = StepSelector(policies, places, mirror, shares, due=due, gives_way=gives_way, offload=offload)
        self._planner = ReplicaPlans(policies.order, limits.budget, limits.grant_lead_s, mirror, places)

    @property
    def num_waiting(self) -> int:
        return self._mirror.num_waiting

    @property
    def num_admitted(self) -> int:
        return len(self._mirror.admitted)

    @property
    def spent(self) -> tuple[int, float]:  # prompt tokens computed or found cached, and GPU-seconds, so far
        return self._mirror.num_prompt_tokens, self._mirror.gpu_s

    @property
    def num_running(self) -> int:  # admitted requests that are to execute next
        return len(self.selector.running)

    @property
    def num_offloaded(self) -> int:
        """Requests with KV on the host, or on its way there."""
        return len(self._mirror.hosted)

    @property
    def admitted(self) -> list[ScheduledRequest]:
        """Requests with a place, in order of admission."""
        return list(self._mirror.admitted.values())

    def waiting(self, now: float) -> Iterator[ScheduledRequest]:
        """Returns the requests that wait for a place, best first, lazily. Needs a worker."""
        return (self._mirror.requests[job.request_id] for job in self.selector.waiting(now))

    @property
    def capacity_tokens(self) -> int:
        """As ``WorkerMirror.capacity``, in which shared prefixes count for each request; 0 without a worker."""
        return 0 if self._mirror.worker is None else self._mirror.capacity()

    @property
    def num_preemptions(self) -> int:
        """Preemptions ordered so far, of all requests."""
        return self.selector.num_preemptions

    @property
    def offload_tally(self) -> OffloadTally:
        """Counts of who has decided about KV so far."""
        return self._offload.tally

    @property
    def cache(self) -> CacheMirror:
        """The worker's prefix cache, where its reports tell of it."""
        return self._mirror.cache

    def resting(self) -> tuple[Key, ...]:
        """Returns the keys of all requests if all wait for clients that do not read, else nothing."""
        return self._mirror.resting()

    def unknown(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Returns the attempts among these that are neither here nor ended lately."""
        return tuple(itertools.filterfalse(self._mirror.knows, keys))

    def sums(self) -> bytes:
        """Returns the sums of the attempts that are here, as ``KeySums`` packs them."""
        return self._mirror.sums.packed()

    def accounts(self, response_id: str) -> Iterator[Account]:
        """Yields the decisions so far about those requests of an answer that are here. O(requests)."""
        return self._trace.accounts.of(response_id)

    def promise(self, request_ids: Iterable[str], now: float) -> list[Promise]:
        """Returns when newly arrived requests will end; nothing before steps have been measured.

        Changes no decision: only later promises learn from these. Costs at most about a millisecond a call.
        """
        jobs, cost = self._here(request_ids), self._planner.cost
        if cost is None or not jobs or self._mirror.worker is None:
            return []
        outlooks = self._promises.promise(jobs, self._replica_jobs(now), cost, now)
        promises = [_promise(job, outlook) for job, outlook in zip(jobs, outlooks, strict=True)]
        for made in promises:
            self._trace.promised(made, now)
        return promises

    def progress(self, request_id: str, now: float) -> Facts:
        """Returns state, tokens so far and predicted end of a request that is here, as named numbers."""
        scheduled = self._mirror.requests[request_id]
        state = "running" if request_id in self._mirror.admitted else "waiting"
        tokens = {"output_tokens": scheduled.output_len, "prefilled_tokens": scheduled.prefilled_len}
        facts: dict[str, float | str] = {"state": state, **tokens}
        for made in self.outlook([request_id], now):
            facts.update(promise_facts(made))
        return facts

    def outlook(self, request_ids: Iterable[str], now: float) -> list[Promise]:
        """Returns when requests that are here will end, as of now; changes nothing."""
        jobs, cost = self._here(request_ids), self._planner.cost
        if cost is None or not jobs or self._mirror.worker is None:
            return []
        outlooks = self._promises.outlook(jobs, self._replica_jobs(now), cost, now)
        return [_promise(job, outlook) for job, outlook in zip(jobs, outlooks, strict=True)]

    def _here(self, request_ids: Iterable[str]) -> list[ScheduledRequest]:
        requests = self._mirror.requests
        return [requests[request_id] for request_id in request_ids if request_id in requests]

    def _replica_jobs(self, now: float) -> ReplicaJobs:
        waiting = list(itertools.islice(self.selector.waiting(now), MAX_LISTED))
        return ReplicaJobs(tuple(self.selector.running), waiting, self._mirror.num_waiting, self.places.num)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Books the event, decides, tells the worker; nothing else mutates. ``now``: seconds of a monotonic clock."""
        if isinstance(event, PromisesAsked):
            return [PromisesMade(tuple(self.promise(event.request_ids, now)))]
        out: list[Instruction] = []
        self._offload.look(now)
        for said in itertools.chain(self._book(event, now), self._decide(event, now), self._tell(now)):
            if isinstance(said, Fact):
                self._trace.observe(said, now)  # when it happens, and nowhere else
            else:
                out.append(said)
        question = self._offload.take_question()
        if question is not None:
            out.append(AskOffload(question))
        return out + self._trace.settle(self._mirror.worker is not None, now)

    # -- Book: what has happened, on the mirror and in the order

    def _book(self, event: Event, now: float) -> Iterable[Fact | Instruction]:
        match event:
            case WorkerReported():
                return self._book_report(event.report, now)
            case StepsRan():
                self._book_steps(event, now)
            case RequestsArrived():
                return self._book_arrivals(event, now)
            case RequestsAborted():
                return self._book_aborts(event.keys)
            case RequestsRecalled():
                return self._book_recalls(event.keys, now)
            case ForecastsArrived():
                return self._book_forecasts(event.made)
            case CostLearned():
                self._learn_cost(event.cost)
            case WorkerConnected():
                return self._connect(event.state, now)
            case WorkerLost():
                return self._lose_all()
            case OffloadUnanswered(seq, lost):
                (self._offload.unanswered if lost else self._offload.late)(seq)
        return ()

    def _book_arrivals(self, event: RequestsArrived, now: float) -> Iterator[Fact | Instruction]:
        placements = itertools.chain(event.placements, itertools.repeat(b""))
        for request, placement in zip(event.requests, placements, strict=False):
            yield from self._book_arrival(request, placement, now)

    def _book_arrival(self, request: Request, placement: bytes, at: float) -> Iterator[Fact | Instruction]:
        if self._mirror.knows((request.request_id, request.attempt)):
            return  # a duplicate delivery, or one that comes after the end
        if request.request_id in self._mirror.requests:
            yield from self._forget(request.request_id, "superseded")
        if (problem := self._never_fits(request)) is not None:
            yield TurnedAway(request, placement, problem.message, at)
            yield problem
            return
        scheduled = self._mirror.add(request, at)
        self._enter(scheduled, at)
        yield Arrived(scheduled, placement, at)

    def _never_fits(self, request: Request) -> RefuseRequest | None:
        worker = self._mirror.worker
        if worker is None or request.max_total_len <= worker.max_model_len:
            return None
        limit = worker.max_model_len
        message = f"prompt and max_tokens make {request.max_total_len} tokens, the worker holds at most {limit}"
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def _book_forecasts(self, made: Iterable[ForecastMade]) -> Iterator[Fact]:
        for each in made:
            scheduled = self._mirror.requests.get(each.request_id)
            if scheduled is not None and scheduled.request.attempt == each.attempt:
                scheduled.request = replace(scheduled.request, forecast=each.forecast)
                scheduled.forecast = each.forecast
                self.order.foreseen(scheduled)
                yield Predicted(scheduled)

    def _book_aborts(self, keys: tuple[Key, ...]) -> Iterator[Fact]:
        for request_id, attempt in keys:
            scheduled = self._mirror.requests.get(request_id)
            if scheduled is not None and scheduled.request.attempt <= attempt:
                yield from self._forget(request_id, "aborted")

    def _book_recalls(self, keys: Iterable[Key], now: float) -> Iterator[Fact | Instruction]:
        """Gives back the attempts that no plan of this lease has named: no worker has them, or can get them later."""
        for request_id, attempt in keys:
            scheduled = self._mirror.requests.get(request_id)
            if scheduled is None or scheduled.request.attempt != attempt or scheduled.shipped_in is not None:
                continue
            if request_id not in self._mirror.admitted:
                yield from self._forget(request_id, "recalled")
                account = self._trace.accounts.reclaim(request_id)
                given = scheduled.request.aged(now - scheduled.arrived_at)
                yield RequestGivenBack(given, None if account is None else account_closed(account))

    def _forget(self, request_id: str, why: str) -> Iterator[Fact]:
        scheduled = self._let_go(request_id)
        self._promises.left(request_id)
        if scheduled.shipped_in is not None:
            self._mirror.stale = True  # the worker forgets what a plan no longer names
        yield Left(scheduled, why)

    def _let_go(self, request_id: str) -> ScheduledRequest:
        scheduled = self._mirror.remove(request_id)
        self._exit(scheduled)
        return scheduled

    def _enter(self, scheduled: ScheduledRequest, at: float) -> None:
        self.order.add(scheduled, at)
        self.shares.add(scheduled)
        if self.limits.gives_way:
            self._just_enough.add(scheduled, at)
            if scheduled.request.wants_speed:
                self._promises.listen()

    def _exit(self, scheduled: ScheduledRequest) -> None:
        if self.limits.gives_way:
            self._just_enough.remove(scheduled.request_id)
        self.order.remove(scheduled)
        self.shares.remove(scheduled)

    def _connect(self, state: WorkerState, now: float) -> Iterator[Fact | Instruction]:
        """Takes over the worker's requests, in its order and ahead of later arrivals; both go on at once."""
        mirror = self._mirror
        waiting = [each for rid, each in mirror.requests.items() if rid not in mirror.admitted]
        newcomers = [*mirror.admitted.values(), *waiting]
        self._lose_worker()
        mirror.connect(state, now)
        self._price()
        for adopted in mirror.requests.values():
            self._enter(adopted, now)
        for progress in state.report.progress:
            yield Adopted(mirror.requests[progress.request_id])
        for known in newcomers:
            yield from self._book_arrival(known.request, b"", known.arrived_at)
        yield from self._book_report(state.report, now)

    def _learn_cost(self, cost: StepCost) -> None:
        """Sets the step cost if it has changed; the order then computes every rank again."""
        if self._planner.cost is None or not cost.is_like(self._planner.cost, COST_CHANGE):
            self._planner.cost = cost
            self._price()

    def _price(self) -> None:
        worker, cost = self._mirror.worker, self._planner.cost
        if worker is None:
            return
        self.shares.capacity = worker.num_blocks * worker.block_size
        if cost is not None:
            self.order.price(cost, self.shares.capacity)

    def _lose_all(self) -> Iterator[Fact]:
        for scheduled in self._mirror.requests.values():
            yield Left(scheduled, "worker_lost")
        self._lose_worker()

    def _lose_worker(self) -> None:
        for tracked in self._mirror.requests.values():
            self._exit(tracked)
            self._promises.left(tracked.request_id)
        self._mirror.lose_worker()
        self._offload.forget()
        self.selector.running = []
        self._planner.begin_anew()

    def _book_report(self, report: StepReport, now: float) -> Iterator[Fact | Instruction]:
        mirror = self._mirror
        if not mirror.apply_report(report):
            return
        self._charge(report.services)
        for notice in mirror.apply_notices(report.cache):
            yield CacheTold(notice)
        for progress in report.progress:
            scheduled = mirror.requests.get(progress.request_id)
            if scheduled is None or scheduled.has_been_told(progress) or scheduled.request.attempt != progress.attempt:
                continue
            if progress.ran_s > 0 and not scheduled.started:
                yield RequestStarted(scheduled.first_run(progress.cached_len, progress.ran_s, now))
            ran_s = mirror.apply_progress(scheduled, progress, now)
            if ran_s > 0:
                scheduled.last_ran_at = now
                self.order.ran(scheduled, ran_s, now)
            if scheduled.residency is Residency.HOST or progress.request_id not in mirror.admitted:
                yield from self._book_place(scheduled, progress)
        for finished in report.finished:
            yield from self._book_end(finished, now)

    def _charge(self, services: Iterable[TenantService]) -> None:
        for tenant, gpu_s in self._mirror.apply_services(services):
            self.shares.charge(tenant, gpu_s)

    def _book_place(self, scheduled: ScheduledRequest, progress: SlotProgress) -> Iterator[Fact]:
        """Books a place that the worker has given by itself, or an offload that it has refused."""
        mirror = self._mirror
        if progress.num_preemptions < scheduled.num_preemptions or progress.num_moves < scheduled.num_moves:
            return  # it does not know the latest orders yet
        if scheduled.residency is Residency.DEVICE:
            if progress.num_blocks > 0:
                mirror.admitted[progress.request_id] = scheduled  # a standby
                yield StartedAlone(scheduled)
        elif progress.residency is Residency.DEVICE:
            # There was no room on the host, or no KV to move: the KV is dropped as at any preemption.
            scheduled.residency, scheduled.told = Residency.DEVICE, None
            yield HostFull(scheduled)
            mirror.drop_kv(scheduled)

    def _book_steps(self, event: StepsRan, now: float) -> None:
        worker, requests = self._mirror.worker, self._mirror.requests
        assert worker is not None
        self._charge(event.services)
        for request_id in event.request_ids:
            scheduled = requests[request_id]
            scheduled.decode(event.num_steps, event.duration_s, worker.block_size)
            self.order.changed(scheduled)
            scheduled.last_ran_at = now
            self.order.ran(scheduled, event.duration_s, now)

    def _book_end(self, finished: FinishedSequence, now: float) -> Iterator[Fact | Instruction]:
        self._mirror.remember((finished.request_id, finished.attempt))
        scheduled = self._mirror.requests.get(finished.request_id)
        if scheduled is None or scheduled.request.attempt != finished.attempt:
            return  # reported again before the acknowledgement arrived, or aborted meanwhile
        if finished.ran_s > 0 and not scheduled.started:
            yield RequestStarted(scheduled.first_run(finished.cached_len, finished.ran_s, now))
        self._let_go(finished.request_id)
        self._mirror.end(scheduled, finished, now)
        yield EndReached(scheduled, finished.status, finished.brought)
        censored = finished.status is not SequenceStatus.FINISHED_STOPPED
        if not scheduled.request.prefill_only:  # its length is no sample of output lengths
            self.order.learn(scheduled, censored=censored)
            self.admission.learn(finished.output_len, censored=censored)
            self._promises.ended(scheduled, now, censored=censored)
        else:
            self._promises.left(finished.request_id)
        yield RequestEnded(finished, scheduled.arrived_at, now, scheduled.shown_forecast, scheduled.first_token_at)

    # -- Decide: whose turn it is

    def _decide(self, event: Event, now: float) -> Iterator[Fact | Instruction]:
        if self._mirror.worker is None:
            return
        if isinstance(event, OffloadOrdered):
            question = self._offload.answer(event.orders, now)
            fits = question is None or (yield from self.selector.obey(question, event.orders, now))
        else:
            self._hurry(now)
            fits = yield from self.selector.choose(now)
        if not fits:
            yield from self._break_off()

    def _hurry(self, now: float) -> None:
        """Lets jobs whose latest start has come go first from now on."""
        cost = self._planner.cost
        if cost is None or not self._just_enough.is_to_look(now):
            return
        pace = ServicePace.beside(self.selector.running, cost, self.limits.max_num_seqs)
        for job, latest_at in self._just_enough.became_due(pace, now):
            self.order.remove(job)
            job.deadline_at = latest_at
            self.order.add(job, now)

    def _break_off(self) -> Iterator[Fact | Instruction]:
        """Forgets all requests; their memory on the worker is free at the next step boundary."""
        keys = self._mirror.keys()
        for request_id, _ in keys:
            yield from self._forget(request_id, "batch_broken")
        if self._mirror.stale:
            self._mirror.mark_preemption()
        yield BatchBroken(keys)

    # -- Tell: the worker, if there is something new to say

    def _tell(self, now: float) -> Iterator[Fact | Instruction]:
        if self._mirror.worker is None:
            return
        selector, running = self.selector, self.selector.running
        standby = selector.standbys(self.limits.standby_slots, now)
        if not self._planner.is_due(running, standby):
            return
        if self.order.preemptive:
            yield TurnsChanged(self._planner.said(), [job.request_id for job in running])
        yield SendPlan(self._planner.write(running, standby, selector.reserve_blocks()))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books, the turns and the journal agree."""
        self._trace.accounts.check_integrity(set(self._mirror.requests))
        self._mirror.check_integrity()
        self.selector.check_integrity()
        self.shares.check_integrity()


def _promise(job: ScheduledRequest, outlook: Outlook) -> Promise:
    return Promise(job.request_id, job.request.attempt, outlook.p50_s, outlook.p90_s, outlook.coarse)
