"""The forward pass against transformers: any shape of model, any cut of the work into steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from core.errors import ConfigError, IntegrityError
from engine.attention.torch_attention import TorchAttention
from engine.steps.model_runner import ModelRunner
from kvcache import StepBatch, StepItem
from tests.unit.engine.driver import Driver
from tests.unit.engine.small_models import SHAPES, assert_greedy, load_reference, save_model


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


def test_longrope_within_its_original_context(tmp_path):
    """Its factors are those for short sequences, and its tables are scaled by the whole context."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
        "partial_rotary_factor": 0.75,
    }
    save_model(tmp_path, architecture="Phi3ForCausalLM", original_max_position_embeddings=64, rope_parameters=rope)
    runner = ModelRunner.from_dir(tmp_path, dtype=torch.float32, num_blocks=64, block_size=4, context_len=64)
    reference = load_reference(tmp_path)
    for token_ids, logits in mixed_steps(runner):
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


@pytest.mark.parametrize("shape", ["gqa", "qwen2_window"])
@pytest.mark.parametrize("chunks", [[40], [1, 39], [39, 1], [7, 13, 1, 19], [4, 4, 4, 28], [1] * 40])
def test_prompt_in_chunks(chunks, shape, make_runner, model_dir):
    prompt = random_ids(random.Random(2), 40)
    driver = Driver(make_runner(shape))
    driver.add("a", prompt)
    *earlier, last = [driver.logits(a=chunk)[0] for chunk in chunks]
    assert earlier == [None] * len(earlier)
    expected = reference_logits(load_reference(model_dir(shape)), prompt)
    assert last is not None and (last - expected).abs().max() < 1e-4


def test_greedy_output_is_that_of_generate(make_runner, model_dir):
    """Token by token; a mismatch is excused only at a near tie."""
    reference = load_reference(model_dir("gqa"))
    driver = Driver(make_runner())
    rng = random.Random(3)
    prompts = {f"s{i}": random_ids(rng, length) for i, length in enumerate((2, 5, 17, 30))}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    for _ in range(24):
        driver.step(**{name: driver.remaining(name) for name in prompts})
    for name, prompt in prompts.items():
        assert_greedy(reference, prompt, driver.sequences[name].token_ids[len(prompt) :])


def test_recomputed_sequence_goes_on_the_same(make_runner):
    """Preempted and prefilled again, prompt and output together: the same tokens, greedy or drawn."""
    prompt = random_ids(random.Random(4), 10)
    for sampling in ({}, {"temperature": 1.0, "seed": 7}):
        straight, preempted = Driver(make_runner()), Driver(make_runner(), seed=9)
        straight.add("a", prompt, **sampling)
        preempted.add("a", prompt, **sampling)
        for _ in range(12):
            straight.step(a=straight.remaining("a"))
        for _ in range(5):
            preempted.step(a=preempted.remaining("a"))
        preempted.computed["a"] = 0
        preempted.step(a=6)
        while preempted.sequences["a"].output_len < 12:
            preempted.step(a=preempted.remaining("a"))
        assert preempted.sequences["a"].token_ids == straight.sequences["a"].token_ids


def test_reused_blocks_carry_nothing_over(make_runner):
    """A sequence whose keys were NaN leaves its blocks to another."""
    runner = make_runner(num_blocks=4)
    driver = Driver(runner)
    prompt = random_ids(random.Random(5), 9)
    results = []
    for _ in range(3):
        driver.add("a", prompt)
        driver.step(a=9)
        results += [driver.step(a=1) for _ in range(3)]
        driver.remove("a")
        for cache in (*runner.pool.keys, *runner.pool.values):
            cache.fill_(float("nan"))
    assert results[:3] == results[3:6] == results[6:]


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


def test_sequences_are_not_changed(make_runner):
    driver = Driver(make_runner())
    driver.add("a", [5, 6, 7])
    assert driver.runner.execute(driver.batch(a=3), driver.sequences)[0] is not None
    assert driver.sequences["a"].token_ids == [5, 6, 7]


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


def test_pool_sizes(tiny_model_dir):
    """The context is 256: the smaller of it and the pool bounds a sequence."""
    for num_blocks, max_model_len in ((8, 128), (16, 256), (17, 256)):
        runner = ModelRunner.from_dir(tiny_model_dir, dtype=torch.float32, num_blocks=num_blocks, block_size=16)
        assert (runner.pool.num_blocks, runner.max_model_len, runner.pool.dtype) == (
            num_blocks,
            max_model_len,
            torch.float32,
        )


def test_a_shorter_context(tiny_model_dir):
    options: dict[str, Any] = {"dtype": torch.float32, "num_blocks": 8, "block_size": 16}
    assert ModelRunner.from_dir(tiny_model_dir, context_len=100, **options).max_model_len == 100
    assert ModelRunner.from_dir(tiny_model_dir, context_len=200, **options).max_model_len == 128
    with pytest.raises(ConfigError, match=r"engine\.max_model_len.*257.*256"):
        ModelRunner.from_dir(tiny_model_dir, context_len=257, **options)
