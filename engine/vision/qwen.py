"""The towers of Qwen2-VL and Qwen2.5-VL: patches of any number, turned by row and column. Torch operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.vision.geometry import PreparedImage
from farsight.engine.vision.layers import ACTIVATIONS, Dense, LayerNorm, RootNorm, TowerTensors

_MAX_LAYERS = 1 << 10
_EPS = 1e-6
_THETA = 10000.0

_COMMON = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2 = _COMMON | {"embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4}
_QWEN2_5 = _COMMON | {
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 4,
}

_Op = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Gated:
    """``down(act(gate(x)) * up(x))``."""

    gate: Dense
    up: Dense
    down: Dense
    act: _Op

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


@dataclass(frozen=True, slots=True)
class _Plain:
    """``down(act(up(x)))``."""

    up: Dense
    down: Dense
    act: _Op

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@dataclass(frozen=True, slots=True)
class _Block:
    norm1: _Op
    qkv: Dense
    out: Dense
    norm2: _Op
    mlp: _Op
    windowed: bool


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the patches of some images lie, in the order that they are computed in.

    Attributes:
        order: Which token comes when: int64 ``[tokens]``, and back.
        cos, sin: What turns each patch, ``[patches, 1, head_dim]`` in float32.
        images: Patches of each image.
        windows: Patches of each window; the same where nothing has windows.
    """

    order: Tensor
    back: Tensor
    cos: Tensor
    sin: Tensor
    images: list[int]
    windows: list[int]


class QwenTower:
    """The tower of Qwen2-VL, or of Qwen2.5-VL, with its merger.

    Args:
        raw: The object in ``config.json``.
        tensors: Those of tower and merger.

    Raises:
        UnsupportedModelError: A tower that is not computed; names the field.
        CheckpointError: A missing or odd tensor.
    """

    def __init__(self, raw: dict[str, Any], tensors: TowerTensors) -> None:
        self._newer = raw["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
        config = Fields(raw.get("vision_config") or {}, _QWEN2_5 if self._newer else _QWEN2, "vision_config.")
        config.require("in_channels", (3,))
        self._width = config.size("hidden_size" if self._newer else "embed_dim")
        self.hidden_size = config.size("out_hidden_size" if self._newer else "hidden_size")
        self._heads = config.size("num_heads")
        if self._width % (4 * self._heads):
            raise config.error("num_heads", f"heads of a multiple of 4 values, {self._width} in all")
        self._merge = config.size("spatial_merge_size", 1 << 6)
        self._window = 0
        if self._newer:
            patch = config.size("patch_size", 1 << 10)
            self._window = config.size("window_size", 1 << 16) // (patch * self._merge)
            if not self._window:
                raise config.error("window_size", f"at least a token's side ({patch * self._merge} pixels)")
        self._take(config, tensors)

    def _take(self, config: Fields, tensors: TowerTensors) -> None:
        width, unit = self._width, self._merge**2
        patch, frames = config.size("patch_size", 1 << 10), config.size("temporal_patch_size", 1 << 6)
        kernel = tensors.take("visual.patch_embed.proj.weight", width, 3, frames, patch, patch)
        self._kernel = kernel.reshape(width, -1)
        act = ACTIVATIONS[config.require("hidden_act", ACTIVATIONS)]
        depth = config.size("depth", _MAX_LAYERS)
        whole = _whole_blocks(config, depth) if self._newer else frozenset(range(depth))
        self._blocks = [self._block(f"visual.blocks.{i}.", config, tensors, act, i not in whole) for i in range(depth)]
        self._merger_norm = self._norm(tensors, "visual.merger.ln_q")
        self._merger = _Plain(
            Dense.take(tensors, "visual.merger.mlp.0", width * unit, width * unit),
            Dense.take(tensors, "visual.merger.mlp.2", self.hidden_size, width * unit),
            F.gelu,
        )

    def _block(self, name: str, config: Fields, tensors: TowerTensors, act: _Op, windowed: bool) -> _Block:
        width = self._width
        mlp: _Op
        if self._newer:
            inner = config.size("intermediate_size")
            gate, up = (Dense.take(tensors, f"{name}mlp.{each}_proj", inner, width) for each in ("gate", "up"))
            mlp = _Gated(gate, up, Dense.take(tensors, f"{name}mlp.down_proj", width, inner), act)
        else:
            inner = int(width * config.positive("mlp_ratio"))
            up = Dense.take(tensors, f"{name}mlp.fc1", inner, width)
            mlp = _Plain(up, Dense.take(tensors, f"{name}mlp.fc2", width, inner), act)
        return _Block(
            self._norm(tensors, f"{name}norm1"),
            Dense.take(tensors, f"{name}attn.qkv", 3 * width, width),
            Dense.take(tensors, f"{name}attn.proj", width, width),
            self._norm(tensors, f"{name}norm2"),
            mlp,
            windowed,
        )

    def _norm(self, tensors: TowerTensors, name: str) -> _Op:
        kind = RootNorm if self._newer else LayerNorm
        return kind.take(tensors, name, self._width, _EPS)

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        places, unit = self._places(images), self._merge**2
        pixels = torch.cat([torch.from_numpy(image.pixels) for image in images]).to(self._kernel)
        hidden = F.linear(pixels, self._kernel)
        hidden = hidden.view(-1, unit, self._width)[places.order].flatten(0, 1)
        for block in self._blocks:
            hidden = hidden + self._attended(block, block.norm1(hidden), places)
            hidden = hidden + block.mlp(block.norm2(hidden))
        merged = self._merger(self._merger_norm(hidden).view(-1, unit * self._width))[places.back]
        return list(torch.split(merged, [image.num_tokens for image in images]))

    def _attended(self, block: _Block, normed: Tensor, places: _Places) -> Tensor:
        qkv = block.qkv(normed).view(len(normed), 3, self._heads, -1)
        query, key = (_turned(qkv[:, i], places.cos, places.sin) for i in (0, 1))
        lengths = places.windows if block.windowed else places.images
        parts = zip(*(torch.split(each, lengths) for each in (query, key, qkv[:, 2])), strict=True)
        return block.out(torch.cat([_attend(*part) for part in parts]))

    def _places(self, images: Sequence[PreparedImage]) -> _Places:
        order: list[Tensor] = []
        rows: list[Tensor] = []
        columns: list[Tensor] = []
        windows: list[int] = []
        unit, first = self._merge**2, 0
        for image in images:
            high, wide = image.grid
            own, lengths = _windows(high, wide, self._window or max(high, wide))
            order.append(own + first)
            windows += [length * unit for length in lengths]
            first += high * wide
            inner = torch.arange(self._merge)
            rows.append(
                (torch.arange(high)[:, None, None, None] * self._merge + inner[:, None])
                .expand(high, wide, self._merge, self._merge)
                .reshape(-1, unit)[own]
            )
            columns.append(
                (torch.arange(wide)[:, None, None] * self._merge + inner)
                .expand(high, wide, self._merge, self._merge)
                .reshape(-1, unit)[own]
            )
        joined, device = torch.cat(order), self._kernel.device
        cos, sin = self._angles(torch.cat(rows).flatten(), torch.cat(columns).flatten())
        counts = [image.num_tokens * unit for image in images]
        return _Places(joined.to(device), joined.argsort().to(device), cos.to(device), sin.to(device), counts, windows)

    def _angles(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Turns a quarter of a head's values by the row, one by the column, each against one half a head apart."""
        half = self._width // self._heads // 2
        speeds = 1.0 / (_THETA ** (torch.arange(0, half, 2, dtype=torch.float) / half))
        angles = torch.cat([rows[:, None] * speeds, columns[:, None] * speeds], -1)
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos(), angles.sin()


def _windows(high: int, wide: int, side: int) -> tuple[Tensor, list[int]]:
    """Returns the tokens of an image window by window, int64 ``[high * wide]``, and the tokens of each window."""
    indices = torch.arange(high * wide).view(high, wide)
    parts = [
        indices[top : top + side, left : left + side].flatten()
        for top in range(0, high, side)
        for left in range(0, wide, side)
    ]
    return torch.cat(parts), [len(part) for part in parts]


def _whole_blocks(config: Fields, depth: int) -> frozenset[int]:
    """Returns blocks whose patches attend to their whole image."""
    value = config["fullatt_block_indexes"]
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < depth for each in value):
        raise config.error("fullatt_block_indexes", f"a list of integers from 0 to {depth - 1}")
    return frozenset(value)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns ``[patches, heads, head_dim]`` in float32."""
    wide = heads.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(heads.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends from every patch to all of ``[patches, heads, head_dim]``; ``[patches, width]``."""
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1])
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1).flatten(1)
