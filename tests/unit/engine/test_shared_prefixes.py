"""Prompts that arrive together and begin alike: a real engine computes the common part once, and no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prefix_batches import run
from core.config.engine import EngineConfig
from core.request import SamplingParams
from engine.engine import Engine

PREFIX = [5 + i * 7 % 90 for i in range(160)]
PROMPTS = [[*PREFIX, *(6 + (i * 11 + j) % 90 for j in range(10 + 5 * i))] for i in range(6)]


@pytest.mark.parametrize("max_batch_tokens", [64, 1024])
def test_the_cache_changes_no_token(tiny_model_dir: Path, max_batch_tokens: int) -> None:
    answers = []
    for prefix_cache in (True, False):
        options = EngineConfig(
            kv_memory="1MiB", block_size=16, num_threads=1, max_batch_tokens=max_batch_tokens, prefix_cache=prefix_cache
        )
        engine = Engine(tiny_model_dir, dtype="float32", engine=options)
        each = [SamplingParams(12, temperature=i % 2, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
        answers.append([completion.token_ids for completion in engine.generate(PROMPTS, each)])
    assert answers[0] == answers[1]


def test_a_prefix_is_computed_once(tiny_model_dir: Path) -> None:
    row = run(tiny_model_dir, PROMPTS, 1, 3, prefix_cache=True)
    assert row["computed_tokens"] == row["once_tokens"] < row["prompt_tokens"] / 2
    assert run(tiny_model_dir, PROMPTS, 1, 3, prefix_cache=False)["computed_tokens"] == row["prompt_tokens"]
