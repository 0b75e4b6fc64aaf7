"""Sequences of every family go to the host and come back, are dropped and computed again."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from core.config.engine import EngineConfig
from core.request import SequenceStatus
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine
from tests.unit.engine.driver import outputs_of
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import save_model
from tests.unit.engine.test_engine import families, greedy, with_random_moves

BLOCK_SIZE = 16  # of the compiled step, where it has the family
ROOMY = EngineConfig(kv_memory="4MiB", block_size=BLOCK_SIZE, max_num_seqs=8, max_batch_tokens=32, num_threads=1)
DEVICE_BLOCKS, HOST_BLOCKS = 9, 12


@pytest.mark.parametrize("name", FAMILIES)
def test_moved_sequences_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model_dir = save_model(tmp_path, **FAMILIES[name])
    prompts = families(12, seed=10)
    sampling = [greedy(20, temperature=0.8, seed=i) for i in range(12)]
    expected = Engine(model_dir, engine=ROOMY).generate(prompts, sampling)
    block_bytes = load_model_config(model_dir).kv_bytes_per_token(torch.float32) * BLOCK_SIZE
    tight = dataclasses.replace(
        ROOMY, kv_memory=str(DEVICE_BLOCKS * block_bytes), host_kv_memory=str(HOST_BLOCKS * block_bytes)
    )
    engine, policy = with_random_moves(model_dir, tight, random.Random(11))
    found, seen = outputs_of(engine, [engine.submit(*each) for each in zip(prompts, sampling, strict=True)])
    assert found == [completion.token_ids for completion in expected]
    assert SequenceStatus.OFFLOADED in seen and policy.num_events > 0
