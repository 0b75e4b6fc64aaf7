"""Every family as on a GPU, in Triton's interpreter: the logits are those that torch operations compute.

``test_fused.py`` runs them, the small ones by day.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.attention.triton_attention import TritonAttention
from farsight.engine.checkpoint.families import ARCHITECTURES
from farsight.engine.checkpoint.model_config import DecoderConfig, load_model_config
from farsight.engine.checkpoint.weights import ModelWeights, allocate_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models import model
from farsight.engine.models.fused_layers import FusedLayers
from farsight.engine.steps.backends import GraphBackend, TorchBackend
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES, FULL, SLIDING, UNEVEN
from tests.unit.engine.families.written import WRITTEN

PAGE, NUM_BLOCKS, MAX_LEN = 16, 6, 64
Steps = tuple[dict[str, int], ...]
STEPS: Steps = ({"a": 5}, {"a": 3, "b": 2}, {"b": 1, "a": 1})
"""Tokens of each sequence: a prompt, a chunk behind it beside a prompt, and rows. Windows end within the first one."""
SMALL_STEPS: Steps = ({"a": 4}, {"a": 2, "b": 1})

_SMALLER = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SMALL: dict[str, dict[str, Any]] = {
    "gemma2": _SMALLER,
    "gpt_neox": {"hidden_size": 32, "num_attention_heads": 2, "rotary_pct": 0.5},
    "gpt-oss": {**_SMALLER, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "num_local_experts": 4},
}
"""By day: offsets, norms behind blocks and caps; LayerNorms and parallel blocks; experts, sinks and windows."""


def family_config(name: str, directory: Path, changes: dict[str, Any]) -> DecoderConfig:
    """The configuration of a tiny model, written as its checkpoints have it."""
    if name in WRITTEN:
        fields: dict[str, Any] = dict(WRITTEN[name]) | {"vocab_size": 320, "padded_vocab_size": 320}
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
        own = {key: 3 if key == "sliding_window" and value else value for key, value in FAMILIES[name].items()}
        architecture = str(own.pop("architecture"))
        spelled = ARCHITECTURES[architecture].spelled
        given = {"vocab_size": 320, "max_position_embeddings": 256} | sizes | own | changes
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


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """Records work as itself: it reads the same memory, changed in place, as a captured one would."""

    def replay() -> None:
        run()

    replay()
    return replay


def logits(
    config: DecoderConfig, weights: ModelWeights, steps: Steps, *, fused: bool, recorded: bool = False
) -> list[Tensor]:
    """Behind each step, of what samples; the tokens are the likeliest."""
    pool = KVPool(config, num_blocks=NUM_BLOCKS, block_size=PAGE, dtype=torch.float32, spare=True)
    for cache in (*pool.keys, *pool.values):
        cache.fill_(float("nan"))
    sizes = StepSizes(2, 4, 16)
    attention = TritonAttention.of_model(config, pool, sizes) if fused else TorchAttention.of_model(config)
    backend: TorchBackend
    if recorded:
        backend = GraphBackend(config, weights, pool, MAX_LEN, attention, sizes, capture, lambda: None)
    else:
        backend = TorchBackend(config, weights, pool, MAX_LEN, attention)
    driver = Driver(ModelRunner(config, pool, backend, MAX_LEN))
    driver.add("a", [(37 * i + 11) % 300 for i in range(steps[0]["a"] + steps[1]["a"])])
    driver.add("b", [5, 250, 17, 90, 3][: steps[1]["b"]])
    found = []
    for work in steps:
        for name, row in zip(work, driver.logits(**work), strict=True):
            if row is not None:
                found.append(row.clone())
                driver.sequences[name].token_ids.append(int(row.argmax()))
    return found


def check(
    name: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    steps: Steps = STEPS,
    *,
    recorded: bool = False,
) -> None:
    config = family_config(name, directory, changes)
    weights = weights_of(config)
    expected = logits(config, weights, steps, fused=False)
    assert len(expected) == 2 * (len(steps) - 1)
    monkeypatch.setattr(model, "make_layers", lambda *args, compiled: FusedLayers(*args))
    for ours, theirs in zip(logits(config, weights, steps, fused=True, recorded=recorded), expected, strict=True):
        assert ours.argmax() == theirs.argmax()
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_small_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, tmp_path, monkeypatch, SMALL[name], SMALL_STEPS)


def even_row(name: str) -> dict[str, Any]:
    """Makes rows of latent attention as long as a multiple of 16, which kernels ask for and published models have."""
    return {"kv_lora_rank": 24, "qk_rope_head_dim": 8} if name.startswith("deepseek") else {}


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in UNEVEN), *WRITTEN])
def test_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, tmp_path, monkeypatch, even_row(name))


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3"])
def test_recorded_mixture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is given to experts too: rows that hold anything, and change nothing of the others."""
    check(name, tmp_path, monkeypatch, even_row(name), recorded=True)
