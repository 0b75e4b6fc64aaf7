"""Random models of odd shapes: head sizes from 16 to 256, odd vocabularies and layers, any number of KV heads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.native.model import native_problem
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES, UNEVEN
from tests.unit.engine.small_models import assert_greedy, randomize

NUM_MODELS = 210
EACH = 17
"""One model in so many is of the short suite."""


def odd_shape(seed: int) -> dict[str, Any]:
    """Fields of a model; the same for the same seed."""
    rng = random.Random(seed)
    even = sorted(FAMILIES.keys() - UNEVEN)
    name = even[seed % len(even)]
    fields = dict(FAMILIES[name])
    kv_heads, group = rng.choice([(1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (3, 1), (3, 2)])
    if "num_key_value_heads" not in fields or "kv_lora_rank" in fields:
        kv_heads, group = kv_heads * group, 1
    head_dim = 16 * rng.randint(1, 4 if rng.random() < 0.8 else 16) if rng.random() < 0.8 else 8 * rng.randint(2, 15)
    fields |= {"num_attention_heads": kv_heads * group, "hidden_size": kv_heads * group * head_dim}
    for each in ("num_key_value_heads", "num_kv_heads"):
        if each in fields:
            fields[each] = kv_heads
    if "head_dim" in fields:
        fields |= {"head_dim": head_dim, "hidden_size": 2 * rng.randint(9, 40)}
        if fields["architecture"].startswith("Gemma"):
            fields["hidden_size"] = kv_heads * group * 2 * rng.randint(5, 20)  # transformers asks for a multiple
    if "rope_parameters" in fields and "short_factor" in fields["rope_parameters"]:
        factors = {f"{kind}_factor": [1.0 + i / 9 for i in range(head_dim // 2)] for kind in ("short", "long")}
        fields["rope_parameters"] = fields["rope_parameters"] | factors
    if "rotary_dim" in fields:
        fields["rotary_dim"] = 2 * rng.randint(1, head_dim // 2)
    for each in ("num_experts", "num_local_experts"):
        if each in fields:
            fields[each] = rng.randint(1, 20)
            fields["num_experts_per_tok"] = rng.randint(1, fields[each])
    for each in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if each in fields:
            fields[each] = 2 * rng.randint(1, 50)
    for each in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        if fields.get(each):
            fields[each] = 2 * rng.randint(1, 30)  # transformers reads pairs where they lie
    if "qk_rope_head_dim" in fields:
        fields["qk_rope_head_dim"] = 2 * rng.randint(1, 40)
    layers = rng.randint(1, 3)
    if "layer_types" in fields:
        fields["layer_types"] = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return fields | {
        "num_hidden_layers": layers,
        "vocab_size": rng.randint(30, 400),
        "intermediate_size": 2 * rng.randint(8, 60),
        "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def save(out: Path, fields: dict[str, Any], seed: int) -> Any:
    """Writes the model without a tokenizer, and returns it."""
    model_class = getattr(transformers, fields.pop("architecture"))
    torch.manual_seed(seed)
    config = model_class.config_class(**fields)
    if config._attn_implementation is None:
        config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the other ones ask for sizes that are multiples of 4
    model = model_class(config).eval()
    randomize(model)
    model.save_pretrained(out)
    return model


def run(model_dir: Path, backend: str, prompts: dict[str, list[int]], block_size: int) -> dict[str, list[int]]:
    """Six greedy tokens of each: chunks beside decodes, blocks at random places of a pool that is full of NaN."""
    runner = ModelRunner.from_dir(
        model_dir, dtype=torch.float32, num_blocks=30, block_size=block_size, context_len=100, backend=backend
    )
    for cache in (*runner.pool.keys, *runner.pool.values):
        cache.fill_(float("nan"))
    driver = Driver(runner)
    for name, prompt in prompts.items():
        driver.add(name, prompt, temperature=0.0, ignore_eos=True)
    first, second = prompts
    driver.step(**{first: 11})
    driver.step(**{first: driver.remaining(first), second: 2})
    driver.step(**{first: 1, second: driver.remaining(second)})
    for _ in range(4):
        driver.step(**dict.fromkeys(prompts, 1))
    return {name: list(driver.sequences[name].token_ids[len(prompt) :]) for name, prompt in prompts.items()}


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed % EACH == 0 else pytest.mark.nightly) for seed in range(NUM_MODELS)],
)
def test_a_model_of_an_odd_shape(seed: int, tmp_path: Path) -> None:
    fields = odd_shape(seed)
    vocab = fields["vocab_size"]
    reference = save(tmp_path, fields, seed)
    rng = random.Random(seed)
    prompts = {name: [rng.randrange(3, vocab) for _ in range(length)] for name, length in (("a", 29), ("b", 9))}
    assert native_problem(load_model_config(tmp_path), torch.float32, 16) is None, json.dumps(fields, default=str)
    for backend in ("torch", "native"):
        for name, output in run(tmp_path, backend, prompts, 16).items():
            assert_greedy(reference, prompts[name], output)
