"""A worker that looks ahead takes the same steps as one that does not."""

from __future__ import annotations

import dataclasses
import random

from farsight.core.messages.plans import Plan
from farsight.core.request import Residency
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch
from farsight.kvcache.block_manager import hash_blocks
from tests.unit.kvcache.plans import plan, slot
from tests.volumes import at_volume

BLOCK = 4


def make(num_blocks: int, *, host_blocks: int = 0, max_num_seqs: int = 6) -> LeaseExecutor:
    host = BlockManager(host_blocks, BLOCK) if host_blocks else None
    return LeaseExecutor(BlockManager(num_blocks, BLOCK), BatchLimits(max_num_seqs, 16), "w", host)


def share(worker: LeaseExecutor) -> None:
    """Prompts are all alike, outputs differ from those of others."""

    def hashes(request_id: str, num_blocks: int) -> list[int]:
        prompt = worker.sequences[request_id].prompt_len
        own = 100 + int(request_id)
        return hash_blocks([1 if i < prompt else own for i in range(num_blocks * BLOCK)], BLOCK)

    worker.share_prefixes(hashes)


def random_plan(rng: random.Random, seq: int, newest: int) -> Plan:
    """Some of the last requests, in any order; they may be moved, preempted, or granted a part."""
    names = rng.sample(range(max(0, newest - 8), newest + 1), rng.randint(1, min(8, newest + 1)))
    slots = []
    for name in names:
        prompt, out = 1 + name * 7 % 11, 1 + name * 13 % 30
        granted = rng.choice([1000, 1000, 1000, prompt + rng.randint(1, 12)])
        made = slot(str(name), prompt, out, prefill_to=rng.choice([1000, granted]), length_to=granted)
        if rng.random() < 0.1:
            made = dataclasses.replace(made, residency=rng.choice(list(Residency)), num_moves=seq)
        slots.append(dataclasses.replace(made, standby=rng.random() < 0.2, num_preemptions=seq * (rng.random() < 0.1)))
    return plan(seq, *slots, reserve=rng.randint(0, 2))


def chosen(batch: StepBatch | None) -> list[tuple[str, int, int, bool, int]]:
    """Which blocks a sequence gets may differ: the worker that is ahead takes them before others become free."""
    return [] if batch is None else [(*item[:4], len(item.blocks)) for item in batch.items]


class Life:
    """Two workers that everything happens to alike; the first looks ahead, and may begin before it has booked."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        sizes = rng.randint(10, 40)
        host_blocks = rng.choice([0, 20])
        self.rng = rng
        self.both = [make(sizes, host_blocks=host_blocks) for _ in range(2)]
        self.num_ahead = self.num_early = 0
        if rng.random() < 0.5:
            for worker in self.both:
                share(worker)

    def run(self, steps: int) -> None:
        seq = 0
        for _ in range(steps):
            if self.rng.random() < 0.15:
                seq += 1
                given = random_plan(self.rng, seq, 3 * seq)
                for worker in self.both:
                    worker.apply_plan(given)
            if self.rng.random() < 0.05:
                stalled = frozenset(self.rng.sample([*self.both[0].sequences, "x"], 1))
                for worker in self.both:
                    worker.stall(stalled)
            self.step()

    def step(self) -> None:
        ahead, plain = self.both
        batch = ahead.next_batch()
        self.compare(batch, plain.next_batch())
        self.copy()
        while batch is not None:
            following = ahead.step_after(batch)
            self.num_ahead += following is not None
            sampled = [item.request_id for item in batch.items if item.samples]
            stopped = [name for name in sampled if self.rng.random() < 0.03]
            early = None if stopped or self.rng.random() < 0.5 else ahead.begin_after(batch)
            for worker in self.both:
                worker.commit(batch, stopped)
                worker.check_integrity()
            if early is None:
                return
            self.num_early += 1
            assert early is following
            self.compare(early, plain.next_batch())
            batch = early

    def compare(self, batch: StepBatch | None, other: StepBatch | None) -> None:
        assert chosen(batch) == chosen(other)
        first, second = (worker.report() for worker in self.both)
        assert first.free_blocks == second.free_blocks and first.short_blocks == second.short_blocks
        assert [worker.out_of_grants for worker in self.both] == [self.both[0].out_of_grants] * 2

    def copy(self) -> None:
        taken = [worker.take_copies() for worker in self.both]
        first, second = ([(copy.copy_id, copy.to, len(copy.target)) for copy in copies] for copies in taken)
        assert first == second
        for copy in taken[0]:
            for worker in self.both:
                worker.complete_copy(copy.copy_id)


@at_volume(50, 500)
def test_looking_ahead_changes_no_step(volume: int) -> None:
    ahead = early = 0
    for seed in range(volume):
        life = Life(seed)
        life.run(60)
        ahead, early = ahead + life.num_ahead, early + life.num_early
    assert ahead > 13 * volume and early > 3 * volume


def test_what_happens_meanwhile_makes_the_step_invalid() -> None:
    worker = make(20)
    worker.apply_plan(plan(1, slot("0", out=20), slot("1", out=20)))
    for change in (
        lambda: worker.apply_plan(plan(2, slot("0", out=20), slot("1", out=20), slot("2"))),
        lambda: worker.stall(frozenset("0")),
    ):
        while (batch := worker.next_batch()) is not None and worker.step_after(batch) is None:
            worker.commit(batch)
        assert batch is not None
        change()
        assert worker.begin_after(batch) is None
        worker.commit(batch)
    worker = make(20)
    worker.apply_plan(plan(1, slot("0", out=3)))
    known = []
    while (batch := worker.next_batch()) is not None:
        known.append(worker.step_after(batch) is not None)
        worker.commit(batch)
    assert known == [False, True, False], "a prompt and a last token have no known successor"


def test_there_may_be_no_block_for_the_step_ahead() -> None:
    worker = make(2)
    worker.apply_plan(plan(1, slot("0", prompt=3, out=9), slot("1", prompt=3, out=9)))
    worker.commit(worker.next_batch() or StepBatch(()))
    batch = worker.next_batch()
    assert batch is not None and worker.step_after(batch) is not None
    assert worker.begin_after(batch) is None
    worker.commit(batch)
    assert worker.next_batch() is None and worker.short_blocks == 2


def test_who_waits_for_a_block_of_this_step_may_join_the_next() -> None:
    worker = make(20)
    worker.share_prefixes(lambda name, count: hash_blocks([1] * 20, BLOCK)[:count])
    worker.apply_plan(plan(1, slot("0", prompt=3, out=9)))
    worker.commit(worker.next_batch() or StepBatch(()))
    worker.apply_plan(plan(2, slot("0", prompt=3, out=9), slot("1", prompt=10)))
    batch = worker.next_batch()
    assert chosen(batch) == [("0", 3, 1, True, 1)], "it completes the first block"
    assert batch is not None and worker.step_after(batch) is None
    worker.commit(batch)
    assert [each[:3] for each in chosen(worker.next_batch())] == [("0", 4, 1), ("1", 4, 6)]
