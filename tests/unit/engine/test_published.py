"""Published weights answer as recorded, and the same whatever happens meanwhile. SmolLM2 by day, Gemma by night."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.request import Request, SamplingParams
from farsight.engine import Engine
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.policies.replica.events import RequestsArrived
from farsight.services.api.text.prompts import PromptEncoder
from tests.published import gemma3, smollm2
from tests.unit.services.api.api_support import chat_ids

BLOCK = 16
NUM_BLOCKS = 8
PROMPTS = (
    "The sea is",
    "Once upon a time there was a king who had three daughters, and the youngest of them was so",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune are the planets of our solar system. "
    "The largest of them is Jupiter, the smallest is Mercury, and the one that we live on is",
)
"""4 to 50 tokens, which grow to 13 blocks: more than the pool holds."""


def engine_of(model: Path) -> Engine:
    """Room for one long sequence, or for two short ones, and for all of them in the host's memory."""
    block_bytes = load_model_config(model).kv_bytes_per_token(torch.float32) * BLOCK
    config = EngineConfig(
        kv_memory=str(NUM_BLOCKS * block_bytes),
        host_kv_memory=str(3 * NUM_BLOCKS * block_bytes),
        block_size=BLOCK,
        max_num_seqs=4,
        num_threads=1,
        prefix_cache=False,
    )
    ticks = itertools.count()
    scheduler = SchedulerConfig(preset="fastserve", watermark=1.0)
    return Engine(model, engine=config, scheduler=scheduler, clock=lambda: 0.005 * next(ticks))


@pytest.fixture(scope="module")
def smol() -> Engine:
    return engine_of(smollm2())


def test_smollm2_chats_as_recorded(smol: Engine) -> None:
    """The prompt is what transformers makes of the conversation, and the answer what it gives in floats."""
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = chat_ids(PromptEncoder(smollm2()), messages)
    assert smol.tokenizer.decode(list(prompt), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    (completion,) = smol.generate([prompt], SamplingParams(20))
    assert (completion.text, completion.finish_reason) == ("The answer to this classic math problem is 4.", "stop")


def assert_nothing_changes_the_answers(engine: Engine, num_tokens: int) -> None:
    """Neither company, nor a pause with the KV in the host's memory, nor a death that tokens are known from before."""
    sampled = [SamplingParams(num_tokens, temperature=0.8, top_p=0.95, seed=seed, ignore_eos=True) for seed in (1, 2)]
    samplings = [SamplingParams(num_tokens, ignore_eos=True)] * 2 + sampled
    alone = [engine.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, samplings, strict=True)]
    assert engine.worker.executor.report().traffic.offloads == 0
    together = engine.generate(PROMPTS, samplings)
    assert [each.text for each in together] == [each.text for each in alone]
    traffic = engine.worker.executor.report().traffic
    assert traffic.offloads > 0 and traffic.uploads > 0
    known = num_tokens // 3
    for index, (answer, sampling) in enumerate(zip(alone, samplings, strict=True)):
        resumed = Request(f"resumed-{index}", 1, "", answer.prompt_ids, sampling, output_ids=answer.token_ids[:known])
        engine._handle(RequestsArrived((resumed,)))
        text = ""
        while not engine.idle:
            text += "".join(delta.text for delta in engine.step())
        assert answer.text.endswith(text) and engine.tokenizer.decode(list(answer.token_ids[known:])) == text


def test_nothing_changes_the_answers_of_smollm2(smol: Engine) -> None:
    assert_nothing_changes_the_answers(smol, 12)


@pytest.mark.nightly
def test_gemma_goes_on_as_recorded_whatever_happens() -> None:
    """Greedy, the words are those of llama.cpp on the same file."""
    engine = engine_of(gemma3())
    (completion,) = engine.generate(["The capital of France is"], SamplingParams(8))
    assert completion.text == " the capital of the country of France."
    assert_nothing_changes_the_answers(engine, 24)
