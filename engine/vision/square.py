"""Pictures that become one square: LLaVA 1.5. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.checkpoint.config_fields import Fields
from engine.vision.pixels import CLIP_MEAN, CLIP_STD, Normalising, centre_cut, read_normalising, resized

BICUBIC = 3
CLIP_PROCESSOR: dict[str, Any] = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "do_rescale": True,
    "do_normalize": True,
    "do_resize": True,
    "do_center_crop": True,
    "do_pad": False,
    "image_mean": list(CLIP_MEAN),
    "image_std": list(CLIP_STD),
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
}
"""Defaults of a processor for CLIP towers."""

_TOWER = {"image_size": 224, "patch_size": 32}


def tower_sides(raw: dict[str, Any]) -> tuple[int, int]:
    """Pixels of a side of the tower's square, and of its patches.

    Raises:
        UnsupportedModelError: A tower whose patches do not fill its square.
    """
    nested = raw.get("vision_config") or {}
    if not isinstance(nested, dict):
        raise Fields(raw, {}).error("vision_config", "an object")
    config = Fields(nested, _TOWER, "vision_config.")
    side, patch = config.size("image_size", 1 << 12), config.size("patch_size", 1 << 12)
    if patch > side:
        raise config.error("patch_size", f"at most image_size ({side})")
    return side, patch


def class_rows(raw: dict[str, Any]) -> int:
    """Rows of a tower's output that are kept beside those of its patches: 1 for the class token, or none."""
    config = Fields(raw, {"vision_feature_select_strategy": "default"})
    return 1 if config.require("vision_feature_select_strategy", ("default", "full")) == "full" else 0


def two_sides(config: Fields, name: str, side: int) -> tuple[int, int]:
    """Height and width that a processor's field asks for, both of them those of the tower.

    Raises:
        UnsupportedModelError: Any other size: the tower has no positions for it.
    """
    value = config[name]
    found: tuple[object, object] = (value, value)
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        found = (edge, edge) if edge is not None else (value.get("height"), value.get("width"))
    if found != (side, side):
        raise config.error(name, f"{side} pixels a side, as vision_config.image_size")
    return side, side


@dataclass(frozen=True, slots=True)
class SquarePixels:
    """One square of a picture.

    Attributes:
        side: Pixels of its side.
        num_tokens: Its tokens.
        keeps_shape: The shorter side is resized and the middle cut out; otherwise both sides are resized.
        pads: It is first padded to a square with the mean colour.
    """

    side: int
    num_tokens: int
    normalising: Normalising
    keeps_shape: bool
    pads: bool

    @property
    def max_tokens(self) -> int:
        return self.num_tokens

    @property
    def max_pixels(self) -> int:
        """Four times the square: finer ones are lost."""
        return 4 * self.side * self.side

    def tokens_of(self, width: int, height: int) -> int:
        return self.num_tokens

    def grid_of(self, width: int, height: int) -> tuple[int, ...]:
        return ()

    def problem(self, width: int, height: int) -> str:
        longest = max(width, height) / min(width, height)
        return "" if longest <= 200 else "a longer side of at most 200 times the shorter"

    def pixels(self, rgb: np.ndarray) -> np.ndarray:
        """float32 ``[1, 3, side, side]``."""
        if self.pads:
            rgb = _padded(rgb, self.normalising)
        height, width = rgb.shape[:2]
        size = (self.side, self.side)
        if self.keeps_shape:
            least = min(height, width)
            long = int(self.side * max(height, width) / least)
            size = (long, self.side) if height > width else (self.side, long)
        square = centre_cut(resized(rgb, *size, self.normalising.resample), self.side, self.side)
        return self.normalising.floats(square)[None]


def _padded(rgb: np.ndarray, normalising: Normalising) -> np.ndarray:
    height, width = rgb.shape[:2]
    side = max(height, width)
    whole = np.empty((side, side, 3), np.uint8)
    whole[:] = [int(each * 255) for each in normalising.mean]
    top, left = (side - height) // 2, (side - width) // 2
    whole[top : top + height, left : left + width] = rgb
    return whole


def read_square(raw: dict[str, Any], processor: dict[str, Any]) -> SquarePixels:
    """By ``config.json`` and ``preprocessor_config.json``.

    Raises:
        UnsupportedModelError: A field of the processor that the tower does not go with.
    """
    side, patch = tower_sides(raw)
    default = CLIP_PROCESSOR | {"size": {"shortest_edge": side}, "crop_size": side}
    config = Fields(processor, default, "preprocessor_config.json: ")
    for name in ("do_resize", "do_center_crop"):
        if not config.flag(name):
            raise config.error(name, "true: the tower reads squares of one size")
    two_sides(config, "size", side)
    two_sides(config, "crop_size", side)
    keeps_shape = not isinstance(config["size"], dict) or "shortest_edge" in config["size"]
    num_tokens = (side // patch) ** 2 + class_rows(raw)
    return SquarePixels(side, num_tokens, read_normalising(config), keeps_shape, config.flag("do_pad"))
