"""Pictures that are stretched to one square and become a fixed number of tokens: Qwen-VL. Knows no torch."""

from __future__ import annotations

import math
from typing import Any

from engine.checkpoint.config_fields import Fields
from engine.vision.pixels import CLIP_MEAN, CLIP_STD, Normalising
from engine.vision.square import BICUBIC, SquarePixels

_VISUAL = {"n_queries": 256}
_MAX_SIDE = 1 << 12


def visual_fields(raw: dict[str, Any]) -> Fields:
    """The object ``visual`` of a ``config.json``, with sizes that fit together.

    Raises:
        UnsupportedModelError: Patches that do not fill the square, or queries that are no square.
    """
    nested = raw.get("visual")
    if not isinstance(nested, dict):
        raise Fields(raw, {}).error("visual", "an object")
    config = Fields(nested, _VISUAL, "visual.")
    side, patch = config.size("image_size", _MAX_SIDE), config.size("patch_size", _MAX_SIDE)
    if side % patch:
        raise config.error("patch_size", f"a divisor of image_size ({side})")
    queries = config.size("n_queries", 1 << 16)
    if math.isqrt(queries) ** 2 != queries:
        raise config.error("n_queries", "the square of a number")
    return config


def read_stretched(raw: dict[str, Any], processor: dict[str, Any]) -> SquarePixels:
    """By ``config.json`` alone: such checkpoints have no processor's file, so that one beside them is refused.

    Raises:
        UnsupportedModelError: As ``visual_fields``, or a processor's file.
    """
    config = visual_fields(raw)
    if processor:
        raise Fields(processor, {}, "preprocessor_config.json: ").error(next(iter(processor)), "no such file")
    normalising = Normalising(BICUBIC, 1 / 255, CLIP_MEAN, CLIP_STD)
    return SquarePixels(config.size("image_size"), config.size("n_queries"), normalising, keeps_shape=False, pads=False)
