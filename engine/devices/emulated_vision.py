"""An image encoder that only takes time: for a worker on an emulated device, which reads no rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.costs import ImageCost
from engine.checkpoint.model_config import load_model_config
from engine.devices.emulated import Pace
from engine.vision.geometry import ImageGeometry, PreparedImage, load_geometry
from estimator.device_profile import find_device_profile


class EmulatedVision:
    """Has the interface of ``engine.vision.model.VisionModel`` and loads no torch. One thread at a time.

    Args:
        cost: Seconds of a batch of pictures.
        hidden_size: Values of a row: what rows take where they are kept is what real ones would.
    """

    def __init__(self, geometry: ImageGeometry, cost: ImageCost, hidden_size: int, pace: Pace | None = None) -> None:
        self.geometry = geometry
        self.hidden_size = hidden_size
        self._cost = cost
        self._pace = pace or Pace()

    def prepare(self, rgb: np.ndarray) -> PreparedImage:
        """``ImageGeometry.prepare``."""
        return self.geometry.prepare(rgb)

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]:
        """Zeros, float32 ``[num_tokens, hidden_size]`` each, when the time of all images is over."""
        batch_s = self._cost.encode_s([image.num_tokens for image in images])
        self._pace.wait_until(self._pace.now() + batch_s)
        return [np.zeros((image.num_tokens, self.hidden_size), np.float32) for image in images]

    def packed(self, rows: np.ndarray) -> bytes:
        """As of a tower in bfloat16; a worker on an emulated device reads none of it."""
        return bytes(2 * rows.size)


def emulate_vision(model_dir: Path, profile: str, pace: Pace | None = None) -> EmulatedVision | None:
    """The encoder of a served model; None for a model that does not see.

    Args:
        profile: As ``EngineConfig.profile``.

    Raises:
        ConfigError, InvalidValueError: As ``find_device_profile``, ``load_geometry`` and ``load_model_config``.
    """
    geometry = load_geometry(model_dir)
    if geometry is None:
        return None
    return EmulatedVision(
        geometry, find_device_profile(profile).image_cost, load_model_config(model_dir).hidden_size, pace
    )
