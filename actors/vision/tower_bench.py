"""Measures the time of pictures in a vision tower on this machine: batches of several sizes, timed and fitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from actors.vision.encoding_cost import EncodingCost
from core.costs import ImageCost
from core.processors import encoder_threads
from engine.vision.geometry import PreparedImage
from estimator.step_profile import MIN_SAMPLES

SIDES = (56, 112, 224, 336, 448)
"""Pixels of the sides of the pictures; a tower for pictures of one size has as many tokens of each."""

BATCHES = (1, 2, 4)


class Tower(Protocol):
    """``engine.vision.model.VisionModel``, or its emulation."""

    def prepare(self, rgb: np.ndarray) -> PreparedImage: ...

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
    images = [tower.prepare(draw.integers(0, 256, (side, side, 3), np.uint8)) for side in SIDES]
    by_tokens = {image.num_tokens: image for image in images}
    return [[image] * count for image in by_tokens.values() for count in BATCHES]


def measure_model(model_dir: Path, dtype: str, device: str, rounds: int) -> ImageCost | None:
    """Measures a model's tower with the threads that an ImageEncoder has; None for a model without vision.

    Raises:
        FarsightError: The model cannot be used; the text says why.
    """
    import torch

    from engine.checkpoint.model_config import load_model_config
    from engine.checkpoint.weights import parse_dtype
    from engine.vision.geometry import load_geometry
    from engine.vision.model import load_vision

    if load_geometry(model_dir) is None:
        return None
    tower = load_vision(model_dir, parse_dtype(dtype, load_model_config(model_dir), device), device)
    assert tower is not None  # it has a geometry
    torch.set_num_threads(encoder_threads(0))
    return measure_tower(tower, rounds)
