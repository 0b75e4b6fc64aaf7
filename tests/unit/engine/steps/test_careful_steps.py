"""A step that the device has no memory for is computed in parts, and gives what it would have given."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from engine.attention.torch_attention import TorchAttention
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.weights import load_weights
from engine.kv.kv_pool import KVPool
from engine.sampling.sampler import StepLogits
from engine.sequence import Sequence
from engine.steps.backends import TorchBackend
from engine.steps.careful_steps import CarefulSteps
from engine.steps.model_runner import ModelRunner
from kvcache import StepBatch
from tests.unit.engine.driver import Driver


class SmallDevice(TorchBackend):
    """Computes so many tokens at once and no more; what a step had written by then stays."""

    room = 10**9
    num_tokens: list[int]

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        found = super().run(batch, order, sequences, more_rows, with_hidden=with_hidden)
        if batch.num_tokens > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_tokens.append(batch.num_tokens)
        return found


@pytest.fixture
def make(model_dir: Callable[[str], Path]) -> Callable[[int], tuple[Driver, SmallDevice, CarefulSteps, list[int]]]:
    config = load_model_config(model_dir("gqa"))
    weights = load_weights(model_dir("gqa"), config, torch.float32)

    def make(room: int) -> tuple[Driver, SmallDevice, CarefulSteps, list[int]]:
        pool = KVPool(config, num_blocks=64, block_size=4, dtype=torch.float32)
        backend = SmallDevice(config, weights, pool, 256, TorchAttention(config.sliding_windows))
        backend.room, backend.num_tokens = room, []
        recoveries: list[int] = []
        careful = CarefulSteps(lambda: recoveries.append(1))
        return Driver(ModelRunner(config, pool, backend, 256, careful=careful)), backend, careful, recoveries

    return make


def work(driver: Driver, **sampling: object) -> list[list[int | None]]:
    """Prompts and decode rows in the same steps."""
    rng = random.Random(0)
    for name, length in (("a", 30), ("b", 7), ("c", 50)):
        driver.add(name, [rng.randrange(3, 300) for _ in range(length)], temperature=1.0, seed=5, **sampling)
    steps = [driver.step(a=20), driver.step(b=7, a=10), driver.step(c=50, a=1, b=1)]
    return steps + [driver.step(c=1, a=1, b=1) for _ in range(5)]


@pytest.mark.parametrize("room", [1, 2, 3, 5, 16, 40])
def test_the_same_tokens_in_parts(make, room: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = work(make(10**9)[0])
    driver, backend, careful, recoveries = make(room)
    with caplog.at_level(logging.WARNING):
        assert work(driver) == expected
    assert max(backend.num_tokens) <= room
    assert careful.num_ooms == driver.runner.num_ooms == len(recoveries) > 0
    assert careful.max_tokens is not None and careful.max_tokens <= room
    assert "out of memory in a step of" in caplog.text


def test_later_steps_do_not_run_into_it_again(make) -> None:
    driver, _, careful, _ = make(16)
    work(driver)
    num_ooms = careful.num_ooms
    driver.add("d", list(range(5, 60)))
    driver.step(d=55, a=1)
    assert careful.num_ooms == num_ooms


def test_log_probabilities_of_parts(make) -> None:
    """A prompt that brings log probabilities stays in one piece."""
    found = []
    for room in (10**9, 20):
        driver, _, careful, _ = make(room)
        driver.add("a", list(range(5, 23)), logprobs=2, prompt_logprobs=True)
        driver.add("b", list(range(30, 45)), logprobs=1)
        tokens = driver.runner.execute(driver.batch(b=15, a=18), driver.sequences)
        found.append((list(tokens), tokens.logprobs))
        assert (careful.num_ooms > 0) == (room == 20)
    (tokens, logprobs), (in_parts, logprobs_in_parts) = found
    assert tokens == in_parts
    assert len(logprobs[1].prompt) == len(logprobs_in_parts[1].prompt) == 17
    assert set(logprobs) == set(logprobs_in_parts) == {0, 1}


def test_what_cannot_be_cut_fails(make) -> None:
    driver, _, _, _ = make(0)
    driver.add("a", [5, 6, 7])
    with pytest.raises(torch.OutOfMemoryError):
        driver.step(a=3)
    driver, _, _, _ = make(5)
    driver.add("a", list(range(5, 15)), prompt_logprobs=True, logprobs=0)
    with pytest.raises(torch.OutOfMemoryError):
        driver.step(a=10)


def test_other_errors_are_not_its_business(make) -> None:
    driver, backend, careful, _ = make(100)
    backend.run = lambda *args: 1 / 0
    driver.add("a", [5])
    with pytest.raises(ZeroDivisionError):
        driver.step(a=1)
    assert careful.num_ooms == 0
