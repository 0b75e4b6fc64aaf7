"""Texts of resumed requests: wherever the first attempt broke off, the client reads on as if nothing had happened.

The model is a script, so that stop strings and half characters come where they are wanted.
"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from core.messages.plans import Plan, Slot, WorkerReady
from core.messages.tokens import TokenDelta
from core.request import Request, SamplingParams
from engine.sequence import Detokenizer, Sequence
from engine.step_fault import StepFault
from engine.worker import Worker
from kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch
from tests.unit.engine.small_models import EOS_ID, byte_level_tokenizer


class Script:
    """Says the same output whatever it is asked."""

    num_ooms = 0

    def __init__(self, output_ids: list[int]) -> None:
        self.output_ids = output_ids

    def begin(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        """Nothing to do."""

    def look_ahead(self, batch: StepBatch, sequences: dict[str, Sequence]) -> bool:
        """Nothing is made ready."""
        return False

    def go_on(self, batch: StepBatch, token_ids: list[int]) -> None:
        """Never asked for."""

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        return [
            self.output_ids[sequences[item.request_id].output_len] if item.samples else None for item in batch.items
        ]

    def fault(self, error: Exception) -> StepFault:
        raise AssertionError("no step of it fails") from error

    def rest(self) -> None:
        """Nothing to do."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


def run(tokenizer: Tokenizer, script: list[int], sampling: SamplingParams, known: int) -> list[TokenDelta]:
    """The deltas of an attempt that begins after ``known`` tokens of the script."""
    executor = LeaseExecutor(BlockManager(64, 4), BatchLimits(4, 64), "w")
    ready = WorkerReady("w", 64, 4, 256, True, 320)
    worker = Worker(Script(script), executor, Detokenizer(tokenizer), (EOS_ID,), ready)
    prompt = tuple(tokenizer.encode("say it:").ids)
    request = Request("r", 1, "i", prompt, sampling, tuple(script[:known]))
    worker.offer_plan(Plan("w", worker.take_over().lease, 1, 0, 0, (Slot("r", 1, 999, 999, False, 0, request),)))
    deltas = []
    while (batch := worker.begin_step()) is not None:
        deltas += [output.delta for output in worker.finish_step(batch, worker.execute(batch))]
        worker.check_integrity()
    return deltas


CASES = {
    "plain": ("hello world, the lazy dog", (), "length"),
    "multi-byte": ("naïve 日本語 🙂🙃, 한국어", (), "length"),
    "stop": ("stop and go, then STOP HERE and no more", ("STOP HERE",), "stop"),
    "stop that almost comes first": ("END EN ENDI ENDING and on", ("ENDING",), "stop"),
    "stop with multi-byte": ("価格は🙂終わり🙃です、ほか", ("🙂終わり🙃",), "stop"),
    "held to the end": ("it may be a ST", ("STOP",), "length"),
    "half a character at the end": ("five 🙂", (), "length"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_text_continues_exactly_wherever_it_broke_off(case: str, tokenizer: Tokenizer) -> None:
    text, stop, reason = CASES[case]
    script = tokenizer.encode(text).ids
    if case == "half a character at the end":
        script = script[:-1]
    sampling = SamplingParams(len(script), stop=stop)
    whole = run(tokenizer, script, sampling, 0)
    assert whole[-1].finish_reason == reason
    expected = text.split(stop[0])[0] if reason == "stop" else tokenizer.decode(script)
    assert "".join(delta.text for delta in whole) == expected
    for cut in range(1, len(whole)):
        resumed = run(tokenizer, script, sampling, cut)
        assert resumed == whole[cut:], f"after {cut} tokens"


def test_special_tokens_among_the_known_output_are_no_text(tokenizer: Tokenizer) -> None:
    script = [*tokenizer.encode("one").ids, EOS_ID, *tokenizer.encode(" two").ids]
    sampling = SamplingParams(len(script), ignore_eos=True)
    whole = run(tokenizer, script, sampling, 0)
    assert "".join(delta.text for delta in whole) == "one two"
    for cut in range(1, len(whole)):
        assert run(tokenizer, script, sampling, cut) == whole[cut:]


def test_a_resumed_request_ends_at_eos(tokenizer: Tokenizer) -> None:
    script = [*tokenizer.encode("one two").ids, EOS_ID]
    resumed = run(tokenizer, script, SamplingParams(50), 2)
    assert (resumed[-1].token_ids, resumed[-1].finish_reason) == ((EOS_ID,), "stop")
