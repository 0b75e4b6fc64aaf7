"""The text model in the configuration of a model that sees. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.checkpoint.config_fields import Fields, UnsupportedModelError
from engine.checkpoint.families.vision import VISION

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
    """
    Args:
        raw: The whole object.
        name: The family's name in ``VISION``.

    Raises:
        UnsupportedModelError: A text model that the family is not computed with, or fields of another form.
    """
    family = VISION[name]
    nested = raw.get(family.text_at)
    if nested is not None and not isinstance(nested, dict):
        raise UnsupportedModelError(family.text_at, nested, "an object")
    own: dict[str, Any] = dict(raw if nested is None else nested)
    kind = own.get("model_type") or family.default_type
    if kind not in family.text:
        raise UnsupportedModelError(f"{family.text_at}.model_type", kind, f"one of {', '.join(family.text)}")
    for field in _OF_THE_WHOLE:
        if raw.get(field) is not None:
            own[field] = raw[field]
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
