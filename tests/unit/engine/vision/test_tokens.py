"""Models that see compute the tokens of transformers' models, by torch operations and by the compiled step.

One scenario a family: prompts of one image, of several and of none, prefills in chunks that cut images, beginnings that
are shared, in a pool so small that sequences are preempted and computed again, or wait on the host.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.images import ImageSpan
from farsight.core.request import SamplingParams
from farsight.engine.checkpoint.families.vision import QWEN_VL, VISION
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.engine import Engine
from farsight.engine.vision.model import VisionModel, load_vision
from tests.unit.engine.small_models import assert_best
from tests.unit.engine.vision.models import IMAGE_ID, SHAPES, SeeingReference, save_seeing_model
from tests.unit.engine.vision.written import WrittenReference, save_written_seeing

WRITTEN = "qwen_vl"
Reference = SeeingReference | WrittenReference

NUM_TOKENS = 40
BLOCK_SIZE = 16

Prompt = tuple[list[int], list[np.ndarray]]
"""Token ids, with one placeholder for each of the pictures."""


def picture(seed: int, width: int, height: int) -> np.ndarray:
    """Coarse colours: what resizing makes of noise is grey."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((-(-height // 6), -(-width // 6), 1), np.uint8))[:height, :width].copy()


def prompts() -> list[Prompt]:
    rng = random.Random(5)
    first, second, third = picture(1, 50, 40), picture(2, 30, 70), picture(3, 33, 31)
    words = [[rng.randrange(3, 300) for _ in range(length)] for length in (9, 4, 21, 14)]
    shared = [*words[0], IMAGE_ID, *words[1]]
    return [
        (shared, [first]),
        ([IMAGE_ID, *words[2], IMAGE_ID, 5], [second, third]),
        (words[3], []),
        ([*shared, 8, IMAGE_ID, 9], [first, second]),
        ([*shared, *words[1]], [third]),  # the same ids, another picture
        ([*words[1], IMAGE_ID], [second]),  # ends with an image
        ([*shared, 7], [first]),
    ]


def expand(vision: VisionModel, prompt: Prompt) -> tuple[list[int], list[ImageSpan]]:
    """As many placeholders as each picture has tokens, and the spans with their rows."""
    ids: list[int] = []
    spans = []
    pictures = iter(prompt[1])
    for token in prompt[0]:
        if token != IMAGE_ID:
            ids.append(token)
            continue
        rgb = next(pictures)
        prepared = vision.geometry.prepare(rgb)
        [rows] = vision.encode([prepared])
        digest = hashlib.sha256(rgb.tobytes() + str(rgb.shape).encode()).digest()
        spans.append(ImageSpan(len(ids), prepared.num_tokens, digest, prepared.grid, vision.packed(rows)))
        ids += [IMAGE_ID] * prepared.num_tokens
    return ids, spans


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    @functools.cache
    def make(shape: str) -> tuple[Path, Reference]:
        if shape == WRITTEN:
            out = save_written_seeing(tmp_path_factory.mktemp("seeing"))
            return out, WrittenReference(out)
        out = save_seeing_model(tmp_path_factory.mktemp("seeing"), shape)
        return out, SeeingReference(out, shape)

    return make


def assert_likeliest(reference: Reference, ids: list[int], images: list[np.ndarray], output: list[int]) -> None:
    """Each token is the reference's likeliest one behind what comes before it, or as likely but for rounding."""
    assert_best(reference.logits([*ids, *output], images)[len(ids) - 1 : -1], output)


def test_every_family_is_compared() -> None:
    """What the registry says of a family is what these tests compare."""
    assert {given["architecture"] for given in SHAPES.values()} == set(VISION) - {QWEN_VL}
    assert all(family.evidence.verified == (name != QWEN_VL) for name, family in VISION.items())


@pytest.mark.parametrize("kept", ["computed again", "on the host"])
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("shape", [*SHAPES, WRITTEN])
def test_tokens_are_those_of_the_reference(
    shape: str, backend: str, kept: str, seeing: Callable[[str], tuple[Path, Reference]]
) -> None:
    model_dir, reference = seeing(shape)
    vision = load_vision(model_dir, torch.float32)
    assert vision is not None
    given = prompts()
    expanded = [expand(vision, prompt) for prompt in given]
    longest = max(len(ids) for ids, _ in expanded) + NUM_TOKENS
    blocks = -(-longest // BLOCK_SIZE) + 1
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_threads=1,
        backend=backend,
        max_batch_tokens=13,  # cuts every image
        max_num_seqs=5,
        kv_memory=str(blocks * BLOCK_SIZE * load_model_config(model_dir).kv_bytes_per_token(torch.float32)),
        max_model_len=longest,
        speculation="off",
    )
    scheduler = SchedulerConfig(preset="fcfs" if kept == "computed again" else "fastserve", watermark=1.0)
    ticks = itertools.count()
    engine = Engine(model_dir, dtype="float32", engine=config, scheduler=scheduler, clock=lambda: 0.005 * next(ticks))
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = engine.generate([ids for ids, _ in expanded], sampling, [spans for _, spans in expanded])
    engine.check_integrity()
    for (ids, _), (_, images), output in zip(expanded, given, outputs, strict=True):
        assert len(output.token_ids) == NUM_TOKENS
        assert_likeliest(reference, ids, images, list(output.token_ids))
    executor = engine.worker.executor
    ids, spans = expanded[0]
    for _ in range(2):  # the pool has forgotten some of it, perhaps
        hits = executor.prefix_hits
        [again] = engine.generate([ids], sampling, [spans])
        assert_likeliest(reference, ids, given[0][1], list(again.token_ids))
    assert executor.prefix_hits - hits == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE, "a repeated image is in the cache"
    traffic = executor.report().traffic
    assert (traffic.recomputed_tokens if kept == "computed again" else traffic.uploads) > 0, traffic
