"""Phi-3's long factors, chosen by request: as transformers chooses for a sequence of that length."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config.engine import EngineConfig
from core.errors import ConfigError, InvalidValueError
from core.request import SamplingParams
from engine import Engine
from tests.unit.engine.small_models import load_reference, save_model

WINDOW = 64
ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 4 * i for i in range(8)]}
PHI3: dict[str, Any] = {
    "architecture": "Phi3ForCausalLM",
    "max_position_embeddings": 256,
    "original_max_position_embeddings": WINDOW,
    "rope_scaling": ROPE,
}
SMALL = EngineConfig(kv_memory="8MiB", block_size=16, max_num_seqs=8, max_batch_tokens=48, num_threads=1)
OUTPUT = 8
BEGIN = [3, 7, 11, 200, 41, 9, 150, 4] * 4
PROMPTS = [BEGIN[:5], BEGIN[: WINDOW // 2], BEGIN + [17] * (WINDOW // 2 + 3), BEGIN * 3]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("phi3"), **PHI3)


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Returns the tokens of a greedy answer and their log probabilities."""
    engine.submit(prompt, SamplingParams(OUTPUT, logprobs=0, ignore_eos=True))
    ids: list[int] = []
    values: list[float] = []
    while not engine.idle:
        for delta in engine.step():
            assert delta.logprobs is not None
            ids += delta.token_ids
            values += [found[0] for _, found in delta.logprobs.output]
    return ids, values


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_each_request_has_the_factors_of_its_length(phi3: Path, backend: str) -> None:
    """One after the other in one engine, whose cache holds their common beginning under both kinds of factors."""
    reference = load_reference(phi3)
    by_request, served = (
        Engine(phi3, dtype="float32", engine=dataclasses.replace(SMALL, backend=backend, long_factors=kind))
        for kind in ("request", "served")
    )
    for prompt in PROMPTS:
        for engine, taken in ((by_request, True), (served, len(prompt) > WINDOW)):
            ids, values = answer(engine, prompt)
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
            theirs = logits.log_softmax(-1)[range(OUTPUT), ids]
            off = (torch.tensor(values) - theirs).abs().max().item()
            assert (off < 1e-3) is taken, (len(prompt), off)


def test_where_it_cannot_be_chosen(phi3: Path) -> None:
    with pytest.raises(InvalidValueError, match="long_factors"):
        EngineConfig(long_factors="sequence")
    with pytest.raises((InvalidValueError, ConfigError), match="long_factors"):
        EngineConfig(long_factors="request", device="cuda")
