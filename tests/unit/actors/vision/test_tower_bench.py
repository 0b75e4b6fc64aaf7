"""What `farsight profile` says of pictures is what the tower takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.vision.encoding_cost import measure_model, measure_tower
from core.costs import ImageCost
from engine.devices.emulated import Pace
from engine.devices.emulated_vision import EmulatedVision, emulate_vision
from tests.unit.engine.vision.models import save_seeing_model

PRICES = ImageCost(batch_s=0.02, token_s=1e-3, pair_s=1e-6)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_prices_are_those_of_the_tower(tmp_path: Path) -> None:
    model_dir = save_seeing_model(tmp_path / "model", "qwen2_vl")
    processor = model_dir / "preprocessor_config.json"
    of_many_sizes = {"size": {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 900}}
    processor.write_text(json.dumps(json.loads(processor.read_text()) | of_many_sizes))
    profile = {"base_s": 1.0, "prefill_token_s": 0.1, "decode_seq_s": 0.0, "context_token_s": 0.0, "kv_bytes": 8}
    prices = {"image_batch_s": PRICES.batch_s, "image_token_s": PRICES.token_s, "image_pair_s": PRICES.pair_s}
    (tmp_path / "profile.json").write_text(json.dumps(profile | prices))
    clock = Clock()
    tower = emulate_vision(model_dir, str(tmp_path / "profile.json"), Pace(lambda: clock.now, clock.sleep))
    assert isinstance(tower, EmulatedVision)
    found = measure_tower(tower, 3, lambda: clock.now)
    for tokens in ([49], [196] * 3, [100, 784, 300]):
        assert found.encode_s(tokens) == pytest.approx(PRICES.encode_s(tokens), rel=0.02)


@pytest.mark.torch
def test_a_real_tower_is_measured(tmp_path: Path) -> None:
    found = measure_model(save_seeing_model(tmp_path, "llava"), "float32", "cpu", 3)
    assert found is not None and not found.is_free
