"""An ImageEncoder without Ray, over a small random tower."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import CollectorRegistry

from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.names import RUN_DIR_VARIABLE
from farsight.actors.runtime.peer import Site
from farsight.actors.vision.image_encoder import ImageEncoder
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.images import ImagesConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.images import EncodedImage, EncodeImages, ImageFile, ImageSpan, digest_of
from farsight.engine.vision.geometry import PreparedImage
from farsight.engine.vision.model import load_vision
from farsight.engine.vision.row_files import SharedEmbeddings
from farsight.engine.vision.spans import carried_rows
from tests.unit.actors.components import until
from tests.unit.engine.vision.models import save_seeing_model
from tests.unit.engine.vision.test_tokens import picture

pytestmark = pytest.mark.torch

NEAR = 1e-5
"""A tower's rows differ by rounding with what they are computed beside."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"), "qwen2_vl")


@asynccontextmanager
async def encoder_of(model_dir: Path, device: str = "cpu", cache_mib: int = 64) -> AsyncIterator[ImageEncoder]:
    config = FarsightConfig(
        model=ModelConfig(dtype="float32"), images=ImagesConfig(cache_mib=cache_mib), engine=EngineConfig(device=device)
    )
    site = Site(config, str(model_dir), "fused", sees=True)
    encoder = ImageEncoder(ComponentContext("image-encoder-0", site, 0, site.peers({}), CollectorRegistry()))
    await encoder.start()
    try:
        yield encoder
    finally:
        await encoder.stop()


def file_of(rgb: np.ndarray) -> ImageFile:
    data = io.BytesIO()
    Image.fromarray(rgb).save(data, "PNG")
    return ImageFile("messages", data.getvalue(), digest_of(data.getvalue()))


async def encoded(encoder: ImageEncoder, *files: ImageFile, salt: str = "") -> Sequence[EncodedImage]:
    return (await encoder.encode(EncodeImages(files, salt))).images


def count(encoder: ImageEncoder, outcome: str) -> float:
    value = encoder.context.registry.get_sample_value("farsight:images_total", {"outcome": outcome})
    return value or 0.0


def span(image: EncodedImage) -> ImageSpan:
    return ImageSpan(0, image.num_tokens, image.digest, image.grid, image.embeddings, image.rows)


async def test_rows_are_those_of_the_tower(model_dir: Path) -> None:
    vision = load_vision(model_dir, torch.float32)
    assert vision is not None
    rgbs = [picture(1, 50, 40), picture(2, 30, 70)]
    async with encoder_of(model_dir) as encoder:
        images = await encoded(encoder, *map(file_of, rgbs))
    for rgb, image in zip(rgbs, images, strict=True):
        prepared = vision.geometry.prepare(rgb)
        [rows] = vision.encode([prepared])
        assert (image.num_tokens, image.grid) == (prepared.num_tokens, prepared.grid)
        assert image.digest == file_of(rgb).digest
        assert np.abs(carried_rows(span(image), vision.hidden_size) - rows).max() < NEAR


async def test_an_emulated_device_counts_tokens_and_takes_time(model_dir: Path, tmp_path: Path) -> None:
    """Rows are of the real size and hold nothing; the same picture is found again."""
    profile = {"base_s": 1.0, "prefill_token_s": 0.1, "decode_seq_s": 0.0, "context_token_s": 0.0, "kv_bytes": 8}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile | {"image_batch_s": 0.3}))
    rgb = picture(1, 50, 40)
    vision = load_vision(model_dir, torch.float32)
    assert vision is not None
    async with encoder_of(model_dir, f"emulated:{path}") as encoder:
        began = time.monotonic()
        [image] = await encoded(encoder, file_of(rgb))
        assert time.monotonic() - began >= 0.3
        [again] = await encoded(encoder, file_of(rgb))
        assert again.is_cached and count(encoder, "encoded") == 1
    prepared = vision.geometry.prepare(rgb)
    assert (image.num_tokens, image.grid) == (prepared.num_tokens, prepared.grid)
    assert image.embeddings == bytes(2 * image.num_tokens * vision.hidden_size)


async def test_rows_in_files_outlive_the_encoder(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor encodes nothing again."""
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    file = file_of(picture(1, 50, 40))
    async with encoder_of(model_dir) as encoder:
        [first] = await encoded(encoder, file)
    assert first.rows and not first.embeddings
    async with encoder_of(model_dir) as encoder:
        [second] = await encoded(encoder, file)
        assert count(encoder, "encoded") == 0 and count(encoder, "cached") == 1
        hidden_size = 64
        assert SharedEmbeddings(tmp_path / "rows").rows(span(second), hidden_size).shape == (first.num_tokens, 64)
    assert second.is_cached and (second.rows, second.grid, second.digest) == (first.rows, first.grid, first.digest)


async def test_a_picture_is_encoded_once_for_each_salt(model_dir: Path) -> None:
    file = file_of(picture(3, 40, 40))
    async with encoder_of(model_dir) as encoder:
        [first] = await encoded(encoder, file, salt="a")
        [again] = await encoded(encoder, file, salt="a")
        assert again.is_cached and again.embeddings == first.embeddings
        [other] = await encoded(encoder, file, salt="b")
        assert not other.is_cached, "who has another salt cannot tell that it was encoded before"
        assert (count(encoder, "encoded"), count(encoder, "cached")) == (2, 1)


async def test_who_asks_at_the_same_time_shares_one_encoding(model_dir: Path) -> None:
    file = file_of(picture(4, 40, 40))
    async with encoder_of(model_dir) as encoder:
        replies = await asyncio.gather(*(encoded(encoder, file) for _ in range(5)))
        assert count(encoder, "encoded") == 1
    assert {each[0].embeddings for each in replies} == {replies[0][0].embeddings}


async def test_an_asker_that_leaves_takes_nothing_from_others(model_dir: Path) -> None:
    file = file_of(picture(5, 40, 40))
    async with encoder_of(model_dir) as encoder:
        leaving, staying = (asyncio.create_task(encoded(encoder, file)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        [image] = await staying
        assert image.num_tokens


class GatedTower:
    """A real tower that computes when it is let, and tells of its batches."""

    def __init__(self, encoder: ImageEncoder) -> None:
        vision = encoder._built.result()
        self.gate, self.batches = threading.Event(), list[int]()
        self._encode = vision.encode
        vision.encode = self.encode  # type: ignore[method-assign]

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]:
        self.batches.append(len(images))
        self.gate.wait()
        return self._encode(images)


async def test_pictures_that_wait_are_encoded_together_and_block_nobody(model_dir: Path) -> None:
    files = [file_of(picture(seed, 40, 40)) for seed in range(10, 16)]
    async with encoder_of(model_dir) as encoder:
        tower = GatedTower(encoder)
        first = asyncio.create_task(encoded(encoder, files[0]))
        await until(lambda: tower.batches == [1])
        others = [asyncio.create_task(encoded(encoder, file)) for file in files[1:]]
        await until(lambda: encoder._prepared.qsize() == 5)  # decoded, while the tower computes
        assert encoder.queue == 6 and encoder.state == "ready", "the event loop goes on"
        tower.gate.set()
        await asyncio.gather(first, *others)
        assert tower.batches == [1, 5]


async def test_a_batch_under_way_is_work_that_may_hang(model_dir: Path) -> None:
    async with encoder_of(model_dir) as encoder:
        assert encoder.work is None
        tower = GatedTower(encoder)
        asked = asyncio.create_task(encoded(encoder, file_of(picture(1, 40, 40))))
        await until(lambda: tower.batches == [1])
        work = encoder.work
        assert work is not None and work.name == "image-encoder-0" and work.clock is not None
        tower.gate.set()
        await asked
        assert encoder.work is None
        await encoded(encoder, file_of(picture(2, 40, 40)))
        assert encoder._num_batches == work.count + 1


async def test_who_asks_before_the_tower_is_loaded_waits_for_it(model_dir: Path) -> None:
    """A restarted encoder is found by its name before it has started."""
    async with encoder_of(model_dir) as other:
        encoder = ImageEncoder(dataclasses.replace(other.context, registry=CollectorRegistry()))
        asked = asyncio.create_task(encoded(encoder, file_of(picture(9, 40, 40))))
        await until(lambda: encoder.queue == 1)
        await encoder.start()
        [image] = await asked
        assert image.num_tokens
        await encoder.stop()


async def test_what_is_no_picture_is_refused_and_the_next_is_read(model_dir: Path) -> None:
    broken = ImageFile("messages", b"no picture", digest_of(b"no picture"))
    narrow = file_of(np.zeros((1, 300, 3), np.uint8))
    async with encoder_of(model_dir) as encoder:
        refused, thin, fine = await encoded(encoder, broken, narrow, file_of(picture(6, 40, 40)))
        assert refused.problem and refused.found and not refused.num_tokens
        assert thin.problem
        assert not fine.problem and fine.num_tokens
        assert count(encoder, "refused") == 2
        [again] = await encoded(encoder, broken)
        assert again.problem


async def test_a_tower_that_fails_fails_its_batch_alone(model_dir: Path) -> None:
    async with encoder_of(model_dir) as encoder:
        vision = encoder._built.result()
        encode, failing = vision.encode, [True]

        def once_failing(images: Sequence[PreparedImage]) -> list[np.ndarray]:
            if failing.pop() if failing else False:
                raise RuntimeError("out of memory")
            return encode(images)

        vision.encode = once_failing  # type: ignore[method-assign]
        with pytest.raises(Exception, match="out of memory"):
            await encoded(encoder, file_of(picture(7, 40, 40)))
        [image] = await encoded(encoder, file_of(picture(7, 40, 40)))
        assert image.num_tokens


async def test_no_more_is_kept_than_its_bound(model_dir: Path) -> None:
    async with encoder_of(model_dir, cache_mib=0) as encoder:
        file = file_of(picture(8, 40, 40))
        await encoded(encoder, file)
        [again] = await encoded(encoder, file)
        assert not again.is_cached
        assert encoder.context.registry.get_sample_value("farsight:image_cache_bytes") == 0
