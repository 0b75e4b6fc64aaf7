"""Pixels before a vision tower reads them: resized as Pillow does, cut, padded, and normalised. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from core.errors import InvalidValueError
from engine.checkpoint.config_fields import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_RESAMPLES = (0, 1, 2, 3, 4, 5)  # Pillow's numbers: nearest, Lanczos, bilinear, bicubic, box, Hamming


@dataclass(frozen=True, slots=True)
class Normalising:
    """How bytes become floats: ``(byte * scale - mean) / std`` by channel."""

    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def floats(self, rgb: np.ndarray) -> np.ndarray:
        """float32 ``[3, h, w]`` of uint8 ``[h, w, 3]``."""
        scaled = (np.arange(256) * self.scale).astype(np.float32)
        channels = zip(rgb.transpose(2, 0, 1), self.mean, self.std, strict=True)
        # There are 256 bytes: a picture of 12 million pixels is looked up, and no copy of it is wider than the floats.
        return np.stack([((scaled - np.float32(mean)) / np.float32(std))[each] for each, mean, std in channels])


def read_normalising(config: Fields) -> Normalising:
    """The fields that all processors have; what is switched off scales by 1 and moves by 0.

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
    """Height and width of a picture.

    Raises:
        InvalidValueError: Not uint8 ``[h, w, 3]``.
    """
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or not rgb.size:
        raise InvalidValueError("image", f"{rgb.dtype} {list(rgb.shape)}", "uint8 [height, width, 3]")
    return rgb.shape[0], rgb.shape[1]


def resized(rgb: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 ``[height, width, 3]``."""
    if rgb.shape[:2] == (height, width):
        return rgb
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling(resample)))


def centre_cut(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of a picture, with black around it where it is smaller."""
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
