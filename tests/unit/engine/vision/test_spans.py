"""What images put into steps, and what is refused of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from core.codec import decode, encode
from core.config.engine import EngineConfig
from core.errors import InvalidValueError
from core.images import ImageSpan, identity_ids
from core.request import Request, SamplingParams
from engine.engine import Engine
from engine.vision.spans import CarriedEmbeddings, SequenceImages
from kvcache.block_manager import hash_blocks
from tests.unit.engine.vision.models import IMAGE_ID, save_seeing_model

DIGEST = b"a picture"
HIDDEN = 4


def span(start: int, length: int, *, digest: bytes = DIGEST, grid: tuple[int, ...] = ()) -> ImageSpan:
    rows = np.arange(length * HIDDEN, dtype="<f4") + 1000 * start
    return ImageSpan(start, length, digest, grid, rows.tobytes())


def images_of(spans: list[ImageSpan], *, axes: bool = False) -> SequenceImages:
    source = CarriedEmbeddings()
    return SequenceImages(spans, [source.rows(each, HIDDEN) for each in spans], axes=axes)


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
    found = CarriedEmbeddings().rows(ImageSpan(0, 3, DIGEST, (), packed), HIDDEN)
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
