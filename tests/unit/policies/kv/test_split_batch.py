"""A replica in batch mode: all of a batch runs, or it breaks off."""

from __future__ import annotations

from functools import partial

from farsight.core.messages.plans import SlotProgress
from farsight.policies.compose import build_batch_runner
from farsight.policies.interfaces import Job, KvMoves, KvView
from farsight.policies.kv.split_batch import SplitBatch
from farsight.policies.replica.events import BatchBroken, Instruction, RequestsAborted, WorkerLost
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from tests.unit.policies.replica.scheduler_harness import Harness, request, running

long_request = partial(request, out=12)


class Replica(Harness):
    """In batch mode."""

    def __init__(self, max_num_seqs: int = 8) -> None:
        self.seq = 0
        super().__init__(max_num_seqs)

    def build(self, preset: str, limits: SchedulerLimits, kv: str) -> ReplicaScheduler:
        return build_batch_runner(limits.max_num_seqs)

    def hear(
        self, *held: SlotProgress, short: int = 0, plan: int = 0, ended: tuple[str, ...] = ()
    ) -> list[Instruction]:
        self.seq += 1
        return self.report(self.seq, *held, short=short, plan=plan, ended=ended)

    @property
    def planned(self) -> list[str]:
        return [slot.request_id for slot in self.plans[-1].slots]


def test_the_whole_batch_starts_at_once_and_nothing_stands_by() -> None:
    replica = Replica()
    assert replica.arrive(*map(long_request, "abc")) == []
    assert replica.planned == ["a", "b", "c"]
    assert not any(slot.standby for slot in replica.plans[-1].slots)
    assert {slot.length_to for slot in replica.plans[-1].slots} == {16}


def test_prompts_that_do_not_fit_together_break_off_before_they_are_shipped() -> None:
    replica = Replica()
    broken = replica.arrive(long_request("a", prompt=20), long_request("b", prompt=21))
    assert broken == [BatchBroken((("a", 0), ("b", 0)))]
    assert replica.planned == [] and len(replica.plans) == 1
    assert replica.arrive(long_request("a", prompt=20, attempt=1)) == []
    assert replica.planned == ["a"]


def test_a_batch_that_lacks_blocks_breaks_off_once_and_the_worker_forgets_it() -> None:
    replica = Replica()
    replica.arrive(*map(long_request, "abcd"))
    full = [running(name, 8, blocks) for name, blocks in zip("abcd", (3, 3, 2, 2), strict=True)]
    assert replica.hear(*full, short=2) == [BatchBroken(tuple((name, 0) for name in "abcd"))]
    assert replica.planned == []
    assert replica.hear(*full, short=2, plan=1) == [], "the worker had not seen the new plan yet"
    assert replica.scheduler.unknown((("a", 0),)) == (("a", 0),)


def test_a_half_starts_when_the_worker_has_let_go_of_the_whole() -> None:
    replica = Replica()
    replica.arrive(*map(long_request, "ab"))
    held = running("a", 10, 5), running("b", 10, 5)
    replica.hear(*held, short=1)
    assert replica.arrive(long_request("a", attempt=1)) == []
    assert replica.planned == []
    assert replica.hear(*held, short=1, plan=1) == []
    assert replica.hear() == []
    assert replica.planned == ["a"]


def test_who_is_alone_by_now_lacks_nothing_that_was_lacking_a_moment_ago() -> None:
    replica = Replica()
    replica.arrive(*map(long_request, "ab"))
    assert replica.hear(running("b", 10, 5), short=1, ended=("a",))[1:] == []
    assert replica.planned == ["a", "b"], "nothing new had to be said"


def test_a_batch_larger_than_a_step_runs_as_places_come_free() -> None:
    replica = Replica(max_num_seqs=2)
    replica.arrive(*map(long_request, "abc"))
    assert replica.planned == ["a", "b"]
    replica.hear(running("b", 1, 2), ended=("a",))
    assert replica.planned == ["b", "c"]


def test_kv_of_those_who_do_not_read_makes_way_for_the_next_batch() -> None:
    replica = Replica()
    replica.arrive(*map(long_request, "ab"))
    slow = running("a", 11, 4, stalled=True), running("b", 11, 4, stalled=True)
    assert replica.scheduler.resting() == ()
    replica.hear(*slow)
    assert replica.scheduler.resting() == (("a", 0), ("b", 0))
    assert replica.arrive(long_request("c", prompt=12)) == []
    assert replica.scheduler.resting() == ()
    assert {slot.request_id: slot.num_preemptions for slot in replica.plans[-1].slots} == {"c": 0, "a": 0, "b": 1}


def test_aborts_and_a_lost_worker_leave_nothing_to_break() -> None:
    replica = Replica()
    replica.arrive(*map(long_request, "ab"))
    replica.handle(RequestsAborted((("a", 0),)))
    assert replica.planned == ["b"]
    replica.handle(WorkerLost())
    assert replica.scheduler.num_admitted == replica.scheduler.num_waiting == 0


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
