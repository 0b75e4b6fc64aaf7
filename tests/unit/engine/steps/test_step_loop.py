"""The thread that steps, run in the test's own thread; what the event loop does meanwhile happens inside a step.

A loop that gets each step ready while the one before it computes gives the tokens of one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farsight.actors.worker import step_loop
from farsight.actors.worker.step_loop import Step, StepLoop
from farsight.core.config.engine import EngineConfig
from farsight.core.errors import IntegrityError, WorkerBroken
from farsight.core.messages.plans import Plan, Slot
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams
from farsight.engine import cuda
from farsight.engine.attention.layout import DecodeInputs
from farsight.engine.emission import Output
from farsight.engine.engine import Engine
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import StepFault
from farsight.engine.steps.careful_steps import fault_of
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.worker import Worker
from farsight.kvcache import StepBatch, StepItem


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
    assert cuda.lost_on("cuda") is cuda.is_lost
    assert not cuda.lost_on("cpu")()


BLOCK = 16
SAMPLING = [
    SamplingParams(40, ignore_eos=True),
    SamplingParams(30, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(60),
    SamplingParams(35, temperature=0.8, seed=9, stop_token_ids=(7, 30, 90)),
    SamplingParams(25, temperature=1.0, seed=2, top_k=20, ignore_eos=True),
]
ADJUSTED = SamplingParams(30, repetition_penalty=1.3, ignore_eos=True)
STOPPED = SamplingParams(30, temperature=1.0, seed=3, stop=("a",))
LOGGED = SamplingParams(20, logprobs=2, ignore_eos=True)


def make_engine(model_dir: Path, backend: str = "native", speculation: str = "off") -> Engine:
    options = EngineConfig(
        kv_memory="1MiB", block_size=BLOCK, num_threads=1, max_num_seqs=8, backend=backend, speculation=speculation
    )
    return Engine(model_dir, dtype="float32", engine=options)


class Answers:
    """What the loop over an engine's worker says to its clients; requests come while it runs."""

    def __init__(self, engine: Engine, coming: list[SamplingParams]) -> None:
        self.deltas: dict[str, list[TokenDelta]] = {}
        self._engine = engine
        self._coming = [(i, sampling) for i, sampling in enumerate(coming)]
        self._loop = StepLoop(engine.worker, self._take, lambda outputs: None)

    def run(self) -> dict[str, tuple[list[int], str, str | None]]:
        """Tokens, text and reason of the end of each request."""
        self._submit(3)
        while not self._engine.idle:
            self._loop.run()
        self._engine.check_integrity()
        return {
            request_id: (
                [token for delta in deltas for token in delta.token_ids],
                "".join(delta.text for delta in deltas),
                deltas[-1].finish_reason,
            )
            for request_id, deltas in self.deltas.items()
        }

    def _take(self, step: Step) -> None:
        assert not step.failures
        for output in self._engine.worker.render(step.emissions):
            self.deltas.setdefault(output.delta.request_id, []).append(output.delta)
            if output.delta.finish_reason:
                self._submit(1)
        self._engine.report()

    def _submit(self, count: int) -> None:
        for i, sampling in self._coming[:count]:
            self._engine.submit([5 + (i * 31 + j) % 90 for j in range(3 + 5 * i % 40)], sampling)
        del self._coming[:count]


@pytest.mark.parametrize(
    ("backend", "speculation", "least"), [("native", "off", 50), ("native", "ngram", 5), ("torch", "off", 50)]
)
def test_the_tokens_are_the_same(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, backend: str, speculation: str, least: int
) -> None:
    coming = [*SAMPLING, *SAMPLING[:3], ADJUSTED, STOPPED, LOGGED, *SAMPLING]
    plain = Answers(make_engine(tiny_model_dir, backend), coming).run()
    early = []
    begin = Worker.go_on

    def go_on(self: Worker, batch: StepBatch, tokens: list[int | None]) -> StepBatch | None:
        early.append(begin(self, batch, tokens))
        return early[-1]

    monkeypatch.setattr(step_loop, "LEAST_TO_LOOK_AHEAD", 1)
    monkeypatch.setattr(Worker, "go_on", go_on)
    assert Answers(make_engine(tiny_model_dir, backend, speculation), coming).run() == plain
    assert sum(batch is not None for batch in early) > least
    assert {end for _, _, end in plain.values()} == {"length", "stop"}


def test_a_step_that_fails_after_another_went_ahead_of_its_booking(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "LEAST_TO_LOOK_AHEAD", 1)
    engine = make_engine(tiny_model_dir)
    compute, steps = ModelRunner.execute, []

    def execute(self: ModelRunner, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        steps.append(batch)
        if len(steps) == 10:
            raise RuntimeError("no kernel image is available")
        return compute(self, batch, sequences)

    monkeypatch.setattr(ModelRunner, "execute", execute)
    taken: list[Step] = []

    def take(step: Step) -> None:
        taken.append(step)
        engine.report()

    engine.submit([5, 6, 7], SamplingParams(40, ignore_eos=True))
    StepLoop(engine.worker, take, lambda outputs: None).run()
    assert [len(step.emissions) for step in taken] == [1] * 9 + [0]
    (failure,) = taken[-1].failures
    assert failure.delta.start == 9 and failure.delta.finish_reason == "error"
    engine.check_integrity()


def test_a_silent_ingress_is_looked_at_between_any_two_steps(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "LEAST_TO_LOOK_AHEAD", 1)
    engine = make_engine(tiny_model_dir)
    taken: list[Step] = []

    def take(step: Step) -> None:
        taken.append(step)
        engine.report()
        if len(taken) == 12:
            loop.abort_ingress("")

    loop = StepLoop(engine.worker, take, lambda outputs: None)
    engine.submit([5, 6, 7], SamplingParams(100, ignore_eos=True))
    loop.run()
    assert len(taken) <= 14, "the step that computes and no other"
    assert not engine.worker.executor.num_held


def sequence(name: str, tokens: tuple[int, ...]) -> Sequence:
    return Sequence.of(Request(name, 0, "", tokens, SamplingParams(9)))


def test_inputs_lack_only_what_the_step_before_brings() -> None:
    sequences = {"a": sequence("a", (1, 2, 3, 4)), "b": sequence("b", (9, 8))}
    blocks = [7]
    items = [StepItem("a", 4, 1, True, blocks), StepItem("b", 2, 1, True, [3])]
    inputs = DecodeInputs.ahead(items, sequences, 4)
    blocks.append(5)
    for name, token in (("a", 50), ("b", 60)):
        sequences[name].token_ids.append(token)
    inputs.complete()
    assert inputs.rows.tolist() == [[50, 60], [4, 2], [5 * 4, 3 * 4 + 2]]
    assert inputs.lengths.tolist() == [[1, 5], [1, 3]]
    assert inputs.tables.tolist() == [[7, 5], [3, 3]]
    inputs.complete([70, 80])
    assert inputs.rows[0].tolist() == [70, 80]


def test_inputs_without_tokens_or_blocks_are_refused() -> None:
    sequences = {"a": sequence("a", (1, 2, 3, 4))}
    with pytest.raises(IntegrityError, match="a: token 5 in 1 blocks of 4"):
        DecodeInputs.ahead([StepItem("a", 5, 1, True, [7])], sequences, 4)
    with pytest.raises(IntegrityError, match="tokens that are not there"):
        DecodeInputs.ahead([StepItem("a", 5, 1, True, [7, 8])], sequences, 4).complete()
    with pytest.raises(IntegrityError, match="a: token 4 in 1 blocks of 4"):
        DecodeInputs.ahead([StepItem("a", 4, 1, True, [7])], sequences, 4).complete([1])


def test_a_step_goes_on_only_if_it_was_got_ready(tiny_model_dir: Path) -> None:
    runner = ModelRunner.from_dir(tiny_model_dir, dtype=torch.float32, num_blocks=16, block_size=BLOCK)
    with pytest.raises(IntegrityError, match="not got ready"):
        runner.go_on(StepBatch((StepItem("a", 0, 1, True, [0]),)), [1])
