"""The thread that steps, run in the test's own thread; what the event loop does meanwhile happens inside a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.worker.step_loop import Step, StepLoop
from core.config.engine import EngineConfig
from core.messages.plans import Plan, Slot
from core.request import Request, SamplingParams
from engine.build import build_worker
from engine.emission import Output
from engine.worker import Worker


@pytest.fixture
def worker(tiny_model_dir: Path) -> Worker:
    config = EngineConfig(kv_memory="1MiB", block_size=4, num_threads=1)
    return build_worker(tiny_model_dir, "float32", config, incarnation="w")


class Run:
    """A loop over one worker and what came of it; ``during`` happens while the first step computes."""

    def __init__(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch, during: Callable[[], None] = lambda: None
    ) -> None:
        self.steps: list[Step] = []
        self.aborted: list[Output] = []
        self.loop = StepLoop(worker, self.steps.append, self.aborted.extend)
        compute = worker.runner.execute

        def execute(batch, sequences):  # type: ignore[no-untyped-def]
            nonlocal during
            now, during = during, lambda: None
            now()
            return compute(batch, sequences)

        monkeypatch.setattr(worker.runner, "execute", execute)


def offer(worker: Worker, **ingresses: str) -> None:
    """A plan of five tokens each for these requests."""
    requests = [
        Request(name, 0, owner, (5, 6), SamplingParams(5, ignore_eos=True)) for name, owner in ingresses.items()
    ]
    worker.offer_plan(Plan("w", 0, 1, 0, 0, tuple(Slot(r.request_id, 0, 99, 99, False, 0, r) for r in requests)))


def test_it_steps_until_nothing_can_run(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(worker, monkeypatch)
    offer(worker, a="x", b="y")
    run.loop.run()
    assert len(run.steps) == 5
    assert [step.gap_s is None for step in run.steps] == [True, False, False, False, False]
    assert [emission.end is not None for emission in run.steps[-1].emissions] == [True, True]
    assert run.steps[0].sample.prefill_tokens == 4
    assert run.steps[1].sample.decode_seqs == 2
    worker.check_integrity()


def test_an_ingress_that_falls_silent_during_a_step_loses_its_requests_after_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(worker, monkeypatch, during=lambda: run.loop.abort_ingress("x"))
    offer(worker, a="x", b="y")
    run.loop.run()
    assert [len(step.emissions) for step in run.steps] == [2, 1, 1, 1, 1], "the step in which it happens is whole"
    assert [(output.delta.request_id, output.delta.finish_reason) for output in run.aborted] == [("a", "abort")]
    worker.check_integrity()


def test_a_broken_step_fails_its_requests_and_the_loop_goes_on(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def burn() -> None:
        raise RuntimeError("device on fire")

    run = Run(worker, monkeypatch, during=burn)
    offer(worker, a="x")
    run.loop.run()
    assert [output.delta.finish_reason for output in run.steps[0].failures] == ["error"]
    offer_again = Request("b", 0, "x", (5, 6), SamplingParams(2, ignore_eos=True))
    worker.offer_plan(Plan("w", 0, 2, 0, 0, (Slot("b", 0, 99, 99, False, 0, offer_again),)))
    run.loop.run()
    assert len(run.steps) == 3
