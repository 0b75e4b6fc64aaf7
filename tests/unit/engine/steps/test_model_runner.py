"""The forward pass against transformers: any shape of model, any cut of the work into steps."""

from __future__ import annotations

import random

import pytest
import torch

from core.errors import IntegrityError
from engine.attention.torch_attention import TorchAttention
from engine.steps.model_runner import ModelRunner
from kvcache import StepBatch, StepItem
from tests.unit.engine.driver import Driver
from tests.unit.engine.small_models import SHAPES, load_reference


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(length)]


@torch.inference_mode()
def reference_logits(model, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0, -1].float()


def mixed_steps(runner: ModelRunner) -> list[tuple[list[int], torch.Tensor]]:
    """Decode rows of many lengths, whole prompts and later chunks in the same steps; tokens and their logits."""
    driver = Driver(runner)
    rng = random.Random(1)
    names = [f"s{i}" for i in range(5)]
    for name, length in zip(names, (1, 3, 9, 21, 40), strict=True):
        driver.add(name, random_ids(rng, length))
    results = []
    for _ in range(12):
        work = {name: rng.randint(1, driver.remaining(name)) for name in names if rng.random() < 0.8}
        if not work:
            continue
        for name, logits in zip(work, driver.logits(**work), strict=True):
            if logits is not None:
                token_ids = driver.sequences[name].token_ids
                results.append((list(token_ids), logits))
                token_ids.append(rng.randrange(3, 300))
    assert len(results) > 15
    return results


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_transformers(shape, make_runner, model_dir):
    reference = load_reference(model_dir(shape))
    for token_ids, logits in mixed_steps(make_runner(shape)):
        assert (logits - reference_logits(reference, token_ids)).abs().max() < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_exact_as_transformers(shape, make_runner, model_dir):
    """Rounding differs with the order of additions, so both are held against exact arithmetic on the same weights."""
    reference = load_reference(model_dir(shape), torch.bfloat16)
    exact = load_reference(model_dir(shape), torch.bfloat16).float()
    ours, theirs = [], []
    for token_ids, logits in mixed_steps(make_runner(shape, "bfloat16")):
        truth = reference_logits(exact, token_ids)
        ours.append((logits - truth).square().mean())
        theirs.append((reference_logits(reference, token_ids) - truth).square().mean())
    assert torch.stack(ours).mean().sqrt() < 1.2 * torch.stack(theirs).mean().sqrt()


@pytest.mark.parametrize("make_runner", ["torch"], indirect=True)
def test_one_long_row_does_not_pad_the_others(make_runner, monkeypatch):
    parts: list[int] = []
    begin_step = TorchAttention.begin_step

    def spy(self, layout, pool):
        attention = begin_step(self, layout, pool)
        parts.extend(part.num_gathered for part in attention._parts)
        return attention

    driver = Driver(make_runner())
    for name, length in (("a", 4), ("b", 100), ("c", 7)):
        driver.add(name, random_ids(random.Random(6), length))
        driver.step(**{name: length})
    monkeypatch.setattr(TorchAttention, "begin_step", spy)
    driver.step(a=1, b=1, c=1)
    assert parts == [26, 4]  # blocks of 4 tokens: 101 tokens, then 5 and 8


@pytest.mark.parametrize(
    ("start", "num_tokens", "blocks"), [(0, 4, [0]), (2, 2, [0]), (0, 0, [0]), (0, 3, []), (2, 1, [])]
)
def test_impossible_item(start, num_tokens, blocks, make_runner):
    driver = Driver(make_runner())
    driver.add("a", [5, 6, 7])
    batch = StepBatch((StepItem("a", start, num_tokens, True, blocks),))
    with pytest.raises(IntegrityError, match="a: step over tokens"):
        driver.runner.execute(batch, driver.sequences)


def test_empty_step(make_runner):
    with pytest.raises(IntegrityError, match="without items"):
        make_runner().execute(StepBatch(()), {})
