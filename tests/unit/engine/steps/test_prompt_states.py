"""The state of a prompt's last token behind half of the layers, which comes with the first token of the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from farsight.core.config.engine import EngineConfig
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine

PROMPTS = [[5, 9, 33], [7], list(range(20, 90)), [*range(20, 84), 4, 5]]


def expected(folder: Path) -> np.ndarray:
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for ids in PROMPTS:
            states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
            rows.append(states[reference.config.num_hidden_layers // 2][0, -1].numpy())
    found = np.stack(rows)
    normed: np.ndarray = found / np.sqrt(np.square(found).mean(axis=1, keepdims=True) + 1e-6)
    return normed


def run(engine: Engine) -> list[TokenDelta]:
    deltas = []
    while not engine.idle:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize(("shape", "backend"), [("qwen3", "native"), ("gqa", "native"), ("opt", "torch")])
def test_states_are_those_of_transformers(shape: str, backend: str, model_dir: Callable[[str], Path]) -> None:
    """In steps of 16 tokens, so in chunks; twice, so that the second time prefixes are cached; beside a vector."""
    folder = model_dir(shape)
    settings = EngineConfig(backend=backend, max_batch_tokens=16, max_num_seqs=4, block_size=16)
    engine = Engine(folder, engine=settings)
    sampling = SamplingParams(3, ignore_eos=True)
    without = [each.token_ids for each in engine.generate(PROMPTS, sampling)]
    engine.worker.runner.reads_states = True
    for _ in range(2):
        names = [engine.submit(prompt, sampling) for prompt in PROMPTS]
        vector = engine.submit([3, 4, 5], SamplingParams(1, pooling="last"))
        deltas = run(engine)
        of = {name: [each for each in deltas if each.request_id == name] for name in [*names, vector]}
        states = np.stack([np.frombuffer(of[name][0].state, np.float16) for name in names]).astype(np.float32)
        np.testing.assert_allclose(states, expected(folder), rtol=2e-3, atol=2e-3)
        assert not any(each.state for name in names for each in of[name][1:]) and not of[vector][0].state
        assert [sum((each.token_ids for each in of[name]), ()) for name in names] == without
    engine.check_integrity()
