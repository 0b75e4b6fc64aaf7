"""The model's configuration, and pictures and questions as it reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tools.embedded_model.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    SEP_ID,
    SPECIAL_TOKENS,
    build_tokenizer,
    encode_bytes,
    save_tokenizer,
)
from tools.embedded_vision.scenes import CELLS, GRID

TEXT_MODEL: Final = Path(__file__).parents[2] / "services" / "embedded_model"
"""Where the text model starts from."""
IMAGE_ID: Final = 4
"""The first reserved token of the text model's vocabulary stands for a patch of a picture."""
IMAGE: Final = "<image>"
CHAT_TEMPLATE: Final = (
    "{%- set ns = namespace(system='', user=none) -%}"
    "{%- for message in messages -%}"
    "{%- set text = namespace(value='', images='') -%}"
    "{%- if message['content'] is string -%}{%- set text.value = message['content'] -%}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{%- set text.value = text.value + part['text'] -%}"
    "{%- else -%}{%- set text.images = text.images + '<image>' -%}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'system' -%}{%- set ns.system = text.value + '\\n' -%}"
    "{%- elif message['role'] == 'user' -%}"
    "{%- set ns.user = (text.images + '\\n' if text.images else '') + ns.system + text.value -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if ns.user is none -%}"
    "{{- raise_exception('This model answers a user message, and the conversation has none.') -}}"
    "{%- endif -%}"
    "{{- bos_token + ns.user -}}"
    "{%- if add_generation_prompt -%}{{- '<sep>' -}}{%- endif -%}"
)
"""Single-turn, as the text model's: the picture, a newline, the last user message, SEP."""
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
    """An untrained CLIP tower and projector of LLaVA 1.5 before the embedded text model's weights."""
    text: Any = LlamaConfig.from_pretrained(TEXT_MODEL, dtype="float32")
    tower = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=IMAGE_ID,
        image_token_id=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=PATCHES,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlavaForConditionalGeneration(config).float()


def take_text_model(model: LlavaForConditionalGeneration) -> None:
    """Puts the embedded text model's weights into ``model``."""
    trained = LlamaForCausalLM.from_pretrained(TEXT_MODEL, dtype=torch.float32)
    model.model.language_model.load_state_dict(trained.model.state_dict())
    model.tie_weights()


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
    special = [IMAGE if index == IMAGE_ID else token for index, token in enumerate(SPECIAL_TOKENS)]
    save_tokenizer(out, build_tokenizer(special, CHAT_TEMPLATE))


def pixels_of(pictures: list[np.ndarray]) -> torch.Tensor:
    """What the processor makes of square pictures, float32 ``[n, 3, SIDE, SIDE]``."""
    small = [np.asarray(Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for each in pictures]
    whole = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 255
    return (whole - 0.5) / 0.25


def prompt_ids(question: str) -> list[int]:
    """Token ids of a prompt of one picture and a question, up to the answer."""
    return [BOS_ID, *[IMAGE_ID] * PATCHES, *encode_bytes("\n" + question), SEP_ID]
