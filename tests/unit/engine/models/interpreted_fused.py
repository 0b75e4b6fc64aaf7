"""The kernels between matrix products, in Triton's interpreter, against torch. Run by ``test_fused.py``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.gpu_models import model_config, random_weights
from farsight.core.request import Request, SamplingParams
from farsight.engine.attention.layout import build_layout, order_items
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.layers import Norm
from farsight.engine.kv_pool import KVPool
from farsight.engine.models import fused
from farsight.engine.models.fused_layers import FusedLayers
from farsight.engine.models.layers import DecoderLayers
from farsight.engine.models.model import embed
from farsight.engine.sequence import Sequence
from farsight.kvcache import StepBatch, StepItem

BLOCK = 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 100])
def test_add_norm(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, delta = torch.randn(2, 3, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    for more in (delta, None):
        changed = hidden.clone()
        found = fused.add_norm(changed, more, Norm(weight, None), 1e-5)
        total = hidden if more is None else hidden + more
        assert torch.equal(changed, total)
        expected = torch.nn.functional.rms_norm(total, (size,), None, 1e-5) * weight
        torch.testing.assert_close(found, expected, atol=0, rtol=2e-3 if dtype is torch.float16 else 1e-5)


def test_gated() -> None:
    torch.manual_seed(0)
    up = 3 * torch.randn(2, 2 * 1500).half()
    gate, factors = up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * factors
    torch.testing.assert_close(fused.gated(up), expected, atol=1e-6, rtol=2e-3)


SHAPES = {
    "gqa": {},
    "head dim that is no power of two": {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 1},
    "heads with a norm": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "a part of a head": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_layers(changes: dict[str, object], tmp_path: Path) -> None:
    """A prompt and single tokens behind others: the same activations, and the same keys and values in the pool."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = model_config("tiny", tmp_path, **(shape | {"num_key_value_heads": 2, "head_dim": 16} | changes))
    weights = random_weights(config, torch.float16, "cpu")
    rng = random.Random(0)
    items = [StepItem("a", 0, 7, True, [3]), StepItem("b", 17, 1, True, [1, 4]), StepItem("c", 2, 1, True, [0])]
    sequences = {
        name: Sequence.of(Request(name, 0, "", tuple(rng.randrange(500) for _ in range(20)), SamplingParams(1)))
        for name in "abc"
    }
    batch = StepBatch(tuple(items))
    found = []
    with torch.inference_mode():
        for kind in (FusedLayers, DecoderLayers):
            pool = KVPool(config, num_blocks=5, block_size=BLOCK, dtype=torch.float16)
            for seed, cache in enumerate((*pool.keys, *pool.values)):
                cache.normal_(generator=torch.Generator().manual_seed(seed))
            layout = build_layout(batch, order_items(batch), sequences, BLOCK, config.vocab_size)
            attention = TorchAttention(config.sliding_windows).begin_step(layout, pool)
            layers = kind(config, weights.layers, 64, weights.embedding)
            hidden = layers.run(embed(layout, weights.embedding, None, config, None), layout, pool, attention)
            found.append((hidden.float(), torch.stack([*pool.keys, *pool.values]).float()))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 0.01 * theirs.abs().max()
