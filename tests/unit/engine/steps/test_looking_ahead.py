"""A loop that gets each step ready while the one before it computes gives the tokens of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.worker import step_loop
from actors.worker.step_loop import Step, StepLoop
from core.config.engine import EngineConfig
from core.errors import IntegrityError
from core.messages.tokens import TokenDelta
from core.request import Request, SamplingParams
from engine.attention.decode_inputs import DecodeInputs
from engine.engine import Engine
from engine.sequence import Sequence
from engine.steps.model_runner import ModelRunner
from engine.worker import Worker
from kvcache import StepBatch, StepItem

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
