"""An emulated encoder keeps its profile's time, and an emulated worker knows pictures by their content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from core.images import ImageSpan
from core.request import Request, SamplingParams
from engine.devices.emulated import Pace, token_hash
from engine.devices.emulated_vision import EmulatedVision, emulate_vision
from engine.sequence import Sequence
from engine.vision.geometry import load_geometry
from estimator.device_profile import A100_7B, find_device_profile
from tests.unit.engine.vision.models import SHAPES

PROFILE = {"base_s": 1.0, "prefill_token_s": 0.1, "decode_seq_s": 0.0, "context_token_s": 0.0, "kv_bytes": 8}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The configuration of a model that sees; an emulated encoder reads no weights."""
    given = SHAPES["llava"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [given["architecture"]], **given["config"]}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given["processor"]))
    return tmp_path


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pictures_take_their_tokens_time(model_dir: Path) -> None:
    (model_dir / "profile.json").write_text(json.dumps({**PROFILE, "image_token_s": 0.5, "image_batch_s": 3.0}))
    clock = Clock()
    vision = emulate_vision(model_dir, str(model_dir / "profile.json"), Pace(lambda: clock.now, clock.sleep))
    assert isinstance(vision, EmulatedVision)
    image = vision.prepare(np.zeros((20, 30, 3), np.uint8))
    assert image.num_tokens == 16 == load_geometry(model_dir).tokens_of(30, 20)  # type: ignore[union-attr]
    rows = vision.encode([image, image])
    assert clock.now == pytest.approx(103.0 + 2 * 16 * 0.5)
    assert [each.shape for each in rows] == [(16, 64)] * 2 and vision.hidden_size == 64
    assert vision.packed(rows[0]) == bytes(2 * 16 * 64)
    assert vision.encode([]) == [] and clock.now == pytest.approx(119.0)


def test_profiles_say_what_a_picture_takes(model_dir: Path) -> None:
    path = model_dir / "profile.json"
    path.write_text(json.dumps(PROFILE))
    assert find_device_profile(str(path)).image_cost.is_free
    assert find_device_profile("a100-7b").image_cost == A100_7B.image_cost and not A100_7B.image_cost.is_free
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert emulate_vision(model_dir, "a100-7b") is None


def test_answers_follow_from_the_picture() -> None:
    def answer(digest: bytes) -> list[int]:
        request = Request("r", 0, "i", (7,) * 6, SamplingParams(9), images=(ImageSpan(1, 4, digest),))
        named = Sequence.of(request).named_ids
        return [token_hash(named, request, index) for index in range(6)]

    cat, other = answer(b"a cat's digest"), answer(b"a dog's digest")
    assert cat == answer(b"a cat's digest")
    assert (cat[0], cat[5]) == (other[0], other[5])
    assert not set(cat[1:5]) & set(other[1:5])
