"""The time that a vision tower takes: learned from its batches, or measured on this machine before it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from farsight.actors.worker.step_loop import FIRST_STEPS_S, MOST_TIMES
from farsight.core.costs import ImageCost
from farsight.core.messages.step_times import StepSample
from farsight.core.processors import encoder_threads
from farsight.engine.vision.geometry import ImageGeometry, PreparedImage
from farsight.estimator.step_profile import MIN_SAMPLES, StepProfile

TERMS = ("batch", "token", "pair")
"""Names of the coefficients: seconds of a batch, of each token, and of each pair of tokens of one picture."""


class EncodingCost:
    """Predicts the seconds of a batch from the tokens of its pictures; fitted like the costs of steps.

    Args:
        stall_s: Seconds that a batch may take in addition to ``MOST_TIMES`` times its predicted seconds.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._profile = StepProfile()

    def add(self, tokens: Sequence[int], seconds: float) -> None:
        """Adds a measured batch: the tokens of each picture, and seconds."""
        self._profile.observe((_sample(tokens, seconds),))

    def batch_s(self, tokens: Sequence[int]) -> float | None:
        """Predicts the seconds of a batch; None until enough batches were measured."""
        if self._profile.num_samples < MIN_SAMPLES:
            return None
        batch_s, token_s, pair_s = self.coefficients()
        return batch_s + token_s * sum(tokens) + pair_s * _pairs(tokens)

    def bound_s(self, tokens: Sequence[int]) -> float:
        """Returns the seconds after which a batch counts as hung."""
        expected_s = self.batch_s(tokens)
        return max(FIRST_STEPS_S, self._stall_s) if expected_s is None else self._stall_s + MOST_TIMES * expected_s

    def coefficients(self) -> tuple[float, float, float]:
        """Returns the coefficients in the order of ``TERMS``, in seconds; 0 where unknown."""
        batch_s, token_s, _, _, pair_s = self._profile.coefficients()
        return batch_s, token_s, pair_s


def _sample(tokens: Sequence[int], seconds: float) -> StepSample:
    return StepSample(sum(tokens), 0, 0, seconds, _pairs(tokens))


def _pairs(tokens: Sequence[int]) -> int:
    """Counts pairs of tokens of one picture: a tower attends within a picture only."""
    return sum(each * each for each in tokens)


SIDES = (56, 112, 224, 336, 448)
"""Pixels of the sides of the pictures; a tower for pictures of one size has as many tokens of each."""

BATCHES = (1, 2, 4)


class Tower(Protocol):
    """``engine.vision.model.VisionModel``, or its emulation."""

    @property
    def geometry(self) -> ImageGeometry: ...

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]: ...


def measure_tower(tower: Tower, rounds: int, clock: Callable[[], float] = time.perf_counter) -> ImageCost:
    """Measures the costs of batches of pictures, fitted as an ImageEncoder fits them live.

    Args:
        rounds: Fewest measurements of each kind of batch; there are more if the fit needs more.
        clock: Returns seconds.
    """
    batches = _batches(tower)
    for batch in batches:
        tower.encode(batch)  # the first batch of a shape is slower
    cost = EncodingCost(stall_s=0.0)
    for _ in range(max(rounds, -(-MIN_SAMPLES // len(batches)))):
        for batch in batches:
            began = clock()
            tower.encode(batch)
            cost.add([image.num_tokens for image in batch], clock() - began)
    return ImageCost(*cost.coefficients())


def _batches(tower: Tower) -> list[list[PreparedImage]]:
    draw = np.random.default_rng(0)
    images = [tower.geometry.prepare(draw.integers(0, 256, (side, side, 3), np.uint8)) for side in SIDES]
    by_tokens = {image.num_tokens: image for image in images}
    return [[image] * count for image in by_tokens.values() for count in BATCHES]


def measure_model(model_dir: Path, dtype: str, device: str, rounds: int) -> ImageCost | None:
    """Measures a model's tower with the threads that an ImageEncoder has; None for a model without vision.

    Raises:
        FarsightError: The model cannot be used; the text says why.
    """
    import torch

    from farsight.engine.checkpoint.dtypes import parse_dtype
    from farsight.engine.checkpoint.model_config import load_model_config
    from farsight.engine.vision.geometry import load_geometry
    from farsight.engine.vision.model import load_vision

    if load_geometry(model_dir) is None:
        return None
    tower = load_vision(model_dir, parse_dtype(dtype, load_model_config(model_dir), device), device)
    assert tower is not None  # it has a geometry
    torch.set_num_threads(encoder_threads(0))
    return measure_tower(tower, rounds)
