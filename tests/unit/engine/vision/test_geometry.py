"""How many tokens a picture has, and what becomes of its pixels: the same as transformers' processors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from core.errors import InvalidValueError
from engine.checkpoint.config_fields import UnsupportedModelError
from engine.vision.geometry import ImageGeometry, load_geometry, read_geometry
from tests.unit.engine.vision.models import IMAGE_ID, SHAPES

SIZES = [(1, 1), (3, 2), (28, 28), (29, 27), (50, 40), (40, 50), (300, 20), (7, 90), (200, 1), (64, 333)]
"""Width and height."""


def files_of(shape: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``preprocessor_config.json``."""
    given = SHAPES[shape]
    raw: dict[str, Any] = getattr(transformers, given["architecture"]).config_class(**given["config"]).to_dict()
    return raw | {"architectures": [given["architecture"]]}, given["processor"]


def geometry_of(shape: str) -> ImageGeometry:
    raw, processor = files_of(shape)
    return read_geometry(raw, raw["architectures"][0], processor)


def processor_of(shape: str) -> Any:
    fields = dict(SHAPES[shape]["processor"])
    return getattr(transformers, fields.pop("image_processor_type"))(**fields)


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_those_of_the_processor(shape: str) -> None:
    geometry, processor = geometry_of(shape), processor_of(shape)
    assert geometry.placeholder_id == IMAGE_ID
    for width, height in SIZES:
        rgb = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        given = processor(images=[rgb], return_tensors="np", input_data_format="channels_last")
        prepared = geometry.prepare(rgb)
        expected = given["pixel_values"][0] if shape == "llava_next" else given["pixel_values"]
        np.testing.assert_array_equal(prepared.pixels, expected)
        assert prepared.num_tokens == geometry.tokens_of(width, height) <= geometry.max_tokens
        if geometry.has_grid:
            [[_, rows, columns]] = given["image_grid_thw"]
            assert prepared.grid == (rows // 2, columns // 2)


def test_tokens_of_tiles_are_those_of_the_processor() -> None:
    """As ``LlavaNextProcessor`` counts them, which needs no pixels."""
    geometry = geometry_of("llava_next")
    count = transformers.LlavaNextProcessor._get_number_of_features

    class Counter:
        image_processor = processor_of("llava_next")
        patch_size, num_additional_image_tokens = 7, 1
        _get_unpadded_features = transformers.LlavaNextProcessor._get_unpadded_features

    counter: Any = Counter()
    for width in (*range(1, 40, 3), 57, 96, 140):
        for height in (*range(1, 40, 5), 61, 113):
            assert geometry.tokens_of(width, height) == count(counter, height, width, 28, 28) - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_no_picture_has_more_tokens_than_the_bound(shape: str) -> None:
    geometry = geometry_of(shape)
    sides = [1, 2, 3, 5, 8, 17, 40, 99, 200, 1000, 4096, 30000]
    for width in sides:
        for height in sides:
            if max(width, height) > 200 * min(width, height):
                with pytest.raises(InvalidValueError, match="at most 200 times"):
                    geometry.tokens_of(width, height)
            else:
                assert 1 <= geometry.tokens_of(width, height) <= geometry.max_tokens


def test_hostile_pictures_are_refused_by_name() -> None:
    geometry = geometry_of("qwen2_vl")
    for bad in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)):
        with pytest.raises(InvalidValueError, match=r"image: .* expected uint8 .height, width, 3."):
            geometry.prepare(bad)
    for width, height in ((0, 5), (1 << 20, 1 << 20)):
        with pytest.raises(InvalidValueError, match="sides of 1 to 32768 pixels"):
            geometry.tokens_of(width, height)


@pytest.mark.parametrize(
    ("shape", "where", "name", "value"),
    [
        ("llava", "processor", "size", {"shortest_edge": 30}),
        ("llava", "processor", "crop_size", {"height": 28, "width": 14}),
        ("llava", "processor", "do_center_crop", False),
        ("llava", "processor", "image_std", [1, 0, 1]),
        ("llava", "processor", "image_mean", [1, 2]),
        ("llava", "processor", "resample", 9),
        ("llava", "config", "vision_feature_select_strategy", "cls"),
        ("llava", "config", "vision_config", []),
        ("llava", "config", "image_token_index", -1),
        ("llava_next", "config", "image_grid_pinpoints", [[28, 30]]),
        ("llava_next", "processor", "image_grid_pinpoints", [[28, 28]]),
        ("qwen2_vl", "processor", "patch_size", 5),
        ("qwen2_vl", "processor", "merge_size", 3),
        ("qwen2_vl", "processor", "min_pixels", 1 << 30),
        ("qwen2_vl", "processor", "do_resize", False),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(shape: str, where: str, name: str, value: object) -> None:
    raw, processor = files_of(shape)
    changed = {name: value}
    raw, processor = (raw | changed, processor) if where == "config" else (raw, processor | changed)
    with pytest.raises(UnsupportedModelError, match=name):
        read_geometry(raw, raw["architectures"][0], processor)


def test_a_model_of_text_alone_has_no_geometry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert load_geometry(tmp_path) is None
    from engine.vision.model import load_vision

    assert load_vision(tmp_path, torch.float32) is None
