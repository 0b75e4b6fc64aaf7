"""Static execution: padded, in lockstep, returned together; the counts are those of Magnus."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from farsight.core.costs import attention_pairs
from farsight.core.messages.plans import FinishedSequence, Slot
from farsight.core.messages.step_times import StepSample
from farsight.core.request import SequenceStatus
from farsight.kvcache import BatchLimits, BlockManager, StaticExecutor, StepBatch
from farsight.kvcache.step_batch import step_sample
from tests.opcodes import num_opcodes
from tests.unit.kvcache.plans import plan, slot, step

BLOCK = 4
CONTEXT = 64


def executor(num_blocks: int = 64, max_num_seqs: int = 8, max_batch_tokens: int = 64, **options: int) -> StaticExecutor:
    limits = BatchLimits(max_num_seqs, max_batch_tokens)
    return StaticExecutor(BlockManager(num_blocks, BLOCK), limits, "w", options.get("max_model_len", CONTEXT))


def padding(batch: StepBatch) -> dict[str, tuple[int, int]]:
    return {item.request_id: (item.start, item.num_tokens) for item in batch.padding.items}


def run(worker: StaticExecutor, stops: dict[str, int] | None = None) -> tuple[list[StepBatch], list[FinishedSequence]]:
    """Steps until nothing runs; ``stops``: the output token with which a sequence stops."""
    batches = []
    outputs = {progress.request_id: progress.output_len for progress in worker.report().progress}
    while (batch := worker.next_batch()) is not None:
        worker.check_integrity()
        for item in batch.items:
            outputs[item.request_id] += item.samples
        stopped = [item.request_id for item in batch.items if (stops or {}).get(item.request_id) == outputs[item[0]]]
        batches.append(batch)
        finished = worker.commit(batch, stopped)
        worker.check_integrity()
        if finished:
            return batches, finished
    return batches, []


def test_prompts_are_padded_decoded_in_lockstep_and_returned_together() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=3, out=1), slot("b", prompt=5, out=3)))
    first = worker.next_batch()
    assert first is not None
    assert [(item.request_id, item.start, item.num_tokens, item.samples) for item in first.items] == [
        ("a", 0, 3, True),
        ("b", 0, 5, True),
    ]
    assert padding(first) == {"a": (3, 2)}
    assert step_sample(first, 0.5) == StepSample(10, 0, 0, 0.5, 2 * attention_pairs(5, 0)), "priced as the longest"
    assert worker.commit(first, duration_s=0.5) == [], "a has its whole output and waits for b"
    second = worker.next_batch()
    assert second is not None
    assert [item.request_id for item in second.items] == ["b"]
    assert padding(second) == {"a": (3, 1)}, "an invalid token, over its own last one"
    assert worker.commit(second, duration_s=0.5) == []
    assert [progress.ran_s for progress in worker.report().progress] == [1.0, 1.0], "all take part in every step"
    third = worker.next_batch()
    assert third is not None and padding(third) == {"a": (4, 1)}
    assert [(end.request_id, end.output_len) for end in worker.commit(third)] == [("a", 1), ("b", 3)]
    assert worker.blocks.num_free == worker.blocks.num_blocks


@pytest.mark.parametrize("max_batch_tokens", [7, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_work_and_memory_are_those_of_the_formulas(seed: int, max_batch_tokens: int) -> None:
    rng = random.Random(seed)
    lens = [(rng.randint(1, 20), rng.randint(2, 20)) for _ in range(6)]
    longest, size = max(prompt for prompt, _ in lens), len(lens)
    worker = executor(max_batch_tokens=max_batch_tokens)
    worker.apply_plan(plan(1, *(slot(f"r{i}", prompt, 40) for i, (prompt, _) in enumerate(lens))))
    stops = {f"r{i}": out for i, (_, out) in enumerate(lens)}
    used = []
    batches = []
    finished: list[FinishedSequence] = []
    outputs = dict.fromkeys(stops, 0)
    while not finished:
        batch = worker.next_batch()
        assert batch is not None and batch.num_tokens <= max_batch_tokens
        batches.append(batch)
        used.append(worker.blocks.num_blocks - worker.blocks.num_free)
        for item in batch.items:
            outputs[item.request_id] += item.samples
        finished = worker.commit(batch, [item[0] for item in batch.items if outputs[item[0]] == stops[item[0]]])
    assert {end.request_id: end.output_len for end in finished} == stops
    num_output = max(stops.values())
    prefills, decodes = batches[: 1 - num_output], batches[1 - num_output :]
    assert sum(batch.num_tokens for batch in prefills) == size * longest
    assert [batch.num_tokens for batch in decodes] == [size] * (num_output - 1)
    invalid = sum(len(batch.padding.items) for batch in decodes)
    assert invalid == sum(num_output - out for out in stops.values())
    contexts = [step_sample(batch, 0.0).context_tokens for batch in decodes]
    assert contexts == [size * (longest + generated) for generated in range(1, num_output)]
    assert used[-1] == size * -(-(longest + num_output) // BLOCK), "eq. (5), in blocks"


def test_nobody_decodes_before_all_prompts_are_computed() -> None:
    worker = executor(max_batch_tokens=6)
    worker.apply_plan(plan(1, slot("a", prompt=4, out=3), slot("b", prompt=8, out=2)))
    batches, finished = run(worker)
    spans = [{item.request_id: (item.start, item.num_tokens) for item in batch.items} for batch in batches]
    assert spans == [{"a": (0, 4)}, {"b": (0, 4)}, {"b": (4, 4)}, {"a": (4, 1), "b": (8, 1)}, {"a": (5, 1)}]
    assert [padding(batch) for batch in batches] == [{"a": (4, 2)}, {"a": (6, 2)}, {}, {}, {"b": (9, 1)}]
    assert [end.output_len for end in finished] == [3, 2]


def test_what_comes_while_a_batch_runs_or_is_more_than_a_step_may_hold_waits_for_its_end() -> None:
    worker = executor(max_num_seqs=2)
    worker.apply_plan(plan(1, slot("a", out=2), slot("b", out=2), slot("c", out=1)))
    assert set(step(worker)) == {"a", "b"}
    worker.apply_plan(plan(2, slot("d", out=1), *(slot(name, payload=False) for name in "abc")))
    assert set(step(worker)) == {"a", "b"}
    assert set(step(worker)) == {"d", "c"}
    worker = executor()
    worker.apply_plan(plan(1, slot("a"), slot("b", payload=False)))
    assert worker.next_batch() is None and worker.short_blocks == 0, "it waits for all the slots of its plan"
    worker.apply_plan(plan(2, slot("a", payload=False), slot("b")))
    assert set(step(worker)) == {"a", "b"}


def test_neither_grants_nor_standbys_nor_clients_that_do_not_read_count_for_a_batch() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=3, prefill_to=2, length_to=4), slot("s", standby=True)))
    worker.stall(frozenset({"a"}))
    assert not any(progress.stalled for progress in worker.report().progress), "or the scheduler would leave it out"
    assert [len(batch.items) for batch in run(worker)[0]] == [1, 1, 1]
    assert worker.next_batch() is None


def test_an_abort_takes_one_out_and_the_others_run_on_padded_as_before() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("long", prompt=9, out=9), slot("b", prompt=2, out=3)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("b", payload=False))) == ["long"]
    worker.check_integrity()
    batch = worker.next_batch()
    assert batch is not None
    assert [item.request_id for item in batch.items] == ["b"]
    assert batch.padding.context_tokens == 7
    assert worker.commit(batch) == []
    assert step(worker) == {"b": (3, 1, True)}
    assert worker.blocks.num_free == worker.blocks.num_blocks


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_step_of_four_times_as_many_costs_four_times_as_much(num_steps: int) -> None:
    """The step after half of the prompts, and the first one that decodes."""
    costs = []
    for size in (16, 64):
        worker = executor(num_blocks=2000, max_num_seqs=64, max_batch_tokens=2 * size)
        worker.apply_plan(plan(1, *(slot(f"r{i}", 4, 9) for i in range(size))))
        for _ in range(num_steps):
            step(worker)
        costs.append(num_opcodes(worker.next_batch))
    assert costs[1] < 4.5 * costs[0]


def test_those_left_after_the_last_one_is_aborted_return_with_the_next_step() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1), slot("b", out=1), slot("c", out=9)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", payload=False), slot("b", payload=False))) == ["c"]
    batch = worker.next_batch()
    assert batch is not None
    assert (batch.items, len(batch.padding.items)) == ((), 2)
    assert [end.request_id for end in worker.commit(batch)] == ["a", "b"]
    worker.check_integrity()
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=7, out=1), slot("b", prompt=7, out=9)))
    step(worker)
    assert worker.next_batch() is None and worker.short_blocks == 2
    worker.apply_plan(plan(2, slot("a", prompt=7, payload=False)))
    assert [end.request_id for end in run(worker)[1]] == ["a"], "without any more blocks"
    worker = executor()
    worker.apply_plan(plan(1, slot("a"), slot("b", out=1), slot("c", out=1)))
    step(worker)
    assert [end.request_id for end in worker.flush()] == ["b", "c"], "those that are complete and no others"
    worker.check_integrity()
    assert worker.apply_plan(plan(2)) == ["a"]
    assert worker.next_batch() is None and worker.blocks.num_free == worker.blocks.num_blocks


def test_where_blocks_are_short_nothing_runs_and_half_of_the_batch_does() -> None:
    worker = executor(num_blocks=7)
    slots = [slot(name, prompt=3, out=9) for name in "abcd"]
    worker.apply_plan(plan(1, *slots))
    batches, finished = run(worker)
    assert (len(batches), finished) == (1, []), "3 + 1 tokens fill a block each; the next token opens another one"
    report = worker.report()
    assert report.short_blocks == 1
    assert {progress.status for progress in report.progress} == {SequenceStatus.PAUSED}
    worker.apply_plan(plan(2))
    worker.apply_plan(plan(3, *slots[:2]))
    assert [end.request_id for end in run(worker)[1]] == ["a", "b"]
    worker.apply_plan(plan(4, *slots[2:]))
    assert [end.request_id for end in run(worker)[1]] == ["c", "d"]
    assert worker.report().short_blocks == 0
    worker = executor(num_blocks=7)
    worker.apply_plan(plan(1, *slots))
    run(worker)
    assert worker.apply_plan(plan(3, *slots[:2])) == ["c", "d"], "the plan that took all back was lost"
    assert [(end.request_id, end.output_len) for end in run(worker)[1]] == [("a", 9), ("b", 9)]


@pytest.mark.parametrize("max_batch_tokens", [64, 6], ids=["computed", "while prompts are computed"])
def test_when_the_longest_has_left_nobody_lacks_blocks_for_its_padding(max_batch_tokens: int) -> None:
    worker = executor(num_blocks=6, max_batch_tokens=max_batch_tokens)
    worker.apply_plan(plan(1, slot("b", prompt=2, out=20), slot("long", prompt=10, out=9)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("b", payload=False))) == ["long"]
    assert [(end.request_id, end.output_len) for end in run(worker)[1]] == [("b", 20)], "2 + 20 tokens fit, 10 + 20 not"


def test_a_preempted_one_computes_anew_after_the_batch() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=3), slot("b", prompt=4, out=3)))
    step(worker)
    worker.apply_plan(plan(2, slot("a", payload=False), slot("b", preemptions=1, payload=False)))
    assert set(step(worker)) == set(step(worker)) == {"a"}
    assert step(worker) == {"b": (0, 5, True)}
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=2), slot("b", out=1)))
    step(worker)
    worker.apply_plan(plan(2, slot("a", payload=False), slot("b", preemptions=1, payload=False)))
    ends = [(end.request_id, end.output_len) for end in run(worker)[1]]
    assert ends == [("a", 2), ("b", 1)], "whose output is complete has nothing to compute again"


def test_nobody_computes_beyond_the_context() -> None:
    worker = executor(max_model_len=12)
    worker.apply_plan(plan(1, slot("long", prompt=11, out=1), slot("short", prompt=1, out=11)))
    batches, finished = run(worker)
    assert len(finished) == 2
    assert [padding(batch)["long"][0] for batch in batches[1:]] == [11] * 10


def test_a_new_attempt_leaves_the_batch_and_waits_for_the_next() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=2), slot("b", out=2)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", attempt=1, resumed=1, out=2), slot("b", payload=False))) == ["a"]
    assert set(step(worker)) == {"b"}
    assert step(worker) == {"a": (0, 5, True)}


@dataclass
class Control:
    """Sends batches one after the other, halves those that do not fit, loses and repeats plans, aborts."""

    rng: random.Random
    worker: StaticExecutor
    outputs: dict[str, int]
    queue: list[list[Slot]]
    current: list[Slot] = field(default_factory=list)
    ended: dict[str, FinishedSequence] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    generated: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    as_of: int = 0

    def send(self) -> None:
        self.seq += 1
        if self.rng.random() < 0.5:
            self.as_of = self.worker.report().report_seq
            self.current = self.alive
        sent = plan(self.seq, *self.current, as_of=self.as_of, lease=self.worker.lease)
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            for request_id in self.worker.apply_plan(sent):
                self.generated.pop(request_id, None)
            self.worker.check_integrity()

    @property
    def alive(self) -> list[Slot]:
        return [each for each in self.current if each.request_id not in self.ended]

    def event(self) -> None:
        alive = self.alive
        what = self.rng.random()
        if what < 0.03 and alive:
            victim = self.rng.choice(alive)
            self.aborted.add(victim.request_id)
            self.current = [each for each in self.current if each is not victim]
            self.send()
        elif what < 0.06:
            self.worker.take_over()
            self.seq = 0
        elif what < 0.15:
            self.send()

    def step(self) -> None:
        batch = self.worker.next_batch()
        self.worker.check_integrity()
        if batch is None:
            self.next_plan()
            return
        for item in batch.items:
            if item.start == 0:
                self.generated[item.request_id] = 0
            self.generated[item.request_id] += item.samples
        stopped = [each[0] for each in batch.items if each[3] and self.generated[each[0]] == self.outputs[each[0]]]
        for end in self.worker.commit(batch, stopped):
            assert end.request_id not in self.ended, "returned twice"
            self.ended[end.request_id] = end
        self.worker.check_integrity()

    def next_plan(self) -> None:
        alive = self.alive
        knows = 0 < self.seq == self.worker.plan_seq
        if self.worker.short_blocks and knows:
            assert len(alive) > 1, "one alone always fits"
            half = -(-len(alive) // 2)
            self.queue[:0] = [alive[:half], alive[half:]]
            self.current = []
        elif not alive and self.queue:
            self.current = self.queue.pop(0)
        self.send()

    @property
    def done(self) -> bool:
        return self.ended.keys() | self.aborted == self.outputs.keys()


@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed: int) -> None:
    rng = random.Random(seed)
    worker = executor(rng.randint(8, 60), rng.randint(1, 6), rng.randint(6, 40), max_model_len=32)
    names = [f"r{i}" for i in range(20)]
    slots, outputs = [], {}
    for name in names:
        prompt = rng.randint(1, 20)
        limit = rng.randint(1, 32 - prompt)
        outputs[name] = rng.randint(1, limit)
        slots.append(slot(name, prompt, limit))
    queue = []
    while slots:
        size = rng.randint(1, 6)
        queue.append(slots[:size])
        slots = slots[size:]
    control = Control(rng, worker, outputs, queue)
    for _ in itertools.repeat(None, 3000):
        if control.done:
            break
        control.event()
        control.step()
    assert control.done, f"left: {outputs.keys() - control.ended.keys() - control.aborted}"
    for name, end in control.ended.items():
        assert end.output_len == outputs[name]
    worker.apply_plan(plan(control.seq + 1, lease=worker.lease))
    assert worker.blocks.num_free == worker.blocks.num_blocks
