"""The model's configuration, and pictures and questions as it reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from lab.embedded_model.tokenizer import BOS_ID, EOS_ID, MAX_POSITIONS, PAD_ID, SEP_ID, save_tokenizer
from lab.embedded_vision.scenes import CELLS, GRID
from lab.embedded_vision.words import IMAGE_ID, build_tokenizer, encode

PATCH: Final = 16
SIDE: Final = PATCH * GRID
"""Pixels of the square that the tower reads: a patch is a cell."""
PATCHES: Final = CELLS
PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def build_model() -> LlavaForConditionalGeneration:
    """The untrained model: LLaVA 1.5 with a CLIP tower of three layers and a Llama of three."""
    text = LlamaConfig(
        vocab_size=len(build_tokenizer()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    tower = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
    )
    fields: dict[str, Any] = {
        "vision_config": tower,
        "text_config": text,
        "image_token_index": IMAGE_ID,
        "image_token_id": IMAGE_ID,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "image_seq_length": PATCHES,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return LlavaForConditionalGeneration(LlavaConfig(**fields)).float()


def export(model: LlavaForConditionalGeneration, out: Path) -> None:
    """Writes the model with bfloat16 weights, its generation settings, its processor and its tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    stored: Any = build_model()
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16)
    for config in (stored.config, stored.config.text_config, stored.config.vision_config):
        config.dtype = torch.bfloat16
    stored.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False
    )
    stored.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(out, build_tokenizer())


def pixels_of(pictures: list[np.ndarray]) -> torch.Tensor:
    """What the processor makes of square pictures, float32 ``[n, 3, SIDE, SIDE]``."""
    small = [np.asarray(Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for each in pictures]
    whole = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 255
    return (whole - 0.5) / 0.25


def prompt_ids(question: str) -> list[int]:
    """Token ids of a prompt of one picture and a question, up to the answer."""
    return [BOS_ID, *[IMAGE_ID] * PATCHES, *encode(question), SEP_ID]
