"""Every family as on a GPU, in Triton's interpreter: the logits are those that torch operations compute.

``test_fused.py`` runs them, the small ones by day.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.attention.triton_attention import TritonAttention
from farsight.engine.checkpoint.architectures import ARCHITECTURES
from farsight.engine.checkpoint.model_config import DecoderConfig, load_model_config
from farsight.engine.checkpoint.weights import ModelWeights, allocate_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models import model
from farsight.engine.models.fused_layers import FusedLayers
from farsight.engine.steps.backends import TorchBackend
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.families.written import WRITTEN

PAGE, NUM_BLOCKS, MAX_LEN = 16, 6, 64
PROMPTS = {"a": [(37 * i + 11) % 300 for i in range(23)], "b": [5, 250, 17, 90, 3]}
STEPS = ({"a": 16}, {"a": 7, "b": 5}, {"a": 1, "b": 1}, {"b": 1, "a": 1})
"""A prompt, a chunk behind it beside a prompt, and rows; some windows end within the first sequence."""

SMALL = ("gemma2", "gpt_neox", "gpt-oss")
"""By day: offsets, norms behind blocks and caps; LayerNorms and parallel blocks; experts, sinks and windows."""


def family_config(name: str, directory: Path) -> DecoderConfig:
    """The configuration of a tiny model, written as its checkpoints have it."""
    if name in WRITTEN:
        fields: dict[str, Any] = dict(WRITTEN[name]) | {"vocab_size": 320, "padded_vocab_size": 320}
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
        own = dict(FAMILIES[name])
        architecture = own.pop("architecture")
        spelled = ARCHITECTURES[architecture].spelled
        given = {"vocab_size": 320, "max_position_embeddings": 256} | sizes | own
        fields = {spelled.get(key, key): value for key, value in given.items()}
        fields |= {"architectures": [architecture], "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(fields))
    return load_model_config(directory)


def weights_of(config: DecoderConfig) -> ModelWeights:
    """Weights of some size, so that nothing is left out without a trace."""
    weights, tensors = allocate_weights(config, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
        tensor.normal_(1.0 if norm else 0.0, 0.2 if norm else 0.15, generator=generator)
    return weights


def logits(config: DecoderConfig, weights: ModelWeights, *, fused: bool) -> list[Tensor]:
    """Behind each step, of what samples; the tokens are the likeliest."""
    pool = KVPool(config, num_blocks=NUM_BLOCKS, block_size=PAGE, dtype=torch.float32)
    for cache in (*pool.keys, *pool.values):
        cache.fill_(float("nan"))
    own = fused and config.latent is None
    attention = TritonAttention.of_model(config, pool, StepSizes(2, 4)) if own else TorchAttention.of_model(config)
    runner = ModelRunner(config, pool, TorchBackend(config, weights, pool, MAX_LEN, attention), MAX_LEN)
    driver = Driver(runner)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    found = []
    for work in STEPS:
        for name, row in zip(work, driver.logits(**work), strict=True):
            if row is not None:
                found.append(row.clone())
                driver.sequences[name].token_ids.append(int(row.argmax()))
    return found


def check(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = family_config(name, directory)
    weights = weights_of(config)
    expected = logits(config, weights, fused=False)
    assert len(expected) == 6
    monkeypatch.setattr(model, "make_layers", lambda *args, compiled: FusedLayers(*args))
    for ours, theirs in zip(logits(config, weights, fused=True), expected, strict=True):
        assert ours.argmax() == theirs.argmax()
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_small_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [name for name in (*FAMILIES, *WRITTEN) if name not in SMALL])
def test_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, tmp_path, monkeypatch)
