"""Embeddings of decoders: the hidden states of transformers' models, whatever else a step computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from core.config.engine import EngineConfig
from core.messages.tokens import TokenDelta
from core.request import SamplingParams
from engine.engine import Engine

_PROMPTS = [[5, 9, 33], [7], list(range(20, 90)), [*range(20, 84), 4, 5], [100] * 41]


def _expected(model_dir: Path, pooling: str) -> torch.Tensor:
    reference = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [reference(torch.tensor([ids])).last_hidden_state[0] for ids in _PROMPTS]
    return torch.stack([each.mean(0) if pooling == "mean" else each[-1] for each in states])


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("shape", ["qwen3", "gqa", "opt"])
def test_embeddings_are_those_of_transformers(
    shape: str, pooling: str, backend: str, model_dir: Callable[[str], Path]
) -> None:
    """In steps of 16 tokens, so in chunks; twice, so that the second time prefixes are cached; beside generation."""
    folder = model_dir(shape)
    settings = EngineConfig(backend=backend, max_batch_tokens=16, max_num_seqs=4, block_size=16)
    engine = Engine(folder, engine=settings)
    expected = _expected(folder, pooling)
    alone = engine.generate([[3, 4, 5]], SamplingParams(12, ignore_eos=True))[0].token_ids
    beside = engine.submit([3, 4, 5], SamplingParams(12, ignore_eos=True))
    sampling = SamplingParams(1, pooling=pooling)
    for _ in range(2):
        names = [engine.submit(prompt, sampling) for prompt in _PROMPTS]
        deltas = _run(engine)
        found = {each.request_id: each for each in deltas if each.request_id in names}
        assert all(each.finish_reason == "stop" and each.token_ids == () and each.text == "" for each in found.values())
        vectors = torch.stack([torch.frombuffer(bytearray(found[name].vector), dtype=torch.float32) for name in names])
        torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=2e-5)
        written = [token for each in deltas if each.request_id == beside for token in each.token_ids]
        assert tuple(written) in ((), alone)
    engine.check_integrity()


def test_a_preempted_mean_counts_each_position_once(model_dir: Callable[[str], Path]) -> None:
    """A pool that holds a part of what is asked for: prompts lose their KV midway and are computed again."""
    folder = model_dir("gqa")
    settings = EngineConfig(max_batch_tokens=16, block_size=16, kv_memory="40KiB", host_kv_memory="0")
    engine = Engine(folder, engine=settings)
    expected = _expected(folder, "mean")
    long = SamplingParams(40, ignore_eos=True)
    for prompt in _PROMPTS[:2]:
        engine.submit(prompt, long)
    names = [engine.submit(prompt, SamplingParams(1, pooling="mean")) for prompt in _PROMPTS]
    found = {each.request_id: each for each in _run(engine) if each.vector}
    vectors = torch.stack([torch.frombuffer(bytearray(found[name].vector), dtype=torch.float32) for name in names])
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=2e-5)


def _run(engine: Engine) -> list[TokenDelta]:
    deltas = []
    for _ in itertools.takewhile(lambda _: not engine.idle, itertools.count()):
        deltas += engine.step()
    return deltas
