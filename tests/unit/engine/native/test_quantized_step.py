"""A compiled step with weights in 8 and 4 bits: the bits of ADR 27 and 42, whatever it is computed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.quantized import QuantizedLinear
from engine.checkpoint.weights import Linear, load_weights
from engine.models.quantize import quantize_weights
from tests.unit.engine.native.exact_step import ExactStep
from tests.unit.engine.native.test_native_exactness import MODELS, Components, _random_tokens, assert_same
from tests.unit.engine.small_models import save_model

SHAPES = ("gqa", "tied", "odd", "biases", "qwen3", "phi3", "opt")
"""Rows of 64, 112 and 48 inputs; those of ``odd`` (66 and 90) stay as they are, but for the 48 of its ``out``."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tied = {"tied": {"num_key_value_heads": 2, "tie_word_embeddings": True}}
    models = {name: (MODELS | tied)[name] for name in SHAPES}
    return {
        name: save_model(tmp_path_factory.mktemp(name), **({"num_hidden_layers": 2} | shape))
        for name, shape in models.items()
    }


def test_which_matrices_are_rounded(saved: dict[str, Path]) -> None:
    for name in SHAPES:
        config = load_model_config(saved[name])
        weights = quantize_weights(load_weights(saved[name], config, torch.float32), 4)
        layer = weights.layers[0]
        kept = [type(each) for each in (layer.qkv, layer.out, layer.up, layer.down)]
        assert kept == ([Linear, QuantizedLinear, Linear, Linear] if name == "odd" else [QuantizedLinear] * 4)
        assert isinstance(weights.lm_head, torch.Tensor) == (name == "odd")
        if isinstance(weights.lm_head, QuantizedLinear):
            assert weights.lm_head.bits == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_roundings_are_those_of_the_contract(saved: dict[str, Path], shape: str, bits: int, dtype: str) -> None:
    (tokens,) = _random_tokens((70,))
    config = load_model_config(saved[shape])
    weights = quantize_weights(load_weights(saved[shape], config, getattr(torch, dtype)), bits)
    ours = Components(saved[shape], dtype, [tokens], seed=0, bits=bits).run(1, 41)
    exact = ExactStep(config, weights, len(tokens)).logits(tokens)
    assert np.array_equal(torch.stack(ours.logits["0"]).numpy(), exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_batch_chunks_or_threads(saved: dict[str, Path], bits: int) -> None:
    tokens = _random_tokens((61, 37, 33, 16, *range(1, 16)))
    alone = Components(saved["gqa"], "bfloat16", tokens, seed=0, bits=bits).run_alone()
    for seed, (most, chunk, threads) in enumerate([(2, 3, 1), (19, 7, 1), (19, 200, 3)], start=1):
        ours = Components(saved["gqa"], "bfloat16", tokens, seed, spare=seed, num_threads=threads, bits=bits)
        assert_same(ours.run(most, chunk), alone)
