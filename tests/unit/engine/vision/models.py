"""Tiny random models that see, of every family, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from farsight.engine.checkpoint.families.vision import VISION
from tests.unit.engine.small_models import byte_level_tokenizer

IMAGE_ID = 310
"""The placeholder; prompts of tests name no other token beyond 300."""

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
_LLAVA = {"vision_config": _CLIP, "image_token_id": IMAGE_ID}
_CLIP_PROCESSOR = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28]]
_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
_QWEN = {
    "image_token_id": IMAGE_ID,
    "vision_start_token_id": 311,
    "vision_end_token_id": 312,
    "video_token_id": 313,
    "text_config": _TEXT | {"rope_parameters": _ROPE},
}
_QWEN_PROCESSOR = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 30},
}
_QWEN_TOWER = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

SHAPES: dict[str, dict[str, Any]] = {
    "llava": {
        "architecture": "LlavaForConditionalGeneration",
        "config": _LLAVA | {"text_config": _TEXT | {"model_type": "llama"}},
        "processor": _CLIP_PROCESSOR | {"image_processor_type": "LlavaImageProcessorPil"},
    },
    "llava_variant": {  # every layer, the class token too, another text model, and sides that are resized apart
        "architecture": "LlavaForConditionalGeneration",
        "config": _LLAVA
        | {
            "text_config": _TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
            "tie_word_embeddings": True,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": [-1, 1],
            "multimodal_projector_bias": False,
            "projector_hidden_act": "relu",
        },
        "processor": {
            "size": {"height": 28, "width": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_processor_type": "CLIPImageProcessorPil",
        },
    },
    "llava_next": {
        "architecture": "LlavaNextForConditionalGeneration",
        "config": _LLAVA | {"text_config": _TEXT | {"model_type": "mistral"}, "image_grid_pinpoints": _PINPOINTS},
        "processor": _CLIP_PROCESSOR
        | {"image_processor_type": "LlavaNextImageProcessorPil", "image_grid_pinpoints": _PINPOINTS},
    },
    "qwen2_vl": {
        "architecture": "Qwen2VLForConditionalGeneration",
        "config": _QWEN | {"vision_config": _QWEN_TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}},
        "processor": _QWEN_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorPil"},
    },
    "qwen2_5_vl": {
        "architecture": "Qwen2_5_VLForConditionalGeneration",
        "config": _QWEN
        | {
            "vision_config": _QWEN_TOWER
            | {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 40,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            }
        },
        "processor": _QWEN_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorPil"},
    },
}


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Weights whose outputs differ from token to token: rounding does not decide which is likeliest."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.normal_(1.0, 0.2)
        elif "embed_tokens" in name:
            parameter.normal_(0, 0.5)
        elif parameter.ndim > 1:
            parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
        else:
            parameter.normal_(0, 0.15)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        layer.weight[IMAGE_ID:] = 0  # no placeholder is ever likely: transformers would look for its image


def save_seeing_model(out: Path, shape: str, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a model with its tokenizer and processor."""
    given = SHAPES[shape]
    model_class = getattr(transformers, given["architecture"])
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**given["config"]))
    _spread(model)
    model.to(dtype).save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps(given["processor"]))
    byte_level_tokenizer().save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return out


class SeeingReference:
    """The same model in transformers."""

    def __init__(self, model_dir: Path, shape: str) -> None:
        given = SHAPES[shape]
        self._model = getattr(transformers, given["architecture"]).from_pretrained(model_dir).eval()
        fields = dict(given["processor"])
        self._processor = getattr(transformers, fields.pop("image_processor_type"))(**fields)

    def inputs(self, images: list[np.ndarray]) -> dict[str, Tensor]:
        """What the processor makes of pictures."""
        # As pictures of Pillow: of an array of 3 x 3 numbers it cannot be told which axis has the colours.
        pictures = [Image.fromarray(each) for each in images]
        return dict(self._processor(images=pictures, return_tensors="pt")) if pictures else {}

    @torch.no_grad()
    def logits(self, ids: list[int], images: list[np.ndarray]) -> Tensor:
        """Those of every position, float32 ``[tokens, vocab]``."""
        given: dict[str, Any] = self.inputs(images)
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE_ID) for token in ids]])
        logits: Tensor = self._model(input_ids=torch.tensor([ids]), **given).logits[0].float()
        return logits


CHATML_PARTS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that takes parts, as Qwen2-VL's does."""


def save_chatting_model(out: Path, shape: str = "qwen2_vl", template: str = CHATML_PARTS) -> Path:
    """``save_seeing_model`` with a chat template and a tokenizer that knows the placeholder."""
    save_seeing_model(out, shape)
    tokenizer = byte_level_tokenizer(IMAGE_ID)
    placeholder = VISION[SHAPES[shape]["architecture"]].placeholder
    fill = [f"<|unused_{index}|>" for index in range(IMAGE_ID - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*fill, placeholder, "<|vision_start|>", "<|vision_end|>"])
    assert tokenizer.token_to_id(placeholder) == IMAGE_ID
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out
