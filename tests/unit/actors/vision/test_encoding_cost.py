"""The time of pictures in a vision tower: learned from batches, and measured beforehand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from farsight.actors.vision.encoding_cost import EncodingCost, measure_model, measure_tower
from farsight.actors.worker.step_loop import FIRST_STEPS_S, MOST_TIMES
from farsight.core.costs import ImageCost
from farsight.engine.devices.emulated import EmulatedVision, Pace, emulate_vision
from tests.unit.engine.vision.models import save_seeing_model


def truth_s(tokens: list[int]) -> float:
    """A tower that takes 5 ms a batch, 0.1 ms a token, and 50 ns a pair."""
    return 5e-3 + 1e-4 * sum(tokens) + 5e-8 * sum(each * each for each in tokens)


def test_the_terms_of_a_tower_are_found() -> None:
    cost, rng = EncodingCost(60.0), random.Random(3)
    assert cost.batch_s([100]) is None
    assert cost.bound_s([100]) == FIRST_STEPS_S
    for _ in range(400):
        tokens = [rng.randrange(4, 2000) for _ in range(rng.randrange(1, 9))]
        cost.add(tokens, truth_s(tokens) * rng.uniform(0.9, 1.1))
    assert cost.coefficients() == pytest.approx((5e-3, 1e-4, 5e-8), rel=0.2)
    assert cost.batch_s([1000, 300]) == pytest.approx(truth_s([1000, 300]), rel=0.05)
    assert cost.bound_s([1000]) == pytest.approx(60.0 + MOST_TIMES * truth_s([1000]), rel=0.05)


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
