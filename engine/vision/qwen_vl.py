"""Qwen-VL's tower: patches of one square, and a resampler that makes a fixed number of rows of them. Torch operations.

Source: Qwen-VL (Bai et al. 2023, section 2.1: ViT-bigG, one layer of cross-attention from 256 learned queries, with
absolute positions of rows and columns in queries and keys), and the published modelling code for names and order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.checkpoint.config_fields import Fields
from farsight.engine.vision.geometry import PreparedImage
from farsight.engine.vision.layers import Dense, LayerNorm, TowerTensors
from farsight.engine.vision.pixels import visual_fields

_MAX_LAYERS = 1 << 10
_EPS = 1e-6
_STORED_PLACES = 256
"""Positions of patches in a checkpoint, a square of 16; those of a larger square lie between them."""

_HEAD_DIM = 128
"""Values of a head of the resampler."""

_SQUARES = 16
"""Squares that are computed at a time: the products of more are no faster."""

_AT = "transformer.visual."


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: LayerNorm
    qkv: Dense
    out: Dense
    norm2: LayerNorm
    up: Dense
    down: Dense


class QwenVlTower:
    """The tower of Qwen-VL with its resampler.

    Args:
        raw: The object in ``config.json``.
        tensors: Those of the tower.

    Raises:
        UnsupportedModelError: A tower that is not computed; names the field.
        CheckpointError: A missing or odd tensor.
    """

    def __init__(self, raw: dict[str, Any], tensors: TowerTensors) -> None:
        config = visual_fields(raw)
        self.hidden_size = config.size("output_dim")
        if self.hidden_size != raw.get("hidden_size", 4096) or self.hidden_size % _HEAD_DIM:
            expected = f"the hidden_size of the text model ({raw.get('hidden_size')}), a multiple of {_HEAD_DIM}"
            raise config.error("output_dim", expected)
        self._width, self._heads = config.size("width"), config.size("heads")
        if self._width % self._heads:
            raise config.error("width", f"a multiple of the {self._heads} heads")
        self._patch = config.size("patch_size")
        self._side = config.size("image_size") // self._patch
        self._take(config, tensors)
        self._take_resampler(math.isqrt(config.size("n_queries")), tensors)

    def _take(self, config: Fields, tensors: TowerTensors) -> None:
        width, inner = self._width, int(self._width * config.positive("mlp_ratio"))
        self._kernel = tensors.take(f"{_AT}conv1.weight", width, 3, self._patch, self._patch).reshape(width, -1)
        places = tensors.take(f"{_AT}positional_embedding", _STORED_PLACES, width)
        self._places = _on_square(places, self._side)
        self._pre_norm = LayerNorm.take(tensors, f"{_AT}ln_pre", width, _EPS)
        self._layers = []
        for index in range(config.size("layers", _MAX_LAYERS)):
            layer = f"{_AT}transformer.resblocks.{index}."
            self._layers.append(
                _Layer(
                    LayerNorm.take(tensors, f"{layer}ln_1", width, _EPS),
                    Dense.take(tensors, f"{layer}attn.in_proj", 3 * width, width),
                    Dense.take(tensors, f"{layer}attn.out_proj", width, width),
                    LayerNorm.take(tensors, f"{layer}ln_2", width, _EPS),
                    Dense.take(tensors, f"{layer}mlp.c_fc", inner, width),
                    Dense.take(tensors, f"{layer}mlp.c_proj", width, inner),
                )
            )

    def _take_resampler(self, queries_side: int, tensors: TowerTensors) -> None:
        """Projects the queries, once: what they are does not depend on a picture."""
        size, pool = self.hidden_size, f"{_AT}attn_pool."
        self._bring = None
        if self._width != size:
            self._bring = Dense.take(tensors, f"{pool}kv_proj", size, self._width, bias=False)
        self._kv_norm = LayerNorm.take(tensors, f"{pool}ln_kv", size, _EPS)
        weights = torch.split(tensors.take(f"{pool}attn.in_proj_weight", 3 * size, size), size)
        biases = torch.split(tensors.take(f"{pool}attn.in_proj_bias", 3 * size), size)
        of_query, self._keys, self._values = (Dense(*pair) for pair in zip(weights, biases, strict=True))
        self._pool_out = Dense.take(tensors, f"{pool}attn.out_proj", size, size)
        places = tensors.take(f"{pool}pos_embed", queries_side**2, size)
        query = tensors.take(f"{pool}query", queries_side**2, size)
        query_norm = LayerNorm.take(tensors, f"{pool}ln_q", size, _EPS)
        self._queries = self._heads_of(of_query(query_norm(query) + places)[None])
        self._key_places = _on_square(places, self._side)
        self._post_norm = LayerNorm.take(tensors, f"{_AT}ln_post", size, _EPS)
        self._project = tensors.take(f"{_AT}proj", size, size)

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        pixels = torch.cat([torch.from_numpy(image.pixels) for image in images]).to(self._kernel)
        return [rows for part in torch.split(pixels, _SQUARES) for rows in self._resampled(self._patches(part))]

    def _patches(self, pixels: Tensor) -> Tensor:
        """Computes ``[squares, patches, width]`` of ``[squares, 3, side, side]``."""
        count, patch = self._side, self._patch
        cut = pixels.reshape(-1, 3, count, patch, count, patch).permute(0, 2, 4, 1, 3, 5)
        hidden = F.linear(cut.reshape(len(pixels), count * count, -1), self._kernel) + self._places
        hidden = self._pre_norm(hidden)
        for layer in self._layers:
            hidden = self._through(layer, hidden)
        return hidden

    def _through(self, layer: _Layer, hidden: Tensor) -> Tensor:
        """Computes a layer; each head's query, key and value lie beside each other in the rows of ``qkv``."""
        packed = layer.qkv(layer.norm1(hidden)).view(*hidden.shape[:2], self._heads, -1).transpose(1, 2)
        query, key, value = packed.chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + layer.out(attended)
        return hidden + layer.down(F.gelu(layer.up(layer.norm2(hidden))))

    def _resampled(self, hidden: Tensor) -> Tensor:
        """Returns ``[squares, queries, hidden of the text model]``."""
        values = self._kv_norm(hidden if self._bring is None else self._bring(hidden))
        keys = self._heads_of(self._keys(values + self._key_places))
        queries = self._queries.expand(len(hidden), -1, -1, -1)
        attended = F.scaled_dot_product_attention(queries, keys, self._heads_of(self._values(values)))
        pooled = self._pool_out(attended.transpose(1, 2).flatten(2))
        return self._post_norm(pooled) @ self._project

    def _heads_of(self, rows: Tensor) -> Tensor:
        """Returns ``[squares, heads, rows, 128]`` of ``[squares, rows, size]``."""
        return rows.view(*rows.shape[:2], -1, _HEAD_DIM).transpose(1, 2)


def _on_square(places: Tensor, side: int) -> Tensor:
    """Returns positions of a square of ``side`` patches a side, between the stored ones: ``[side * side, size]``."""
    stored = math.isqrt(len(places))
    if stored == side:
        return places
    square = places.float().view(1, stored, stored, -1).permute(0, 3, 1, 2)
    found = F.interpolate(square, size=(side, side), mode="bicubic", align_corners=False)
    return found[0].permute(1, 2, 0).flatten(0, 1).to(places)
