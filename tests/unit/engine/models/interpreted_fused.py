"""The kernels between matrix products, in Triton's interpreter, against torch. Run by ``test_fused.py``."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.gpu_models import model_config, random_weights
from farsight.core.request import Request, SamplingParams
from farsight.engine.attention.layout import build_layout, order_items
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.layers import Linear, Norm
from farsight.engine.kv_pool import KVPool
from farsight.engine.models import fused
from farsight.engine.models.fused_layers import FusedLayers
from farsight.engine.models.grouped import GroupedExperts, most_blocks
from farsight.engine.models.layers import ACTIVATION_FUNCTIONS, DecoderLayers, linear
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


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_tanh"])
def test_gated(activation: str) -> None:
    torch.manual_seed(0)
    up = 3 * torch.randn(2, 2 * 1500).half()
    gate, factors = up.chunk(2, -1)
    expected = ACTIVATION_FUNCTIONS[activation](gate) * factors
    torch.testing.assert_close(fused.gated(up, activation), expected, atol=1e-5, rtol=2e-3)


@pytest.mark.parametrize("tokens", [1, 70])
def test_grouped_products(tokens: int) -> None:
    """Experts without a token, with one and with most; few pairs in small blocks, and many in large ones."""
    torch.manual_seed(0)
    count, active, hidden, inner = 3, 2, 40, 24
    up, down = (
        tuple(Linear(torch.randn(shape) / 8, torch.randn(shape[0]) / 8) for _ in range(count))
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    normed, factors = torch.randn(tokens, hidden), torch.rand(tokens, active)
    chosen = torch.tensor([[2, 0]] + [[2, 0 if i < 3 else 2] for i in range(1, tokens)])
    found = GroupedExperts(up, down).mixed(normed, chosen, factors, fused.gated)
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for expert, factor in zip(chosen[token].tolist(), factors[token], strict=True):
            gate, more = linear(normed[token], up[expert]).chunk(2)
            expected[token] += factor * linear(torch.nn.functional.silu(gate) * more, down[expert])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_blocks_suffice_however_pairs_fall() -> None:
    rng = random.Random(0)
    for _ in range(200):
        pairs, experts, rows = rng.randint(1, 300), rng.randint(1, 40), rng.choice((1, 16, 128))
        counts = Counter(min(rng.randrange(experts), rng.randrange(experts)) for _ in range(pairs))
        assert sum(-(-count // rows) for count in counts.values()) <= most_blocks(pairs, experts, rows) <= pairs
    assert most_blocks(20, 3, 16) == 4  # 18, 1 and 1


class OnTheDeviceAlone(TorchDispatchMode):
    """Refuses operations whose value or shape the host has to know: a recorded step has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags), func
        return func(*args, **(kwargs or {}))


SHAPES = {
    "gqa": {},
    "head dim that is no power of two": {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 1},
    "experts": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_layers(changes: dict[str, object], tmp_path: Path) -> None:
    """A prompt and single tokens behind others: the same activations, and the same keys and values in the pool.

    The fused layers never wait for the device.
    """
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
    with torch.no_grad():
        for kind in (FusedLayers, DecoderLayers):
            pool = KVPool(config, num_blocks=5, block_size=BLOCK, dtype=torch.float16)
            for seed, cache in enumerate((*pool.keys, *pool.values)):
                cache.normal_(generator=torch.Generator().manual_seed(seed))
            layout = build_layout(batch, order_items(batch), sequences, BLOCK, config.vocab_size)
            attention = TorchAttention(config.sliding_windows).begin_step(layout, pool)
            layers = kind(config, weights.layers, 64, weights.embedding)
            assert layers.recordable or kind is DecoderLayers
            hidden = embed(layout, weights.embedding, None, config, None)
            with OnTheDeviceAlone() if layers.recordable else contextlib.nullcontext():
                hidden = layers.run(hidden, layout, pool, attention)
            found.append((hidden.float(), torch.stack([*pool.keys, *pool.values]).float()))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 0.01 * theirs.abs().max()
