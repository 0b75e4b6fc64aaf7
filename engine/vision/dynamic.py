"""Pictures that keep their shape and nearly their size, so that larger ones have more tokens: Qwen2-VL. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.vision.pixels import CLIP_PROCESSOR, LONGEST, Normalising, read_normalising, resized

_PROCESSOR = CLIP_PROCESSOR | {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "min_pixels": None,
    "max_pixels": None,
}


@dataclass(frozen=True, slots=True)
class DynamicPixels:
    """Patches of the whole picture.

    Attributes:
        patch: Pixels of a patch's side.
        frames: Frames that a patch spans; a picture is repeated.
        merge: Patches of a token's side.
        min_pixels, max_pixels: Bounds on the pixels of the resized picture.
    """

    patch: int
    frames: int
    merge: int
    min_pixels: int
    max_pixels: int
    normalising: Normalising

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """Also of the longest pictures, one of whose sides is a single token, and of small ones, rounded up."""
        thin = math.isqrt(self.max_pixels * LONGEST) // self.side + 1
        small = self.min_pixels // self.side**2 + 2 * math.isqrt(self.min_pixels * LONGEST) // self.side + 3
        return max(self.max_pixels // self.side**2, thin, small)

    def tokens_of(self, width: int, height: int) -> int:
        rows, columns = self.grid_of(width, height)
        return rows * columns

    def grid_of(self, width: int, height: int) -> tuple[int, ...]:
        """Returns rows and columns of tokens."""
        new_height, new_width = self._resized(height, width)
        return new_height // self.side, new_width // self.side

    def pixels(self, rgb: np.ndarray) -> np.ndarray:
        """Returns float32 ``[patches, 3 * frames * patch * patch]``: the patches of a token together."""
        height, width = self._resized(*rgb.shape[:2])
        floats = self.normalising.floats(resized(rgb, height, width, self.normalising.resample))
        rows, columns, merge, patch = height // self.side, width // self.side, self.merge, self.patch
        parts = floats.reshape(3, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        repeated = np.repeat(parts[:, :, :, :, :, None], self.frames, axis=5)
        return repeated.reshape(rows * columns * merge * merge, -1)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Multiples of a token's side, near the picture's own shape, within the bounds."""
        side = self.side
        high, wide = round(height / side) * side, round(width / side) * side
        if high * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            high = max(side, math.floor(height / shrink / side) * side)
            wide = max(side, math.floor(width / shrink / side) * side)
        elif high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            high, wide = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        return high, wide


def read_dynamic(raw: dict[str, Any], processor: dict[str, Any]) -> DynamicPixels:
    """Reads ``config.json`` and ``preprocessor_config.json``.

    Raises:
        UnsupportedModelError: A field of the processor that the tower does not go with.
    """
    config = Fields(processor, _PROCESSOR, "preprocessor_config.json: ")
    if not config.flag("do_resize"):
        raise config.error("do_resize", "true: sides are multiples of a token's")
    nested = raw.get("vision_config") or {}
    if not isinstance(nested, dict):
        raise Fields(raw, {}).error("vision_config", "an object")
    tower = Fields(nested, {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}, "vision_config.")
    least, most = _bounds(config)
    return DynamicPixels(
        patch=_same(config, "patch_size", tower, "patch_size"),
        frames=_same(config, "temporal_patch_size", tower, "temporal_patch_size"),
        merge=_same(config, "merge_size", tower, "spatial_merge_size"),
        min_pixels=least,
        max_pixels=most,
        normalising=read_normalising(config),
    )


def _same(config: Fields, mine: str, tower: Fields, theirs: str) -> int:
    """Returns a size that processor and tower must agree on."""
    size = config.size(mine, 1 << 10)
    if size != tower.size(theirs, 1 << 10):
        raise config.error(mine, f"{tower[theirs]}, as vision_config.{theirs}")
    return size


def _bounds(config: Fields) -> tuple[int, int]:
    """Reads the bounds. Old files say them by names of their own, and these win, as in transformers."""
    size = config["size"]
    if not isinstance(size, dict):
        raise config.error("size", "an object with shortest_edge and longest_edge")
    edges = Fields(size, {}, "preprocessor_config.json: size.")
    least = config.size_or_none("min_pixels") or edges.size("shortest_edge")
    most = config.size_or_none("max_pixels") or edges.size("longest_edge")
    if least > most:
        raise config.error("min_pixels", f"at most max_pixels ({most})")
    return least, most
