"""Pixels before a vision tower reads them: resized as Pillow does, cut, padded, and normalised. Knows no torch.

The two simplest forms are here: one square for a picture (LLaVA 1.5), and one stretched to it (Qwen-VL).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.config_fields import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

LONGEST = 200
"""The longer side of a picture is at most so many times the shorter."""

_RESAMPLES = (0, 1, 2, 3, 4, 5)  # Pillow's numbers: nearest, Lanczos, bilinear, bicubic, box, Hamming


@dataclass(frozen=True, slots=True)
class Normalising:
    """How bytes become floats: ``(byte * scale - mean) / std`` by channel."""

    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def floats(self, rgb: np.ndarray) -> np.ndarray:
        """Returns float32 ``[3, h, w]`` of uint8 ``[h, w, 3]``."""
        scaled = (np.arange(256) * self.scale).astype(np.float32)
        channels = zip(rgb.transpose(2, 0, 1), self.mean, self.std, strict=True)
        # There are 256 bytes: a picture of 12 million pixels is looked up, and no copy of it is wider than the floats.
        return np.stack([((scaled - np.float32(mean)) / np.float32(std))[each] for each, mean, std in channels])


def read_normalising(config: Fields) -> Normalising:
    """Returns the fields that all processors have; what is switched off scales by 1 and moves by 0.

    Raises:
        UnsupportedModelError: A field of another form.
    """
    resample = config.require("resample", _RESAMPLES)
    scale = config.positive("rescale_factor") if config.flag("do_rescale") else 1.0
    if not config.flag("do_normalize"):
        return Normalising(resample, scale, (0.0,) * 3, (1.0,) * 3)
    mean = config["image_mean"]
    if not isinstance(mean, list | tuple) or len(mean) != 3 or not all(type(each) in (int, float) for each in mean):
        raise config.error("image_mean", "a list of 3 numbers")
    std = config.positives("image_std", 3)
    return Normalising(resample, scale, tuple(map(float, mean)), std)


def check_rgb(rgb: np.ndarray) -> tuple[int, int]:
    """Returns height and width of a picture.

    Raises:
        InvalidValueError: Not uint8 ``[h, w, 3]``.
    """
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or not rgb.size:
        raise InvalidValueError("image", f"{rgb.dtype} {list(rgb.shape)}", "uint8 [height, width, 3]")
    return rgb.shape[0], rgb.shape[1]


def resized(rgb: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Resizes to uint8 ``[height, width, 3]``."""
    if rgb.shape[:2] == (height, width):
        return rgb
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling(resample)))


def centre_cut(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns the middle of a picture, with black around it where it is smaller."""
    had_height, had_width = rgb.shape[:2]
    top, left = (had_height - height) // 2, (had_width - width) // 2
    if top >= 0 and left >= 0:
        return rgb[top : top + height, left : left + width]
    tall, broad = max(height, had_height), max(width, had_width)
    whole = np.zeros((tall, broad, 3), np.uint8)
    pad_top, pad_left = -(-(tall - had_height) // 2), -(-(broad - had_width) // 2)
    whole[pad_top : pad_top + had_height, pad_left : pad_left + had_width] = rgb
    top, left = max(0, top + pad_top), max(0, left + pad_left)
    return whole[top : top + height, left : left + width]


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
    """Returns pixels of a side of the tower's square, and of its patches.

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
    """Returns rows of a tower's output that are kept beside those of its patches: 1 for the class token, or none."""
    config = Fields(raw, {"vision_feature_select_strategy": "default"})
    return 1 if config.require("vision_feature_select_strategy", ("default", "full")) == "full" else 0


def two_sides(config: Fields, name: str, side: int) -> tuple[int, int]:
    """Returns height and width that a processor's field asks for, both of them those of the tower.

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

    def pixels(self, rgb: np.ndarray) -> np.ndarray:
        """Returns float32 ``[1, 3, side, side]``."""
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
    """Reads ``config.json`` and ``preprocessor_config.json``.

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


_VISUAL = {"n_queries": 256}
_MAX_SIDE = 1 << 12


def visual_fields(raw: dict[str, Any]) -> Fields:
    """Returns the object ``visual`` of a ``config.json``, with sizes that fit together.

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
    """Reads ``config.json`` alone: such checkpoints have no processor's file, so that one beside them is refused.

    Raises:
        UnsupportedModelError: As ``visual_fields``, or a processor's file.
    """
    config = visual_fields(raw)
    if processor:
        raise Fields(processor, {}, "preprocessor_config.json: ").error(next(iter(processor)), "no such file")
    normalising = Normalising(BICUBIC, 1 / 255, CLIP_MEAN, CLIP_STD)
    return SquarePixels(config.size("image_size"), config.size("n_queries"), normalising, keeps_shape=False, pads=False)
