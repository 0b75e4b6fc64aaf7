"""A Qwen2-VL of random weights, as large as a processor encodes and decodes in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from benchmarks.make_model import train_tokenizer

_PLACEHOLDERS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}<assistant>"
)
_TEXT = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}
_TOWER = {
    "depth": 6,
    "embed_dim": 192,
    "hidden_size": 256,
    "num_heads": 6,
    "mlp_ratio": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
PIXELS_OF_A_TOKEN = 28 * 28


def save_seeing_model(out: Path, max_tokens: int) -> Path:
    """Writes the model with its tokenizer and processor.

    Args:
        max_tokens: Most tokens of a picture.
    """
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_PLACEHOLDERS.values())})
    tokenizer.chat_template = _TEMPLATE
    ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in _PLACEHOLDERS.items()}
    special: dict[str, Any] = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    text = _TEXT | special | {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    fields: dict[str, Any] = {"text_config": text, "vision_config": _TOWER, **ids}
    model: Any = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**fields))
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = {"shortest_edge": 4 * PIXELS_OF_A_TOKEN, "longest_edge": max_tokens * PIXELS_OF_A_TOKEN}
    processor = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    (out / "preprocessor_config.json").write_text(json.dumps(processor))
    return out
