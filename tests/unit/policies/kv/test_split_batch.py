"""A replica in batch mode: all of a batch runs, or it breaks off."""

from __future__ import annotations

from core.messages.plans import FinishedSequence, Plan, SlotProgress, StepReport, WorkerReady, WorkerState
from core.request import Request, SamplingParams, SequenceStatus
from policies.compose import build_batch_runner
from policies.interfaces import Job, KvMoves, KvView
from policies.kv.split_batch import SplitBatch
from policies.replica.events import (
    BatchBroken,
    Event,
    Instruction,
    RequestsAborted,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)

READY = WorkerReady("w", num_blocks=10, block_size=4, max_model_len=40, pool_limited=True, vocab_size=100)


def request(name: str, prompt: int = 4, out: int = 12, attempt: int = 0) -> Request:
    return Request(name, attempt, "i", (1,) * prompt, SamplingParams(out))


def progress(name: str, output: int, blocks: int, *, attempt: int = 0, stalled: bool = False) -> SlotProgress:
    computed = 4 + output - 1 if blocks else 0
    return SlotProgress(name, attempt, SequenceStatus.RUNNING, 0, computed, output, blocks, stalled)


class Replica:
    """A scheduler whose integrity is checked after every event."""

    def __init__(self, max_num_seqs: int = 8) -> None:
        self.machine = build_batch_runner(max_num_seqs)
        self.plans: list[Plan] = []
        self._seq = 0
        self.tell(WorkerConnected(WorkerState(1, READY, (), self._report((), 0, (), 0))))

    def tell(self, event: Event) -> list[Instruction]:
        out = self.machine.handle(event, 0.0)
        self.machine.check_integrity()
        self.plans += [each.plan for each in out if isinstance(each, SendPlan)]
        return [each for each in out if not isinstance(each, SendPlan)]

    def arrive(self, *requests: Request) -> list[Instruction]:
        return self.tell(RequestsArrived(requests))

    def report(
        self, *held: SlotProgress, short: int = 0, plan: int | None = None, ended: tuple[str, ...] = ()
    ) -> list[Instruction]:
        plan_seq = self.plans[-1].plan_seq if plan is None else plan
        return self.tell(WorkerReported(self._report(held, short, ended, plan_seq)))

    def _report(self, held: tuple[SlotProgress, ...], short: int, ended: tuple[str, ...], plan_seq: int) -> StepReport:
        self._seq += 1
        done = tuple(FinishedSequence(name, 0, SequenceStatus.FINISHED_STOPPED, 2) for name in ended)
        return StepReport("w", 1, self._seq, plan_seq, 0, short, held, done, ())

    @property
    def planned(self) -> list[str]:
        return [slot.request_id for slot in self.plans[-1].slots]


def test_the_whole_batch_starts_at_once_and_nothing_stands_by() -> None:
    replica = Replica()
    assert replica.arrive(*map(request, "abc")) == []
    assert replica.planned == ["a", "b", "c"]
    assert not any(slot.standby for slot in replica.plans[-1].slots)
    assert {slot.length_to for slot in replica.plans[-1].slots} == {16}


def test_prompts_that_do_not_fit_together_break_off_before_they_are_shipped() -> None:
    replica = Replica()
    broken = replica.arrive(request("a", prompt=20), request("b", prompt=21))
    assert broken == [BatchBroken((("a", 0), ("b", 0)))]
    assert replica.planned == [] and len(replica.plans) == 1
    assert replica.arrive(request("a", prompt=20, attempt=1)) == []
    assert replica.planned == ["a"]


def test_a_batch_that_lacks_blocks_breaks_off_once_and_the_worker_forgets_it() -> None:
    replica = Replica()
    replica.arrive(*map(request, "abcd"))
    full = [progress(name, 8, blocks) for name, blocks in zip("abcd", (3, 3, 2, 2), strict=True)]
    assert replica.report(*full, short=2) == [BatchBroken(tuple((name, 0) for name in "abcd"))]
    assert replica.planned == []
    assert replica.report(*full, short=2, plan=1) == [], "the worker had not seen the new plan yet"
    assert replica.machine.unknown((("a", 0),)) == (("a", 0),)


def test_a_half_starts_when_the_worker_has_let_go_of_the_whole() -> None:
    replica = Replica()
    replica.arrive(*map(request, "ab"))
    held = progress("a", 10, 5), progress("b", 10, 5)
    replica.report(*held, short=1)
    assert replica.arrive(request("a", attempt=1)) == []
    assert replica.planned == []
    assert replica.report(*held, short=1, plan=1) == []
    assert replica.report() == []
    assert replica.planned == ["a"]


def test_who_is_alone_by_now_lacks_nothing_that_was_lacking_a_moment_ago() -> None:
    replica = Replica()
    replica.arrive(*map(request, "ab"))
    assert replica.report(progress("b", 10, 5), short=1, ended=("a",))[1:] == []
    assert replica.planned == ["a", "b"], "nothing new had to be said"


def test_a_batch_larger_than_a_step_runs_as_places_come_free() -> None:
    replica = Replica(max_num_seqs=2)
    replica.arrive(*map(request, "abc"))
    assert replica.planned == ["a", "b"]
    replica.report(progress("b", 1, 2), ended=("a",))
    assert replica.planned == ["b", "c"]


def test_kv_of_those_who_do_not_read_makes_way_for_the_next_batch() -> None:
    replica = Replica()
    replica.arrive(*map(request, "ab"))
    slow = progress("a", 11, 4, stalled=True), progress("b", 11, 4, stalled=True)
    assert replica.machine.resting() == ()
    replica.report(*slow)
    assert replica.machine.resting() == (("a", 0), ("b", 0))
    assert replica.arrive(request("c", prompt=12)) == []
    assert replica.machine.resting() == ()
    assert {slot.request_id: slot.num_preemptions for slot in replica.plans[-1].slots} == {"c": 0, "a": 0, "b": 1}


def test_aborts_and_a_lost_worker_leave_nothing_to_break() -> None:
    replica = Replica()
    replica.arrive(*map(request, "ab"))
    replica.tell(RequestsAborted((("a", 0),)))
    assert replica.planned == ["b"]
    replica.tell(WorkerLost())
    assert replica.machine.num_admitted == replica.machine.num_waiting == 0


def job(name: str, computed: int = 5) -> Job:
    return Job(name, 0.0, 4, 10, computed_len=computed)


def view(*running: Job, idle: tuple[Job, ...] = (), free: int = 0, needed: int = 0, short: int = 0) -> KvView:
    return KvView(running, idle, (), free, needed, 0, 0, block_size=4, short=short)


def test_what_is_not_needed_breaks_nothing() -> None:
    a, b, c = job("a"), job("b"), job("c", 0)
    policy = SplitBatch()
    assert policy.moves(view(a, b, free=8, needed=8), 0.0) == KvMoves()
    assert policy.moves(view(a, b, free=8, needed=9), 0.0) == KvMoves(break_off=True)
    assert policy.moves(view(a, b, free=8, short=4), 0.0) == KvMoves(break_off=True)
    assert policy.moves(view(a, free=8, short=4), 0.0) == KvMoves()
    assert policy.moves(view(a, free=0, needed=4), 0.0) == KvMoves(break_off=True)
    assert policy.moves(view(a, idle=(b,), needed=8), 0.0) == KvMoves(drop=(b,)), "five tokens are two blocks"
    assert policy.moves(view(a, idle=(b, c), needed=9), 0.0) == KvMoves(drop=(b,), break_off=True)
