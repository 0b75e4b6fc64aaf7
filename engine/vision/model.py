"""From prepared pixels to the rows that a decoder reads in place of placeholder tokens. Torch operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from farsight.engine.checkpoint.config_fields import CheckpointError, read_json
from farsight.engine.checkpoint.families.vision import VISION, Tower
from farsight.engine.vision.clip import ClipTower
from farsight.engine.vision.geometry import ImageGeometry, PreparedImage, load_geometry
from farsight.engine.vision.layers import TowerTensors, read_tower
from farsight.engine.vision.qwen import QwenTower
from farsight.engine.vision.qwen_vl import QwenVlTower


class VisionTower(Protocol):
    """Computes the rows of prepared images."""

    hidden_size: int

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """Returns the rows of each, ``[tokens, hidden]`` in the tower's dtype."""
        ...


_TOWERS: Mapping[Tower, Callable[..., VisionTower]] = {
    "clip": ClipTower,
    "qwen2_vl": QwenTower,
    "qwen2_5_vl": QwenTower,
    "qwen_vl": QwenVlTower,
}


_INSTRUCTIONS: Mapping[torch.dtype, Sequence[str]] = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Features of processors, by PyTorch's names, that compute with a type."""


class VisionModel:
    """A tower with its geometry, ready to run. One thread at a time.

    Attributes:
        geometry: How pictures become tokens; knows no torch.
        hidden_size: Values of a row, those of the text model's embeddings.
        dtype: What its rows are rounded to, and what it computes in where the processor has instructions for that.
    """

    def __init__(self, geometry: ImageGeometry, tower: VisionTower, dtype: torch.dtype) -> None:
        self.geometry = geometry
        self.hidden_size = tower.hidden_size
        self.dtype = dtype
        self._tower = tower

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]:
        """Returns rows of each image, float32 ``[num_tokens, hidden_size]``; exact also where the tower has 16 bits."""
        if not images:
            return []
        rows = self._tower.encode(images)
        for image, found in zip(images, rows, strict=True):
            if found.shape != (image.num_tokens, self.hidden_size):
                expected = f"{image.num_tokens} rows of {self.hidden_size}"
                raise CheckpointError("vision tower", f"rows {list(found.shape)} of an image", expected)
        return [found.to(self.dtype).float().cpu().numpy() for found in rows]

    def packed(self, rows: np.ndarray) -> bytes:
        """Returns the rows of an image as ``ImageSpan.embeddings``: 2 bytes a value where they are exact so, else 4."""
        if self.dtype == torch.bfloat16:
            return torch.from_numpy(rows).to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
        return rows.astype("<f4").tobytes()


def load_vision(model_dir: Path, dtype: torch.dtype, device: str = "cpu") -> VisionModel | None:
    """Returns the vision tower of the model in ``model_dir``; None for a model that does not see.

    Raises:
        UnsupportedModelError: A tower that is not computed; names the field of its configuration.
        CheckpointError: A damaged file, or a missing or odd tensor; names it.
    """
    geometry = load_geometry(model_dir)
    if geometry is None:
        return None
    raw = read_json(model_dir, "config.json") or {}
    family = VISION[geometry.family]
    tensors = TowerTensors(read_tower(model_dir, family, _computed_in(dtype, device), device))
    tower = _TOWERS[family.tower](raw, tensors)
    tensors.check_all_taken()
    return VisionModel(geometry, tower, dtype)


def _computed_in(dtype: torch.dtype, device: str) -> torch.dtype:
    """Returns float32 where a processor takes values of 16 bits apart: their products take five times as long there."""
    if device != "cpu" or dtype not in _INSTRUCTIONS:
        return dtype
    features = torch.cpu.get_capabilities()
    return dtype if any(features.get(name) for name in _INSTRUCTIONS[dtype]) else torch.float32
