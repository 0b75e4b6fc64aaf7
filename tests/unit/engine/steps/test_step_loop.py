"""The thread that steps, run in the test's own thread; what the event loop does meanwhile happens inside a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.worker.step_loop import Step, StepLoop
from core.config.engine import EngineConfig
from core.errors import WorkerBroken
from core.messages.plans import Plan, Slot
from core.request import Request, SamplingParams
from engine import cuda
from engine.build import build_worker
from engine.emission import Output
from engine.sequence import Sequence
from engine.step_fault import StepFault, lost_on
from engine.steps.careful_steps import fault_of
from engine.steps.model_runner import ModelRunner
from engine.worker import Worker
from kvcache import StepBatch


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

        def execute(batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
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
    (failure,) = run.steps[0].failures
    assert failure.delta.finish_reason == "error" and "device on fire" in (failure.delta.error or "")
    assert worker.executor.blocks.num_free == worker.executor.blocks.num_blocks
    offer_again = Request("b", 0, "x", (5, 6), SamplingParams(2, ignore_eos=True))
    worker.offer_plan(Plan("w", 0, 2, 0, 0, (Slot("b", 0, 99, 99, False, 0, offer_again),)))
    run.loop.run()
    assert len(run.steps) == 3


def step_after_step(run: Run, worker: Worker, names: str) -> None:
    """A request of one step each, one after the other."""
    for seq, name in enumerate(names, 2):
        request = Request(name, 0, "x", (5, 6), SamplingParams(1, ignore_eos=True))
        worker.offer_plan(Plan("w", 0, seq, 0, 0, (Slot(name, 0, 99, 99, False, 0, request),)))
        run.loop.run()


def failing(worker: Worker, monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None]) -> Run:
    """A loop whose steps raise these errors, one each."""
    left = iter(errors)

    def fail() -> None:
        error = next(left)
        if error is not None:
            raise error

    run = Run(worker, monkeypatch)
    compute = worker.runner.execute

    def execute(batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        fail()
        return compute(batch, sequences)

    monkeypatch.setattr(worker.runner, "execute", execute)
    return run


ERROR = RuntimeError("no kernel image is available")


def test_steps_that_fail_in_a_row_break_the_worker_and_the_last_ones_requests_go_elsewhere(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failing(worker, monkeypatch, [ERROR] * 3)
    with pytest.raises(WorkerBroken, match="3 steps in a row have failed, the last with RuntimeError: no kernel"):
        step_after_step(run, worker, "abc")
    assert [output.delta.request_id for step in run.steps for output in step.failures] == ["a", "b"]
    assert worker.executor.holds("c"), "its client is told of no end: it is resumed"


def test_a_step_that_succeeds_in_between_begins_the_count_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failing(worker, monkeypatch, [ERROR, ERROR, None, ERROR, ERROR, None])
    step_after_step(run, worker, "abcdef")
    assert len(run.steps) == 6


def test_steps_that_the_device_has_no_memory_for_do_not_break_the_worker(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failing(worker, monkeypatch, [torch.OutOfMemoryError("no room")] * 5)
    step_after_step(run, worker, "abcde")
    assert sum(len(step.failures) for step in run.steps) == 5


def test_a_device_that_is_lost_breaks_the_worker_at_once(
    tiny_model_dir: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner.from_dir(tiny_model_dir, dtype=torch.float32, num_blocks=16, block_size=4)
    runner = ModelRunner(runner.config, runner.pool, runner.backend, 16, is_lost=cuda.is_lost)
    worker.runner = runner
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: cuda_error("device-side assert triggered"))
    run = Run(worker, monkeypatch, during=lambda: cuda_error("device-side assert triggered"))
    offer(worker, a="x")
    with pytest.raises(WorkerBroken, match=r"the device is lost: .*device-side assert triggered"):
        run.loop.run()
    assert run.steps == []
    assert worker.executor.holds("a"), "its client is told of no end: it is resumed"


def cuda_error(text: str) -> None:
    """As torch raises it: the exception has a type of its own since torch 2.8."""
    raise getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: {text}")


@pytest.mark.parametrize(
    ("error", "lost", "fault"),
    [
        (torch.OutOfMemoryError("no room"), False, StepFault.REQUESTS),
        (RuntimeError("shapes do not match"), False, StepFault.UNKNOWN),
        (RuntimeError("CUDA error: unspecified launch failure"), True, StepFault.LOST),
        (ValueError("a row"), True, StepFault.LOST),  # whatever it was that came up first
    ],
)
def test_what_a_failed_step_says_about_the_device(error: Exception, lost: bool, fault: StepFault) -> None:
    assert fault_of(error, lambda: lost) is fault


def test_only_a_gpu_is_lost() -> None:
    assert lost_on("cuda") is cuda.is_lost
    assert not lost_on("cpu")()
