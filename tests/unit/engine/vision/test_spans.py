"""How many tokens a picture has and what becomes of its pixels, as transformers' processors say; what images put into
steps, and what is refused of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from farsight.core.codec import decode, encode
from farsight.core.config.engine import EngineConfig
from farsight.core.errors import InvalidValueError
from farsight.core.images import ImageSpan, identity_ids
from farsight.core.request import Request, SamplingParams
from farsight.engine.checkpoint.config_fields import UnsupportedModelError
from farsight.engine.engine import Engine
from farsight.engine.vision.geometry import ImageGeometry, load_geometry, read_geometry
from farsight.engine.vision.spans import SequenceImages, carried_rows
from farsight.kvcache.block_manager import hash_blocks
from tests.unit.engine.vision.models import IMAGE_ID, SHAPES, save_seeing_model

DIGEST = b"a picture"
HIDDEN = 4


def span(start: int, length: int, *, digest: bytes = DIGEST, grid: tuple[int, ...] = ()) -> ImageSpan:
    rows = np.arange(length * HIDDEN, dtype="<f4") + 1000 * start
    return ImageSpan(start, length, digest, grid, rows.tobytes())


def images_of(spans: list[ImageSpan], *, axes: bool = False) -> SequenceImages:
    return SequenceImages(spans, [carried_rows(each, HIDDEN) for each in spans], axes=axes)


def test_any_cut_gives_the_same_rows_and_positions() -> None:
    spans = [span(2, 6, grid=(2, 3)), span(8, 4, grid=(4, 1)), span(15, 4, grid=(2, 2))]
    images, end = images_of(spans, axes=True), 25
    whole = images.given(0, end, 0)
    assert whole is not None and whole.positions is not None
    for cut in range(1, end):
        parts = [images.given(0, cut, 0), images.given(cut, end, cut)]
        found = [part for part in parts if part is not None]
        assert np.array_equal(np.concatenate([part.rows for part in found]), whole.rows)
        assert np.array_equal(np.concatenate([part.values for part in found]), whole.values)
        on_axes = [part.positions for part in found if part.positions is not None]
        assert np.array_equal(np.concatenate(on_axes, axis=1), whole.positions)
        assert np.array_equal(
            np.concatenate([images.positions(0, cut), images.positions(cut, end)]), images.positions(0, end)
        )
    assert images.given(19, end, 0) is None
    assert images.given(12, 15, 0) is None


def test_positions_go_on_behind_the_larger_side() -> None:
    """Two rows of three columns take three positions; the text behind them goes on from there."""
    images = images_of([span(2, 6, grid=(2, 3))], axes=True)
    assert [images.position(index) for index in (0, 1, 8, 9)] == [0, 1, 5, 6]
    given = images.given(0, 10, 0)
    assert given is not None and given.positions is not None
    assert given.positions.tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert images_of([span(2, 6)]).position(9) == 9, "without axes nothing is saved"


def test_rows_of_16_bits_are_read_as_they_are() -> None:
    values = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    packed = values.view(torch.int16).numpy().tobytes()
    found = carried_rows(ImageSpan(0, 3, DIGEST, (), packed), HIDDEN)
    assert np.array_equal(found, values.float().numpy())


def test_blocks_are_named_by_the_picture() -> None:
    ids = [7, *[IMAGE_ID] * 8, 9, 9, 9]
    named = [identity_ids(ids, [span(1, 8, digest=digest)]) for digest in (DIGEST, DIGEST, b"another one")]
    assert named[0] == named[1]
    assert hash_blocks(named[0], 4) == hash_blocks(named[1], 4)
    assert not set(hash_blocks(named[0], 4)) & set(hash_blocks(named[2], 4))
    assert not set(hash_blocks(named[0], 4)) & set(hash_blocks(ids, 4)), "nor by the text of placeholders"
    assert (named[0][0], *named[0][9:]) == (7, 9, 9, 9)
    assert len(set(named[0][1:9])) == 8


def test_a_request_with_images_crosses_the_wire() -> None:
    request = Request("r", 0, "i", (1, *[IMAGE_ID] * 4), SamplingParams(1), images=(span(1, 4, grid=(2, 2)),))
    assert decode(encode(request), Request) == request


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ([(0, 3), (2, 2)], r"images\[1\]"),
        ([(3, 2), (0, 2)], r"images\[1\]"),
        ([(4, 3)], r"images\[0\]"),
    ],
)
def test_images_that_overlap_or_reach_beyond_are_refused(images: list[tuple[int, int]], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        Request("r", 0, "i", (1,) * 6, SamplingParams(1), images=tuple(span(*each) for each in images))


@pytest.mark.parametrize(
    ("start", "length", "digest", "grid"),
    [
        (-1, 2, DIGEST, ()),
        (0, 0, DIGEST, ()),
        (0, 4, b"short", ()),
        (0, 4, b"x" * 65, ()),
        (0, 4, DIGEST, (2, 3)),
        (0, 4, DIGEST, (4,)),
        (0, 4, DIGEST, (-2, -2)),
    ],
)
def test_spans_that_cannot_be_are_refused(start: int, length: int, digest: bytes, grid: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValueError, match="images"):
        ImageSpan(start, length, digest, grid)


def test_what_cannot_be_read_fails_alone_and_shares_nothing(tmp_path: Path) -> None:
    engine = Engine(
        save_seeing_model(tmp_path, "qwen2_vl"),
        dtype="float32",
        engine=EngineConfig(block_size=16, num_threads=1, max_model_len=64, kv_memory="1MiB"),
    )
    ids, sampling = [5, *[IMAGE_ID] * 16, 6, 7], SamplingParams(3, temperature=0.0, ignore_eos=True)
    rows = np.ones(16 * 64, "<f4").tobytes()
    cases = {
        engine.submit(ids, sampling, [ImageSpan(1, 16, DIGEST, (4, 4), rows[:-4])]): "4096 bytes .float32.",
        engine.submit(ids, sampling, [ImageSpan(1, 16, DIGEST, (4, 4))]): "0 bytes",
        engine.submit(ids, sampling, [ImageSpan(1, 16, DIGEST, (), rows)]): "positions have axes",
    }
    right = engine.submit(ids, sampling, [ImageSpan(1, 16, DIGEST, (4, 4), rows)])
    ended = {}
    while not engine.idle:
        for delta in engine.step():
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta
    assert ended[right].finish_reason == "length"
    for request_id, reason in cases.items():
        assert ended[request_id].finish_reason == "error"
        assert re.search(reason, ended[request_id].error or ""), ended[request_id].error
    assert engine.worker.executor.prefix_hits == 0
    engine.check_integrity()


def test_a_model_of_text_alone_takes_no_images(tiny_model_dir: Path) -> None:
    engine = Engine(tiny_model_dir, engine=EngineConfig(num_threads=1, kv_memory="1MiB"))
    engine.submit([1, 2, 3], SamplingParams(2), [ImageSpan(0, 2, DIGEST)])
    [delta] = [delta for _ in range(3) for delta in engine.step()]
    assert "the model reads text alone" in (delta.error or "")


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
    from farsight.engine.vision.model import load_vision

    assert load_vision(tmp_path, torch.float32) is None
