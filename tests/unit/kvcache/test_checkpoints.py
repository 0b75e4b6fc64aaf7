"""States of cached prefixes: where they are kept, which one a sequence begins behind, what leaves first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch
from farsight.kvcache.block_manager import hash_blocks
from farsight.kvcache.checkpoints import OUTPUT_SPACING, state_spacing

SIZE, SPACING = 16, 512


class Server:
    """An executor with tokens: output token i of every sequence is 1,000 + i."""

    def __init__(self, places: int = 8, batch_tokens: int = 1024) -> None:
        self.executor = LeaseExecutor(BlockManager(2000, SIZE), BatchLimits(8, batch_tokens), "w")
        self.executor.share_prefixes(self._hashes)
        self.executor.keep_states(places, SPACING)
        self._tokens: dict[str, list[int]] = {}
        self._slots: tuple[Slot, ...] = ()
        self.computed: dict[str, int] = {}

    def _hashes(self, name: str, num_blocks: int) -> list[int]:
        return hash_blocks(self._tokens[name][: num_blocks * SIZE], SIZE)

    def add(self, name: str, prompt: Sequence[int], out: int = 1) -> None:
        self._tokens[name] = [*prompt, *range(1000, 1000 + out)]
        request = Request(name, 0, "i", tuple(prompt), SamplingParams(out))
        self._plan(*self._slots, Slot(name, 0, 9999, 9999, False, 0, request))

    def preempt(self, name: str) -> None:
        self._plan(*(dataclasses.replace(each, num_preemptions=each.request_id == name) for each in self._slots))

    def _plan(self, *slots: Slot) -> None:
        self._slots = slots
        self.executor.apply_plan(Plan("w", 0, self.executor.plan_seq + 1, 0, 0, slots))

    def step(self) -> StepBatch | None:
        batch = self.executor.next_batch()
        for item in () if batch is None else batch.items:
            self.computed[item.request_id] = self.computed.get(item.request_id, 0) + item.num_tokens
        if batch is not None:
            self.executor.commit(batch)
        self.executor.check_integrity()
        return batch

    def run(self) -> None:
        while self.step() is not None:
            pass

    def compute(self, name: str, prompt: Sequence[int], out: int = 1) -> int:
        """Returns the tokens that a request computes which runs alone, its last one (of no step) not counted."""
        self.add(name, prompt, out)
        self.run()
        return self.computed[name] - (out - 1)


def test_the_next_turn_of_a_conversation_computes_little() -> None:
    """4,000 tokens: the prompt's own state and the latest of the output are kept; cold it computes all of them."""
    server, prompt = Server(), list(range(3700))
    assert server.compute("first", prompt, 200) == 3700
    turn = [*prompt, *range(1000, 1200), *range(5000, 5100)]
    assert server.compute("again", turn) == 160 <= 0.1 * len(turn)
    assert server.compute("edited", [*prompt, *range(6000, 6300)]) <= SIZE + 300, "without the output"
    assert server.compute("same", prompt) <= SIZE
    assert Server().compute("cold", turn) == len(turn) == 4000


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    server, system = Server(), list(range(800))
    found = [server.compute(name, [*system, *range(2000 * i, 2000 * i + 90)]) for i, name in enumerate("abc", 1)]
    assert found == [890, 890 - SPACING, 90]
    waiting = Server()
    for i, name in enumerate("abcd", 1):
        waiting.add(name, [*system, *range(2000 * i, 2000 * i + 90)])
    waiting.run()
    assert [waiting.computed[name] for name in "abcd"] == [890, 890 - SPACING, 90, 90], "no one computes what arises"


def test_a_preempted_sequence_begins_behind_its_latest_state() -> None:
    server = Server(batch_tokens=300)
    server.add("a", range(1000), 100)
    for _ in range(4 + 70):
        server.step()
    server.preempt("a")
    batch = server.step()
    assert batch is not None and batch.items[0].start == 1024 and batch.items[0].restore >= 0
    server.run()


def test_the_least_recently_used_leaves_first_and_outputs_keep_one() -> None:
    server = Server(places=2)
    server.compute("a", range(100), 1)
    assert server.compute("b", range(3000, 3100), 300) == 100
    assert server.compute("a again", range(100)) == 100, "the prompt and the output of b have both places"
    server = Server(places=2)
    server.compute("a", range(100))
    server.compute("b", range(3000, 3100))
    assert server.compute("a again", range(100)) == 4
    server.compute("c", range(6000, 6100))
    assert [server.compute("a still", range(100)), server.compute("b again", range(3000, 3100))] == [4, 100]


def test_what_a_step_loses_is_not_found() -> None:
    server = Server(places=1)
    server.add("a", range(100))
    batch = server.executor.next_batch()
    assert batch is not None and batch.items[0].keeps == ((96, 0),)
    server.executor.cut_off(batch, 1.0)
    server.executor.check_integrity()
    again = server.executor.next_batch()
    assert again is not None and again.items[0].keeps == ((96, 0),)
    server.executor.commit(again, failed={"a"})
    server.executor.check_integrity()
    assert server.compute("b", range(100)) == 100
    states = server.executor._states
    assert states is not None
    states._free.append(0)
    with pytest.raises(IntegrityError, match="1 free"):
        server.executor.check_integrity()


def test_states_take_no_more_bytes_than_the_keys_and_values_between_them() -> None:
    assert state_spacing(49 << 20, 32 << 10, 32) == 1568
    assert state_spacing(80 << 10, 12 << 10, 32) == 512


def test_steps_at_once_end_where_a_state_is_kept() -> None:
    server = Server()
    server.add("a", range(100), 400)
    server.step()
    jumps = []
    while (batch := server.executor.next_batch()) is not None:
        num_steps = server.executor.horizon(batch, 1 << 30)
        jumps.append((batch.items[0].start + 1, num_steps, bool(batch.items[0].keeps)))
        server.executor.commit(batch, num_steps=num_steps)
    assert sum(steps for _, steps, _ in jumps) == 399
    assert [at for at, _, keeps in jumps if keeps] == list(range(128, 499, OUTPUT_SPACING))
