"""Pictures that become one small square and tiles of a larger one: LLaVA-NeXT. Knows no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.vision.pixels import (
    CLIP_PROCESSOR,
    Normalising,
    class_rows,
    read_normalising,
    resized,
    tower_sides,
    two_sides,
)

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_MAX_TILES = 1 << 8

Sides = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, slots=True)
class AnyresPixels:
    """The picture as one square, and as tiles.

    Attributes:
        side: Pixels of a tile's side, and of the square's.
        patch: Pixels of a patch's side.
        pinpoints: What the tiles may make up together, height and width in pixels.
        class_rows: Rows of the square beside those of its patches.
    """

    side: int
    patch: int
    pinpoints: tuple[Sides, ...]
    class_rows: int
    normalising: Normalising

    @property
    def patches(self) -> int:
        """Patches of a tile's side."""
        return self.side // self.patch

    @property
    def max_tokens(self) -> int:
        base = self.patches**2 + self.class_rows
        tiles = [(height // self.side, width // self.side) for height, width in self.pinpoints]
        return base + max(rows * self.patches * (columns * self.patches + 1) for rows, columns in tiles)

    @property
    def max_pixels(self) -> int:
        """Four times the largest of the pinpoints: finer ones are lost."""
        return 4 * max(height * width for height, width in self.pinpoints)

    def tokens_of(self, width: int, height: int) -> int:
        rows, columns = self.kept(height, width)
        return self.patches**2 + self.class_rows + rows * (columns + 1)

    def grid_of(self, width: int, height: int) -> tuple[int, ...]:
        return ()

    def best(self, height: int, width: int) -> Sides:
        """Returns the pinpoint that keeps most of the picture's pixels, and wastes least beside it."""

        def worth(sides: Sides) -> tuple[int, int]:
            scale = min(sides[1] / width, sides[0] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return used, used - sides[0] * sides[1]

        return max(self.pinpoints, key=worth)

    def kept(self, height: int, width: int) -> Sides:
        """Returns rows and columns of patches of the tiles that belong to the picture, and not to what pads it."""
        high, wide = self.best(height, width)
        rows, columns = high // self.side * self.patches, wide // self.side * self.patches
        top, left = self.unpadded(height, width, rows, columns)
        return rows - 2 * top, columns - 2 * left

    @staticmethod
    def unpadded(height: int, width: int, rows: int, columns: int) -> Sides:
        """Returns rows above, as below, and columns left, as right, that only pad the picture."""
        if width / height > columns / rows:
            return (rows - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (rows / height), 7))) // 2

    def pixels(self, rgb: np.ndarray) -> np.ndarray:
        """Returns the square, then the tiles row by row, float32 ``[1 + tiles, 3, side, side]``."""
        side, resample = self.side, self.normalising.resample
        high, wide = self.best(*rgb.shape[:2])
        parts = [resized(rgb, side, side, resample)]
        whole = self._fitted(rgb, high, wide)
        for top in range(0, high, side):
            parts += [whole[top : top + side, left : left + side] for left in range(0, wide, side)]
        return np.stack([self.normalising.floats(part) for part in parts])

    def _fitted(self, rgb: np.ndarray, high: int, wide: int) -> np.ndarray:
        """Fits the picture as large as it can be into the middle of black."""
        height, width = rgb.shape[:2]
        scale_wide, scale_high = wide / width, high / height
        if scale_wide < scale_high:
            new_high, new_wide = min(math.ceil(height * scale_wide), high), wide
        else:
            new_high, new_wide = high, min(math.ceil(width * scale_high), wide)
        whole = np.zeros((high, wide, 3), np.uint8)
        top, left = (high - new_high) // 2, (wide - new_wide) // 2
        whole[top : top + new_high, left : left + new_wide] = resized(
            rgb, new_high, new_wide, self.normalising.resample
        )
        return whole


def read_anyres(raw: dict[str, Any], processor: dict[str, Any]) -> AnyresPixels:
    """Reads ``config.json`` and ``preprocessor_config.json``.

    Raises:
        UnsupportedModelError: A field of the processor that the tower does not go with.
    """
    side, patch = tower_sides(raw)
    default = CLIP_PROCESSOR | {"size": {"shortest_edge": side}, "crop_size": side}
    config = Fields(processor, default, "preprocessor_config.json: ")
    two_sides(config, "size", side)
    two_sides(config, "crop_size", side)
    whole = Fields(raw, {"image_grid_pinpoints": _PINPOINTS})
    pinpoints = _pinpoints(whole, side)
    given = config["image_grid_pinpoints"]
    if given is not None and given != whole["image_grid_pinpoints"]:
        raise config.error("image_grid_pinpoints", "the same as in config.json")
    return AnyresPixels(side, patch, pinpoints, class_rows(raw), read_normalising(config))


def _pinpoints(config: Fields, side: int) -> tuple[Sides, ...]:
    value = config["image_grid_pinpoints"]
    ok = isinstance(value, list) and value and all(_is_pinpoint(each, side) for each in value)
    if not ok:
        raise config.error("image_grid_pinpoints", f"heights and widths, each a multiple of {side} pixels")
    return tuple((height, width) for height, width in value)


def _is_pinpoint(value: object, side: int) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int for each in value):
        return False
    height, width = value
    return min(value) >= side and not height % side and not width % side and height * width <= _MAX_TILES * side * side
