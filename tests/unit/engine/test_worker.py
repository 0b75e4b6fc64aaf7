"""The worker's own duties: answers from broken steps, tokens that no lost reply can lose."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import EngineConfig
from core.messages import Plan, Slot, TokenDelta
from core.request import Request, SamplingParams
from engine.build import build_worker
from engine.outbox import TokenOutbox
from engine.worker import Worker


@pytest.fixture
def worker(tiny_model_dir: Path) -> Worker:
    config = EngineConfig(kv_memory="1MiB", block_size=4, num_threads=1)
    return build_worker(tiny_model_dir, "float32", config, incarnation="w")


def plan(seq: int, *names: str) -> Plan:
    sampling = SamplingParams(5, ignore_eos=True)
    slots = tuple(Slot(name, 0, 99, 99, False, 0, Request(name, 0, f"for-{name}", (5, 6), sampling)) for name in names)
    return Plan("w", seq, 0, 0, slots)


def test_deltas_are_addressed_to_the_ingress_of_their_request(worker: Worker) -> None:
    worker.offer_plan(plan(1, "a", "b"))
    batch = worker.begin_step()
    assert batch is not None
    outputs = worker.finish_step(batch, worker.execute(batch))
    assert [(output.ingress_id, output.delta.request_id) for output in outputs] == [("for-a", "a"), ("for-b", "b")]
    worker.check_integrity()


def test_the_newest_plan_wins_and_applies_at_the_step_boundary(worker: Worker) -> None:
    worker.offer_plan(plan(2, "b"))
    worker.offer_plan(plan(1, "a"))
    batch = worker.begin_step()
    assert batch is not None
    worker.offer_plan(plan(3))
    assert worker.executor.holds("b"), "not while the step runs"
    worker.finish_step(batch, worker.execute(batch))
    assert worker.begin_step() is None
    worker.check_integrity()
    assert worker.executor.blocks.num_free == worker.executor.blocks.num_blocks


def test_a_step_that_raises_ends_its_requests_with_an_error_and_frees_them(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.offer_plan(plan(1, "a", "b"))
    batch = worker.begin_step()
    assert batch is not None
    outputs = worker.fail_step(batch, RuntimeError("device on fire"))
    assert [output.delta.finish_reason for output in outputs] == ["error", "error"]
    assert "device on fire" in (outputs[0].delta.error or "")
    worker.check_integrity()
    assert worker.executor.blocks.num_free == worker.executor.blocks.num_blocks
    worker.offer_plan(plan(2, "c"))
    again = worker.begin_step()
    assert again is not None
    assert len(worker.finish_step(again, worker.execute(again))) == 1


def delta(start: int) -> TokenDelta:
    return TokenDelta("a", 0, start, (1,), "x", None, None)


def test_the_outbox_repeats_until_acknowledged_and_never_renumbers() -> None:
    box = TokenOutbox("w")
    assert box.take().batches == ()
    box.put(delta(0))
    box.put(delta(1))
    first = box.take().batches
    assert [(batch.seq, len(batch.deltas)) for batch in first] == [(1, 2)]
    box.put(delta(2))
    second = box.take().batches
    assert second[0] == first[0], "not acknowledged: it comes again, the same"
    assert [batch.seq for batch in second] == [1, 2]
    box.acknowledge(1)
    assert [batch.seq for batch in box.take().batches] == [2]
    assert box.has_sent
    box.acknowledge(2)
    assert not box.has_sent
    assert box.take().batches == ()
