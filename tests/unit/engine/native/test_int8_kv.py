"""Keys and values in 8 bits: what they cost, where they go, and their integers on every instruction set (ADR 46)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.native.components import BUILDS, Components, assert_same, compiled_probe, random_tokens
from tests.unit.engine.native.exact_step import ExactStep, round_heads


def test_what_is_stored_and_what_it_costs(saved: Callable[[str], Path]) -> None:
    """The first layer's keys and values are those of a pool of floats, rounded; its logits stay near."""
    (tokens,) = random_tokens((150,))
    full = Components(saved("gqa"), "float32", [tokens], seed=0).run_alone()
    ours = Components(saved("gqa"), "float32", [tokens], seed=0, kv_dtype="int8").run_alone()
    layers = full.runner.config.num_hidden_layers
    floats, stored = full.kv("0"), ours.kv("0")
    for index in (0, layers):  # keys, values
        integers, scales = round_heads(floats[index].numpy(), 127)
        assert np.array_equal(stored[index].numpy(), integers)
        assert np.array_equal(stored[2 * layers + index].numpy(), scales)
    expected, found = torch.stack(full.logits["0"]), torch.stack(ours.logits["0"])
    assert 0 < (found - expected).square().mean().sqrt() < 0.02 * expected.std()


class RoundedKeysAndValues(ExactStep):
    """Attention in float32, over keys and values that have been rounded to 8 bits."""

    def _mix(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None) -> np.ndarray:
        (key, of_key), (value, of_value) = round_heads(key, 127), round_heads(value, 127)
        key, value = (key * of_key[..., None]).astype(np.float32), (value * of_value[..., None]).astype(np.float32)
        return super()._mix(query, key, value, window)


def test_queries_and_weights_of_16_bits_lose_nothing_that_matters(saved: Callable[[str], Path]) -> None:
    """Beside float32 over the same integers the logits differ by less than a thousandth of their spread."""
    (tokens,) = random_tokens((150,))
    config = load_model_config(saved("gqa"))
    floats = RoundedKeysAndValues(config, load_weights(saved("gqa"), config, torch.float32), len(tokens))
    expected = floats.logits(tokens)
    found = torch.stack(Components(saved("gqa"), "float32", [tokens], seed=0, kv_dtype="int8").run(1, 41).logits["0"])
    assert np.sqrt(np.square(found.numpy() - expected).mean()) < 1e-3 * expected.std()


def test_blocks_move_with_their_scales(saved: Callable[[str], Path]) -> None:
    """A copy to a host pool and back, to other blocks, as offloading makes it."""
    (tokens,) = random_tokens((40,))
    alone = Components(saved("gqa"), "float32", [tokens], seed=0, kv_dtype="int8").run_alone()
    moved = Components(saved("gqa"), "float32", [tokens], seed=0, spare=3, kv_dtype="int8")
    for _ in range(33):
        moved.step({"0": 1})
    pool, old = moved.runner.pool, moved.tables["0"]
    host = KVPool(moved.runner.config, num_blocks=3, block_size=pool.block_size, dtype=pool.dtype)
    host.copy_blocks([2, 0, 1], pool, old)
    moved.tables["0"] = [block for block in range(pool.num_blocks) if block not in old][:3]
    pool.copy_blocks(moved.tables["0"], host, [2, 0, 1])
    for cache in (*pool.keys, *pool.values):
        cache.view(pool.num_blocks, -1)[old] = -1
    while moved.left("0"):
        moved.step({"0": 1})
    assert_same(moved, alone)


def test_the_memory_of_a_token(saved: Callable[[str], Path]) -> None:
    config = load_model_config(saved("gqa"))
    pool = KVPool(config, num_blocks=3, block_size=16, dtype=torch.int8)
    per_layer = config.num_key_value_heads * (config.head_dim + 4)
    assert config.kv_bytes_per_token(torch.int8) == 2 * config.num_hidden_layers * per_layer
    assert sum(cache.nbytes for cache in (*pool.keys, *pool.values)) == 48 * config.kv_bytes_per_token(torch.int8)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "torch"}, "auto (torch operations keep KV in the model's type)"),
        ({"device": "cuda"}, "auto (int8 is for the CPU)"),
        ({"device": "emulated:a100-7b"}, "auto (the profile says what KV takes)"),
        ({"kv_dtype": "int4"}, "one of auto, int8"),
    ],
)
def test_where_it_is_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype") as refusal:
        EngineConfig(**({"kv_dtype": "int8"} | settings))  # type: ignore[arg-type]
    assert says in str(refusal.value)


def test_what_cannot_be_compiled_refuses_it(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype: .*block_size 4"):
        ModelRunner.from_dir(saved("gqa"), dtype=torch.float32, num_blocks=4, block_size=4, kv_dtype="int8")


@pytest.mark.parametrize("build", BUILDS)
def test_every_instruction_set_computes_the_same_integers(build: str, tmp_path: Path) -> None:
    """Scores and sums, extremes included; numbers of tokens and dimensions that fill no pair of vectors."""
    compiled = compiled_probe("kv_probe.cpp", build, tmp_path)
    rng = np.random.default_rng(0)
    for tokens, d in ((1, 16), (37, 48), (5, 20), (33, 24), (18, 40), (128, 64), (127, 256)):
        keys, values = rng.normal(size=(2, tokens, d)).astype(np.float32)
        queries = rng.normal(size=(3, d)).astype(np.float32)
        if d == 256:
            keys[:], values[:], queries[:] = 1.0, -1.0, 1.0
        weights = np.zeros((3, 128), np.int16)
        weights[:, :tokens] = rng.integers(0, 32768, (3, tokens)) if d < 256 else 32767
        blocks = np.full((2, 8 * 16 * (d + 4)), 255, np.uint8)
        scores, sums = np.empty((3, tokens), np.float32), np.empty((3, d), np.int32)
        arrays = [a.ctypes.data_as(ctypes.c_void_p) for a in (keys, values, queries, weights, blocks[0], blocks[1])]
        results = [a.ctypes.data_as(ctypes.c_void_p) for a in (scores, sums)]
        compiled.probe(*arrays[:2], tokens, d, *arrays[2:], *results)
        roundings = ((keys, 127), (values, 127), (queries, 32767))
        (k, of_key), (v, _), (q, of_query) = (round_heads(a[:, None], most) for a, most in roundings)
        products = (q[:, 0] @ k[:, 0].T).astype(np.float32)
        assert np.array_equal(scores, products * of_query * of_key.T)
        assert np.array_equal(sums, weights[:, :tokens].astype(np.int64) @ v[:, 0])
