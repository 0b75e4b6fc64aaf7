"""An image encoder that only takes time: for a worker on an emulated device, which reads no rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.costs import ImageCost
from engine.devices.emulated import Pace
from engine.vision.geometry import ImageGeometry, PreparedImage, load_geometry
from estimator.device_profile import find_device_profile


class EmulatedVision:
    """Has the interface of ``engine.vision.model.VisionModel`` and loads no torch. One thread at a time.

    Args:
        cost: Seconds of a batch of pictures.

    Attributes:
        hidden_size: 0: rows have no values.
    """

    hidden_size = 0

    def __init__(self, geometry: ImageGeometry, cost: ImageCost, pace: Pace | None = None) -> None:
        self.geometry = geometry
        self._cost = cost
        self._pace = pace or Pace()

    def prepare(self, rgb: np.ndarray) -> PreparedImage:
        """``ImageGeometry.prepare``."""
        return self.geometry.prepare(rgb)

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]:
        """Rows without values, ``[num_tokens, 0]``, when the time of all images is over."""
        batch_s = self._cost.encode_s([image.num_tokens for image in images])
        self._pace.wait_until(self._pace.now() + batch_s)
        return [np.zeros((image.num_tokens, 0), np.float32) for image in images]

    def packed(self, rows: np.ndarray) -> bytes:
        """Nothing: a worker on an emulated device reads no rows."""
        return rows.tobytes()


def emulate_vision(model_dir: Path, profile: str, pace: Pace | None = None) -> EmulatedVision | None:
    """The encoder of a served model; None for a model that does not see.

    Args:
        profile: As ``EngineConfig.profile``.

    Raises:
        ConfigError, InvalidValueError: As ``find_device_profile`` and ``load_geometry``.
    """
    geometry = load_geometry(model_dir)
    return None if geometry is None else EmulatedVision(geometry, find_device_profile(profile).image_cost, pace)
