"""Families of models that see: which text model they hold, and what kind of tower and image they have.

The text model of such a checkpoint is computed like any other: its fields stand in ``text_config`` (or, in older
files, beside ``vision_config``), and its tensors have names with a prefix more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from farsight.engine.checkpoint.config_fields import Fields, UnsupportedModelError
from farsight.engine.checkpoint.families.record import NEW, Evidence

Tower = Literal["clip", "qwen2_vl", "qwen2_5_vl", "qwen_vl"]
"""What turns pixels into rows."""

Shape = Literal["square", "anyres", "dynamic", "stretched"]
"""How a picture becomes tokens: one square; a square and tiles of it; as many as its size asks for; a square that all
of it is stretched to, of a fixed number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFamily:
    """A family of which the text is computed, whatever else its checkpoints hold.

    Attributes:
        text: The text model's name in ``ARCHITECTURES``, by the ``model_type`` of its configuration.
        default_type: The ``model_type`` where the configuration names none.
        text_at: Where the text model's fields stand; where there is no such object, beside ``vision_config``.
        renamed: Beginnings of names of the text model's tensors, and what ``TensorNames`` says instead.
        towers: Beginnings of names of the other tensors.
        text_defaults: Defaults of the text model's fields that are not those of the family that computes it.
        axes: Whether positions have three axes (M-RoPE).
    """

    evidence: Evidence
    text: Mapping[str, str]
    default_type: str
    text_at: str = "text_config"
    renamed: tuple[tuple[str, str], ...] = ()
    towers: tuple[str, ...] = ()
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    axes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily(TextFamily):
    """A family whose pictures are computed too.

    Attributes:
        placeholder: The token that stands for an image, as text.
        placeholder_fields: Where its id stands, by precedence; ``a.b`` is a field of an object.
        placeholder_behind: By how much its id is more than what stands there.
        default_id: Its id where no field says it.
        around: Text before and behind an image's tokens in a prompt that no chat template wrote.
    """

    tower: Tower
    shape: Shape
    placeholder: str
    placeholder_fields: tuple[str, ...]
    default_id: int
    placeholder_behind: int = 0
    around: tuple[str, str] = ("", "")


_LLAVA_TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
_LLAVA_NAMES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_LLAVA_TOWERS = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "image_newline",
    "model.image_newline",
)
_QWEN_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1000000.0,
    "eos_token_id": 151645,
}
_QWEN_NAMES = (("model.language_model.", "model."),)

_QWEN_1 = "QWenLMHeadModel"
QWEN_VL = "QwenVLForConditionalGeneration"
"""Qwen-VL, whose checkpoints call themselves by the name of Qwen 1."""

VISION: Mapping[str, VisionFamily] = {
    "LlavaForConditionalGeneration": VisionFamily(
        evidence=Evidence("LLaVA 1.5, with images", test="vision/test_tokens.py"),
        text=_LLAVA_TEXTS,
        default_type="llama",
        tower="clip",
        shape="square",
        placeholder="<image>",
        placeholder_fields=("image_token_index", "image_token_id"),
        default_id=32000,
        renamed=_LLAVA_NAMES,
        towers=_LLAVA_TOWERS,
    ),
    "LlavaNextForConditionalGeneration": VisionFamily(
        evidence=Evidence("LLaVA-NeXT, with images", test="vision/test_tokens.py"),
        text=_LLAVA_TEXTS,
        default_type="llama",
        tower="clip",
        shape="anyres",
        placeholder="<image>",
        placeholder_fields=("image_token_index", "image_token_id"),
        default_id=32000,
        renamed=_LLAVA_NAMES,
        towers=_LLAVA_TOWERS,
    ),
    "Qwen2VLForConditionalGeneration": VisionFamily(
        evidence=Evidence("Qwen2-VL, with images", test="vision/test_tokens.py"),
        text={"qwen2_vl": "Qwen2ForCausalLM", "qwen2_vl_text": "Qwen2ForCausalLM"},
        default_type="qwen2_vl_text",
        tower="qwen2_vl",
        shape="dynamic",
        placeholder="<|image_pad|>",
        placeholder_fields=("image_token_id",),
        default_id=151655,
        around=("<|vision_start|>", "<|vision_end|>"),
        text_defaults=_QWEN_TEXT,
        renamed=_QWEN_NAMES,
        towers=("visual.", "model.visual."),
        axes=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": VisionFamily(
        evidence=Evidence("Qwen2.5-VL, with images", test="vision/test_tokens.py"),
        text={"qwen2_5_vl": "Qwen2ForCausalLM", "qwen2_5_vl_text": "Qwen2ForCausalLM"},
        default_type="qwen2_5_vl_text",
        tower="qwen2_5_vl",
        shape="dynamic",
        placeholder="<|image_pad|>",
        placeholder_fields=("image_token_id",),
        default_id=151655,
        around=("<|vision_start|>", "<|vision_end|>"),
        text_defaults=_QWEN_TEXT,
        renamed=_QWEN_NAMES,
        towers=("visual.", "model.visual."),
        axes=True,
    ),
    QWEN_VL: VisionFamily(
        evidence=Evidence(
            "Qwen-VL, with images", "a description", verified=False, test="vision/test_tokens.py", date="2026-11-27"
        ),
        text={"qwen": _QWEN_1},
        default_type="qwen",
        tower="qwen_vl",
        shape="stretched",
        placeholder="<imgpad>",
        placeholder_fields=("visual.image_start_id",),
        placeholder_behind=2,
        default_id=151859,
        around=("<img>", "</img>"),
        towers=("transformer.visual.",),
    ),
}
"""Families by their name in ``config.json``, but for Qwen-VL (``seeing_name``)."""


_HELD = "families/test_held.py"
_GEMMA4_TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")

TEXTS: Mapping[str, TextFamily] = {
    "Gemma4ForConditionalGeneration": TextFamily(
        evidence=Evidence("Gemma 4 as published, as text", test=_HELD, date=NEW),
        text={"gemma4_text": "Gemma4ForCausalLM"},
        default_type="gemma4_text",
        renamed=_QWEN_NAMES,
        towers=_GEMMA4_TOWERS,
    ),
    "Gemma4UnifiedForConditionalGeneration": TextFamily(
        evidence=Evidence("Gemma 4 12B as published, as text", test=_HELD, date=NEW),
        text={"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
        default_type="gemma4_unified_text",
        renamed=_QWEN_NAMES,
        towers=(*_GEMMA4_TOWERS, "model.vision_embedder."),
    ),
    "Mistral3ForConditionalGeneration": TextFamily(
        evidence=Evidence("Ministral 3 and Mistral Small 3.1 as published, as text", test=_HELD, date=NEW),
        text={"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
        default_type="mistral",
        renamed=_LLAVA_NAMES,
        towers=_LLAVA_TOWERS,
    ),
    "Qwen3_5ForConditionalGeneration": TextFamily(
        evidence=Evidence("Qwen 3.5 and 3.6 as published, as text", test=_HELD, date=NEW),
        text={"qwen3_5_text": "Qwen3_5ForCausalLM"},
        default_type="qwen3_5_text",
        renamed=_QWEN_NAMES,
        towers=("model.visual.", "mtp."),
    ),
    "Qwen3_5MoeForConditionalGeneration": TextFamily(
        evidence=Evidence("Qwen 3.5 and 3.6 mixtures as published, as text", test=_HELD, date=NEW),
        text={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        default_type="qwen3_5_moe_text",
        renamed=_QWEN_NAMES,
        towers=("model.visual.", "mtp."),
    ),
}
"""Families of which the text alone is computed: a prompt with an image is refused."""


def seeing_name(raw: Mapping[str, Any]) -> str | None:
    """Returns the family of a configuration that sees; None for any other.

    Qwen-VL's configuration has the name of its text model, Qwen 1, and the object ``visual`` beside.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        return None
    name = QWEN_VL if names[0] == _QWEN_1 and raw.get("visual") is not None else names[0]
    return name if name in list(VISION) else None


_OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields that the whole says for its text model."""

_EOS = "eos_token_id"

_SECTIONS = (16, 24, 24)
"""As transformers has them where a configuration says nothing."""


@dataclass(frozen=True, slots=True)
class NestedText:
    """The text model's own configuration.

    Attributes:
        raw: Its fields, as in the ``config.json`` of such a model alone.
        architecture: Its name in ``ARCHITECTURES``.
        sections: Frequencies of each axis of a position; empty where positions have one axis.
    """

    raw: dict[str, Any]
    architecture: str
    sections: tuple[int, ...]


def text_part(raw: dict[str, Any], name: str) -> NestedText:
    """Returns the configuration of the text model in that of a model that sees.

    Args:
        raw: The whole object.
        name: The family's name in ``VISION`` or ``TEXTS``.

    Raises:
        UnsupportedModelError: A text model that the family is not computed with, or fields of another form.
    """
    family = VISION[name] if name in VISION else TEXTS[name]
    nested = raw.get(family.text_at)
    if nested is not None and not isinstance(nested, dict):
        raise UnsupportedModelError(family.text_at, nested, "an object")
    own: dict[str, Any] = dict(raw if nested is None else nested)
    kind = own.get("model_type") or family.default_type
    if kind not in family.text:
        raise UnsupportedModelError(f"{family.text_at}.model_type", kind, f"one of {', '.join(family.text)}")
    for key in _OF_THE_WHOLE:
        if raw.get(key) is not None:
            own[key] = raw[key]
    if own.get(_EOS) is None:
        own[_EOS] = raw.get(_EOS)
    text = {field: value for field, value in {**family.text_defaults, **own}.items() if value is not None}
    sections = _take_sections(text) if family.axes else ()
    return NestedText(text, family.text[kind], sections)


def _take_sections(text: dict[str, Any]) -> tuple[int, ...]:
    """Takes the axes out of the rotary fields, which then are those of a model without."""
    found: tuple[int, ...] = ()
    for holder in ("rope_scaling", "rope_parameters"):
        rope = text.get(holder)
        if not isinstance(rope, dict):
            continue
        rope = dict(rope)
        sections = rope.pop("mrope_section", None)
        for kind in ("type", "rope_type"):
            if rope.get(kind) == "mrope":
                rope[kind] = "default"
        text[holder] = rope
        if sections is None:
            continue
        if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
            raise Fields({"mrope_section": sections}, {}, f"{holder}.").error("mrope_section", "three integers >= 0")
        found = tuple(sections)
    return found or _SECTIONS
