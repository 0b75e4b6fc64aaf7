"""Checkpoints as they are published, which hold towers beside the text: the text is computed, a picture refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from farsight.engine.checkpoint.check import check_checkpoint
from farsight.engine.checkpoint.config_fields import UnsupportedModelError
from farsight.engine.checkpoint.families.vision import TEXTS
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import byte_level_tokenizer, randomize

SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma4ForConditionalGeneration": ("gemma4 e", {"vision_config": VISION, "audio_config": None}),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4 unified", {"audio_config": None}),
    "Mistral3ForConditionalGeneration": ("ministral3", {"vision_config": {"model_type": "pixtral", **VISION}}),
    "Qwen3_5ForConditionalGeneration": ("qwen3.5", {"vision_config": QWEN}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3.5 moe", {"vision_config": QWEN}),
}
"""The text model of each, and what its towers are."""

PROMPT = [3, 7, 11, 200, 41, 9, 150, 4, 77, 31, 8]


def test_every_family_is_compared() -> None:
    assert SHAPES.keys() == TEXTS.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_the_text_of_a_checkpoint_with_towers(name: str, tmp_path: Path) -> None:
    family, towers = SHAPES[name]
    model_class = getattr(transformers, name)
    fields = SIZES | {key: value for key, value in FAMILIES[family].items() if key != "architecture"}
    whole = model_class.config_class()
    text = type(whole.text_config) if name != "Mistral3ForConditionalGeneration" else transformers.Ministral3Config
    config = model_class.config_class(text_config=text(**fields), tie_word_embeddings=False, **towers)
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ours = load_model_config(tmp_path)
    check_checkpoint(tmp_path, ours)
    assert not ours.sees
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    for backend in ("torch", "native"):
        runner = ModelRunner.from_dir(
            tmp_path, dtype=torch.float32, num_blocks=4, block_size=16, context_len=64, backend=backend
        )
        driver = Driver(runner)
        driver.add("a", PROMPT)
        driver.logits(a=6)
        (found,) = driver.logits(a=len(PROMPT) - 6)
        assert found is not None
        assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3), f"{backend}: {(found - expected).abs().max()}"


def test_another_text_model_is_refused(tmp_path: Path) -> None:
    held = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}}
    (tmp_path / "config.json").write_text(json.dumps(held))
    with pytest.raises(UnsupportedModelError, match=r"text_config.model_type.*mistral4"):
        load_model_config(tmp_path)
