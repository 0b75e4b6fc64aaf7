"""How many tokens an image has, and what becomes of its pixels before a tower reads them. Knows no torch.

Reads ``config.json`` and ``preprocessor_config.json``. Processes that decode pictures, count tokens or write prompts
use this alone; ``engine.vision.model`` computes what the tokens become.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.config_fields import Fields, read_json
from farsight.engine.checkpoint.families.vision import VISION, Shape, VisionFamily, seeing_name
from farsight.engine.vision.anyres import read_anyres
from farsight.engine.vision.dynamic import read_dynamic
from farsight.engine.vision.pixels import LONGEST, check_rgb, read_square, read_stretched
from farsight.tokenization.gguf_file import is_gguf

MAX_SIDE = 1 << 15
"""Longest side of a picture, in pixels."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """What a tower reads of one picture.

    Attributes:
        pixels: float32: ``[squares, 3, side, side]`` of a CLIP tower, ``[patches, values of a patch]`` of Qwen2-VL's.
        num_tokens: Its tokens in the prompt.
        grid: Rows and columns of its tokens, as of ``core.images.ImageSpan``.
        size: Height and width of the picture.
    """

    pixels: np.ndarray
    num_tokens: int
    grid: tuple[int, ...]
    size: tuple[int, int]


class Pixels(Protocol):
    """A way from a picture to the pixels that a tower reads, and to a number of tokens."""

    def tokens_of(self, width: int, height: int) -> int: ...

    def grid_of(self, width: int, height: int) -> tuple[int, ...]: ...

    def pixels(self, rgb: np.ndarray) -> np.ndarray: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_pixels(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """The images of one model.

    Attributes:
        family: Its name in ``config.json``.
        placeholder: The token that stands for an image in a chat template's text: one, in place of which as many are
            written as ``tokens_of`` says.
        placeholder_id: Its id.
        before, after: Text around the tokens of an image in a prompt that no chat template wrote.
        has_grid: Whether the positions of an image's tokens have axes: its span must carry ``grid_of``.
        max_pixels: Pixels of a picture that any more are of no use to; a decoder may halve what is larger.
    """

    family: str
    placeholder: str
    placeholder_id: int
    before: str
    after: str
    has_grid: bool
    max_pixels: int
    _pixels: Pixels

    def tokens_of(self, width: int, height: int) -> int:
        """Returns placeholder tokens of a picture of so many pixels.

        Raises:
            InvalidValueError: A picture of a size that the model does not take.
        """
        self._check(width, height)
        return self._pixels.tokens_of(width, height)

    def grid_of(self, width: int, height: int) -> tuple[int, ...]:
        """Returns rows and columns of these tokens where positions have axes, else nothing."""
        self._check(width, height)
        return self._pixels.grid_of(width, height) if self.has_grid else ()

    @property
    def max_tokens(self) -> int:
        """Most tokens that one picture has."""
        return self._pixels.max_tokens

    def prepare(self, rgb: np.ndarray) -> PreparedImage:
        """Returns what the tower reads of a picture.

        Args:
            rgb: uint8 ``[height, width, 3]``.

        Raises:
            InvalidValueError: Another array, or a picture of a size that the model does not take.
        """
        height, width = check_rgb(rgb)
        num_tokens = self.tokens_of(width, height)
        return PreparedImage(self._pixels.pixels(rgb), num_tokens, self.grid_of(width, height), (height, width))

    def _check(self, width: int, height: int) -> None:
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
            expected = f"sides of 1 to {MAX_SIDE} pixels"
        elif max(width, height) > LONGEST * min(width, height):
            expected = f"a longer side of at most {LONGEST} times the shorter"
        else:
            return
        raise InvalidValueError("image", f"{width} x {height} pixels", expected)


_READERS: Mapping[Shape, Callable[[dict[str, Any], dict[str, Any]], Pixels]] = {
    "square": read_square,
    "anyres": read_anyres,
    "dynamic": read_dynamic,
    "stretched": read_stretched,
}


def load_geometry(model_dir: Path) -> ImageGeometry | None:
    """Reads how the model in ``model_dir`` sees; None for one that does not.

    Raises:
        UnsupportedModelError: A field of its configuration that is not computed so.
        InvalidValueError: No readable configuration.
    """
    if is_gguf(model_dir):
        return None
    raw = read_json(model_dir, "config.json")
    name = seeing_name(raw or {})
    if raw is None or name is None:
        return None
    return read_geometry(raw, name, read_json(model_dir, "preprocessor_config.json") or {})


def read_geometry(raw: dict[str, Any], name: str, processor: dict[str, Any]) -> ImageGeometry:
    """Reads, as ``load_geometry``, the objects in the files of a model of the family ``name``."""
    family = VISION[name]
    pixels = _READERS[family.shape](raw, processor)
    return ImageGeometry(
        name,
        family.placeholder,
        _placeholder_id(raw, family),
        *family.around,
        has_grid=family.axes,
        max_pixels=pixels.max_pixels,
        _pixels=pixels,
    )


def _placeholder_id(raw: dict[str, Any], family: VisionFamily) -> int:
    for path in family.placeholder_fields:
        holder, _, name = path.rpartition(".")
        fields = Fields(raw[holder] if holder else raw, {}, f"{holder}." if holder else "")
        value = fields[name]
        if value is not None:
            if type(value) is not int or value < 0:
                raise fields.error(name, "a token id")
            return value + family.placeholder_behind
    return family.default_id
