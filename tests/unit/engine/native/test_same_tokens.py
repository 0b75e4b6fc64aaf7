"""The same seed draws the same tokens with the compiled step: 1,000 prompts alone, in batches, and resumed (ADR 27)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from core.config.engine import EngineConfig
from core.request import SamplingParams
from engine.engine import Engine

NUM_PROMPTS = 1000
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(1, 40))] for _ in range(NUM_PROMPTS)]


def sampling(index: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(num_tokens, temperature=1.0, seed=index, ignore_eos=True)


def make_engine(model_dir: Path, dtype: str, **options) -> Engine:
    options = {"kv_memory": "1MiB", "max_batch_tokens": 256, **options}
    config = EngineConfig(block_size=16, num_threads=1, backend="native", **options)
    return Engine(model_dir, dtype=dtype, engine=config)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path, dtype: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The outputs of requests that came one after the other."""
    engine = make_engine(tiny_model_dir, dtype)
    return [engine.generate([prompt], sampling(index))[0].token_ids for index, prompt in enumerate(prompts)]


def test_batches_draw_what_a_request_draws_alone(
    tiny_model_dir: Path, dtype: str, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    """In a pool so small that requests are preempted and computed again, prompts in chunks of any size."""
    small = "96KiB" if dtype == "float32" else "48KiB"
    engine = make_engine(tiny_model_dir, dtype, max_batch_tokens=48, max_num_seqs=40, kv_memory=small)
    together = engine.generate(prompts, [sampling(index) for index in range(NUM_PROMPTS)])
    assert engine.scheduler.num_preemptions > 0
    assert [completion.token_ids for completion in together] == alone


def test_a_resumed_request_goes_on_with_what_it_would_have_drawn(
    tiny_model_dir: Path, dtype: str, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    """As after the death of a worker: prompt and known output are computed as one prompt elsewhere, then it goes on."""
    known = [1 + index % (NUM_TOKENS - 1) for index in range(NUM_PROMPTS)]
    engine = make_engine(tiny_model_dir, dtype)
    resumed = engine.generate(
        [[*prompt, *output[:count]] for prompt, output, count in zip(prompts, alone, known, strict=True)],
        [sampling(index, NUM_TOKENS - count) for index, count in enumerate(known)],
    )
    assert [
        (*output[:count], *rest.token_ids) for output, count, rest in zip(alone, known, resumed, strict=True)
    ] == alone
